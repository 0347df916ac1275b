"""Concatenated steps in whole runs: what is trained on, and what cannot be."""

import pytest

from tests.launch import runs
from tests.launch.test_bad_input import refused
from tests.launch.test_runs import QUICK, sound, trained_on

LAKE = """
from configs import base, debug
def get_config(algorithm='grpo'):
  c = debug.get_config(algorithm)
  del c.env.arithmetic
  c.env.lake = base.env_section(
    'frozen_lake', max_steps=3, max_tokens_per_step=4, row_format='concatenated')
  c.batch.max_length = 256
  return c
"""


@pytest.fixture
def lake(tmp_path):
  path = tmp_path / 'lake.py'
  path.write_text(LAKE)
  return str(path)


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_learns_from_joined_steps(lake, tmp_path):
  recorder = runs.record(tmp_path / 'run', *QUICK, '--config.num_steps=2', config=lake)
  sound(recorder, steps=2)
  rows = [row for groups in trained_on(recorder) for group in groups for row in group]
  joined = [row for row in rows if 'segments' in row.extras]
  assert joined and all(len(row.tokens) <= 256 for row in rows)
  for row in joined:
    assert sum(row.extras['segments']) == len(row.tokens)
  members = {(row.env_group, row.episode_id, row.sample_index) for row in rows}
  assert len(members) < sum(row.metrics['turns'] for row in rows)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ((), 'algorithm gigpo needs each turn in its own row'),
    (
      ('--config.rollout.engine=jax(exact=True)',),
      'an exact engine needs each sequence in its own row',
    ),
  ],
)
def test_what_needs_rows_of_their_own_is_refused(
  lake, tmp_path, capsys, options, message
):
  config = lake if options else f'{lake}:gigpo'
  assert message in refused(tmp_path, capsys, *options, config=config)
