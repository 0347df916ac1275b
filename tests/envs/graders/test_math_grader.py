"""The math grader: by algebra what plain comparison leaves open, within its limit."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl.envs.graders.answer_matching import compare_answers
from jaxrl.envs.graders.grader_processes import shared_grader_pool
from jaxrl.envs.graders.math_grader import make_math_grader
from jaxrl.envs.math_env import MathEnv
from jaxrl.options import ConfigError
from jaxrl.types import Task
from tests.calls import env_factory, make_grader
from tests.envs.graders import math_replies

SHARED = Path(__file__).parents[4] / 'shared' / 'data'
needs_math_verify = pytest.mark.skipif(
  importlib.util.find_spec('math_verify') is None, reason='needs math-verify'
)


@pytest.mark.parametrize(
  ('candidate', 'answer', 'decided'),
  [
    ('18.0', '18', True),
    ('17', '18', False),
    ('1/2', '0.5', True),
    (r'\left(1, 2\right)', '(1,2)', True),
    ('', 'x', False),
    ('x', '18', None),
    ('٤٢', '42', False),
    ('٤٢, 42', '42', False),
    ('1_000', '1', False),
    ('1010_2', '1010_{2}', None),
    (r'\sqrt{4}', '2', None),
  ],
)
def test_what_is_decided_without_algebra(candidate, answer, decided):
  assert compare_answers(candidate, answer) is decided


@needs_math_verify
@pytest.mark.parametrize(
  ('reply', 'answer', 'score'),
  [
    (r'\boxed{\sqrt{4}}', '2', 1),
    (r'\boxed{2p^3-2p}', '2p(p^2 - 1)', 1),
    (r'\boxed{\frac{\sqrt{3}}{12}}', r'\dfrac{1}{4\sqrt3}', 1),
    (r'#### \pi/4', r'\dfrac{\pi}{4}', 1),
    (r'\boxed{\{3, 1, 2\}}', r'\{1,2,3\}', 1),
    (r'\boxed{(2, 1)}', '(1, 2)', 0),
    (r'\boxed{\ln x}', r'\log_2 x', 0),
    (r'\boxed{\text{Yes}}', 'Yes', 1),
    (r'\boxed{seY}', 'Yes', 0),  # to algebra the same product
    (r'\boxed{on}', 'No', 0),
    (r'\boxed{\frac{1}{}', '2x', 0),
    (r'\boxed{x}' + 'x' * 10_000, 'x', 1),
    (rf'\boxed{{{"(" * 40}}}', 'x', 0),
    ('', 'x', 0),
    (r'\boxed{1{,}000}', '1000', 1),
    (r'\boxed{1010_2}', '1010_{2}', 1),
    (r'\boxed{1 1/2}', '11/2', 0),
    (r'\boxed{1,2}', '12', 0),
    (r'\boxed{２x}', '2x', 0),
    (r'\boxed{infinity}', r'\infty', 1),
  ],
)
def test_math(reply, answer, score):
  assert make_math_grader(timeout=30)(reply, {'answer': answer}) == score


@needs_math_verify
@pytest.mark.parametrize(('reply', 'answer', 'score'), math_replies.REPLIES)
def test_replies_as_models_write_them(reply, answer, score):
  assert make_math_grader(timeout=30)(reply, {'answer': answer}) == score


@needs_math_verify
@pytest.mark.slow
def test_math_verify_alone_differs_as_the_docs_say():
  """The docs give the reasons for what the package scores otherwise."""
  from math_verify import parse, verify

  def score(reply, answer):
    gold = parse(rf'\boxed{{{answer.rpartition("####")[2].strip()}}}')
    return float(verify(gold, parse(reply)))

  given = [
    (score(reply, answer), right) for reply, answer, right in math_replies.REPLIES
  ]
  stricter = sum(score < right for score, right in given)
  more_lenient = sum(score > right for score, right in given)
  agree = len(given) - stricter - more_lenient
  row = f'| {agree} of {len(given)} | {stricter} | {more_lenient} |'
  assert row in (Path(__file__).parents[3] / 'docs' / 'graders.md').read_text()


@needs_math_verify
def test_strict_takes_marked_answers_alone():
  assert make_math_grader()('It is 18.', {'answer': '18'}) == 1
  assert make_math_grader(strict=True)('It is 18.', {'answer': '18'}) == 0


@needs_math_verify
def test_algebra_without_end_is_a_timeout_and_the_next_reply_is_graded():
  grade = make_grader('math(timeout=1.0)')
  result = grade(r'\boxed{9^{9^{9^{9}}}x}', {'answer': '2x'})
  assert result.score == 0
  assert result.metrics['grader/timeouts'] + result.metrics['grader/deaths'] == 1
  assert result.error.startswith('math: ')
  assert make_grader('math(timeout=30)')(r'\boxed{2x}', {'answer': 'x+x'}).score == 1


def test_without_the_package_it_says_so(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ConfigError, match=r"pip install -e '\.\[envs\]'"):
    make_math_grader()


def play(reply, answer, **options):
  env = env_factory('math', options)()
  item = {'question': '?', 'answer': answer}
  env.reset(seed=0, options={'task': Task(seed=0, index=0, item=item)})
  return env.step(reply)


@needs_math_verify
def test_the_environment_with_a_grader():
  spec = "math(timeout=30) + format(tags='answer', weight=.5)"
  options = {'grader': spec, 'reward': 2.0}
  _, reward, terminated, _, info = play(r'<answer>$3x$</answer>', 'x+x', **options)
  assert (reward, terminated) == (1, True)
  _, reward, _, _, info = play(r'<answer>\boxed{2x}</answer>', 'x+x', **options)
  assert reward == 3
  assert info['metrics']['reward/math'] == info['metrics']['correct'] == 1
  assert info['metrics']['reward/format'] == info['metrics']['marked'] == 1
  assert info['metrics']['grader/timeouts'] == 0
  assert info['columns']['grader_fault'] == ''
  assert play(r'\boxed{2x}', 'x+x')[1] == 0  # as plain text they differ


def test_a_grader_may_do_without_answers():
  env = env_factory('math', {'grader': "instructions(rules='no_comma')"})()
  task = Task(seed=0, index=0, item={'question': '?'})
  env.reset(seed=0, options={'task': task})
  assert env.step('a, b')[1] == 0
  with pytest.raises(KeyError):  # without one there is nothing to compare with
    MathEnv().reset(seed=0, options={'task': task})


def test_a_grader_of_the_environment_is_checked_before_one_is_made():
  with pytest.raises(ValueError, match='no grader'):
    env_factory('math', {'grader': 'maths'})
  refused: list[dict[str, Any]] = [{'strict': True}, {'format_reward': 0.1}]
  for options in refused:
    with pytest.raises(ValueError, match='write its options there'):
      MathEnv(grader='exact', **options)


@needs_math_verify
@pytest.mark.skipif(not SHARED.exists(), reason='the shared data folder is not here')
def test_algebra_finds_deepmaths_answers_equal_to_themselves_alone():
  """Every 20th; in the other tests plain comparison spares most of them this."""
  lines = (SHARED / 'deepmath' / 'math_deepmath_deal.jsonl').read_text().splitlines()
  answers = [json.loads(line)['ground_truth'] for line in lines[::20]]

  def verified(candidate, answer):
    ask, needs = shared_grader_pool().call, ['math_verify']
    return ask(
      f'{make_math_grader.__module__}:verify_answers',
      candidate,
      answer,
      limit=30,
      needs=needs,
    )

  assert [answer for answer in answers if not verified(answer, answer)] == []
  assert [answer for answer in answers if verified('123456789.5', answer)] == []
