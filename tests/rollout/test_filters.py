"""Group filters: by name, by call string, by dotted path; never in validation."""

import pytest

from jaxrl.rollout.filters import make_filter, scores
from jaxrl.signature import ConfigError
from tests.rollout.fakes import row


class Odd:
  """A user's filter."""

  def __init__(self, config, env_manager_config, mode, *, modulus: int = 2):
    self.seen = (config, env_manager_config, mode, modulus)

  def filter(self, group_id, episode_id, group):
    return group_id % self.seen[3] == 1


def group(*values):
  return [row(value, member) for member, value in enumerate(values)]


def test_reward_std_drops_groups_without_a_difference():
  drops = make_filter('reward_std')
  assert drops(0, 0, group(1, 1, 1))
  assert drops(0, 0, group(1))
  assert not drops(0, 0, group(1, 0, 1))


def test_options_by_call_string():
  drops = make_filter('reward_std(min_std=0.6)')
  assert drops(0, 0, group(0, 1))
  assert not drops(0, 0, group(0, 2))
  keeps = make_filter('score_range(low=0.2, high=0.8)')
  assert [keeps(0, 0, group(*g)) for g in ([0, 0], [0, 1], [1, 1])] == [1, 0, 1]


def test_scores_count_attempts_not_rows():
  rows = [row(1, 0), row(2, 0, step=1), row(5, 1)]
  assert scores(rows).tolist() == [3, 5]
  assert not make_filter('reward_std')(0, 0, rows)


def test_a_users_class():
  drops = make_filter('tests.rollout.test_filters:Odd(modulus=3)', {'a': 1}, {'b': 2})
  assert drops.__self__.seen == ({'a': 1}, {'b': 2}, 'train', 3)
  assert [drops(g, 0, []) for g in range(3)] == [False, True, False]


def test_none_and_never_in_validation():
  assert make_filter('') is None
  assert make_filter('reward_std', mode='val') is None


def test_wrong_names_and_options():
  with pytest.raises(ConfigError, match='reward_std'):
    make_filter('reward_sdt')
  with pytest.raises(ConfigError, match='min_std'):
    make_filter('reward_std(min=1)')
