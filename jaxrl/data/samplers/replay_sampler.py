"""ReplaySampler is a replay buffer: groups are used several times, newest first."""

import dataclasses
import math

import numpy as np

from jaxrl import group_stats
from jaxrl.data import trajectory_codec
from jaxrl.data.samplers.sampler import Metrics, Sampler, SamplerSource, mean_age
from jaxrl.types import Group, StateDict


@dataclasses.dataclass
class ReplayEntry:
  """A group in the replay buffer.

  Attributes:
    number: The position in the order of arrival.
    group: The trajectories.
    version: The oldest weights version that wrote the group.
    uses: How often the group has been drawn.
    ready: The first step at which the group may be drawn.
    packed: The group as text, once a checkpoint needed it.
  """

  number: int
  group: Group
  version: int
  uses: int = 0
  ready: int = 0
  packed: str = ''

  def pack(self) -> str:
    """Returns the group as text, which is computed once.

    Returns:
      The text that `trajectory_codec.unpack` reads.
    """
    self.packed = self.packed or trajectory_codec.pack([self.group])
    return self.packed


class ReplaySampler(Sampler):
  """Draws the groups of highest priority from a buffer of played ones.

      priority = version − decay·uses + sigma·ε,  ε ~ N(0, 1) from (seed, step, group)

  Each step, ⌈fresh · num_groups⌉ newly played groups enter the buffer; then the best
  num_groups eligible ones are drawn, older ones first among equals. Until the buffer
  holds as many, a step has fewer groups. Groups older than the source's max_staleness
  leave the buffer.

  The buffer is part of the checkpoint. It takes about 10 bytes per token when
  compressed, so at most capacity · group_size · batch.max_length · 10 bytes.

  Args:
    source: What the sampler draws from.
    fresh: The share of a step's groups that is newly played, in (0, 1].
    decay: How many versions of priority a use costs.
    sigma: The standard deviation of the noise on the priority, in versions.
    cooldown: A group is drawn again this many steps later at the earliest.
    use_limit: A group leaves the buffer after this many uses.
    capacity: The number of groups that the buffer keeps; beyond it, those of lowest
      priority leave.

  Raises:
    ValueError: If an option is out of range, or if no group could be used twice.
  """

  reuses = True

  def __init__(
    self,
    source: SamplerSource,
    *,
    fresh: float = 0.5,
    decay: float = 2.0,
    sigma: float = 0.0,
    cooldown: int = 1,
    use_limit: int = 3,
    capacity: int = 64,
  ):
    if not 0 < fresh <= 1:
      raise ValueError(f'fresh={fresh}: must be above 0 and at most 1')
    for name, value in (('decay', decay), ('sigma', sigma)):
      if not 0 <= value < math.inf:
        raise ValueError(f'{name}={value}: must be at least 0, and finite')
    minimum_one = {'cooldown': cooldown, 'use_limit': use_limit, 'capacity': capacity}
    for name, value in minimum_one.items():
      if value < 1:
        raise ValueError(f'{name}={value}: must be at least 1')
    max_staleness = source.max_staleness
    if max_staleness is not None and max_staleness < cooldown:
      raise ValueError(
        f'cooldown={cooldown}: no group could be used again, as '
        'rollout.staleness_policy drops those older than '
        f'{max_staleness} steps: raise its max, or lower cooldown'
      )
    super().__init__(source)
    self.groups_from_queue = math.ceil(round(fresh * source.num_groups, 6))
    self._source = source
    self._size = source.num_groups
    self._decay = decay
    self._sigma = sigma
    self._cooldown = cooldown
    self._use_limit = use_limit
    self._capacity = capacity
    self._entries: list[ReplayEntry] = []
    self._num_arrived = 0
    self._metrics = Metrics()

  async def next(self, step: int) -> list[Group]:
    """Adds new groups to the buffer and draws the groups of a step."""
    for group in await self._source.take(step):
      version = group_stats.oldest_weights_version(group)
      version = step if version is None else version
      self._entries.append(ReplayEntry(self._num_arrived, group, version))
      self._num_arrived += 1
    if self._source.max_staleness is not None:
      oldest = step - self._source.max_staleness
      self._entries = [e for e in self._entries if e.version >= oldest]
    drawn = self._best([e for e in self._entries if e.ready <= step], step, self._size)
    reused = sum(entry.uses > 0 for entry in drawn)
    for entry in drawn:
      entry.uses += 1
      entry.ready = step + self._cooldown
    remaining = [entry for entry in self._entries if entry.uses < self._use_limit]
    self._entries = self._best(remaining, step, self._capacity)
    groups = [entry.group for entry in drawn]
    self._metrics = mean_age(groups, step) | {
      'sampler/reused': float(reused),
      'sampler/buffer_size': float(len(self._entries)),
    }
    return groups

  def _best(
    self, entries: list[ReplayEntry], step: int, count: int
  ) -> list[ReplayEntry]:
    """Returns the `count` entries of highest priority, in order of arrival."""

    def order(entry: ReplayEntry) -> tuple[float, int]:
      return -self._priority(entry, step), entry.number

    return sorted(sorted(entries, key=order)[:count], key=lambda entry: entry.number)

  def _priority(self, entry: ReplayEntry, step: int) -> float:
    priority = entry.version - self._decay * entry.uses
    if self._sigma:
      rng = np.random.default_rng([self._source.seed, step, entry.number])
      priority += self._sigma * float(rng.standard_normal())
    return priority

  def metrics(self) -> Metrics:
    """Returns the number of reused groups, the buffer size and the mean age."""
    return self._metrics

  def state_dict(self) -> StateDict:
    """Returns the buffer as JSON."""
    entry_states = [[e.number, e.version, e.uses, e.ready] for e in self._entries]
    groups = [entry.pack() for entry in self._entries]
    return {'arrived': self._num_arrived, 'places': entry_states, 'groups': groups}

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the buffer.

    Args:
      state: The saved state.

    Raises:
      ValueError: If a group cannot be restored.
    """
    self._entries = [
      ReplayEntry(number, trajectory_codec.unpack(text)[0], *entry_state, packed=text)
      for (number, *entry_state), text in zip(
        state['places'], state['groups'], strict=True
      )
    ]
    self._num_arrived = state['arrived']
