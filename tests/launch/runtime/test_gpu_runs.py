"""Whole runs whose weights go from the learner's GPUs into a real vLLM's, on machines
without one: `stand_ins` says which calls of CUDA's and NCCL's are not the real ones.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.launch import runs
from tests.launch.runtime.test_vllm import OPTIONS
from tests.rollout.vllm import needs

pytestmark = [*needs.VLLM, pytest.mark.ray, pytest.mark.slow]
pytestmark += [pytest.mark.xdist_group('ray')]
STAND_INS = pathlib.Path(__file__).with_name('stand_ins')


@pytest.mark.parametrize(
  'weights, placement, gpus',
  [('ipc', 'colocated(sleep=True)', 1), ('nccl', 'split', 2)],
)
def test_a_run_learns_from_what_vllm_plays(tmp_path, weights, placement, gpus):
  options = (
    *OPTIONS,
    '--config.num_steps=2',
    # vLLM fills the vocabulary up to 320.
    runs.model(tie_embeddings=False, vocab_size=288, head_dim=32),
    '--config.rollout.engine=vllm(block_size=32)',
    f'--config.cluster.placement={placement}',
    f'--config.weight_sync.transport={weights}',
  )
  path = os.pathsep.join([str(STAND_INS), str(runs.ROOT)])
  done = subprocess.run(
    [sys.executable, '-m', f'{__package__}.share_gpus', str(gpus), tmp_path, *options],
    capture_output=True,
    text=True,
    cwd=runs.ROOT,
    env={**os.environ, 'PYTHONPATH': path},
    timeout=500,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith('{')]
  steps = [line for line in lines if 'step' in line]
  assert [row['step'] for row in steps] == [0, 1]
  assert all(row['optimizer/grad_norm'] > 0 for row in steps)
  assert all(row['weights/bytes'] > 1e5 for row in steps)
  # What vLLM serves is what was just learned, every step.
  assert all(row['mismatch/logprob_difference'] < 1e-5 for row in steps)
  assert [line['versions'] for line in lines if 'kind' in line] == [[0], [1]]
