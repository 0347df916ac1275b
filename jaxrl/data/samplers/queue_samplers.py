"""Queue samplers return groups as they were played, optionally only fresh ones."""

from jaxrl.data.samplers.sampler import Metrics, Sampler, SamplerSource, mean_age
from jaxrl.types import Group


class FifoSampler(Sampler):
  """Returns whole groups from the queue, in order."""

  def __init__(self, source: SamplerSource):
    super().__init__(source)
    self._source = source

  async def next(self, step: int) -> list[Group]:
    """Returns the next groups of the queue."""
    return await self._source.take(step)


class StalenessSampler(Sampler):
  """Returns only groups whose tokens are all from recent enough weights.

  Every action token of a group returned at `step` has weights_version ≥ step −
  max_staleness. Older groups are dropped, counted and replaced.

  Args:
    source: What the sampler draws from.
    max_staleness: The maximum age in steps.

  Raises:
    ValueError: If `max_staleness` is negative.
  """

  def __init__(self, source: SamplerSource, *, max_staleness: int = 1):
    if max_staleness < 0:
      raise ValueError(f'max_staleness={max_staleness}: must be at least 0')
    super().__init__(source)
    self._source = source
    self._max_staleness = max_staleness
    self._num_dropped = 0
    self._metrics = Metrics()

  async def next(self, step: int) -> list[Group]:
    """Returns the next groups that are fresh enough."""
    groups = await self._source.take(step, step - self._max_staleness)
    dropped_before = self._num_dropped
    self._num_dropped = await self._source.num_stale()
    dropped = {'sampler/stale_dropped': float(self._num_dropped - dropped_before)}
    self._metrics = dropped | mean_age(groups, step)
    return groups

  def metrics(self) -> Metrics:
    """Returns how many groups were dropped, and the mean age of the others."""
    return self._metrics
