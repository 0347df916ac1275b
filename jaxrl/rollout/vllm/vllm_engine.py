"""vLLM engine: serves requests with vLLM behind the `RolloutEngine` protocol.

The learner's weights reach it through vLLM's own weight transfer, by a transfer engine
of ours (`vllm_worker`) that reads published versions where the model is.
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
from jaxrl.options import ConfigError
from jaxrl.rollout.engine.engine_base import (
  EngineBase,
  EngineRequest,
  find_stop_string,
)
from jaxrl.rollout.vllm import vllm_options
from jaxrl.rollout.vllm.core_log import CoreLog
from jaxrl.rollout.vllm.stat_logger import VllmStatLogger, VllmStats
from jaxrl.rollout.vllm.vllm_sampling import likeliest, to_vllm_sampling
from jaxrl.rollout.vllm.vllm_worker import (
  PULL_BACKEND,
  TRANSFER_BACKENDS,
  WorkerExtension,
)
from jaxrl.rollout.weights.publisher import VersionWriter, VersionWriterOptions
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.transport import SharedMemoryTransport, WeightsError
from jaxrl.types import Params, SamplingParams

POLL_S = 0.01  # between two looks whether the workers have received a version
MIN_TEMPERATURE = 0.01  # vLLM raises lower temperatures, except for 0, to this one


class VllmEngine(EngineBase):
  """Serves many requests at once, each with a seed of its own.

  A request's tokens depend on its prompt, its sampling parameters and its seed, not on
  other requests. A completion that is continued (`SamplingParams.num_generated`) draws
  from another random stream. When weights are loaded, running requests are kept. Their
  keys and values are computed again with the new weights, so that later log-probs are
  wholly theirs, and `Completion.weights_versions` says which version drew each token.
  The log-probs of greedy requests are at temperature 1.

  Tensor and pipeline parallelism, LoRA, quantization and GPUs are left to vLLM and have
  not been run.

  Args:
    folder: A Hugging Face model. Its weights are not read unless `load_format` says
      so, because the learner's weights replace them.
    tokenizer: Only needed for stop strings.
    max_num_seqs: Most requests that are decoded at the same time.
    max_length: Context length, in tokens of prompt and completion together.
    dtype: Of weights and cache: 'float32', 'bfloat16' …
    transfer: How weights arrive: by default they are pulled from where they are
      published. 'ipc' and 'nccl' receive what a `GpuWeightSender` sends.
    **options: Options of vLLM's `AsyncEngineArgs`, by name.

  Raises:
    ConfigError: If vLLM does not have an option, or refuses it, or cannot take new
      weights of this family.
  """

  traits = vllm_options.VLLM_TRAITS

  def __init__(
    self,
    folder: str | pathlib.Path,
    tokenizer: Any = None,
    *,
    max_num_seqs: int = 64,
    max_length: int = 1024,
    dtype: str = 'float32',
    transfer: str = PULL_BACKEND,
    **options: object,
  ):
    vllm_options.check_vllm_options(options, 'vllm')
    if current_platform.is_tpu():
      raise ConfigError(f'rollout.engine: {vllm_options.TPU_OBSTACLE}')
    config = huggingface.load_config(folder)
    vllm_options.check_family(config)
    vllm_options.check_folder(folder)
    super().__init__(tokenizer, max_length=max_length, vocab_size=config.vocab_size)
    if config.vision is not None:
      from jaxrl.models.vision.patch_processor import PatchProcessor  # few models do

      self._processor = PatchProcessor(config.vision)
      options = {'limit_mm_per_prompt': {'video': 0}} | options
      # The layer that would normalise pixels in the model has its constants among the
      # weights. 'dummy' fills them with noise, and no update brings them back.
      options['mm_device_do_normalize'] = False
    self._stats = VllmStats(max_num_seqs)
    self._version: int | None = None
    self._is_paused = False
    self._is_updating = False
    self._asleep: tuple[str, ...] = ()  # tags of the memory that vLLM has given up
    self._pull_lock = asyncio.Lock()
    self._request_numbers = itertools.count()
    # vLLM's id and the task of each request, by our id.
    self._served: dict[str, tuple[str, asyncio.Task[None]]] = {}
    self._aborting: set[asyncio.Task[None]] = set()
    self._address = ''
    self._local_channel: tuple[SharedMemoryTransport, VersionWriter] | None = None
    if current_platform.is_cpu():
      vllm_options.check_cpu_head_size(config)
      cache_bytes = vllm_options.kv_cache_bytes(
        config, max_num_seqs * max_length, dtype
      )
      options = vllm_options.cpu_options(config, options, cache_bytes)
      if options['enforce_eager']:  # compiling vLLM's helpers takes half a minute
        os.environ.setdefault('TORCHDYNAMO_DISABLE', '1')
    options = {'dtype': dtype, 'load_format': 'dummy', 'seed': 0} | options
    self._core_log = CoreLog()
    if overrides := vllm_options.hf_overrides(config):
      options.setdefault('hf_overrides', overrides)
    tokenizer_file = pathlib.Path(folder) / 'tokenizer_config.json'
    self._llm = self._start_vllm(
      model=str(folder),
      max_model_len=max_length,
      max_num_seqs=max_num_seqs,
      # vLLM needs one for images, and for constraints.
      skip_tokenizer_init=config.vision is None and not tokenizer_file.exists(),
      logprobs_mode='processed_logprobs',
      weight_transfer_config={'backend': TRANSFER_BACKENDS[transfer]},
      worker_extension_cls=f'{WorkerExtension.__module__}.{WorkerExtension.__name__}',
      disable_log_stats=True,
      **options,
    )

  def _start_vllm(self, **options: object) -> AsyncLLM:
    """Starts vLLM with options of `AsyncEngineArgs`."""
    try:
      return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**options),
        stat_loggers=[lambda *_: VllmStatLogger(self._stats)],
      )
    except (ValueError, TypeError) as error:
      message = ' '.join(str(error).split())[:300]
      raise ConfigError(
        f'vLLM refuses the options of rollout.engine: {message}'
      ) from error
    except RuntimeError as error:  # which may only say that its core has ended
      cause = self._core_log.last_error()
      raise RuntimeError(f'vLLM cannot start: {cause or error}') from error

  @property
  def version(self) -> int | None:
    """Returns the weights version being served; None before the first one is loaded."""
    return self._version

  @property
  def is_dead(self) -> bool:
    """Returns whether vLLM's processes have ended, so that it cannot serve any more."""
    return self._llm.errored

  def death_cause(self) -> str:
    """Returns what ended vLLM's processes, as far as they have told."""
    return self._core_log.last_error() or 'its log does not say why'

  @property
  def seconds_since_progress(self) -> float:
    """Returns the seconds since vLLM's last step; 0 if it has no work."""
    is_idle = not self._requests or self._is_paused or self._is_updating
    return 0.0 if is_idle else self._stats.seconds_since_step()

  def metrics(self) -> dict[str, float]:
    """Returns metrics since the last call, named as `JaxEngine` names them."""
    return self._stats.report()

  async def warmup(self) -> None:
    """Serves one short request, so that no later one waits for a compiler."""
    await self.generate('warmup', [0], SamplingParams(max_tokens=2))
    self._stats.report()

  # ---- weights

  async def connect(self, address: str, parts: int = 1) -> None:
    """Connects to where the learner publishes versions.

    Args:
      address: The folder of the versions; it may be in memory.
      parts: Number of the learner's processes, each of which publishes a part.

    Raises:
      WeightsError: If the folder cannot be read.
    """
    with self._translate_errors(address):
      await self.init_transfer({'address': address, 'parts': parts})
    self._address = address

  async def pull(self, version: int, *, full: bool = False) -> str:
    """Loads the newest version, which is `version` or a later one.

    Decoding continues until the version has arrived. It rests while the version is
    loaded, and resumes unless `pause` was called.

    Args:
      version: The oldest version that will do.
      full: Whether to read all bytes again.

    Returns:
      The digest of the arrays that were received. Arrays that differ from what was
      published are not loaded.

    Raises:
      WeightsError: If the version cannot be had, or vLLM's processes received different
        versions. The version in use then remains.
    """
    async with self._pull_lock:
      fetched_version, digest = await self._fetch(version, full)
      if fetched_version is not None:
        await self.begin_update()
        await self.update({'version': fetched_version})
        await self.end_update(fetched_version)
      return digest

  async def load(self, version: int, params: Params) -> None:
    """Serves `params` as `version`, which pass through shared memory of this engine.

    Args:
      version: The weights version.
      params: The model's parameters.

    Raises:
      WeightsError: If vLLM received other arrays.
    """
    if self._local_channel is None:
      memory = SharedMemoryTransport()
      options = VersionWriterOptions(keep=1)
      self._local_channel = memory, VersionWriter(memory, options=options)
      await self.connect(memory.address)
    writer = self._local_channel[1]
    is_repeated = writer.version == version  # the caller doubts what came before
    if not is_repeated:
      shards = await asyncio.to_thread(snapshot, params)
      await asyncio.to_thread(writer.publish, version, shards)
    if await self.pull(version, full=is_repeated) != writer.digest:
      raise WeightsError(f'version {version} was loaded with another digest')

  async def _fetch(self, version: int, full: bool) -> tuple[int | None, str]:
    """Lets every worker receive a version.

    Returns the version, or None if it differs from what was published, and the digest.
    """
    if not self._address:
      raise WeightsError('the engine is not connected to a transport: call connect')
    while True:
      with self._translate_errors(f'version {version}'):
        await self._llm.collective_rpc('fetch_weights', args=(version, full))
        fetched: list[Any] = [None]  # by worker; None while one is receiving
        while None in fetched:
          await asyncio.sleep(POLL_S)
          fetched = await self._llm.collective_rpc('fetched_weights')
      if len({tuple(by_worker) for by_worker in fetched}) == 1:
        return tuple(fetched[0])
      versions = [version for version, _ in fetched if version is not None]
      if len(set(versions)) < 2:
        return None, next(digest for version, digest in fetched if version is None)
      version, full = max(versions), False  # a newer one was published meanwhile

  @contextlib.contextmanager
  def _translate_errors(self, subject: str) -> Iterator[None]:
    """Turns vLLM's errors about its workers into WeightsError."""
    try:
      yield
    except Exception as error:
      if self.is_dead:
        raise
      raise WeightsError(f'vLLM could not receive {subject}: {error}') from error

  # ---- an update in steps, as `GpuWeightSender` calls them

  async def init_transfer(self, info: Mapping[str, object]) -> None:
    """Initializes the transfer engines of vLLM's workers.

    Args:
      info: Fields of the transfer engine's init info.
    """
    await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(dict(info)))

  async def begin_update(self) -> None:
    """Pauses decoding, keeping every request, and opens an update."""
    self._is_updating = True
    async with self._stop_serving_on_error():
      await self._wake_up('weights')  # but no cache before `resume`
      await self._llm.pause_generation(mode='keep', clear_cache=False)
      await self._llm.start_weight_update()

  async def update(self, info: object) -> None:
    """Loads weights into vLLM's workers.

    Args:
      info: Fields of the transfer engine's update info, which say where weights are.
    """
    async with self._stop_serving_on_error():
      await self._llm.update_weights(WeightTransferUpdateRequest(info))

  async def end_update(self, version: int, digest: str = '') -> str:
    """Serves what has been loaded, unless its digest differs.

    After a wrong digest nothing is served until an update loads the right weights.

    Args:
      version: The weights version.
      digest: Digest of the tensors that were sent; '' if they were checked before.

    Returns:
      The digest of the tensors that were loaded; '' if `digest` is ''.
    """
    async with self._stop_serving_on_error():
      await self._llm.finish_weight_update(weight_version=str(version))
      loaded_digest = ''
      if digest:
        digests = await self._llm.collective_rpc('loaded_weights')
        # Every worker is handed all tensors.
        loaded_digest = '-'.join(sorted(set(digests)))
      if loaded_digest != digest:
        self._version = None
        return loaded_digest
      await self._llm.reset_prefix_cache(
        reset_running_requests=True, reset_connector=True
      )
      if self._processor is not None:  # the tower may have changed, too
        await self._llm.reset_encoder_cache()
    self._version = version
    self._is_updating = False
    if not self._is_paused:
      await self._llm.resume_generation()
    return loaded_digest

  @contextlib.asynccontextmanager
  async def _stop_serving_on_error(self) -> AsyncIterator[None]:
    """Fails all requests on an error, which may leave half of a version in place."""
    try:
      yield
    except Exception as error:
      self._version = None
      self._is_updating = False
      for request in list(self._requests.values()):
        request.fail(error)
        self._finish(request, 'abort')
      raise

  # ---- control

  async def pause(self) -> None:
    """Stops decoding and keeps every request; returns when the device is idle."""
    self._is_paused = True
    await self._llm.pause_generation(mode='keep', clear_cache=False)

  async def drain(self) -> None:
    """Starts no more requests, finishes those that run, and pauses; others wait."""
    self._is_paused = True
    await self._llm.pause_generation(mode='wait', clear_cache=False)

  async def sleep(self) -> None:
    """Drains, frees the cache and moves the weights to the host until `resume`.

    An update only wakes the weights up. Nothing is freed without vLLM's
    `enable_sleep_mode`, which exists on GPUs.
    """
    self._is_paused = True
    if set(self._asleep) != set(SLEEP_TAGS):
      await self._wake_up(*self._asleep)
      await self._llm.sleep(level=1, mode='wait')
      self._asleep = tuple(SLEEP_TAGS)

  async def resume(self) -> None:
    """Ends a pause, a drain or a sleep."""
    self._is_paused = False
    await self._wake_up(*self._asleep)
    if self._version is not None and not self._is_updating:
      await self._llm.resume_generation()

  async def _wake_up(self, *tags: str) -> None:
    """Wakes parts of vLLM's memory up, without letting it decode yet.

    vLLM would decode as soon as none of its memory is asleep, so it is paused.
    """
    if asleep := [tag for tag in tags if tag in self._asleep]:
      await self._llm.wake_up(asleep)
      self._asleep = tuple(tag for tag in self._asleep if tag not in asleep)
      if not self._asleep:
        await self._llm.pause_generation(mode='keep', clear_cache=False)

  def close(self) -> None:
    """Ends vLLM's processes."""
    if self._local_channel is not None:
      memory, writer = self._local_channel
      writer.close()
      memory.close()
    self._llm.shutdown()
    del self._llm  # its finalizer would shut it down once more

  # ---- requests: submitted by `EngineBase`

  def _check_limits(self, prompt: np.ndarray, sampling: SamplingParams) -> str:
    if sampling.constraint is not None and sampling.num_generated:
      return 'a completion with a constraint cannot be continued'
    if 0 < sampling.temperature < MIN_TEMPERATURE:
      return (
        f'temperature={sampling.temperature} must be 0 or at least {MIN_TEMPERATURE}'
      )
    return ''

  def _enqueue(self, request: EngineRequest) -> None:
    if len(self._requests) == 1:
      self._stats.start_work()
    # The number tells it from an older request of the same id that vLLM still ends.
    vllm_id = f'{request.request_id}#{next(self._request_numbers)}'
    task = asyncio.get_running_loop().create_task(self._serve(request, vllm_id))
    self._served[request.request_id] = vllm_id, task
    task.add_done_callback(lambda _: self._on_task_done(request, vllm_id))

  def _finish(self, request: EngineRequest, finish_reason: str) -> None:
    """Aborts a request in vLLM, whose last output brings the versions of its tokens."""
    if self._requests.get(request.request_id) is not request:
      return  # it is ending already
    vllm_id, task = self._served[request.request_id]
    del self._requests[request.request_id]
    if not request.tokens:
      task.cancel()  # vLLM may not know of it yet
      return
    aborting = asyncio.get_running_loop().create_task(self._llm.abort(vllm_id))
    self._aborting.add(aborting)
    aborting.add_done_callback(self._aborting.discard)

  def _on_task_done(self, request: EngineRequest, vllm_id: str) -> None:
    """Forgets a request whose task has ended or was cancelled before it began."""
    request.finish('abort')
    if self._requests.get(request.request_id) is request:
      del self._requests[request.request_id]
    if self._served.get(request.request_id, ('',))[0] == vllm_id:
      del self._served[request.request_id]

  async def _serve(self, request: EngineRequest, vllm_id: str) -> None:
    """Appends vLLM's output to the request until it has ended, and resolves it."""
    finish_reason = ''
    try:
      sampling = to_vllm_sampling(request.sampling, request.max_new_tokens)
      prompt: Any = tokens_input(request.prompt.tolist())
      if request.images:
        prompt = await self._image_prompt(request)
      outputs = self._llm.generate(prompt, sampling, vllm_id)
      async with contextlib.aclosing(outputs):
        async for output in outputs:
          new = output.outputs[0]
          if request.images and not request.tokens:
            from jaxrl.rollout.vllm import vllm_images

            vllm_images.check_expanded(request.prompt, output.prompt_token_ids)
          if not finish_reason and self._append_output(request, new):
            finish_reason = 'stop'
            if not output.finished:
              await self._llm.abort(vllm_id)
          assign_versions(request, new.weight_versions or ())
      finish_reason = finish_reason or str(new.finish_reason)
      if finish_reason not in ('stop', 'length', 'abort'):
        raise RuntimeError(
          f'request {request.request_id!r}: vLLM ended it with {finish_reason!r}'
        )
      request.finish(finish_reason)
    except Exception as error:
      request.fail(error)

  async def _image_prompt(self, request: EngineRequest) -> Any:
    from jaxrl.rollout.vllm import vllm_images  # text alone needs no images

    return await asyncio.to_thread(
      vllm_images.make_prompt, self._processor, request.prompt, request.images
    )

  def _append_output(self, request: EngineRequest, output: CompletionOutput) -> bool:
    """Appends new tokens; returns True if they complete a stop string."""
    tokens = list(output.token_ids)
    logprobs: list[float] = [
      by_token[token].logprob
      for token, by_token in zip(tokens, output.logprobs or (), strict=True)
    ]
    if not np.isfinite(logprobs).all():
      raise FloatingPointError(
        f'request {request.request_id!r}: logits are not finite at token '
        f'{len(request.tokens)}, weights version {self._version}'
      )
    request.append_tokens(tokens, logprobs, self._version or 0)
    sampling = request.sampling
    if sampling.top_logprobs:
      ranked = ((place, sampling.top_logprobs) for place in output.logprobs or ())
      request.top_logprobs += [likeliest(*one) for one in ranked]
    stop_length = find_stop_string(
      self._tokenizer, request.generated_ids, len(tokens), sampling.stop
    )
    if stop_length is None:
      return False
    request.truncate(stop_length - sampling.num_generated)
    return True


def assign_versions(request: EngineRequest, spans: Iterable[Any]) -> None:
  """Records which weights version drew which token of a request.

  Args:
    request: The request; its `weights_versions` are updated.
    spans: vLLM's `WeightVersionSpan`s.
  """
  for span in spans:
    end = min(span.end, len(request.weights_versions))
    num_tokens = max(end - span.start, 0)
    request.weights_versions[span.start : end] = [int(span.version)] * num_tokens
