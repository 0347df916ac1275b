"""Priority replay: groups are learned from several times, the newest first."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.data import trajectories
from jaxrl.data.samplers.base import Metrics, Sampler, Source, mean_age
from jaxrl.signature import ConfigError
from jaxrl.types import Group


@dataclasses.dataclass
class Entry:
  """A group in the buffer.

  number: its place in the order of arrival. version: the oldest weights that wrote
  it. uses: how often it has been drawn. ready: the first step it may be drawn at.
  packed: the group as text, once a checkpoint has asked for it.
  """

  number: int
  group: Group
  version: int
  uses: int = 0
  ready: int = 0
  packed: str = ''

  def pack(self) -> str:
    self.packed = self.packed or trajectories.pack([self.group])
    return self.packed


class Replay(Sampler):
  """Draws each step the groups of highest priority from a buffer of played ones.

    priority = version − decay·uses + sigma·ε,  ε ~ N(0, 1) from (seed, step, group)

  Each step, ⌈fresh · num_groups⌉ newly played groups enter the buffer; then the best
  num_groups that may be drawn are, older ones first among equals. Until the buffer
  holds as many, a step has fewer groups.

  fresh: the share of a step's groups that is played anew, in (0, 1]. decay: versions
  that a use costs. sigma: noise on the priority, in versions, so that what decayed may
  still come. cooldown: a group is drawn again so many steps later at the soonest.
  use_limit: a group leaves the buffer after so many uses. capacity: groups that the
  buffer keeps; beyond it, those of lowest priority leave. What is older than the
  source's max_staleness leaves too.

  The buffer is in the checkpoint: some 10 bytes for each of its tokens, compressed, so
  at most capacity · group_size · batch.max_length · 10 bytes.
  """

  reuses = True

  def __init__(
    self,
    source: Source,
    *,
    fresh: float = 0.5,
    decay: float = 2.0,
    sigma: float = 0.0,
    cooldown: int = 1,
    use_limit: int = 3,
    capacity: int = 64,
  ):
    if not 0 < fresh <= 1:
      raise ConfigError(f'fresh={fresh}: must lie in (0, 1]')
    for name, value in (('decay', decay), ('sigma', sigma)):
      if not 0 <= value < math.inf:
        raise ConfigError(f'{name}={value}: must be at least 0, and finite')
    least = {'cooldown': cooldown, 'use_limit': use_limit, 'capacity': capacity}
    for name, value in least.items():
      if value < 1:
        raise ConfigError(f'{name}={value}: must be at least 1')
    most = source.max_staleness
    if most is not None and most < cooldown:
      raise ConfigError(
        f'cooldown={cooldown}: --config.rollout.staleness drops what is older than '
        f'{most} steps, so no group would be learned from again: raise its max'
      )
    super().__init__(source)
    self.groups_from_queue = math.ceil(round(fresh * source.num_groups, 6))
    self._source, self._size = source, source.num_groups
    self._decay, self._sigma, self._cooldown = decay, sigma, cooldown
    self._use_limit, self._capacity = use_limit, capacity
    self._entries: list[Entry] = []
    self._arrived, self._metrics = 0, Metrics()

  async def next(self, step: int) -> list[Group]:
    for group in await self._source.take(step):
      version = trajectories.oldest_version(group)
      version = step if version is None else version
      self._entries.append(Entry(self._arrived, group, version))
      self._arrived += 1
    if self._source.max_staleness is not None:
      oldest = step - self._source.max_staleness
      self._entries = [e for e in self._entries if e.version >= oldest]
    drawn = self._best([e for e in self._entries if e.ready <= step], step, self._size)
    reused = sum(entry.uses > 0 for entry in drawn)
    for entry in drawn:
      entry.uses += 1
      entry.ready = step + self._cooldown
    left = [entry for entry in self._entries if entry.uses < self._use_limit]
    self._entries = self._best(left, step, self._capacity)
    groups = [entry.group for entry in drawn]
    self._metrics = mean_age(groups, step) | {
      'sampler/reused': float(reused),
      'sampler/buffer_size': float(len(self._entries)),
    }
    return groups

  def _best(self, entries: list[Entry], step: int, count: int) -> list[Entry]:
    """The `count` of highest priority, in the order they came in."""

    def order(entry: Entry) -> tuple[float, int]:
      return -self._priority(entry, step), entry.number

    return sorted(sorted(entries, key=order)[:count], key=lambda entry: entry.number)

  def _priority(self, entry: Entry, step: int) -> float:
    priority = entry.version - self._decay * entry.uses
    if self._sigma:
      rng = np.random.default_rng([self._source.seed, step, entry.number])
      priority += self._sigma * float(rng.standard_normal())
    return priority

  def metrics(self) -> Metrics:
    return self._metrics

  def state_dict(self) -> dict[str, Any]:
    places = [[e.number, e.version, e.uses, e.ready] for e in self._entries]
    groups = [entry.pack() for entry in self._entries]
    return {'arrived': self._arrived, 'places': places, 'groups': groups}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Raises ValueError for a state whose groups cannot be read."""
    self._entries = [
      Entry(number, trajectories.unpack(text)[0], *rest, packed=text)
      for (number, *rest), text in zip(state['places'], state['groups'], strict=True)
    ]
    self._arrived = state['arrived']
