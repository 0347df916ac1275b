"""Trajectories and sinks for the tests of dumps."""

import numpy as np

from jaxrl.types import Trajectory


def row(number=0, sample_index=0, turn=0, rewards=(0.0, 0.5), tag='t', **more):
  """A trajectory of two tokens."""
  return Trajectory(
    tokens=np.array([3, 4], np.int32),
    action_mask=np.array([False, True]),
    rollout_logprobs=np.array([0, -0.1], np.float32),
    rewards=np.array(rewards, np.float32),
    weights_version=np.array([-1, 0], np.int32),
    env_group=number,
    sample_index=sample_index,
    turn=turn,
    tag=tag,
    episode_seed=100 + number,
    **more,
  )


class Memory:
  """Keeps parts by name; `fail` of its writes raise, after or before they are kept."""

  def __init__(self, fail=0, after=True):
    self.parts, self.fail, self.after, self.checked = {}, fail, after, []

  def check(self, *, fresh):
    self.checked.append(fresh)

  def write(self, name, rows):
    if self.fail and not self.after:
      self.fail -= 1
      raise OSError('gone')
    self.parts[name] = list(rows)
    if self.fail:
      self.fail -= 1
      raise OSError('gone')
