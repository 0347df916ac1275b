"""What became of the groups that never reached the trainer, and what to do about it."""

from collections import Counter
from typing import NamedTuple

ADVICE = {
  'dropped': 'see why episodes fail: python -m launch.play, with this config',
  'stale': 'raise the bound (rollout.staleness, or max_staleness of the sampler), '
  'lower rollout.async_ratio, or play faster',
}


class CannotFill(RuntimeError):
  """So many groups were lost in a row that the batch cannot be filled."""


class Drop(NamedTuple):
  """A filter's verdict. name: the filter's. why: of this group. advice: what helps."""

  name: str
  why: str
  advice: str = ''


class Lost:
  """Counts groups lost since the last was kept, and since the last batch.

  limit: that many in a row are too many.
  """

  def __init__(self, limit: int):
    if limit < 1:
      raise ValueError(f'max_lost must be at least 1, not {limit}')
    self._limit = limit
    self._in_a_row = self._stale = self._kept = 0
    self._reasons: Counter[str] = Counter()

  def keep(self) -> None:
    """A group was kept."""
    self._in_a_row = 0
    self._kept += 1

  def taken(self) -> None:
    """A batch was taken: what came before is past."""
    self._kept = self._stale = 0
    self._reasons.clear()

  def lose(self, drop: Drop) -> CannotFill | None:
    """A group was lost. Returns the error when it was one too many.

    What went stale had been kept before, so it is counted by itself.
    """
    stale = drop.name == 'stale'
    self._reasons[drop.name] += 1
    self._stale += stale
    self._in_a_row += not stale
    lost = max(self._in_a_row, self._stale)
    if lost < self._limit:
      return None
    tried = self._kept + sum(self._reasons.values()) - self._reasons['stale']
    reasons = ', '.join(f'{name} {n}' for name, n in self._reasons.most_common())
    advice = drop.advice or ADVICE.get(drop.name, 'loosen the filter')
    return CannotFill(
      f'{lost} groups in a row were lost and none was kept, so the batch cannot be '
      f'filled (rollout.max_lost={self._limit}). Tried since the last batch: {tried} '
      f'groups; lost: {reasons}. The last because: {drop.why}. What may help: {advice}'
    )
