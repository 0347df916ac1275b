"""Asynchronous, on Ray with two engines, a run learns from its rewards."""

import numpy as np
import pytest

from tests.launch import runs

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.xdist_group('ray')]
OPTIONS = (
  '--config.num_steps=30',
  '--config.optimizer.learning_rate=1e-2',
  '--config.cluster.ray=true',
  '--config.cluster.num_engines=2',
  '--config.rollout.async_ratio=1',
)


@pytest.mark.extended
def test_a_run_of_stale_samples_raises_its_reward(tmp_path):
  """The share of vowels in a reply; of a fresh model's replies it is about a fifth."""
  runs.run(tmp_path, *OPTIONS, config=f'{runs.ROOT}/tests/launch/rewarded.py')
  rows = [row for row in runs.rows(tmp_path) if 'reward/mean' in row]
  rewards = [row['reward/mean'] for row in rows]
  assert np.mean(rewards[-5:]) >= np.mean(rewards[:5]) + 0.3, rewards
  assert max(row['staleness/max'] for row in rows) == 1
  assert sum(row['staleness/share'] > 0 for row in rows) > len(rows) / 2
