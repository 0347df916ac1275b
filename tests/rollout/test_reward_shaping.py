"""Shapers by hand-made groups: rewards, weights, and what stays of the score."""

import numpy as np
import pytest

from jaxrl.group_stats import RAW_SCORE, sample_accuracies, sample_scores
from jaxrl.options import ConfigError
from jaxrl.types import Trajectory
from tests.calls import make_reward_shaper
from tests.rollout.fakes import row


def attempt(score, length, sample_index=0, **fields):
  """A row of one prompt token and `length` written ones."""
  mask = np.array([False] + [True] * length)
  rewards = np.zeros(length + 1, np.float32)
  rewards[-1] = score
  zeros = np.zeros(length + 1, np.int32)
  return Trajectory(
    tokens=zeros,
    action_mask=mask,
    rollout_logprobs=zeros.astype(np.float32),
    rewards=rewards,
    weights_version=zeros,
    sample_index=sample_index,
    **fields,
  )


def group(*values):
  return [row(value, member) for member, value in enumerate(values)]


def shaped(spec, rows, **limits):
  return make_reward_shaper(spec, limits)(rows)


def double(group, *, times: int = 2):
  """A user's shaper."""
  for r in group:
    r.weight = float(times)
  return group


def test_overlong_by_hand():
  rows = [attempt(1.0, n, m) for m, n in enumerate((6, 8, 9, 10))]
  out = shaped('overlong(max_length=10, cache=2)', rows)
  assert sample_scores(out) == pytest.approx([1, 1, 0.5, 0])
  assert [r.rewards[-1] for r in out] == pytest.approx([1, 1, 0.5, 0])
  assert [r.metrics[RAW_SCORE] for r in out] == [1, 1, 1, 1]
  assert sample_accuracies(out).tolist() == [1, 1, 1, 1]
  assert [r.score for r in rows] == [1, 1, 1, 1]  # those given are left alone


def test_overlong_takes_the_runs_limit_and_a_share_of_it():
  rows = [attempt(0.0, n, m) for m, n in enumerate((80, 90, 100))]
  assert sample_scores(shaped('overlong', rows, max_length=100)).tolist() == [
    0,
    -0.5,
    -1,
  ]
  shaped_rows = shaped('overlong(max_length=200, scale=2.0)', rows, max_length=100)
  assert sample_scores(shaped_rows).tolist() == [0, 0, 0]
  with pytest.raises(ValueError, match='max_length'):
    shaped('overlong', rows)


def test_overlong_counts_an_attempts_rows_together():
  rows = [attempt(0.0, 5), attempt(1.0, 5, turn=1)]
  first, last = shaped('overlong(max_length=10, cache=4)', rows)
  assert (first.score, last.score) == (0, 0)
  assert first.metrics[RAW_SCORE] == last.metrics[RAW_SCORE] == 1


def test_overlong_reaches_the_greedy_attempt_too():
  rows = [attempt(1.0, 5), attempt(1.0, 10, 1, is_greedy=True)]
  assert [r.score for r in shaped('overlong(max_length=10, cache=5)', rows)] == [1, 0]


def test_truncated_attempts_weigh_nothing_and_keep_their_scores():
  rows = [
    attempt(1.0, 3, 0),
    attempt(1.0, 3, 1, stop_reason='max_length'),
    attempt(1.0, 3, 2, turn=0, stop_reason='max_steps'),
    attempt(0.0, 3, 2, turn=1, stop_reason='max_steps'),
    attempt(1.0, 3, 3, extras={'cut_off': True}),
  ]
  out = shaped('mask_truncated', rows)
  assert [r.weight for r in out] == [1, 0, 0, 0, 0]
  assert sample_scores(out).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
  ('options', 'wanted'),
  [
    ('add=1.5', [1.5, 2.5, 4.5]),
    ("subtract='mean'", [-4 / 3, -1 / 3, 5 / 3]),
    ("subtract='max'", [-3, -2, 0]),
    ("add='min', multiply=2.0", [0, 2, 6]),
    ("divide='max'", [0, 1 / 3, 1]),
    ("subtract='median', divide=2", [-0.5, 0, 1]),
    ("subtract='mean', divide='std'", [-0.8728716, -0.2182179, 1.0910895]),
    ("add='metrics.quality', multiply=0.5", [5, 10.5, 16.5]),
  ],
)
def test_reward_by_hand(options, wanted):
  rows = [
    row(value, m, metrics={'quality': 10.0 * (m + 1)})
    for m, value in enumerate((0, 1, 3))
  ]
  assert sample_scores(shaped(f'reward({options})', rows)) == pytest.approx(wanted)


def test_reward_of_equals_divides_by_one():
  rows = group(*[0.7] * 7)
  out = shaped("reward(subtract='mean', divide='std')", rows)
  assert np.abs(sample_scores(out)).max() < 1e-6
  assert sample_scores(shaped("reward(divide='std')", group(3))) == [3]


def test_reward_scales_turns_and_adds_at_the_end():
  one = row(2.0)
  one.rewards = np.array([1.0, 2.0], np.float32)
  (out,) = shaped('reward(add=4, multiply=0.5)', [one])
  assert out.rewards.tolist() == [0.5, 3.0]


def test_statistics_are_of_sampled_attempts():
  rows = [*group(0, 2), row(10, 2, is_greedy=True)]
  assert [r.score for r in shaped("reward(subtract='mean')", rows)] == [-1, 1, 9]


def test_an_unknown_statistic_lists_those_there_are():
  with pytest.raises(ConfigError, match=r"'meen'.*mean.*metrics\.quality"):
    shaped("reward(add='meen')", [row(1, metrics={'quality': 1.0})])


def test_clip_and_chains():
  assert sample_scores(shaped('clip(low=0, high=1)', group(-3, 0.5, 7))).tolist() == [
    0,
    0.5,
    1,
  ]
  out = shaped('reward(multiply=10) + clip(high=5.0) + reward(add=1)', group(0, 1))
  assert sample_scores(out).tolist() == [1, 6]
  assert [r.metrics[RAW_SCORE] for r in out] == [0, 1]


def test_difficulty():
  def weights(spec, *values):
    return [r.weight for r in shaped(spec, group(*values))]

  mask = 'difficulty_mask(low=0.1, high=0.5)'
  assert weights(mask, 0, 0) == [0, 0]
  assert weights(mask, 0, 1) == [1, 1]
  assert weights(mask, 1, 1, 0) == [0, 0, 0]
  assert weights('difficulty_weights', 0, 0) == [2, 2]
  assert weights('difficulty_weights', 1, 1) == [0.5, 0.5]
  assert weights('difficulty_weights + difficulty_weights', 0, 1) == [1.25**2] * 2


def test_difficulty_goes_by_the_unshaped_score():
  out = shaped('reward(subtract=1) + difficulty_weights', group(1, 1))
  assert [r.weight for r in out] == [0.5, 0.5]


def test_length_weights_by_hand():
  rows = [attempt(0, n, m) for m, n in enumerate((10, 20, 30))]
  out = shaped('length_weights', rows)
  assert [r.weight for r in out] == pytest.approx([4 / 3, 1, 2 / 3])
  same = shaped('length_weights', [attempt(0, 9, m) for m in range(3)])
  assert [r.weight for r in same] == [1, 1, 1]


def test_an_attempt_that_wrote_nothing_can_be_shaped():
  rows = [attempt(0.0, 0), attempt(1.0, 4, 1)]
  out = shaped("reward(subtract='mean') + length_weights + mask_truncated", rows)
  assert sample_scores(out).tolist() == [-0.5, 0.5]


def test_a_users_function():
  out = shaped('tests.rollout.test_reward_shaping:double(times=3)', group(1, 2))
  assert [r.weight for r in out] == [3, 3]


def test_none_wrong_names_and_options():
  assert make_reward_shaper('') is None
  with pytest.raises(ConfigError, match="Did you mean 'overlong'"):
    make_reward_shaper('overlng')
  with pytest.raises(ConfigError, match='cache'):
    make_reward_shaper('overlong(cahce=1)')
  with pytest.raises(ConfigError, match='a number or a text'):
    make_reward_shaper('reward(add=True)')
