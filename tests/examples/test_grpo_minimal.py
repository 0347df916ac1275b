"""The minimal example learns, ends by itself, and is reproducible."""

import asyncio
import re
import sys

import numpy as np
import pytest

from examples import grpo_minimal
from tests.docs import blocks


@pytest.mark.slow
def test_the_reward_rises():
  """Run as the README says."""
  output = blocks.run([sys.executable, 'examples/grpo_minimal.py'], blocks.ROOT)
  rewards = [float(reward) for reward in re.findall(r'reward (\d\.\d+)', output)]
  assert len(rewards) == len(output.splitlines()) == grpo_minimal.NUM_STEPS
  assert np.mean(rewards[:5]) < 0.25
  assert np.mean(rewards[-5:]) > 0.9
  again = asyncio.run(grpo_minimal.train(num_steps=3))
  assert again == pytest.approx(rewards[:3], abs=1e-3)
