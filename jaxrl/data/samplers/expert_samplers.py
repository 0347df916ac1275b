"""Expert samplers use rows from files, before rollouts or alongside them."""

import dataclasses
import math

import numpy as np

from jaxrl.data.samplers.sampler import ExpertRows, Metrics, Sampler, SamplerSource
from jaxrl.types import Group, StateDict


class WarmupSampler(Sampler):
  """Returns expert rows in the first steps and rollouts afterwards.

  Rollouts only start to be played then. An expert step has as many rows as a step of
  rollouts. Each expert row is a group of its own without a baseline, so its advantage
  is its reward.

  Args:
    source: What the sampler draws from.
    steps: The number of expert steps.
    reward: The reward of each expert row, on its last action token; None keeps the
      reward from the file.

  Raises:
    ValueError: If `steps` is less than 1.
  """

  reads_experts = True

  def __init__(
    self, source: SamplerSource, *, steps: int = 10, reward: float | None = 1.0
  ):
    if steps < 1:
      raise ValueError(f'steps={steps}: must be at least 1')
    super().__init__(source)
    self._source = source
    self._steps = steps
    self._reward = reward
    self.expert_rows = source.num_groups * source.group_size
    self._experts = source.experts(self.expert_rows)
    self._num_drawn = 0

  def plays(self, step: int) -> bool:
    """Returns whether the expert steps are over."""
    return step >= self._steps

  async def next(self, step: int) -> list[Group]:
    """Returns expert rows, or played groups after the expert steps."""
    self._num_drawn = 0
    if self.plays(step):
      return await self._source.take(step)
    groups = await draw_expert_groups(self._experts, step, self._reward)
    self._num_drawn = sum(map(len, groups))
    return groups

  def metrics(self) -> Metrics:
    """Returns the number of expert rows of the last step."""
    return {'sampler/expert_rows': float(self._num_drawn)}

  def state_dict(self) -> StateDict:
    """Returns the position in the expert rows."""
    return {'experts': self._experts.state_dict()}

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the position in the expert rows."""
    self._experts.load_state_dict(state['experts'])


class MixedSampler(Sampler):
  """Returns expert rows alongside rollouts in every step.

  Of the B = num_groups · group_size rows of a step, ⌈ρB⌉ are expert rows, a group each.
  The rest are whole groups of rollouts; what they leave over is filled with expert rows
  too, so that every step has B rows. Only that many groups are played.

  Args:
    source: What the sampler draws from.
    expert_share: The share ρ of expert rows, in (0, 1).
    reward: The reward of each expert row; see `WarmupSampler`.

  Raises:
    ValueError: If the share is out of range or leaves no room for a group.
  """

  reads_experts = True

  def __init__(
    self,
    source: SamplerSource,
    *,
    expert_share: float = 0.5,
    reward: float | None = 1.0,
  ):
    if not 0 < expert_share < 1:
      raise ValueError(f'expert_share={expert_share}: must be between 0 and 1')
    super().__init__(source)
    rows, size = source.num_groups * source.group_size, source.group_size
    experts = math.ceil(round(expert_share * rows, 6))
    self.groups_from_queue = (rows - experts) // size
    if not self.groups_from_queue:
      raise ValueError(
        f'expert_share={expert_share} leaves {rows - experts} of {rows} rows '
        f'for rollouts, but a group needs {size}: lower it, or raise '
        'batch.num_groups'
      )
    self._source = source
    self._reward = reward
    self.expert_rows = rows - self.groups_from_queue * size
    self._experts = source.experts(self.expert_rows)
    self._num_drawn = 0

  async def next(self, step: int) -> list[Group]:
    """Returns played groups, followed by expert rows."""
    groups = await self._source.take(step)
    if not groups:
      return []
    experts = await draw_expert_groups(self._experts, step, self._reward)
    self._num_drawn = sum(map(len, experts))
    return groups + experts

  def metrics(self) -> Metrics:
    """Returns the number of expert rows of the last step."""
    return {'sampler/expert_rows': float(self._num_drawn)}

  def state_dict(self) -> StateDict:
    """Returns the position in the expert rows."""
    return {'experts': self._experts.state_dict()}

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the position in the expert rows."""
    self._experts.load_state_dict(state['experts'])


async def draw_expert_groups(
  experts: ExpertRows, step: int, reward: float | None
) -> list[Group]:
  """Returns the next expert rows, each with `reward` on its last action token.

  Args:
    experts: The source of expert rows.
    step: The training step.
    reward: The reward; None keeps the rewards from the file.

  Returns:
    The groups.
  """
  groups = await experts.next(step)
  if reward is None:
    return groups
  rewarded = []
  for group in groups:
    rows = []
    for row in group:
      rewards = np.zeros(len(row.tokens), np.float32)
      rewards[np.flatnonzero(row.action_mask)[-1:]] = reward
      rows.append(dataclasses.replace(row, rewards=rewards))
    rewarded.append(rows)
  return rewarded
