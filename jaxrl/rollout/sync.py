"""When engines get new weights: the styles of `rollout.sync`, a call string.

Every style hands over weights at the start of a step at the earliest, on the one loop.
In flight, requests keep running and go on with the new weights, so a sequence may hold
two versions; drained, engines end what they run before they take the weights.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import jax

from jaxrl import signature
from jaxrl.rollout.handles import settle
from jaxrl.rollout.weight_store import WeightStore
from jaxrl.signature import ConfigError
from jaxrl.types import Params

Weights = Callable[[], Awaitable[Params]]


class Style(NamedTuple):
  """interval: steps, or for an explorer steps' worth of groups, between versions.

  asked: the rollout side says when. waits: for engines to have this version, 'now'; to
  have the one before, 'last'; or for nothing, 'never'. drain: engines end the requests
  they run before they take new weights.
  """

  interval: int
  asked: bool
  waits: str
  drain: bool

  def lag(self, ahead: float) -> int | None:
    """The most steps that engines' weights are behind the learner's; None: any number.

    ahead: steps that rollouts may run ahead, `rollout.async_ratio`.
    """
    if self.waits == 'never':
      return None
    if self.asked:
      # Whole groups at a version are at most (1 + ahead) steps' worth; so many steps
      # later and `interval` more, the rollout side has played its share.
      return self.interval + math.ceil(ahead)
    return self.interval - 1 if self.waits == 'now' else 2 * self.interval - 1


def fixed(*, interval: int = 1, drain: bool = False) -> Style:
  """Every `interval` steps, and the step waits until all engines have them."""
  return Style(interval, asked=False, waits='now', drain=drain)


def explorer(*, interval: int = 1, drain: bool = False) -> Style:
  """Whenever the rollout side has played `interval` steps' worth of whole groups."""
  return Style(interval, asked=True, waits='now', drain=drain)


def trainer(*, interval: int = 1) -> Style:
  """Every `interval` steps the trainer pushes and goes on; engines take it in flight.

  It waits only where the push before has not arrived. Costs a copy of the weights.
  """
  return Style(interval, asked=False, waits='last', drain=False)


def asynchronous(*, interval: int = 1) -> Style:
  """As `trainer`, but nobody waits: what is newest is pushed next, others are skipped.

  Nothing bounds how far engines fall behind, so `rollout.staleness` must.
  """
  return Style(interval, asked=False, waits='never', drain=False)


STYLES: dict[str, Callable[..., Style]] = {
  'fixed': fixed,
  'explorer': explorer,
  'trainer': trainer,
  'asynchronous': asynchronous,
}


def parse(text: str) -> Style:
  """The style that a call string names. Raises ConfigError."""
  style = signature.call(text, STYLES, 'style', 'rollout.sync')
  if style.interval < 1:
    raise ConfigError(f'--config.rollout.sync={text}: interval must be at least 1')
  return style


class Engines(Protocol):
  """All engines of a run as one, as `EngineRouter` is."""

  async def drain(self) -> None: ...

  async def resume(self) -> None: ...


class Swaps:
  """Hands the learner's weights to the engines, in one style.

  store: where they are published. engines: of which only `drain` asks anything.
  copy: makes parameters that the learner will not donate. played: counts the whole
  groups since the run began. num_groups: of a step.
  """

  def __init__(
    self,
    style: Style,
    store: WeightStore,
    engines: Engines,
    *,
    copy: Callable[[Params], Awaitable[Params]],
    played: Callable[[], Awaitable[float]],
    num_groups: int,
  ):
    self.num_groups = num_groups
    self._style, self._store, self._engines = style, store, engines
    self._copy, self._played = copy, played
    self.version: int | None = None  # that all engines have
    self._next: tuple[int, Params] | None = None
    self._pushing: asyncio.Task | None = None
    self._since = 0.0  # whole groups when the engines got their weights
    self._told = self._given = -1  # the last step, and the last one handed over

  async def at(self, step: int, weights: Weights) -> None:
    """Before a step that plays: engines get the learner's weights if it is time.

    weights: makes what they are given, and is asked only then. After steps that did
    not play it waits for them in every style: what would be played meanwhile would be
    as many steps older than the style allows.
    """
    self._raise()
    paused, self._told = step > self._told + 1, step
    if self.version is None:  # nothing can be played before
      await self.now(step, weights)
    elif not await self._due(step, paused):
      return
    elif paused or self._style.waits == 'now':
      await self.now(step, weights)
    else:
      if self._style.waits == 'last':
        await self._landed()
      self._next = None  # let go of before there is another copy
      self._next = step, await self._copy(await weights())
      self._given = step
      self._raise()
      if self._pushing is None:
        self._pushing = asyncio.ensure_future(self._push())

  async def now(self, step: int, weights: Weights) -> None:
    """Returns when every engine serves `step`; none takes a version until `at`.

    So an evaluation that follows sees one version.
    """
    self._told = self._given = step
    self._next = None  # what is older need not go out any more
    await self._landed()
    if self.version != step:
      await self._swap(step, await weights())

  async def close(self) -> None:
    """Gives up what is on its way."""
    if self._pushing is not None:
      self._pushing.cancel()
      with contextlib.suppress(BaseException):
        await self._pushing

  def metrics(self, step: int) -> dict[str, float]:
    """sync/lag: steps that the engines' weights are behind `step`."""
    return {} if self.version is None else {'sync/lag': float(step - self.version)}

  async def _due(self, step: int, paused: bool) -> bool:
    interval = self._style.interval
    if self._style.asked:
      played = await self._played() - self._since
      return paused or played >= interval * self.num_groups
    # Not step % interval: the step that is one may not have played.
    return step // interval > self._given // interval

  async def _swap(self, step: int, params: Params) -> None:
    if self._style.drain and self.version is not None:
      await settle(self._engines.drain())
      try:
        await self._store.publish(step, params)
      finally:
        await settle(self._engines.resume())
    else:
      await self._store.publish(step, params)
    self.version = step
    if self._style.asked:
      self._since = await self._played()

  async def _push(self) -> None:
    while self._next is not None:
      (step, params), self._next = self._next, None
      await self._store.publish(step, params)
      self.version = step

  async def _landed(self) -> None:
    if self._pushing is not None:
      await asyncio.wait({self._pushing})
      self._raise()

  def _raise(self) -> None:
    """Forgets a push that is over, and raises what it raised."""
    if self._pushing is not None and self._pushing.done():
      done, self._pushing = self._pushing, None
      done.result()


async def copy(run: Callable[..., Awaitable[Any]], params: Params) -> Params:
  """A copy on the devices, made by `run`, a dispatcher's, in its turn."""
  return await run(_copied, params)


def _copied(params: Params) -> Params:
  copies = jax.tree.map(lambda x: x.copy(), params)
  return jax.block_until_ready(copies)
