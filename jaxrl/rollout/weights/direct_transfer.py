"""Direct transfer sends weights from the learner's GPUs into the engines' GPUs.

The learner sends a version to all engines at once, one whole Hugging Face tensor after
another, and each engine answers with the digest of what it received. Nothing is stored
to be fetched later: a new engine is sent the newest weights.
"""

import asyncio
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxrl.models import hf_names
from jaxrl.models.hf_names import CheckpointTensor, FusedTensor
from jaxrl.models.model_config import ModelConfig
from jaxrl.options import option
from jaxrl.rollout.engine.actor_proxy import EngineDeadError, maybe_await
from jaxrl.rollout.weights.transport import WeightsError
from jaxrl.rollout.weights.weight_store import WeightStoreOptions, check_version_rises
from jaxrl.types import Params

log = logging.getLogger(__name__)

# Calls a method of every engine, each with its own arguments; waits for all results.
EngineCaller = Callable[[Sequence[Any], str, Sequence[tuple[Any, ...]]], list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferOptions(WeightStoreOptions):
  """How weights are sent."""

  patience: float = option(600.0, 'Seconds that a version may take.')
  buffer_bytes: int = option(
    256 << 20,
    'Bytes sent at once, or the largest tensor where that is more.',
    low=1,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NcclOptions(TransferOptions):
  """Sends from one of the learner's GPUs to the GPUs of all vLLM engines; needs Ray."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IpcOptions(TransferOptions):
  """Copies within a GPU, from the learner's memory into vLLM's; needs Ray."""


@dataclasses.dataclass(frozen=True)
class TransferTarget:
  """An engine that weights are sent to.

  Attributes:
    engine: Its handle. The handle's `key()` identifies the engine's process.
    num_gpus: Number of its GPUs.
    device_indices: Which of the sender's GPUs these are, if they share them.
  """

  engine: Any
  num_gpus: int = 1
  device_indices: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class TransferReport:
  """What was sent.

  Attributes:
    version: Its number.
    digest: Of the tensors as they were sent.
    engine_digests: Of the tensors that each engine received.
    num_bytes: Of the tensors.
  """

  version: int
  digest: str
  engine_digests: tuple[str, ...]
  num_bytes: int


class DirectWeightStore:
  """A `WeightStore` whose versions the learner's processes send to the engines.

  The parameters it is given have a method `push`, as `RemoteParams` has. An engine that
  is gone before a version is sent is skipped; whoever replaces it calls `catch_up`.

  Args:
    targets: All engines.
    backend: 'ipc' or 'nccl'.
    options: How weights are sent.
    engine_lost_error: Raised when an engine is lost while a version is sent.

  Attributes:
    version: The newest version; None before the first.
  """

  def __init__(
    self,
    targets: Sequence[TransferTarget],
    backend: str,
    options: TransferOptions,
    *,
    engine_lost_error: Callable[[str], Exception] = WeightsError,
  ):
    self._targets = targets
    self._backend = backend
    self._options = options
    self._engine_lost_error = engine_lost_error
    self._lock = asyncio.Lock()
    self._newest: Any = None
    self._metrics: dict[str, float] = {}
    self.version: int | None = None

  async def publish(self, version: int, params: Any) -> None:
    """Sends `params`; every living engine serves them when this returns.

    Args:
      version: The number of the version; it must be greater than the one before.
      params: Where the parameters are, with a method `push`.

    Raises:
      ValueError: `version` is not greater than the newest one.
      WeightsError: An engine received other tensors than were sent, twice, or it took
        too long.
    """
    async with self._lock:
      check_version_rises(version, self.version)
      start_time = time.perf_counter()
      self._newest, self.version = params, version
      report = await self._send(version, range(len(self._targets)))
      self._metrics = {
        'weights/bytes': float(report.num_bytes if report else 0),
        'weights/share': 1.0,
        'weights/pull_s': time.perf_counter() - start_time,
      }

  async def catch_up(self, engine: Any, name: str) -> None:
    """Sends the newest weights, if there are any, to an engine that was started since.

    If the learner has learned since it published, these are a newer version.
    """
    async with self._lock:
      if self._newest is not None:
        indices = [i for i, t in enumerate(self._targets) if t.engine is engine]
        await self._send(None, indices)

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """Raises WeightsError: nothing is stored."""
    raise WeightsError('weights that go from GPU to GPU are kept nowhere to be fetched')

  def metrics(self) -> dict[str, float]:
    """Returns what the newest version took; {} before the first."""
    return self._metrics

  async def close(self) -> None:
    """Does nothing: the learner closes its own end."""

  async def _send(
    self, version: int | None, indices: Sequence[int]
  ) -> TransferReport | None:
    """Sends a version, None for the newest, to the engines with these indices."""
    is_alive = await asyncio.gather(*(self._is_alive(index) for index in indices))
    living = [index for index, alive in zip(indices, is_alive, strict=True) if alive]
    if not living:
      return None
    targets = [self._targets[index] for index in living]
    report = await self._send_once(version, targets)
    if set(report.engine_digests) != {report.digest}:
      report = await self._send_once(version, targets)
    for index, digest in zip(living, report.engine_digests, strict=True):
      if digest != report.digest:
        raise WeightsError(
          f'engine {index + 1} of {len(self._targets)} received other weights than '
          f'were sent, twice: version {report.version}, digest {digest}, where '
          f'{report.digest} was sent'
        )
    return report

  async def _send_once(
    self, version: int | None, targets: Sequence[TransferTarget]
  ) -> TransferReport:
    push = self._newest.push(version, targets, self._backend, self._options)
    try:
      async with asyncio.timeout(self._options.patience):
        return await push
    except TimeoutError:
      reason = f'not all engines had it within {self._options.patience:g} s'
    except EngineDeadError as error:
      reason = str(error)
    raise self._engine_lost_error(
      'an engine was lost while weights were sent to it, and with it the way to the '
      f'others; the same command resumes from the last checkpoint ({reason})'
    )

  async def _is_alive(self, index: int) -> bool:
    """Returns whether an engine answers, before others wait for it."""
    try:
      await maybe_await(self._targets[index].engine.health(self._options.patience))
    except EngineDeadError:
      message = 'engine %d of %d gets no weights: it is gone'
      log.warning(message, index + 1, len(self._targets))
      return False
    return True


def make_engine_caller(loop: asyncio.AbstractEventLoop) -> EngineCaller:
  """Returns a function that calls engines from a thread.

  Args:
    loop: The event loop in which the engines' handles work.
  """

  def call(
    engines: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]]
  ) -> list[Any]:
    async def call_all() -> list[Any]:
      calls = (
        maybe_await(getattr(engine, method)(*args))
        for engine, args in zip(engines, arguments, strict=True)
      )
      return await asyncio.gather(*calls)

    return asyncio.run_coroutine_threadsafe(call_all(), loop).result()

  return call


# ---- Tensors as a checkpoint has them


def gather_hf_tensors(
  config: ModelConfig, params: Params, dtype: str | None = None
) -> Iterator[tuple[CheckpointTensor | FusedTensor, jax.Array]]:
  """Yields every tensor under its Hugging Face name, gathered one at a time.

  Parameters in the host's memory are brought to the devices a layer at a time. The
  order is a checkpoint's: layer after layer, so that whoever loads them can finish one
  before the next.

  Args:
    config: The model.
    params: May be sharded over the devices of several processes. All of these then
      iterate in step.
    dtype: Floating-point arrays are cast to it; None keeps the dtype of each.

  Yields:
    The tensor's description and its array, whole on every device. No array is a view of
    `params`.
  """
  host_pieces: dict[tuple[str, ...], list[np.ndarray]] = {}
  current, on_device = None, {}
  for tensor in hf_names.checkpoint_tensors(config):
    leaves, index = _leaves(params, tensor), tensor.index
    if leaves[0].sharding.memory_kind == 'pinned_host':
      paths = [part.path for part in tensor.parts]
      if (paths, index[:1]) != current:
        on_device = {}  # released before there is another
        for path, leaf in zip(paths, leaves, strict=True):
          if path not in host_pieces:
            host_pieces[path] = _addressable_arrays(leaf)
          on_device[path] = _layer_to_device(leaf, host_pieces[path], index[:1])
        current = paths, index[:1]
      leaves = [on_device[path] for path in paths]
      index = (*(0 for _ in index[:1]), *index[1:])
    names = cast_dtype(leaves[0], dtype), _replicated(leaves[0].sharding)
    convert = _make_converter(_without_place(tensor), *names)
    yield tensor, convert(leaves, index)


def hf_tensors_bytes(
  config: ModelConfig, params: Params, dtype: str | None = None
) -> int:
  """Returns the bytes of all tensors that `gather_hf_tensors` yields."""
  return sum(
    math.prod(tensor.shape)
    * jnp.dtype(cast_dtype(_leaves(params, tensor)[0], dtype)).itemsize
    for tensor in hf_names.checkpoint_tensors(config)
  )


def cast_dtype(leaf: jax.Array, dtype: str | None) -> str:
  """Returns the name of the dtype that `leaf` has after a cast to `dtype`, if any."""
  is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
  return dtype if dtype and is_float else leaf.dtype.name


def _leaves(params: Params, tensor: CheckpointTensor | FusedTensor) -> list[jax.Array]:
  leaves = []
  for part in tensor.parts:
    leaf = params
    for key in part.path:
      leaf = leaf[key]
    leaves.append(leaf)
  return leaves


def _without_place(
  tensor: CheckpointTensor | FusedTensor,
) -> CheckpointTensor | FusedTensor:
  """Returns the tensor without name and index, equal for all of its kind."""
  if isinstance(tensor, FusedTensor):
    parts = tuple(_without_place(part) for part in tensor.parts)
    return dataclasses.replace(tensor, name='', parts=parts)  # pyright: ignore
  return dataclasses.replace(tensor, name='', index=(0,) * len(tensor.index))


def _addressable_arrays(leaf: jax.Array) -> list[np.ndarray]:
  """Returns this process's shards; equal ones are the same array."""
  arrays: dict[str, np.ndarray] = {}
  for shard in leaf.addressable_shards:
    if str(shard.index) not in arrays:
      arrays[str(shard.index)] = np.asarray(shard.data)
  return [arrays[str(shard.index)] for shard in leaf.addressable_shards]


def _layer_to_device(
  leaf: jax.Array, pieces: Sequence[np.ndarray], layers: tuple[int, ...]
) -> jax.Array:
  """Brings a layer of a parameter from the host's memory, which programs cannot read.

  Args:
    leaf: The parameter.
    pieces: This process's shards of the parameter.
    layers: The layer, whose leading axis is then 1; empty for the whole parameter.
  """
  sharding = leaf.sharding.with_memory_kind('device')
  for layer in layers:
    pieces = [piece[layer : layer + 1] for piece in pieces]
  devices = [shard.device for shard in leaf.addressable_shards]
  shape = (1, *leaf.shape[1:]) if layers else leaf.shape
  arrays = jax.device_put(pieces, devices)
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _replicated(sharding: Sharding) -> Sharding:
  if isinstance(sharding, NamedSharding):
    return NamedSharding(sharding.mesh, PartitionSpec())
  return sharding


@functools.cache
def _make_converter(
  kind: CheckpointTensor | FusedTensor, dtype: str, sharding: Sharding
) -> Callable[[list[jax.Array], tuple[int, ...]], jax.Array]:
  """Returns one program for the tensors of a kind of all layers and experts."""

  def convert(leaves: list[jax.Array], index: tuple[int, ...]) -> jax.Array:
    whole = kind.join([leaf[index] for leaf in leaves])
    return jnp.array(whole, dtype=dtype, copy=True)

  return jax.jit(convert, out_shardings=sharding)
