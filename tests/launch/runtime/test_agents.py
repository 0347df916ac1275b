"""Agents under Ray: each worker has an endpoint of its own, beside its environments."""

import pytest

from tests.launch import runs
from tests.launch.runtime.test_ray_runtime import RAY, same
from tests.launch.test_agents import CONFIG

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray'), pytest.mark.slow]
AGENT = 'tests.rollout.agent_cases:good'
OPTIONS = (
  '--config.num_steps=1',
  '--config.batch.num_groups=2',
  '--config.eval.interval=0',
  '--config.rollout.engine=jax(decode_steps=4)',
  f'--config.env.bot.env_config.agent={AGENT}',
)


def test_agents_play_under_ray_as_in_one_process(ray, tmp_path):
  alone = runs.record(tmp_path / 'alone', *OPTIONS, config=CONFIG)
  under_ray = runs.record(tmp_path / 'ray', *OPTIONS, *RAY, config=CONFIG)
  same(alone, under_ray)
  rows = [row for _, _, groups, _ in under_ray.played for g in groups for row in g]
  assert {row.metrics['agent/replies'] for row in rows} == {2}
