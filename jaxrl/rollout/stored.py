"""Groups out of an experience store, in the place of groups that are played."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from jaxrl.data.store.reader import Facts, Reader, Verdict
from jaxrl.data.trajectories import oldest_version
from jaxrl.rollout.gate import Gate
from jaxrl.rollout.lost import CannotFill, Drop, Lost
from jaxrl.rollout.members import members
from jaxrl.signature import ConfigError
from jaxrl.types import Group

POLL = 0.5  # seconds between looks into a store that has too little
FIRST, EVERY = 5.0, 30.0  # seconds until the first line about it, and between others
KEPT = ('taken', 'reused')  # the counts that tell of no loss
log = logging.getLogger(__name__)


class Starved(CannotFill):
  """No explorer has written for as long as the trainer was to wait."""


class Stopped(Exception):
  """The user asked to stop while the trainer waited for groups."""


class StoredGroups:
  """Takes groups as a queue of played ones does, filters and shapers included.

  reader: the store's. gates: by tag, what becomes of its groups. name: the store's,
  for people. num_groups: of a step. size: sampled members a group has, of which
  `least` must be sound; more are left out. max_length, vocab_size: what a row may
  have. wanted: facts that explorers must share with this run, each with the key it
  is set by. wait: seconds without a new group until training stops. max_lost: as the
  queue has it. most: steps that a token may be old; None: any. stop: True when the user
  asked to end.
  """

  def __init__(
    self,
    reader: Reader,
    gates: Mapping[str, Gate],
    *,
    name: str,
    num_groups: int,
    size: int,
    least: int,
    max_length: int,
    vocab_size: int,
    wanted: Mapping[str, tuple[Any, str]],
    wait: float,
    max_lost: int,
    most: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
  ):
    self.num_groups = num_groups
    self._reader, self._gates, self._name = reader, gates, name
    self._size, self._least = size, least
    self._max_length, self._vocab_size = max_length, vocab_size
    self._wanted, self._wait = wanted, wait
    self._lost, self._most, self._stop = Lost(max_lost), most, stop
    self._clock, self._sleep = clock, sleep
    self._counts: Counter[str] = Counter()
    self._error: Exception | None = None
    self._last: Drop | None = None
    self._checked: list[Facts] = []

  async def take(self, step: int, min_version: int | None = None) -> list[Group]:
    """The batch of a step; waits for explorers to write it.

    After the longest wait a batch of fewer groups is given, and with none `Starved` is
    raised. min_version: groups with a token of older weights are lost. Raises
    CannotFill when too many are lost in a row, ConfigError when explorers played with
    other settings, Stopped.
    """
    if self._most is not None:
      min_version = max(step - self._most, -1 if min_version is None else min_version)
    begun, size = self._clock(), -1
    since = spoken = begun
    while True:
      late = self._clock() - since >= self._wait
      groups = await asyncio.to_thread(self._draw, step, min_version, late)
      if groups:
        return groups
      now = self._clock()
      if self._stop():
        raise Stopped
      size, before = await asyncio.to_thread(self._reader.size), size
      if size != before:
        since = now
      elif late:
        raise Starved(await asyncio.to_thread(self._starved, step, size))
      if now - spoken >= (FIRST if spoken == begun else EVERY):
        spoken = now
        log.info(await asyncio.to_thread(self._waiting, step, size, now - begun))
      await self._sleep(POLL)

  def _draw(self, step: int, min_version: int | None, partial: bool) -> list[Group]:
    def judge(group: Group, facts: Facts) -> Verdict:
      return self._judge(group, facts, min_version)

    places = self._reader.draw(step, self.num_groups, judge, partial=partial)
    if self._error is not None:
      raise self._error
    if places:
      self._lost.taken()
      self._counts['taken'] += len(places)
      self._counts['reused'] += sum(place.use > 0 for place in places)
    return [place.group for place in places]

  def _judge(self, group: Group, facts: Facts, min_version: int | None) -> Verdict:
    self.check(facts)
    rows, drop = self._sound(group)
    oldest = oldest_version(rows)
    if drop is None and None not in (min_version, oldest) and oldest < min_version:  # pyright: ignore
      why = f'written by the weights of step {oldest}, wanted {min_version}'
      advice = 'raise the bound (rollout.staleness), or explore with newer weights'
      drop = Drop('stale', why, advice)
    if drop is None:
      first = rows[0]
      gate = self._gates[first.tag]
      rows, drop = gate.judge(first.group_id, first.episode_id, rows)
    if drop is None:
      self._lost.keep()
      return Verdict(rows)
    kind = drop.name if drop.name in ('stale', 'dropped') else f'filtered/{drop.name}'
    self._counts[kind] += 1
    self._last = drop
    self._error = self._error or self._lost.lose(drop)
    return Verdict(group, drop.name)

  def _sound(self, group: Group) -> tuple[Group, Drop | None]:
    """As many sound attempts as a group has; and why it is dropped, if so."""
    attempts = members(group)
    sound = {m: rows for m, rows in attempts.items() if not any(r.failed for r in rows)}
    rows = [row for m in sorted(sound)[: self._size] for row in sound[m]]
    if len(sound) < self._least:
      why = f'{len(sound)} of its {len(attempts)} attempts are sound, and {self._least}'
      advice = f'explore with --group_size={self._size}'
      if len(attempts) < self._least:
        advice += f', or set --config.algorithm.group_size={len(attempts)}'
      return group, Drop('dropped', f'{why} are needed', advice)
    for row in rows:
      if len(row.tokens) > self._max_length:
        why = f'a row has {len(row.tokens)} tokens, batch.max_length={self._max_length}'
        return group, Drop('dropped', why, 'raise --config.batch.max_length')
      if row.tokens.min() < 0 or row.tokens.max() >= self._vocab_size:
        why = f'a token is none of the {self._vocab_size} of the model'
        return group, Drop('dropped', why, 'explore with the model that is trained')
    return rows, None

  def check(self, facts: Facts) -> None:
    """Raises ConfigError for an explorer whose groups cannot be learned from here."""
    if facts in self._checked:
      return
    for name, (value, key) in self._wanted.items():
      if facts.get(name, value) != value:
        raise ConfigError(
          f'{self._name}: an explorer played with {name} {facts.get(name)!r}, and this '
          f'run has {value!r}: set --config.{key} as it was, or take another store'
        )
    self._checked.append(facts)

  def _waiting(self, step: int, size: int, seconds: float) -> str:
    left = self._reader.left()
    return (
      f'step {step} waits for groups, {seconds:.0f} s so far: {self._name} has {size}, '
      f'{left} of them not used up, and a step takes {self.num_groups}{self._why()}'
    )

  def _starved(self, step: int, size: int) -> str:
    return (
      f'step {step}: no new group in {self._name} for {self._wait:g} s; it has {size}, '
      f'all used as often as asked, or lost{self._why()}. Start an explorer (python -m '
      'launch.rollout) and then this command again, which goes on from here; wait=… in '
      'the call string of --config.data.source has it wait longer'
    )

  def _why(self) -> str:
    if self._last is None:
      return ''
    lost = {name: n for name, n in self._counts.items() if name not in KEPT}
    names = ', '.join(f'{name} {count}' for name, count in lost.items())
    return f' ({names}; the last because {self._last.why}: {self._last.advice})'

  async def counts(self) -> dict[str, float]:
    """What became of groups since the process began."""
    return {f'queue/{name}': float(n) for name, n in self._counts.items()}
