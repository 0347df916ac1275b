"""The minimal example learns, ends by itself, and is reproducible."""

import asyncio

import numpy as np
import pytest

from examples import grpo_minimal


@pytest.mark.slow
def test_the_reward_rises(capsys):
  rewards = asyncio.run(grpo_minimal.train())
  assert np.mean(rewards[:5]) < 0.25
  assert np.mean(rewards[-5:]) > 0.9
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == grpo_minimal.NUM_STEPS
  assert asyncio.run(grpo_minimal.train(num_steps=3)) == rewards[:3]
