"""Sums of graders: weights, parts logged, faults told, settings checked."""

import time

import pytest

from jaxrl.envs.graders.grader_processes import GraderError
from tests.calls import make_grader

SLOW = 'tests.envs.graders.slow'
ITEM = {'question': 'How many?', 'answer': '18'}


def test_weights_and_parts():
  spec = r"exact(marked=True) + format(tags='answer', weight=.25) + exact(weight=0)"
  grade = make_grader(spec)
  result = grade(r'<answer>\boxed{18}</answer>', ITEM)
  assert result.score == 1.25
  assert result.parts == {'exact': 1, 'format': 1, 'exact_2': 0}
  assert result.metrics == {
    'reward/exact': 1,
    'reward/format': 1,
    'reward/exact_2': 0,
    'grader/timeouts': 0,
    'grader/deaths': 0,
  }
  assert result.error == ''
  assert grade('<answer>17</answer>', ITEM).score == 0.25
  assert make_grader('exact + exact(weight=-.5, case=False)')('18', ITEM).score == 0.5


def test_a_pattern_without_end_is_a_timeout_not_a_hang():
  grade = make_grader("exact + format(pattern='(a|a)*b', timeout=.2, weight=.5)")
  begun = time.monotonic()
  result = grade('a' * 60, {'answer': 'a' * 60})
  assert time.monotonic() - begun < 30
  assert result.score == 1
  assert result.metrics['grader/timeouts'] == 1
  assert result.metrics['reward/format'] == 0
  assert result.error == 'format: no answer within 0.2 s'
  assert grade('aab', {'answer': 'aab'}).score == 1.5  # and the next is none the worse


def test_graders_of_ones_own():
  result = make_grader(f'exact + {SLOW}:length(scale=.5, weight=2)')('18', ITEM)
  assert result.parts == {'exact': 1, 'length': 1}
  assert result.score == 3
  assert result.metrics['reward/length'] == 1
  grade = make_grader(f'{SLOW}:act(timeout=.2)')
  assert 'no answer within 0.2 s' in grade('hang', {'answer': object()}).error
  dead = grade('die', ITEM)
  assert dead.score == 0
  assert (dead.metrics['grader/deaths'], dead.metrics['grader/timeouts']) == (1, 0)
  with pytest.raises(GraderError, match="KeyError: 'broken'"):
    grade('raise', ITEM)
  with pytest.raises(GraderError, match='must return a finite number'):
    make_grader(f'{SLOW}:nothing')('18', ITEM)
  for bad in ('nan', '-inf', '1e300'):
    with pytest.raises(GraderError, match='must return a finite number'):
      make_grader(f'{SLOW}:number')(bad, ITEM)


@pytest.mark.parametrize(
  ('kinds', 'score'),
  [
    ('np.float32 np.float16 np.float64 array fraction decimal jax', 0.5),
    ('np.bool np.int64 bool', 1.0),
  ],
)
def test_any_real_scalar_is_a_score(kinds, score):
  for kind in kinds.split():
    grade = make_grader(f'{SLOW}:scalar(kind="{kind}", timeout=60)')
    assert grade('', ITEM).score == score, kind


@pytest.mark.parametrize(
  'kind',
  ['text', 'complex', 'np.complex64', 'list', 'vector', 'none', 'np.nan', 'np.inf'],
)
def test_what_is_no_real_scalar_is_refused(kind):
  with pytest.raises(GraderError, match=r'finite number|which is not a number'):
    make_grader(f'{SLOW}:scalar(kind="{kind}")')('', ITEM)


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('', 'at least one'),
    ('exac', "no grader 'exac'. Did you mean 'exact'"),
    ('exact(cases=True)', "no option 'cases'. Did you mean 'case'"),
    ('exact(case=1)', 'must be true or false'),
    ("exact(weight='1')", 'weight is .1.; it must be a number'),
    (f'{SLOW}:length(size=2)', "no option 'size'"),
    (f"{SLOW}:length(timeout='1')", 'must be a number'),
    (f'{SLOW}:longth', 'longth'),
  ],
)
def test_wrong_settings_are_refused_at_once(spec, message):
  with pytest.raises(ValueError, match=message):
    make_grader(spec)
