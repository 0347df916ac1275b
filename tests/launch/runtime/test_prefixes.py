"""Turns are replayed under Ray as in one process: the queue is an actor there."""

import pytest

from tests.launch import runs
from tests.launch.runtime.test_ray_runtime import RAY, same
from tests.launch.test_prefixes import COINS, PREFIXES

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray'), pytest.mark.slow]


def test_the_same_turns_are_replayed(ray, tmp_path):
  options = (PREFIXES, '--config.num_steps=4', '--config.checkpoint.export=false')
  alone = runs.record(tmp_path / 'alone', *options, config=COINS)
  under_ray = runs.record(tmp_path / 'ray', *options, *RAY, config=COINS)
  same(alone, under_ray)
  rows = [row for *_, groups, _ in alone.played for group in groups for row in group]
  assert any(row.metrics.get('prefix/share') for row in rows)
