"""A mark counts only if it holds an answer, whatever kind of answer is right."""

import time

import pytest

from jaxrl.envs.graders.answer_marks import final_answer, marked_answer
from jaxrl.envs.graders.rule_graders import (
  make_exact_grader,
  make_format_grader,
  make_multiple_choice_grader,
)

INSIDE = [
  *('', ' ', '$$', '$ $', '$$$$', '$', r'\$', '**', '** **', '__', '`', '``', '~', '.'),
  *('...', '…', '$...$', r'\dots', r'$\ldots$', '-', '—', '?', '!', ':', ',', '=', '|'),
  *(r'\(\)', r'\[ \]', r'\text{}', r'\text{ }', r'\textbf{}', r'\mathrm{}', r'\quad'),
  *(r'\boxed{}', r'$\boxed{}$', r'\boxed{\text{}}', r'\phantom{0}', r'\hspace{1cm}'),
  *('{}', '()', '[]', '\u200b', '\u00a0', '&nbsp;', '<br>', '_____', '<|im_end|>'),
  *('</s>', '<eos>', '<end_of_turn>', '<｜end▁of▁sentence｜>', 'Answer', 'Answer:'),
  *(
    '**Answer:**',
    'answer',
    'your answer',
    '[your answer here]',
    '<answer>',
    '[number]',
  ),
  *('The answer is', 'The answer is **', 'The answer is $$', '...your answer...'),
  *('Final answer here', 'The final answer is:', 'x =', '#'),
]


@pytest.mark.parametrize('like', ['18', 'x+1', 'Paris', '2024-05-17'])
@pytest.mark.parametrize('mark', ['#### {}', '####{}', r'\boxed{{{}}}', r'\fbox{{{}}}'])
def test_a_mark_without_an_answer_does_not_count(mark, like):
  found = {inside: marked_answer(mark.format(inside), like) for inside in INSIDE}
  assert {inside: answer for inside, answer in found.items() if answer} == {}


@pytest.mark.parametrize('like', ['18', 'x+1', 'Paris'])
@pytest.mark.parametrize('mark', ['<answer>{}</answer>', '<answer>\n{}\n</answer>'])
def test_a_tag_without_an_answer_does_not_count(mark, like):
  inside = [text for text in INSIDE if '<answer>' not in text]
  inside += ['####', '#### $$', '```\n```', '<answer></answer>']
  found = {text: marked_answer(mark.format(text), like) for text in inside}
  assert {text: answer for text, answer in found.items() if answer} == {}


@pytest.mark.parametrize(
  ('inside', 'like'),
  [
    ('18', '17'),
    ('$18', '17'),
    ('x', 'y'),
    ('N/A', '17'),  # says that there is none
    ('n', 'Paris'),
    ('巴黎', 'Paris'),
    (r'\pi', '17'),
    (r'\infty', 'x'),
    ('∞', 'x'),
    (r'\emptyset', 'x'),
    ('∅', 'x'),
    (r'\{\}', r'\{1\}'),  # the empty set
    ('½', '17'),
    (r'\text{A}', 'B'),
    (r'\mathbb{R}', 'x'),
    ('+', '-'),  # a sign, where one is right
    ('?', '?'),
    ('...', '...'),
    ('answer', 'answer'),
    ('the answer of Paris', 'Paris'),
    ('result set', 'Paris'),
  ],
)
def test_a_mark_with_an_answer_counts(inside, like):
  if inside != '...':
    assert marked_answer(rf'\boxed{{{inside}}}', like) == inside
    assert marked_answer(f'<answer>{inside}</answer>', like)


def test_an_earlier_mark_is_the_answer_then():
  for empty in ('#### $$', r'\boxed{$$}', '<answer>**</answer>', '#### **Answer:**'):
    assert marked_answer(f'#### 18\n{empty}', '18') == '18'
    assert marked_answer(f'\\boxed{{x}}\n{empty}', 'x+1') == 'x'
  assert final_answer('The answer is $2x$.\n\nFinal answer: **', 'x+x') == '2x'
  assert final_answer('The answer is 18.\n#### $$', '18') == '18'


def test_no_grader_takes_an_empty_mark():
  for inside in INSIDE:
    for mark in ('#### {}', r'\boxed{{{}}}'):
      reply = mark.format(inside)
      item = {'answer': 'A', 'choices': ['Rome', 'Paris']}
      assert make_multiple_choice_grader(strict=True)(reply, item) == 0
      assert make_exact_grader(marked=True)(reply, {'answer': 'A'}) == 0


@pytest.mark.parametrize(
  ('inside', 'score'),
  [
    *((text, 0) for text in ('$$', '**', '...', '\u200b', '&nbsp;', r'\boxed{}')),
    *((text, 0) for text in (r'$\boxed{\text{}}$', '<|im_end|>', '`', '####')),
    *((text, 1) for text in ('+', '{}', '[]', '-', '∞', r'\{\}', '42', 'Answer: 42')),
  ],
)
def test_tags_hold_more_than_markup(inside, score):
  grade = make_format_grader(tags='think, answer')
  assert grade(f'<think>a</think><answer>{inside}</answer>', {}) == score
  assert grade(f'<think>{inside}</think><answer>a</answer>', {}) == score


@pytest.mark.parametrize('unit', ['$', r'\text{', r'\hspace{', '<|', '####\n', '_ '])
def test_huge_replies_are_read_at_once(unit):
  reply, begun = unit * (400_000 // len(unit)), time.process_time()
  marked_answer(reply, '18')
  marked_answer(rf'\boxed{{{reply}}}', 'x')
  final_answer(f'<answer>{reply}</answer>', 'x')
  assert time.process_time() - begun < 10
