"""Graders by rules: what scores, what does not, and which settings are refused."""

import time

import pytest

from jaxrl.envs.graders.rule_graders import (
  make_exact_grader,
  make_format_grader,
  make_multiple_choice_grader,
)
from tests.envs.graders import choice_replies, exact_replies, format_replies


@pytest.mark.parametrize(
  ('reply', 'options', 'score'),
  [
    ('Paris', {}, 1),
    (' Paris\n', {}, 1),
    ('paris', {}, 0),
    ('paris', {'case': False}, 1),
    ('It is Paris', {}, 0),
    (r'It is \boxed{Paris}', {'marked': True}, 1),
    ('Paris', {'marked': True}, 0),
    ('', {}, 0),
  ],
)
def test_exact(reply, options, score):
  assert make_exact_grader(**options)(reply, {'answer': 'Paris'}) == score


@pytest.mark.parametrize(('reply', 'answer', 'whole', 'marked'), exact_replies.REPLIES)
def test_exact_replies_as_models_write_them(reply, answer, whole, marked):
  assert make_exact_grader()(reply, {'answer': answer}) == whole
  assert make_exact_grader(marked=True)(reply, {'answer': answer}) == marked


def test_an_empty_reply_is_no_exact_answer_to_nothing():
  assert make_exact_grader()('', {'answer': ''}) == 0


TAGGED = '<think>\na\n</think>\n<answer>b</answer>'


@pytest.mark.parametrize(
  ('reply', 'score'),
  [
    (TAGGED, 1),
    (f'  {TAGGED}\n', 1),
    (f'Well: {TAGGED}', 0),
    (f'{TAGGED} indeed', 0),
    (TAGGED.replace('\na\n', ' '), 0),
    (TAGGED.replace('</think>', ''), 0),
    (TAGGED + '<answer>c</answer>', 0),
    ('<answer>b</answer><think>a</think>', 0),
    ('<think><answer>b</answer></think>', 0),
    ('', 0),
  ],
)
def test_format_by_tags(reply, score):
  assert make_format_grader(tags='think, answer')(reply, {}) == score


@pytest.mark.parametrize(('reply', 'prompt', 'score'), format_replies.REPLIES)
def test_formats_as_models_write_them(reply, prompt, score):
  grade = make_format_grader(tags='think, answer')
  assert grade(reply, {'generation_prompt': prompt}) == score


def test_format_by_a_pattern():
  grade = make_format_grader(pattern=r'.*Answer: \d+')
  assert grade('So\nAnswer: 12\n', {}) == 1
  assert grade('Answer: 12 or so', {}) == 0
  assert grade('answer: 12', {}) == 0


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({}, 'give either'),
    ({'pattern': 'a', 'tags': 'b'}, 'give either'),
    ({'pattern': '('}, 'unterminated'),
    ({'tags': 'a,,b'}, 'write names'),
  ],
)
def test_formats_that_say_nothing_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make_format_grader(**options)


CHOICES = ['Rome', 'Paris', 'Oslo']


@pytest.mark.parametrize(('reply', 'letter'), choice_replies.REPLIES)
def test_multiple_choice(reply, letter):
  for right in 'ABCD':
    item = {'answer': right, 'choices': choice_replies.CAPITALS}
    assert make_multiple_choice_grader()(reply, item) == (right == letter), right


def test_without_choices_a_letter_is_still_no_word():
  grade = make_multiple_choice_grader()
  for reply in ('The answer is A city', 'Answer: I think so', 'A or B'):
    assert [grade(reply, {'answer': right}) for right in 'ABI'] == [0, 0, 0], reply
  assert (
    grade('Answer: I', {'answer': 'I'}) == grade('answer is a.', {'answer': 'A'}) == 1
  )


def test_choices_in_other_forms():
  grade = make_multiple_choice_grader()
  for choices in (
    {'A': 'Rome', 'B': 'Paris'},
    {'label': ['A', 'B'], 'text': ['Rome', 'Paris']},
    ['A) Rome', 'B) Paris'],
  ):
    assert grade('The answer is Paris.', {'answer': 'B', 'choices': choices}) == 1
    assert grade('The answer is Rome.', {'answer': 'Paris', 'choices': choices}) == 0
  with pytest.raises(ValueError, match='multiple_choice: its choices are a text'):
    grade('B', {'answer': 'B', 'choices': 'Rome, Paris'})


def test_choices_that_are_numbers():
  item = {'answer': 'C', 'choices': ['1', '12', '1/2', '$-2$']}
  grade = make_multiple_choice_grader()
  for reply in ('The answer is 0.5.', r'\boxed{\frac{1}{2}}', 'C) 1/2', '1/2'):
    assert grade(reply, item) == 1, reply
  for reply in ('The answer is 1.', r'\boxed{12}', 'It is 1.5', 'The answer is -2.'):
    assert grade(reply, item) == 0, reply


@pytest.mark.parametrize('unit', ['A', '(', 'Answer: A or ', 'answer is ', 'B. x\n'])
def test_huge_replies_are_graded_at_once(unit):
  begun = time.monotonic()
  make_multiple_choice_grader()(unit * (1_000_000 // len(unit)), {'answer': 'B'})
  assert time.monotonic() - begun < 10


def test_the_answer_of_a_multiple_choice():
  grade = make_multiple_choice_grader(strict=True)
  assert grade('#### B', {'answer': '(B)'}) == 1
  assert grade('#### B', {'answer': 'Paris', 'choices': CHOICES}) == 1
  assert grade('The answer is B', {'answer': 'B'}) == 0
  with pytest.raises(ValueError, match='neither a letter nor one'):
    grade('#### B', {'answer': 'Bern', 'choices': CHOICES})
  with pytest.raises(ValueError, match='has no answer'):
    grade('#### B', {})
