"""A weight store hands new weights from the learner to the engines.

Within one process a version is a copy on the devices: the learner may donate its own
arrays to the next train step at once. An engine that lays weights out anew copies them
as it does so; any other uses the store's copy without copying again.
"""

import asyncio
import dataclasses
import functools
from typing import Protocol, cast

import jax
import jax.numpy as jnp

from jaxrl.device_thread import DeviceThread
from jaxrl.options import Options, option
from jaxrl.types import Params, RolloutEngine


class WeightStore(Protocol):
  """A series of numbered weights, of which only the newest version is kept."""

  async def publish(self, version: int, params: Params) -> None:
    """Makes `params` the newest version.

    Args:
      version: The number of the version; it must be greater than the one before.
      params: The parameters, which may be donated when this returns.

    Raises:
      ValueError: `version` is not greater than the newest one.
    """
    ...

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """Returns the newest (version, params), waiting for one after `newer_than`."""
    ...

  def metrics(self) -> dict[str, float]:
    """Returns what it took to bring the newest version to the engines, `weights/…`."""
    ...


class CopyingEngine(Protocol):
  """An engine with the attribute `copies_weights`."""

  async def load(self, version: int, params: Params, *, copy: bool = False) -> None:
    """Serves new weights; `params` may be donated afterwards if `copy` is set."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightStoreOptions(Options):
  """What every weight store can be told."""

  dtype: str | None = option(
    None, 'Floating-point arrays are cast to it; None keeps the dtype of each.'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class InProcessOptions(WeightStoreOptions):
  """Passes the learner's arrays to the engine of the same process."""


class InProcessWeightStore:
  """A `WeightStore` for a learner and engines that share a process.

  Args:
    *engines: Every engine is given each version before `publish` returns. One whose
      attribute `copies_weights` is true is asked to copy it. A store without engines
      keeps the newest version for `fetch`; one with engines does not, because they hold
      what they need of it in a layout of their own.
    device_thread: The thread on which copies are made.
    options: How copies are made.
    sharding: Where copies are placed, one sharding or a tree of them; None keeps the
      sharding of each array.
  """

  def __init__(
    self,
    *engines: RolloutEngine,
    device_thread: DeviceThread,
    options: WeightStoreOptions = InProcessOptions(),
    sharding: jax.sharding.Sharding | Params | None = None,
  ):
    self._engines = engines
    self._device_thread = device_thread
    self._dtype = options.dtype
    self._sharding = sharding
    self._version: int | None = None
    self._newest: Params | None = None
    self._published = asyncio.Event()

  @property
  def _engines_copy(self) -> bool:
    """Returns whether every engine copies weights itself, as they are."""
    if not self._engines or self._dtype is not None or self._sharding is not None:
      return False
    return all(getattr(engine, 'copies_weights', False) for engine in self._engines)

  @property
  def version(self) -> int | None:
    """Returns the newest version; None before the first."""
    return self._version

  async def publish(self, version: int, params: Params) -> None:
    """Hands a copy of `params` to every engine.

    When this returns, the caller may donate `params`, and every engine serves
    `version` from its next dispatch on.

    Args:
      version: The number of the version; it must be greater than the one before.
      params: The parameters to copy.

    Raises:
      ValueError: `version` is not greater than the newest one.
    """
    check_version_rises(version, self.version)
    if self._engines_copy:
      self._version = version
      engines = cast('tuple[CopyingEngine, ...]', self._engines)
      await asyncio.gather(*(one.load(version, params, copy=True) for one in engines))
      return
    copy = await self._device_thread.run(self._copy, params)
    self._version = version
    self._newest = None if self._engines else copy
    self._published.set()
    self._published = asyncio.Event()
    await asyncio.gather(*(engine.load(version, copy) for engine in self._engines))

  def metrics(self) -> dict[str, float]:
    """Returns {}, as nothing is sent."""
    return {}

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """Waits for a version after `newer_than`; its arrays must not be donated.

    Raises:
      RuntimeError: The store has engines, and so keeps no version.
    """
    if self._engines:
      raise RuntimeError('a store with engines keeps no version to fetch')
    while self._newest is None or self._version is None or self._version <= newer_than:
      await self._published.wait()
    return self._version, self._newest

  def _copy(self, params: Params) -> Params:
    copy = cast_copy(params, self._dtype)
    if self._sharding is not None:
      copy = jax.block_until_ready(jax.device_put(copy, self._sharding))
    return copy


def check_version_rises(version: int, newest: int | None) -> None:
  """Raises ValueError unless `version` is greater than the newest one, if any."""
  if newest is not None and version <= newest:
    raise ValueError(
      f'weights version {version} was published after version {newest}; '
      'versions must rise'
    )


def cast_copy(params: Params, dtype: str | None = None) -> Params:
  """Copies arrays on their devices. Call it on the device thread.

  Args:
    params: A tree of JAX arrays. The copies keep their shardings.
    dtype: Floating-point arrays are cast to it; None keeps the dtype of each.

  Returns:
    The copies. They are ready, so a donation of `params` cannot overtake them.
  """
  return jax.block_until_ready(_cast_copy(params, dtype))


@functools.partial(jax.jit, static_argnums=1)
def _cast_copy(params: Params, dtype: str | None) -> Params:
  def copy(x: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.array(x, dtype=dtype if is_float else None, copy=True)

  return jax.tree.map(copy, params)
