"""Where the learner leaves new weights and engines find them.

In one process a version is a copy on the device: the learner may donate its own
arrays to the next train step at once, and engines adopt the copy without another.
"""

import asyncio
import functools
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxrl.dispatch import Dispatcher
from jaxrl.types import Params, RolloutEngine


class WeightStore(Protocol):
  """A numbered series of weights; only the newest is kept."""

  async def publish(self, version: int, params: Params) -> None:
    """Makes `params` the newest. Versions must rise, else ValueError."""
    ...

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """The newest (version, params), as soon as there is one past `newer_than`."""
    ...

  def metrics(self) -> dict[str, float]:
    """What the newest version took to bring to the engines, `weights/…`."""
    ...


class InProcessWeights:
  """A `WeightStore` for a learner and engines that share a process.

  dtype: floating-point arrays are cast to it; None keeps each one's own. sharding:
  where copies lie, one sharding or a tree of them; None keeps each array's own.
  engines: told of every version before `publish` returns.
  """

  def __init__(
    self,
    *engines: RolloutEngine,
    dispatcher: Dispatcher,
    dtype: str | None = None,
    sharding: jax.sharding.Sharding | Params | None = None,
  ):
    self._engines, self._dispatcher, self._sharding = engines, dispatcher, sharding
    self._copy = jax.jit(functools.partial(_copy, dtype=dtype))
    self._newest: tuple[int, Params] | None = None
    self._news = asyncio.Event()

  @property
  def version(self) -> int | None:
    """The newest version; None before the first."""
    return self._newest and self._newest[0]

  async def publish(self, version: int, params: Params) -> None:
    """Copies `params` and hands the copy to every engine.

    When this returns, the caller may donate `params`, and every engine serves
    `version` from its next dispatch on. Raises ValueError unless `version` rises.
    """
    if self._newest is not None and version <= self._newest[0]:
      raise ValueError(
        f'weights version {version} was published after version {self._newest[0]}; '
        'versions must rise'
      )
    copy = await self._dispatcher.run(self._snapshot, params)
    self._newest = version, copy
    self._news.set()
    self._news = asyncio.Event()
    await asyncio.gather(*(engine.load(version, copy) for engine in self._engines))

  def metrics(self) -> dict[str, float]:
    """{}: nothing is sent."""
    return {}

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """Waits for a version past `newer_than`; the arrays must not be donated."""
    while self._newest is None or self._newest[0] <= newer_than:
      await self._news.wait()
    return self._newest

  def _snapshot(self, params: Params) -> Params:
    copy = self._copy(params)
    if self._sharding is not None:
      copy = jax.device_put(copy, self._sharding)
    # Waited for, so that a donation right after cannot overtake the copy.
    return jax.block_until_ready(copy)


def _copy(params: Params, dtype: str | None) -> Params:
  def one(x: jax.Array) -> jax.Array:
    real = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.array(x, dtype=dtype if real else None, copy=True)

  return jax.tree.map(one, params)
