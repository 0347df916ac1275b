"""Graders by rules: what scores, what does not, and which settings are refused."""

import pytest

from jaxrl.call_strings import ConfigError
from jaxrl.envs.graders.rule_graders import (
  make_exact_grader,
  make_format_grader,
  make_multiple_choice_grader,
)


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
  with pytest.raises(ConfigError, match=message):
    make_format_grader(**options)


CHOICES = ['Rome', 'Paris', 'Oslo']


@pytest.mark.parametrize(
  ('reply', 'letter'),
  [
    (r'so \boxed{B}', 'B'),
    (r'\boxed{\text{(B)}}', 'B'),
    ('#### b', 'B'),
    ('#### Paris', 'B'),
    (r'\boxed{A} is tempting but \boxed{B. Paris}', 'B'),
    ('The answer is (B).', 'B'),
    ("I'd say the answer is A; no, the answer is B, not C", 'B'),
    ('**Answer: B**', 'B'),
    ('B', 'B'),
    ('First Rome, then …\n**(B)**', 'B'),
    ('Hm.\nB) Paris', 'B'),
    ('the answer is a city', ''),
    ("The answer is I'm not sure", ''),
    ('A train goes to B', ''),
    (r'\boxed{Bern}', ''),
    ('', ''),
  ],
)
def test_multiple_choice(reply, letter):
  for right in 'ABC':
    item = {'answer': right, 'choices': CHOICES}
    assert make_multiple_choice_grader()(reply, item) == (right == letter), right


def test_the_answer_of_a_multiple_choice():
  grade = make_multiple_choice_grader(strict=True)
  assert grade('#### B', {'answer': '(B)'}) == 1
  assert grade('#### B', {'answer': 'Paris', 'choices': CHOICES}) == 1
  assert grade('The answer is B', {'answer': 'B'}) == 0
  with pytest.raises(ValueError, match='neither a letter nor one'):
    grade('#### B', {'answer': 'Bern', 'choices': CHOICES})
  with pytest.raises(ValueError, match='has no answer'):
    grade('#### B', {})
