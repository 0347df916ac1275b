"""vLLM behind the `RolloutEngine` protocol: token ids in, token ids and log-probs out.

The learner's weights reach it through vLLM's own weight transfer, by an engine of ours
(`worker.py`) that reads the transports of `jaxrl.rollout.weights` where the model is.
"""

# pyright: reportMissingImports=false

import asyncio
import contextlib
import itertools
import os
import pathlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from vllm.distributed.weight_transfer.base import (
  WeightTransferInitRequest,
  WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import SLEEP_TAGS

from jaxrl.models import huggingface
from jaxrl.rollout.desk import Desk
from jaxrl.rollout.slots import Request
from jaxrl.rollout.stopping import stop_index
from jaxrl.rollout.vllm import arguments
from jaxrl.rollout.vllm.meter import Meter
from jaxrl.rollout.vllm.sampling import COLDEST, translate
from jaxrl.rollout.vllm.steps import Steps
from jaxrl.rollout.vllm.worker import BACKEND, BACKENDS, Extension
from jaxrl.rollout.weights.errors import WeightsError
from jaxrl.rollout.weights.layout import snapshot
from jaxrl.rollout.weights.publisher import Publisher
from jaxrl.rollout.weights.shared_memory import SharedMemory
from jaxrl.signature import ConfigError
from jaxrl.types import Params, SamplingParams

LOOK = 0.01  # seconds between two looks whether the workers have a version


class VllmEngine(Desk):
  """Serves many requests at once, each with its own seed.

  A request's tokens depend on its prompt, sampling and seed, not on its neighbours; a
  completion that is continued (`SamplingParams.first`) draws anew. When weights are
  loaded, what runs is kept: its keys and values are computed again with the new ones,
  so that later log-probs are wholly theirs, and `Completion.versions` says which token
  came from which. Greedy log-probs are at temperature 1.

  folder: a Hugging Face model; its weights are not read unless `load_format` says so,
  since the learner's replace them. tokenizer: needed for stop strings only. num_slots:
  requests at a time. max_length: the window. dtype: 'float32', 'bfloat16' …
  transfer: 'ipc' or 'nccl', vLLM's own, for what `device.Sender` sends; by default
  weights are pulled. options: of vLLM's `AsyncEngineArgs`, by name.

  Raises ConfigError for options that vLLM has not or refuses. Tensor and pipeline
  parallel, LoRA, quantisation and a GPU are handed to vLLM and were not run.
  """

  def __init__(
    self,
    folder: str | pathlib.Path,
    tokenizer: Any = None,
    *,
    num_slots: int = 64,
    max_length: int = 1024,
    dtype: str = 'float32',
    transfer: str = BACKEND,
    **options: Any,
  ):
    arguments.check(options, 'vllm')
    shape = huggingface.load_config(folder)
    super().__init__(tokenizer, window=max_length, vocab_size=shape.vocab_size)
    self._meter = Meter(num_slots)
    self._version: int | None = None
    self._paused = self._swapping = False
    self._asleep: tuple[str, ...] = ()  # what of its memory it has given up
    self._turn = asyncio.Lock()
    self._numbers = itertools.count()
    self._served: dict[str, tuple[str, asyncio.Task[None]]] = {}  # by our name
    self._ending: set[asyncio.Task[None]] = set()
    self._address = ''
    self._own: tuple[SharedMemory, Publisher] | None = None
    if current_platform.is_cpu():
      room = arguments.cache_bytes(shape, num_slots * max_length, dtype)
      options = {'enforce_eager': True, 'kv_cache_memory_bytes': room} | options
      if options['enforce_eager']:  # compiling vLLM's odd helpers takes half a minute
        os.environ.setdefault('TORCHDYNAMO_DISABLE', '1')
    options = {'dtype': dtype, 'load_format': 'dummy', 'seed': 0} | options
    try:
      self._llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
          model=str(folder),
          max_model_len=max_length,
          max_num_seqs=num_slots,
          skip_tokenizer_init=True,
          logprobs_mode='processed_logprobs',
          weight_transfer_config={'backend': BACKENDS[transfer]},
          worker_extension_cls=f'{Extension.__module__}.{Extension.__name__}',
          disable_log_stats=True,
          **options,
        ),
        stat_loggers=[lambda *_: Steps(self._meter)],
      )
    except (ValueError, TypeError) as error:
      said = ' '.join(str(error).split())[:300]
      raise ConfigError(f'vllm refuses its options: {said}') from error

  @property
  def version(self) -> int | None:
    """The version that is served; None before the first."""
    return self._version

  @property
  def dead(self) -> bool:
    """Whether vLLM's processes have ended: nothing can be served any more."""
    return self._llm.errored

  @property
  def stalled(self) -> float:
    """Seconds since there was anything from vLLM, which has work; 0 without work."""
    idle = not self._requests or self._paused or self._swapping
    return 0.0 if idle else self._meter.silence()

  def metrics(self) -> dict[str, float]:
    """Figures since the last call, named as `JaxEngine` names them."""
    return self._meter.report()

  async def warmup(self) -> None:
    """Serves one short request, so that no later one waits for a compiler."""
    await self.generate('warmup', [0], SamplingParams(max_tokens=2))
    self._meter.report()

  # ---- weights

  async def connect(self, address: str, parts: int = 1) -> None:
    """Names the folder, in memory perhaps, where the learner publishes versions."""
    with self._receiving(address):
      await self.init_transfer({'address': address, 'parts': parts})
    self._address = address

  async def pull(self, version: int, *, full: bool = False) -> str:
    """Loads the newest version, which is `version` or one after it.

    Decoding goes on until it is here; then it rests while the version is loaded, and
    resumes unless `pause` was called. full: all bytes come anew. Returns the digest of
    what was handed to vLLM; what is not as it was published is not. Raises
    WeightsError when it cannot be had, or the processes of the engine hold different
    versions; the version in use then remains.
    """
    async with self._turn:
      number, digest = await self._fetch(version, full)
      if number is not None:
        await self._swap(number)
      return digest

  async def load(self, version: int, params: Params) -> None:
    """Serves `params` as `version`: through shared memory of this engine's own."""
    if self._own is None:
      memory = SharedMemory()
      self._own = memory, Publisher(memory, keep=1)
      await self.connect(memory.address)
    publisher = self._own[1]
    again = publisher.version == version  # who asks doubts what came before
    if not again:
      shards = await asyncio.to_thread(snapshot, params)
      await asyncio.to_thread(publisher.publish, version, shards)
    if await self.pull(version, full=again) != publisher.digest:
      raise WeightsError(f'version {version} was loaded with another digest')

  async def _fetch(self, version: int, full: bool) -> tuple[int | None, str]:
    """Has every worker receive a version; (None, digest) if it came as another."""
    if not self._address:
      raise WeightsError('the engine knows no transport: connect it to one')
    while True:
      with self._receiving(f'version {version}'):
        await self._llm.collective_rpc('fetch_weights', args=(version, full))
        found: list[Any] = [None]
        while None in found:
          await asyncio.sleep(LOOK)
          found = await self._llm.collective_rpc('fetched_weights')
      if len({tuple(worker) for worker in found}) == 1:
        return tuple(found[0])
      numbers = [number for number, _ in found if number is not None]
      if len(set(numbers)) < 2:
        return None, next(digest for number, digest in found if number is None)
      version, full = max(numbers), False  # a newer one came between

  @contextlib.contextmanager
  def _receiving(self, what: str) -> Iterator[None]:
    """What a worker raises comes as vLLM's words for it."""
    try:
      yield
    except Exception as error:
      if self.dead:
        raise
      raise WeightsError(f'vLLM could not receive {what}: {error}') from error

  async def _swap(self, version: int) -> None:
    await self.begin_update()
    await self.update({'version': version})
    await self.end_update(version)

  # ---- an update, step by step: what `device.Sender` drives

  async def init_transfer(self, info: Mapping[str, Any]) -> None:
    """Hands vLLM's workers what their transfer engine begins with."""
    await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(dict(info)))

  async def begin_update(self) -> None:
    """Rests decoding, keeping every request, and opens an update."""
    self._swapping = True
    async with self._all_or_none():
      await self._wake('weights')  # and no cache before `resume`
      await self._llm.pause_generation(mode='keep', clear_cache=False)
      await self._llm.start_weight_update()

  async def update(self, info: Any) -> None:
    """Hands vLLM's workers what says where the weights are."""
    async with self._all_or_none():
      await self._llm.update_weights(WeightTransferUpdateRequest(info))

  async def end_update(self, version: int, digest: str = '') -> str:
    """Serves what has been loaded, as `version`, if it is what it should be.

    digest: of the tensors that were sent. Returns that of those that were handed to
    vLLM, if one was given; where it is another, nothing is served until an update ends
    that brings the right ones.
    """
    async with self._all_or_none():
      await self._llm.finish_weight_update(weight_version=str(version))
      held = ''
      if digest:
        found = await self._llm.collective_rpc('loaded_weights')
        held = '-'.join(sorted(set(found)))  # all workers are handed all tensors
      if held != digest:
        self._version = None
        return held
      await self._llm.reset_prefix_cache(
        reset_running_requests=True, reset_connector=True
      )
    self._version, self._swapping = version, False
    if not self._paused:
      await self._llm.resume_generation()
    return held

  @contextlib.asynccontextmanager
  async def _all_or_none(self) -> AsyncIterator[None]:
    """Half of a version may be in place after an error: then nothing is served."""
    try:
      yield
    except Exception as error:
      self._version, self._swapping = None, False
      for request in list(self._requests.values()):
        request.fail(error)
        self._end(request, 'abort')
      raise

  # ---- requests

  async def pause(self) -> None:
    """Stops decoding and keeps every request; returns when the device is quiet."""
    self._paused = True
    await self._llm.pause_generation(mode='keep', clear_cache=False)

  async def drain(self) -> None:
    """Begins no more requests, ends those that run, and pauses; others wait."""
    self._paused = True
    await self._llm.pause_generation(mode='wait', clear_cache=False)

  async def sleep(self) -> None:
    """Drains, and gives up the cache; weights lie in the host's memory until `resume`.

    An update wakes the weights alone. Frees nothing without vLLM's
    `enable_sleep_mode`, which it has on GPUs.
    """
    self._paused = True
    if set(self._asleep) != set(SLEEP_TAGS):
      await self._wake(*self._asleep)
      await self._llm.sleep(level=1, mode='wait')
      self._asleep = tuple(SLEEP_TAGS)

  async def resume(self) -> None:
    self._paused = False
    await self._wake(*self._asleep)
    if self._version is not None and not self._swapping:
      await self._llm.resume_generation()

  async def _wake(self, *tags: str) -> None:
    """vLLM may decode as soon as nothing of it is asleep: not before it is told to."""
    if found := [tag for tag in tags if tag in self._asleep]:
      await self._llm.wake_up(found)
      self._asleep = tuple(tag for tag in self._asleep if tag not in found)
      if not self._asleep:
        await self._llm.pause_generation(mode='keep', clear_cache=False)

  def close(self) -> None:
    """Ends vLLM's processes."""
    if self._own is not None:
      self._own[1].close()
      self._own[0].close()
    self._llm.shutdown()
    del self._llm  # which would end them once more

  def _refuse(self, prompt: np.ndarray, sampling: SamplingParams) -> str:
    if 0 < sampling.temperature < COLDEST:
      return f'temperature={sampling.temperature} must be 0 or at least {COLDEST}'
    return ''

  def _begin(self, request: Request) -> None:
    if len(self._requests) == 1:
      self._meter.wake()
    name = f'{request.name}#{next(self._numbers)}'  # vLLM may still end an older one
    task = asyncio.get_running_loop().create_task(self._serve(request, name))
    self._served[request.name] = name, task
    task.add_done_callback(lambda _: self._over(request, name))

  def _end(self, request: Request, reason: str) -> None:
    """Has vLLM end it: its last words bring the versions of what was emitted."""
    if self._requests.get(request.name) is not request:
      return  # it is ending already
    name, task = self._served[request.name]
    del self._requests[request.name]
    if not request.tokens:
      task.cancel()  # vLLM may not know of it yet
      return
    ending = asyncio.get_running_loop().create_task(self._llm.abort(name))
    self._ending.add(ending)
    ending.add_done_callback(self._ending.discard)

  def _over(self, request: Request, name: str) -> None:
    """Its task has ended; one that was cancelled may not even have begun."""
    request.finish('abort')
    if self._requests.get(request.name) is request:
      del self._requests[request.name]
    if self._served.get(request.name, ('',))[0] == name:
      del self._served[request.name]

  async def _serve(self, request: Request, name: str) -> None:
    """Takes what vLLM emits until the request has ended, and answers it."""
    reason = ''
    try:
      params = translate(request.sampling, request.budget)
      prompt = tokens_input(request.prompt.tolist())
      async with contextlib.aclosing(self._llm.generate(prompt, params, name)) as parts:
        async for output in parts:
          part = output.outputs[0]
          if not reason and self._deliver(request, part):
            reason = 'stop'
            if not output.finished:
              await self._llm.abort(name)
          label(request, part.weight_versions or ())
      reason = reason or str(part.finish_reason)
      if reason not in ('stop', 'length', 'abort'):
        raise RuntimeError(f'request {request.name!r}: vLLM ended it with {reason!r}')
      request.finish(reason)
    except Exception as error:
      request.fail(error)

  def _deliver(self, request: Request, part: CompletionOutput) -> bool:
    """Gives `request` its new tokens; True when they complete a stop string."""
    tokens = list(part.token_ids)
    logprobs: list[float] = [
      at[t].logprob for t, at in zip(tokens, part.logprobs or (), strict=True)
    ]
    if not np.isfinite(logprobs).all():
      raise FloatingPointError(
        f'request {request.name!r}: logits are not finite at token '
        f'{len(request.tokens)}, weights version {self._version}'
      )
    request.extend(tokens, logprobs, self._version or 0)
    rules = request.sampling
    cut = stop_index(self._tokenizer, request.written, len(tokens), rules.stop)
    if cut is None:
      return False
    request.cut(cut - rules.first)
    return True


def label(request: Request, spans: Iterable[Any]) -> None:
  """Writes down which version drew which token. spans: vLLM's `WeightVersionSpan`s."""
  for span in spans:
    end = min(span.end, len(request.versions))
    count = max(end - span.start, 0)
    request.versions[span.start : end] = [int(span.version)] * count
