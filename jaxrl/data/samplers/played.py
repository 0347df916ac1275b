"""Groups as they were played: all of them, or those that are young enough."""

from jaxrl.data.samplers.base import Metrics, Sampler, Source, mean_age
from jaxrl.signature import ConfigError
from jaxrl.types import Group


class Fifo(Sampler):
  """Whole groups from the queue, in its order."""

  def __init__(self, source: Source):
    super().__init__(source)
    self._source = source

  async def next(self, step: int) -> list[Group]:
    return await self._source.take(step)


class Staleness(Sampler):
  """Only groups of which no token was written by weights older than a bound.

  max_staleness: a group of `step` has weights_version ≥ step − max_staleness in every
  action token. Older ones are dropped, counted, and others played in their place.
  """

  def __init__(self, source: Source, *, max_staleness: int = 1):
    if max_staleness < 0:
      raise ConfigError(f'max_staleness={max_staleness}: must be at least 0')
    super().__init__(source)
    self._source, self._max_staleness = source, max_staleness
    self._dropped, self._metrics = 0, Metrics()

  async def next(self, step: int) -> list[Group]:
    groups = await self._source.take(step, step - self._max_staleness)
    before, self._dropped = self._dropped, await self._source.num_stale()
    dropped = {'sampler/stale_dropped': float(self._dropped - before)}
    self._metrics = dropped | mean_age(groups, step)
    return groups

  def metrics(self) -> Metrics:
    return self._metrics
