"""StoreGroupSource takes groups from an experience store instead of playing them."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from jaxrl.data.store.experience_reader import (
  ExperienceReader,
  GroupDecision,
  WriterFacts,
)
from jaxrl.group_stats import oldest_weights_version, rows_by_sample
from jaxrl.rollout.queue.group_pipeline import (
  DropReason,
  DropTracker,
  GroupPipeline,
  StopRequested,
  StoreTimeoutError,
)
from jaxrl.types import Group, Trajectory

STORE_POLL_S = 0.5  # seconds between looks into a store that has too few groups
FIRST_LOG_S = 5.0  # seconds of waiting before the first log line
LOG_INTERVAL_S = 30.0  # seconds between further log lines
_KEPT_COUNTS = ('taken', 'reused')  # all other counts are of dropped groups
log = logging.getLogger(__name__)


class StoreGroupSource:
  """Takes groups from a store as `GroupQueue` does, filters and shapers included.

  Attributes:
    num_groups: Groups per step.
  """

  def __init__(
    self,
    reader: ExperienceReader,
    pipelines: Mapping[str, GroupPipeline],
    *,
    name: str,
    num_groups: int,
    group_size: int,
    min_samples: int,
    max_length: int,
    vocab_size: int,
    required_facts: Mapping[str, tuple[Any, str]],
    timeout: float,
    max_consecutive_drops: int,
    max_staleness: int | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
  ):
    """Creates a source.

    Args:
      reader: Reads the store.
      pipelines: Filters and shapes the groups of each tag.
      name: The store's name, for messages.
      num_groups: Groups per step.
      group_size: At most this many valid samples of a group are used.
      min_samples: A group with fewer valid samples is dropped.
      max_length: Tokens a row may have.
      vocab_size: Token ids must be below this.
      required_facts: For each fact that explorers must share with this run, its value
        and the config key that sets it.
      timeout: Seconds without a new group until training stops.
      max_consecutive_drops: How many groups may be dropped in a row before it is an
        error.
      max_staleness: How many steps old a token may be; None for any age.
      stop_requested: Returns True once the user asked to stop.
      clock: Returns the time in seconds.
      sleep: Waits for a number of seconds.
    """
    self.num_groups = num_groups
    self._reader = reader
    self._pipelines = pipelines
    self._name = name
    self._group_size = group_size
    self._min_samples = min_samples
    self._max_length = max_length
    self._vocab_size = vocab_size
    self._required_facts = required_facts
    self._timeout = timeout
    self._drops = DropTracker(max_consecutive_drops)
    self._max_staleness = max_staleness
    self._stop_requested = stop_requested
    self._clock = clock
    self._sleep = sleep
    self._counts: Counter[str] = Counter()
    self._error: Exception | None = None
    self._last_drop: DropReason | None = None
    self._checked_facts: list[WriterFacts] = []

  async def take(self, step: int, min_version: int | None = None) -> list[Group]:
    """Takes the batch of a step and waits for explorers to write it.

    Args:
      step: The training step.
      min_version: Groups with a token of older weights are dropped.

    Returns:
      The groups; fewer than `num_groups` once the timeout has passed.

    Raises:
      StoreTimeoutError: If there is no group when the timeout has passed.
      InsufficientGroupsError: If too many groups were dropped in a row.
      ValueError: If an explorer played with other settings.
      StopRequested: If the user asked to stop.
    """
    if self._max_staleness is not None:
      oldest_allowed = step - self._max_staleness
      min_version = max(oldest_allowed, -1 if min_version is None else min_version)
    started, size = self._clock(), -1
    last_growth = last_log = started
    while True:
      timed_out = self._clock() - last_growth >= self._timeout
      groups = await asyncio.to_thread(self._draw, step, min_version, timed_out)
      if groups:
        return groups
      now = self._clock()
      if self._stop_requested():
        raise StopRequested
      previous_size, size = size, await asyncio.to_thread(self._reader.num_groups)
      if size != previous_size:
        last_growth = now
      elif timed_out:
        message = await asyncio.to_thread(self._timeout_message, step, size)
        raise StoreTimeoutError(message)
      interval = FIRST_LOG_S if last_log == started else LOG_INTERVAL_S
      if now - last_log >= interval:
        last_log = now
        seconds = now - started
        log.info(await asyncio.to_thread(self._waiting_message, step, size, seconds))
      await self._sleep(STORE_POLL_S)

  def _draw(self, step: int, min_version: int | None, partial: bool) -> list[Group]:
    def decide(group: Group, facts: WriterFacts) -> GroupDecision:
      return self._decide(group, facts, min_version)

    places = self._reader.draw(step, self.num_groups, decide, partial=partial)
    if self._error is not None:
      raise self._error
    if places:
      self._drops.reset()
      self._counts['taken'] += len(places)
      self._counts['reused'] += sum(place.use > 0 for place in places)
    return [place.group for place in places]

  def _decide(
    self, group: Group, facts: WriterFacts, min_version: int | None
  ) -> GroupDecision:
    """Decides whether a group is trained on, and shapes it if so."""
    self.check_facts(facts)
    rows, drop = self._select_valid(group)
    if drop is None:
      drop = _staleness(rows, min_version)
    if drop is None:
      first = rows[0]
      pipeline = self._pipelines[first.tag]
      rows, drop = pipeline.process(first.env_group, first.episode_id, rows)
    if drop is None:
      self._drops.record_kept()
      return GroupDecision(rows)
    is_filtered = drop.name not in ('stale', 'dropped')
    self._counts[f'filtered/{drop.name}' if is_filtered else drop.name] += 1
    self._last_drop = drop
    self._error = self._error or self._drops.record_drop(drop)
    return GroupDecision(group, drop.name)

  def _select_valid(self, group: Group) -> tuple[Group, DropReason | None]:
    """Returns up to `group_size` valid samples, or why the group is dropped."""
    samples = rows_by_sample(group)
    valid = {i: rows for i, rows in samples.items() if not any(r.failed for r in rows)}
    if len(valid) < self._min_samples:
      reason = (
        f'{len(valid)} of its {len(samples)} samples are valid, and '
        f'{self._min_samples} are needed'
      )
      hint = f'explore with group_size={self._group_size}'
      if len(samples) < self._min_samples:
        hint += f', or set algorithm.group_size={len(samples)}'
      return group, DropReason('dropped', reason, hint)
    rows = [row for i in sorted(valid)[: self._group_size] for row in valid[i]]
    for row in rows:
      if drop := self._row_problem(row):
        return group, drop
    return rows, None

  def _row_problem(self, row: Trajectory) -> DropReason | None:
    if len(row.tokens) > self._max_length:
      reason = (
        f'a row has {len(row.tokens)} tokens, but batch.max_length={self._max_length}'
      )
      return DropReason('dropped', reason, 'raise batch.max_length')
    if row.tokens.min() < 0 or row.tokens.max() >= self._vocab_size:
      reason = f"a token id is outside the model's {self._vocab_size} ids"
      return DropReason('dropped', reason, 'explore with the model that is trained')
    return None

  def check_facts(self, facts: WriterFacts) -> None:
    """Checks that this run can learn from an explorer's groups.

    Args:
      facts: What the explorer played with.

    Raises:
      ValueError: If a required fact differs.
    """
    if facts in self._checked_facts:
      return
    for name, (value, key) in self._required_facts.items():
      if facts.get(name, value) != value:
        raise ValueError(
          f'{self._name}: an explorer played with {name} {facts.get(name)!r}, but this '
          f'run has {value!r}: set {key} to the same value, or use another '
          'store'
        )
    self._checked_facts.append(facts)

  def _waiting_message(self, step: int, size: int, seconds: float) -> str:
    num_left = self._reader.num_left()
    return (
      f'step {step} waits for groups, {seconds:.0f} s so far: {self._name} has {size} '
      f'groups, {num_left} of them not used up, and a step takes '
      f'{self.num_groups}{self._drop_summary()}'
    )

  def _timeout_message(self, step: int, size: int) -> str:
    return (
      f'step {step}: no new group in {self._name} for {self._timeout:g} s; it has '
      f'{size} groups, all of them used up or dropped{self._drop_summary()}. Start an '
      'explorer (python -m launch.rollout), then repeat this command, which continues '
      'from here. To wait longer, set wait=… in the call string of '
      'dataset.experience_store'
    )

  def _drop_summary(self) -> str:
    if self._last_drop is None:
      return ''
    dropped = {n: count for n, count in self._counts.items() if n not in _KEPT_COUNTS}
    counts = ', '.join(f'{name} {count}' for name, count in dropped.items())
    last = self._last_drop
    return f' ({counts}; the last because {last.reason}: {last.hint})'

  async def counts(self) -> dict[str, float]:
    """Returns what happened to groups since the process began, by metric name."""
    return {f'queue/{name}': float(n) for name, n in self._counts.items()}


def _staleness(rows: Group, min_version: int | None) -> DropReason | None:
  """Returns why a group is too old, or None."""
  oldest = oldest_weights_version(rows)
  if min_version is None or oldest is None or oldest >= min_version:
    return None
  reason = (
    f'it has tokens written by the weights of step {oldest}, but step {min_version} or '
    'later is required'
  )
  hint = 'raise the bound (rollout.staleness_policy), or explore with newer weights'
  return DropReason('stale', reason, hint)
