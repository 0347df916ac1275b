"""What is sent of bf16 weights in a step of a real run, at a learning rate of 1e-6."""

import json
import subprocess
import sys

import pytest

from tests.launch import runs

# As small as still learns: each group's rewards differ, so that gradients are not 0.
RUN = """
import json
from configs import quickstart
from tests.benchmarks import weights
config = quickstart.get_config()
config.model.random = 'qwen3(hidden_size=64, num_layers=2)'
config.batch.num_groups, config.sft.batch_size = 6, 32
print(json.dumps(weights.real(config, steps=10, lessons=60)))
"""


@pytest.mark.slow
@pytest.mark.extended
def test_a_step_takes_three_percent_of_the_full_bytes_at_most():
  env = runs.environment()
  command = [sys.executable, '-c', RUN]
  result = subprocess.run(
    command, cwd=runs.ROOT, env=env, text=True, stdout=subprocess.PIPE, check=True
  )
  figures = json.loads(result.stdout.splitlines()[-1])
  assert figures['real_steps'] == 10
  assert figures['real_share'] <= 0.03
  # It is little that changes, and something does: the run learns.
  assert 0.002 <= figures['real_moved'] <= 0.03
