"""Training in an environment with tools."""

import pathlib

import numpy as np
import pytest

from jaxrl.envs.sandbox import local_sandbox
from tests.launch import runs

EAGER = str(pathlib.Path(__file__).with_name('eager.py'))
QUICK = (
  '--config.num_steps=2',
  '--config.checkpoint.save_interval=0',
  '--config.eval.num_tasks=2',
  runs.ONE_LAYER,
  '--config.algorithm.group_size=4',
  '--config.batch.max_length=768',
)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.skipif(
  bool(local_sandbox.unsupported_reason()), reason=local_sandbox.unsupported_reason()
)
def test_two_steps_with_tool_turns(tmp_path):
  recorder = runs.record(tmp_path, *QUICK, config=EAGER)
  steps = [row for _, row in recorder.metrics if 'loss/total' in row]
  assert len(steps) == 2 and all(np.isfinite(row['loss/total']) for row in steps)
  played = [groups for _, kind, groups, _ in recorder.played if kind == 'train']
  rows = [row for groups in played for group in groups for row in group]
  assert len(rows) >= 8 and not any(row.failed for row in rows)
  for row in rows:
    roles = [message['role'] for message in row.messages]
    assert roles == ['user', 'assistant', 'tool', 'assistant']
    assert row.messages[2]['content'] == '42'
    turns = np.flatnonzero(np.diff(row.action_mask.astype(int)) > 0)
    assert len(turns) == 2  # what the tool said lies between, and is not learned
    assert row.metrics['tools/python/calls'] == 1
  scores = [row for _, row in recorder.metrics if 'eval/problems/tools/calls' in row]
  assert scores and scores[0]['eval/problems/tools/python/calls'] == 1
