"""vLLM in an actor, which may have a Python of its own: the others need no vLLM."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.rollout.weights.pulls import Puller
from jaxrl.rollout.weights.transport import Folder, Transport
from jaxrl.types import Completion, SamplingParams
from launch.cluster.engines import Watched

# Nothing is fetched or reported, and vLLM's own sockets stay on this machine. JAX is
# there for its arrays on the host alone. What the environment says already goes first.
ENVIRONMENT = {
  'GLOO_SOCKET_IFNAME': 'lo',
  'HF_HUB_OFFLINE': '1',
  'JAX_PLATFORMS': 'cpu',
  'VLLM_HOST_IP': '127.0.0.1',
  'VLLM_LOGGING_LEVEL': 'WARNING',
  'VLLM_NO_USAGE_STATS': '1',
}


class _Vllm:
  """The methods of a `VllmEngine` that is made, and vLLM imported, in the actor.

  transport: what it pulls weights from; None where the learner sends them.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    transport: Callable[[], Transport] | None,
    *,
    parts: int = 1,
    **options: Any,
  ):
    for name, value in ENVIRONMENT.items():
      os.environ.setdefault(name, value)
    from jaxrl.rollout.vllm.engine import VllmEngine

    self._engine = VllmEngine(folder, load_tokenizer(folder), **options)
    self._transport = None if transport is None else transport()
    self._parts = parts
    self._puller: Puller | None = None

  @property
  def stalled(self) -> float:
    return self._engine.stalled

  async def pull(self, version: int, *, full: bool = False) -> str:
    """Loads `version` or a newer one; the digest of what it has loaded.

    vLLM's processes read folders and shared memory themselves. What goes through Ray
    comes to this process, and from here through shared memory.
    """
    transport, self._transport = self._transport, None
    if isinstance(transport, Folder):
      await self._engine.connect(str(transport.path), self._parts)
    elif transport is not None:
      self._puller = Puller(transport, self._engine.load, place=None, parts=self._parts)
    pull = self._engine.pull if self._puller is None else self._puller.pull
    with self._told():
      return await pull(version, full=full)

  # What the learner calls that sends from its GPU.

  async def init_transfer(self, info: Mapping[str, Any]) -> None:
    with self._told():
      await self._engine.init_transfer(info)

  async def begin_update(self) -> None:
    with self._told():
      await self._engine.begin_update()

  async def update(self, info: Any) -> None:
    with self._told():
      await self._engine.update(info)

  async def end_update(self, version: int, digest: str) -> str:
    with self._told():
      return await self._engine.end_update(version, digest)

  async def generate(
    self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams
  ) -> Completion:
    with self._told():
      return await self._engine.generate(request_id, token_ids, sampling)

  @contextlib.contextmanager
  def _told(self) -> Iterator[None]:
    """Errors as they are understood where there is no vLLM.

    An actor whose vLLM has died ends with it: whoever waits finds the engine lost, and
    goes on with its requests on another one.
    """
    try:
      yield
    except Exception as error:
      self._alive()
      if type(error).__module__.split('.')[0] in ('vllm', 'torch'):
        said = f'vLLM: {type(error).__name__}: {error}'
        raise RuntimeError(said) from None
      raise

  def _alive(self) -> None:
    if self._engine.dead:
      os._exit(1)

  async def abort(self, request_id: str) -> None:
    await self._engine.abort(request_id)

  async def progress(self, request_ids: Sequence[str]) -> dict[str, Completion]:
    return await self._engine.progress(request_ids)

  async def pause(self) -> None:
    await self._engine.pause()

  async def drain(self) -> None:
    await self._engine.drain()

  async def resume(self) -> None:
    await self._engine.resume()

  async def sleep(self) -> None:
    with self._told():
      await self._engine.sleep()

  async def warmup(self) -> None:
    await self._engine.warmup()

  async def metrics(self) -> dict[str, float]:
    return self._engine.metrics()


class VllmActor(Watched, _Vllm):
  """An engine as the fleet looks after it."""

  async def health(self, limit: float) -> str:
    self._alive()
    return await super().health(limit)

  async def close(self) -> None:
    if self._puller is not None:
      self._puller.close()
    self._engine.close()
