"""Ray engines are actors that run an engine: the JAX engine, vLLM or a user's own.

vLLM's actor may have a Python interpreter of its own; the others need no vLLM.
"""

import asyncio
import contextlib
import os
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.device_thread import DeviceThread
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.weights.transport import FolderTransport, Transport
from jaxrl.rollout.weights.verified_store import EngineWeightClient
from jaxrl.types import Completion, Pixels, SamplingParams
from jaxrl.user_code import import_object

# Nothing is fetched or reported, and vLLM's own sockets stay on this machine. JAX is
# only used for its arrays on the host. Variables that are set already take precedence.
VLLM_ENVIRONMENT = {
  'GLOO_SOCKET_IFNAME': 'lo',
  'HF_HUB_OFFLINE': '1',
  'JAX_PLATFORMS': 'cpu',
  'VLLM_HOST_IP': '127.0.0.1',
  'VLLM_LOGGING_LEVEL': 'WARNING',
  'VLLM_NO_USAGE_STATS': '1',
}
# How long a dead engine's actor stays, so that the pool, which asks each second, is
# told what it has died of.
DEATH_NOTICE_S = 5.0


class MonitoredEngine:
  """A mixin, before an engine's class, that lets an `EnginePool` check its health."""

  _problem = ''

  async def generate(
    self,
    request_id: str,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *images: Sequence[Pixels],
  ) -> Completion:
    """Generates as the engine does, and remembers errors that are the engine's own."""
    try:
      arguments = request_id, token_ids, sampling, *images
      return await super().generate(*arguments)  # pyright: ignore
    except (ValueError, FloatingPointError):  # of the request, or of the weights
      raise
    except Exception as error:
      self._problem = f'{type(error).__name__}: {error}'
      raise

  async def health(self, limit: float) -> str:
    """Returns what is wrong with the engine, '' for nothing.

    Args:
      limit: Seconds that a dispatch may take.
    """
    if self.seconds_since_progress > limit:  # pyright: ignore
      return f'a dispatch has taken more than {limit:g} s'
    return self._problem

  async def close(self) -> None:
    """Releases what would outlive the engine's process."""


class EngineActor(MonitoredEngine, JaxEngine):
  """A `JaxEngine` in a process of its own.

  Args:
    model: The model.
    folder: Where its tokenizer is.
    transport: Makes the engine's end of the transport that weights come through.
    parts: Number of the learner's processes.
    **options: Options of `JaxEngine`.
  """

  def __init__(
    self,
    model: TransformerLM,
    folder: pathlib.Path,
    transport: Callable[[], Transport],
    *,
    parts: int = 1,
    **options: Any,
  ):
    tokenizer = load_tokenizer(folder)
    super().__init__(model, tokenizer, device_thread=DeviceThread('engine'), **options)
    self._weight_client = EngineWeightClient(transport(), self.load, parts=parts)

  async def pull(self, version: int, *, full: bool = False) -> str:
    """Loads `version` or a later one; returns the digest of what it has loaded."""
    return await self._weight_client.pull(version, full=full)


def _forward(name: str) -> Callable[..., Awaitable[Any]]:
  """Returns a method that awaits the engine's method of this name."""

  async def call(self: '_HostedEngine', *args: object) -> Any:
    async with self._translate_errors():
      return await getattr(self._engine, name)(*args)

  return call


class _HostedEngine:
  """Passes an actor's calls on to `_engine`, which the actor itself makes."""

  _engine: Any

  @contextlib.asynccontextmanager
  async def _translate_errors(self) -> AsyncIterator[None]:
    """Turns errors into ones that other processes can read."""
    yield

  @property
  def seconds_since_progress(self) -> float:
    return self._engine.seconds_since_progress

  generate, abort, progress = map(_forward, ('generate', 'abort', 'progress'))
  pause, drain, resume = map(_forward, ('pause', 'drain', 'resume'))
  sleep, warmup = map(_forward, ('sleep', 'warmup'))

  async def metrics(self) -> dict[str, float]:
    return self._engine.metrics()


class OwnEngineActor(MonitoredEngine, _HostedEngine):
  """An engine of a user's own class, in a process of its own.

  Args:
    location: Where the class is.
    model: The model.
    folder: Where its tokenizer is.
    transport: Makes the engine's end of the transport that weights come through.
    parts: Number of the learner's processes.
    **options: Options of the engine.
  """

  def __init__(
    self,
    location: str,
    model: TransformerLM,
    folder: pathlib.Path,
    transport: Callable[[], Transport],
    *,
    parts: int = 1,
    **options: Any,
  ):
    self._engine = import_object(location)(
      model, load_tokenizer(folder), device_thread=DeviceThread('engine'), **options
    )
    self._weight_client = EngineWeightClient(
      transport(), self._engine.load, parts=parts
    )

  async def pull(self, version: int, *, full: bool = False) -> str:
    """Loads `version` or a later one; returns the digest of what it has loaded."""
    return await self._weight_client.pull(version, full=full)


class VllmActor(MonitoredEngine, _HostedEngine):
  """A `VllmEngine` in a process of its own, where it is made, and vLLM imported.

  Args:
    folder: Folder of the model.
    transport: Makes its end of the transport; None if the learner sends weights.
    parts: Processes of the learner.
    **options: Options of the engine.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    transport: Callable[[], Transport] | None,
    *,
    parts: int = 1,
    **options: Any,
  ):
    for name, value in VLLM_ENVIRONMENT.items():
      os.environ.setdefault(name, value)
    from jaxrl.rollout.vllm.vllm_engine import VllmEngine

    self._engine = VllmEngine(folder, load_tokenizer(folder), **options)
    self._transport = None if transport is None else transport()
    self._parts = parts
    self._weight_client: EngineWeightClient | None = None

  async def pull(self, version: int, *, full: bool = False) -> str:
    """Loads `version` or a later one; returns the digest of what it has loaded.

    vLLM's processes read folders and shared memory themselves. What goes through Ray
    comes to this process, and from here through shared memory.
    """
    transport, self._transport = self._transport, None
    if isinstance(transport, FolderTransport):
      await self._engine.connect(str(transport.path), self._parts)
    elif transport is not None:
      self._weight_client = EngineWeightClient(
        transport, self._engine.load, place=None, parts=self._parts
      )
    client = self._weight_client
    pull = self._engine.pull if client is None else client.pull
    async with self._translate_errors():
      return await pull(version, full=full)

  # The learner calls these four if it sends from its GPUs.

  init_transfer, begin_update = _forward('init_transfer'), _forward('begin_update')
  update, end_update = _forward('update'), _forward('end_update')

  @contextlib.asynccontextmanager
  async def _translate_errors(self) -> AsyncIterator[None]:
    """Turns vLLM's errors into ones that can be unpickled where there is no vLLM.

    An actor whose vLLM has died ends with it: callers find the engine lost, and go on
    with its requests on another one. Before that, the pool asks for the cause.
    """
    try:
      yield
    except Exception as error:
      if self._engine.is_dead:
        await asyncio.sleep(DEATH_NOTICE_S)
        os._exit(1)
      if type(error).__module__.split('.')[0] in ('vllm', 'torch'):
        message = f'vLLM: {type(error).__name__}: {error}'
        raise RuntimeError(message) from None
      raise

  async def health(self, limit: float) -> str:
    """Returns what is wrong with the engine, '' for nothing."""
    if self._engine.is_dead:
      return f'vLLM has ended: {self._engine.death_cause()}'
    return await super().health(limit)

  async def close(self) -> None:
    """Releases what would outlive the engine's process."""
    if self._weight_client is not None:
      self._weight_client.close()
    self._engine.close()
