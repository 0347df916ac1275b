"""Rows that someone else wrote, before rollouts or beside them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.data.samplers.base import Files, Metrics, Sampler, Source
from jaxrl.signature import ConfigError
from jaxrl.types import Group


class Warmup(Sampler):
  """Expert rows for the first steps, then rollouts, which begin to be played then.

  steps: how many. An expert step has as many rows as a step of rollouts. reward: what
  each expert row is given, on its last action token; None leaves what its file says. A
  row is a group of its own, without a baseline, so its advantage is its reward.
  """

  def __init__(self, source: Source, *, steps: int = 10, reward: float | None = 1.0):
    if steps < 1:
      raise ConfigError(f'steps={steps}: must be at least 1')
    super().__init__(source)
    self._source, self._steps, self._reward = source, steps, reward
    self.expert_rows = source.num_groups * source.group_size
    self._experts, self._drawn = source.experts(self.expert_rows), 0

  def plays(self, step: int) -> bool:
    return step >= self._steps

  async def next(self, step: int) -> list[Group]:
    self._drawn = 0
    if self.plays(step):
      return await self._source.take(step)
    groups = await draw(self._experts, step, self._reward)
    self._drawn = sum(map(len, groups))
    return groups

  def metrics(self) -> Metrics:
    return {'sampler/expert_rows': float(self._drawn)}

  def state_dict(self) -> dict[str, Any]:
    return {'experts': self._experts.state_dict()}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    self._experts.load_state_dict(state['experts'])


class Mixed(Sampler):
  """Expert rows beside rollouts, in every step.

  Of the B = num_groups · group_size rows of a step, ⌈ρB⌉ are expert rows, a group
  each; the rest are whole groups of rollouts, and what is left over by them is filled
  with expert rows too, so that every step has B. Only so many groups are played.

  expert_share: ρ, in (0, 1). reward: as `Warmup` has it.
  """

  def __init__(
    self, source: Source, *, expert_share: float = 0.5, reward: float | None = 1.0
  ):
    if not 0 < expert_share < 1:
      raise ConfigError(f'expert_share={expert_share}: must lie between 0 and 1')
    super().__init__(source)
    rows, size = source.num_groups * source.group_size, source.group_size
    experts = math.ceil(round(expert_share * rows, 6))
    self.groups_from_queue = (rows - experts) // size
    if not self.groups_from_queue:
      raise ConfigError(
        f'expert_share={expert_share} leaves {rows - experts} of {rows} rows for '
        f'rollouts, and a group has {size}: lower it, or raise batch.num_groups'
      )
    self._source, self._reward = source, reward
    self.expert_rows = rows - self.groups_from_queue * size
    self._experts, self._drawn = source.experts(self.expert_rows), 0

  async def next(self, step: int) -> list[Group]:
    played = await self._source.take(step)
    if not played:
      return []
    experts = await draw(self._experts, step, self._reward)
    self._drawn = sum(map(len, experts))
    return played + experts

  def metrics(self) -> Metrics:
    return {'sampler/expert_rows': float(self._drawn)}

  def state_dict(self) -> dict[str, Any]:
    return {'experts': self._experts.state_dict()}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    self._experts.load_state_dict(state['experts'])


async def draw(experts: Files, step: int, reward: float | None) -> list[Group]:
  """The next expert rows, each given `reward`."""
  groups = await experts.next(step)
  if reward is None:
    return groups
  changed = []
  for group in groups:
    rows = []
    for row in group:
      rewards = np.zeros(len(row.tokens), np.float32)
      rewards[np.flatnonzero(row.action_mask)[-1:]] = reward
      rows.append(dataclasses.replace(row, rewards=rewards))
    changed.append(rows)
  return changed
