"""Reward metrics say whose rewards they are: the environment's, shaped, or greedy."""

import jax
import pytest

from jaxrl.group_stats import RESPONSE_TRUNCATED
from jaxrl.training.monitoring import memory_metrics, reward_metrics
from tests.calls import make_reward_shaper
from tests.rollout.fakes import row


def group(*values, **fields):
  return [row(value, member, **fields) for member, value in enumerate(values)]


def test_plain_rewards_by_hand():
  metrics = reward_metrics([group(0, 1), group(1, 1)])
  assert metrics['reward/mean'] == 0.75
  assert metrics['reward/group_std'] == 0.25
  assert metrics['reward/groups_without_spread'] == 0.5
  assert (metrics['reward/min'], metrics['reward/max']) == (0, 1)
  assert not any('shaped' in name or 'greedy' in name for name in metrics)


def test_the_share_of_samples_that_were_cut_short():
  cut = [row(0, 0, 'max_length'), row(0, 1, extras={RESPONSE_TRUNCATED: True})]
  metrics = reward_metrics([group(0, 1), cut])
  assert metrics['rollout/truncated'] == 0.5
  assert reward_metrics([group(0, 1)])['rollout/truncated'] == 0


def test_shaped_rewards_have_their_own_names():
  shape = make_reward_shaper('reward(multiply=4, subtract=1)')
  metrics = reward_metrics([shape(group(0, 1)), shape(group(1, 1))])
  assert metrics['reward/mean'] == 0.75
  assert metrics['reward/shaped_mean'] == -1
  assert metrics['reward/shaped_group_std'] == 1
  assert metrics['reward/groups_without_spread'] == 0.5


def test_greedy_attempts_count_in_their_own_mean_alone():
  groups = [[*group(0, 1), row(5, 2, is_greedy=True)]]
  metrics = reward_metrics(groups)
  assert metrics['reward/mean'] == metrics['reward/group_std'] == 0.5
  assert metrics['reward/max'] == 1
  assert metrics['reward/greedy_mean'] == 5


def test_an_attempt_of_many_rows_counts_once():
  metrics = reward_metrics([[row(1, 0), row(2, 0, turn=1), row(5, 1)]])
  assert metrics['reward/mean'] == pytest.approx(4)
  assert reward_metrics([[row(1, 0, is_expert=True)]]) == {}


def test_parts_of_rewards_are_averaged_over_attempts_that_have_them():
  parts = {'reward/math': 1.0, 'reward/mean': 9.0, 'grader/timeouts': 0.0, 'turns': 3.0}
  stuck = {'reward/math': 0.0, 'grader/timeouts': 1.0}
  rows = [row(1, 0, metrics=parts), row(0, 1, metrics=stuck), row(0, 2)]
  metrics = reward_metrics(
    [rows, [row(0, 0, metrics=stuck), row(0, 0, turn=1, metrics=parts)]]
  )
  assert metrics['reward/math'] == pytest.approx(2 / 3)  # the last turn speaks for all
  assert metrics['grader/timeouts'] == pytest.approx(1 / 3)
  assert metrics['reward/mean'] == 0.25  # the batch's own mean, whatever is reported
  assert 'turns' not in metrics
  greedy = row(1, 1, is_greedy=True, metrics=parts)
  assert 'reward/math' not in reward_metrics([[row(0, 0), greedy]])


def test_memory_is_that_of_the_process_and_of_the_fullest_device():
  class Device:
    def __init__(self, stats):
      self.memory_stats = lambda: stats

  metrics = memory_metrics(
    [Device(None), Device({'bytes_in_use': 2e9}), Device({'bytes_in_use': 3e9})]
  )
  assert 0.01 < metrics.pop('memory/process_gb') < 100
  assert metrics == {'memory/device_gb': 3.0}
  assert 'memory/process_gb' in memory_metrics(jax.local_devices())
