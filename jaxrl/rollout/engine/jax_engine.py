"""JAX engine: continuous batching in JAX, behind the `RolloutEngine` protocol.

The path of a request:

1. `generate` validates and submits it (`EngineBase`), which queues it (`_enqueue`).
2. `_step` runs once per dispatch, in one asyncio task that lives only while there is
   work. `Scheduler.schedule` assigns queued requests to free slots of the cache.
3. `_dispatch_decode` prefills new prompts and starts decoding all slots together.
4. `_collect_decode` waits for the tokens. If no request is queued, it runs after the
   next dispatch has started, so that host and device work overlap.
5. `_process_results` appends the tokens to their requests and calls `_finish` for those
   that have ended. Their slots are free in the next dispatch.

All device work runs on the `DeviceThread`, so the event loop is never blocked.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxrl import spans
from jaxrl.device_thread import DeviceThread, trim_heap
from jaxrl.models.exact_mode import Exact
from jaxrl.models.kv_cache import keeps_prompts
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import AT_LEAST_ONE, NOT_NEGATIVE, option_ranges
from jaxrl.rollout.engine import token_sampling
from jaxrl.rollout.engine.engine_base import (
  DecodeResult,
  EngineBase,
  EngineRequest,
  EngineStats,
  EngineTraits,
  find_stop_string,
)
from jaxrl.rollout.engine.model_runner import default_buckets
from jaxrl.rollout.engine.scheduler import Scheduler, SchedulerOutput
from jaxrl.rollout.engine.threaded_decode import (
  check_cache_use,
  configure_model,
  make_model_runner,
  make_weights_format,
)
from jaxrl.types import AnyArray, Params, Pixels, PyTree, SamplingParams


@option_ranges(
  decode_threads=NOT_NEGATIVE,
  draft_tokens=NOT_NEGATIVE,
  draft_match=AT_LEAST_ONE,
  prompt_block=NOT_NEGATIVE,
  decode_steps=AT_LEAST_ONE,
  prefill_tokens=AT_LEAST_ONE,
  max_stop_ids=AT_LEAST_ONE,
  weights_block=AT_LEAST_ONE,
)
class JaxEngine(EngineBase):
  """Generates tokens for many requests at once.

  A request's tokens and log-probs depend only on its prompt, its sampling parameters
  and the weights, bit for bit. They do not depend on its slot, on the other requests or
  on when it arrived. Weights that are loaded while it runs take effect at the next
  dispatch. The keys and values it already has stay as the old weights computed them,
  and `Completion.weights_versions` says which version drew each token.

  Args:
    model: The model.
    tokenizer: Only needed for stop strings.
    device_thread: Runs the engine's device work.
    max_num_seqs: Most requests that are decoded at the same time.
    decode_threads: Threads that decode max_num_seqs / decode_threads slots each; 0
      chooses a number that suits the device and its cores. Bits depend on it: set it
      if runs on different machines must be equal.
    max_length: Context length, in tokens of prompt and completion together.
    decode_steps: Most tokens drawn per dispatch and slot. New weights, aborts and new
      requests wait for at most one dispatch (two if no request is queued).
    prompt_buckets: Padded prompt lengths; by default powers of two from 32 to the
      context length.
    prefill_tokens: Prompt tokens, with padding, that one prefill program computes.
    max_stop_ids: Most stop token ids of a request.
    exact: Makes the log-probs of untruncated draws equal those of a learner in exact
      mode, bit for bit, at the price of speed.
    router_replay: Returns the experts that every token took, so that the learner can
      take them too (https://arxiv.org/abs/2510.11370).
    weights_dtype: 'bfloat16' keeps the matrices of attention and MLPs, the embedding
      table and the LM head in it, on one CPU device: it reads half as much for a token
      as float32, and rounds what is multiplied. With a C compiler, a kernel multiplies
      it, with AVX-512's bfloat16 products or else in float32. Without one, XLA does,
      and it pays where XLA has bfloat16 products, as with AMX, not with AVX2 alone.
      'int8' and 'float8_e4m3fn' keep the matrices of attention, MLPs and experts in 8
      bits, on any device, and decode them in front of each product. '' is the model's
      type.
    weights_block: Inputs that share the scale of 8-bit weights, at most.
    draft_tokens: Most tokens that a step guesses of a request and checks in the rows of
      idle slots; tokens and log-probs stay the same, bit for bit. 0 guesses none.
    draft_match: How many of the last tokens must have occurred before in the request's
      prompt or reply, for the tokens that followed then to be guessed.
    prompt_block: Tokens of the blocks that prompts are computed in. A prompt then takes
      over the blocks that it shares with the beginning of any prompt in the cache, as
      the turns of a session, branches and samples that part late do. Bits depend on it.
      0 computes prompts whole and shares equal ones alone.
    sharding: Where weights and cache lie; by default the first device.

  Attributes:
    copies_weights: Whether `load` can be asked to copy.

  Raises:
    ValueError: If the options contradict each other.
  """

  traits = EngineTraits(external=False)
  copies_weights = True
  make_runner: Any = staticmethod(make_model_runner)

  def __init__(
    self,
    model: TransformerLM,
    tokenizer: Any = None,
    *,
    device_thread: DeviceThread,
    max_num_seqs: int = 64,
    decode_threads: int = 0,
    max_length: int = 1024,
    decode_steps: int = 8,
    prompt_buckets: Sequence[int] | None = None,
    prefill_tokens: int = 256,
    max_stop_ids: int = 8,
    exact: bool = False,
    router_replay: bool = False,
    weights_dtype: Literal['', 'bfloat16', 'int8', 'float8_e4m3fn'] = '',
    weights_block: int = 128,
    draft_tokens: int = 0,
    draft_match: int = 3,
    prompt_block: int = 0,
    sharding: jax.sharding.Sharding | None = None,
  ):
    super().__init__(
      tokenizer, max_length=max_length, vocab_size=model.config.vocab_size
    )
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weights_format = make_weights_format(weights_dtype, weights_block)
    model = configure_model(
      model,
      sharding,
      exact=Exact.for_slots(max_num_seqs) if exact else None,
      router_replay=router_replay,
      weights_dtype=weights_dtype,
      weights_format=weights_format,
    )
    has_prompts = keeps_prompts(model.config, max_length, exact=exact)
    drafting = check_cache_use(
      *(model, draft_tokens, draft_match, prompt_block),
      devices=sharding.num_devices,
      keeps_prompts=has_prompts,
    )
    self._model_runner: Any = self.make_runner(  # has the methods of a ModelRunner
      model,
      decode_threads=decode_threads,
      num_slots=max_num_seqs,
      max_length=max_length,
      decode_steps=decode_steps,
      prompt_buckets=prompt_buckets or default_buckets(max_length),
      prefill_tokens=prefill_tokens,
      max_stop_ids=max_stop_ids,
      sharding=sharding,
      weights_format=weights_format,
      drafting=drafting,
      prompt_block=prompt_block,
    )
    if model.config.vision is not None:
      from jaxrl.models.vision.patch_processor import PatchProcessor  # few models do

      self._processor = PatchProcessor(model.config.vision)
    self._device_thread = device_thread
    self._scheduler = Scheduler(
      max_num_seqs,
      self._model_runner.num_partitions,
      keeps_prompts=has_prompts,
      prompt_block=prompt_block,
    )
    self._stats = EngineStats(max_num_seqs, drafts=drafting is not None)
    self._weights: tuple[int, Params] | None = None
    self._is_loading = False
    self._is_paused = False
    self._admits_requests = True
    self._dispatch_start = 0.0  # on time.monotonic; 0 while no dispatch is awaited
    self._task: asyncio.Task | None = None
    self._reset()

  def _reset(self) -> None:
    """Drops slots and device state, so the next dispatch starts with an empty cache."""
    self._scheduler.reset_slots()
    self._state: tuple[PyTree, PyTree] | None = None  # cache and slots, on the device
    self._in_flight: DecodeResult | None = None

  @property
  def version(self) -> int | None:
    """Returns the version the next dispatch serves; None before the first `load`."""
    return self._weights and self._weights[0]

  @property
  def compile_count(self) -> int:
    """Returns the number of programs compiled so far; constant after `warmup`."""
    return self._model_runner.compile_count

  @property
  def seconds_since_progress(self) -> float:
    """Returns the seconds that the current dispatch has taken so far; 0 without one."""
    return time.monotonic() - self._dispatch_start if self._dispatch_start else 0.0

  def metrics(self) -> dict[str, float]:
    """Returns token counts, times and slot use since the last call, by name."""
    return self._stats.report()

  # ---- control

  async def warmup(self) -> None:
    """Compiles every program, so that no later request waits for a compiler.

    Raises:
      RuntimeError: If no weights are loaded.
    """
    params = self._loaded_weights()[1]
    await self._device_thread.run(self._model_runner.warmup, params)
    await self._device_thread.run(trim_heap)

  async def load(self, version: int, params: Params, *, copy: bool = False) -> None:
    """Serves `params` as `version` from the next dispatch on.

    While there are no requests, the earlier weights are dropped before the new ones are
    laid out, which then take their place in memory.

    Args:
      version: The weights version.
      params: The model's parameters.
      copy: Whether the caller may donate `params` when this returns. If not, arrays
        that already lie where the engine wants them are used as they are.
    """
    old = None
    if not self._requests and (self._task is None or self._task.done()):
      self._is_loading = True  # a request that comes now waits for the new weights
      if self._weights is not None:
        old = self._model_runner.spent_panels(self._weights[1])
        self._weights = self._weights[0], None
    prepare_params = self._model_runner.prepare_params
    try:
      with spans.span('weights', 'engine', 'load', detail=f'version {version}'):
        prepared = await self._device_thread.run(prepare_params, params, copy, old)
      self._weights = version, prepared
    finally:
      self._is_loading = False
      self._start_if_idle()

  async def pause(self) -> None:
    """Stops decoding and keeps every request; returns when the device is idle."""
    self._is_paused = True
    if self._task is not None and not self._task.done():
      await asyncio.wait({self._task})

  async def drain(self) -> None:
    """Admits no more requests to slots, and pauses once those in slots have ended.

    Queued requests wait until `resume`.
    """
    self._admits_requests = False
    while running := {request.future for request in self._scheduler.running}:
      await asyncio.wait(running)
    if not self._admits_requests:  # otherwise `resume` was called meanwhile
      await self.pause()

  async def sleep(self) -> None:
    """Drains, and frees the cache's memory until `resume`."""
    await self.drain()
    if not self._admits_requests:  # otherwise `resume` was called meanwhile
      self._reset()

  async def resume(self) -> None:
    """Ends a pause, a drain or a sleep."""
    self._is_paused = False
    self._admits_requests = True
    self._start_if_idle()

  def _loaded_weights(self) -> tuple[int, Params]:
    if self._weights is None or self._weights[1] is None:
      raise RuntimeError('the engine has no weights yet: call load(version, params)')
    return self._weights

  # ---- requests: submitted by `EngineBase`

  def _check_limits(self, prompt: np.ndarray, sampling: SamplingParams) -> str:
    del prompt
    max_stop_ids = self._model_runner.max_stop_ids
    if len(sampling.stop_token_ids) > max_stop_ids:
      return (
        f'{len(sampling.stop_token_ids)} stop token ids are more than the '
        f'max_stop_ids={max_stop_ids} the engine was built with'
      )
    return ''

  def _check_size(self, prompt: np.ndarray) -> str:
    max_prefill = max(self._model_runner.prompt_buckets)
    if problem := super()._check_size(prompt):
      return problem
    if len(prompt) - 1 > max_prefill:
      return (
        f'its prompt of {len(prompt)} tokens exceeds the largest prompt bucket, '
        f'{max_prefill}'
      )
    return ''

  def _enqueue(self, request: EngineRequest) -> None:
    if request.images:
      from jaxrl.rollout.engine import image_features

      place = self._processor, request.prompt, request.images
      request.position_shift = image_features.position_shift(*place)
    self._scheduler.add(request)
    self._start_if_idle()

  def _finish(self, request: EngineRequest, finish_reason: str) -> None:
    self._requests.pop(request.request_id, None)
    self._scheduler.remove(request)
    request.finish(finish_reason)

  # ---- the decode loop

  def _start_if_idle(self) -> None:
    is_idle = self._task is None or self._task.done()
    if self._requests and is_idle and not self._is_paused and not self._is_loading:
      self._task = asyncio.get_running_loop().create_task(self._run())

  async def _run(self) -> None:
    """Steps until there is nothing to do; an error fails every request."""
    try:
      while self._requests and not (self._is_paused and self._in_flight is None):
        if self._is_paused:
          result, self._in_flight = self._in_flight, None
          collected = await self._device_thread.run(self._collect_decode, result)
          self._process_results([collected])
        else:
          await self._step()
      self._in_flight = None  # nobody waits for it
    except BaseException as error:
      stranded = list(self._requests.values())
      self._requests.clear()
      self._scheduler.waiting.clear()
      self._reset()
      for request in stranded:
        request.fail(error)
      if not isinstance(error, Exception):
        raise

  async def _step(self) -> None:
    """Schedules one dispatch and processes the results that it brings."""
    version, params = self._loaded_weights()
    scheduled = self._scheduler.schedule(version, admit_waiting=self._admits_requests)
    self._stats.num_prefilled += scheduled.num_prefilled_tokens
    self._stats.num_reused += scheduled.num_reused_tokens
    self._dispatch_start = time.monotonic()
    try:
      self._in_flight, results = await self._device_thread.run(
        self._dispatch, params, scheduled, self._in_flight
      )
    finally:
      self._dispatch_start = 0.0
    self._process_results(results)

  def _dispatch(
    self, params: Params, scheduled: SchedulerOutput, previous: DecodeResult | None
  ) -> tuple[DecodeResult | None, list[DecodeResult]]:
    """Starts a dispatch, then collects what has arrived. Device thread only.

    Returns the dispatch if it is still in flight, and the collected results.
    """
    result = self._dispatch_decode(params, scheduled)
    collected = [self._collect_decode(previous)] if previous is not None else []
    if scheduled.requests_waiting:
      return None, [*collected, self._collect_decode(result)]
    return result, collected

  def _dispatch_decode(
    self, params: Params, scheduled: SchedulerOutput
  ) -> DecodeResult:
    """Starts the scheduled requests and a decode dispatch. Device thread only."""
    runner = self._model_runner
    cache, slots = self._state if self._state is not None else runner.init_state()
    if scheduled.prefill or scheduled.copies or scheduled.staged:
      jax.block_until_ready(cache)
      start = time.perf_counter()
      images: tuple[()] | tuple[Mapping[int, Sequence[Pixels]], int] = ()
      if scheduled.images:
        images = scheduled.images, scheduled.weights_version
      cache = runner.prefill(params, cache, scheduled.prefill, *images)
      cache = runner.copy_prompts(cache, scheduled.copies)
      if scheduled.staged:
        cache = runner.prefill_staged(params, cache, scheduled.staged)
      jax.block_until_ready(cache)
      self._stats.record_prefill(start)
    if update := scheduled.slot_update(runner.idle_slots):
      slots = runner.update_slots(slots, *update)
    prompt_experts = [
      (request, runner.routed_experts(cache, slot))
      for slot, request in scheduled.assignments
    ]
    dispatch_time = time.perf_counter()
    # Of all requests in slots, whether or not they have ended on the device.
    needs = token_sampling.needs_of(
      request.sampling for request in scheduled.owners if request is not None
    )
    cache, slots, *drawn = runner.decode(params, cache, slots, needs)
    tokens, logprobs, routed, draft_counts = drawn
    self._state = cache, slots
    runner.log_recompiles(f'version {scheduled.weights_version}')
    return DecodeResult(
      owners=scheduled.owners,
      weights_version=scheduled.weights_version,
      tokens=tokens,
      logprobs=logprobs,
      routed_experts=routed,
      prompt_experts=prompt_experts,
      dispatch_time=dispatch_time,
      draft_counts=draft_counts,
    )

  def _collect_decode(self, result: DecodeResult) -> DecodeResult:
    """Waits for a dispatch and copies its results to the host. Device thread only."""
    result.tokens = _to_host(result.tokens)
    result.logprobs = _to_host(result.logprobs)
    result.routed_experts = _to_host(result.routed_experts)
    if result.routed_experts is not None:
      for request, experts in result.prompt_experts:
        request.routed_pieces = [np.asarray(experts)[: len(request.prompt) - 1]]
    result.draft_counts = _to_host(result.draft_counts)
    self._stats.record_decode(result.tokens, result.dispatch_time, result.draft_counts)
    return result

  def _process_results(self, results: list[DecodeResult]) -> None:
    """Appends new tokens to their requests and finishes those that have ended."""
    for result in results:
      for slot, request in enumerate(result.owners):
        if request is not None and not request.future.done():
          self._append_tokens(request, slot, result)

  def _append_tokens(
    self, request: EngineRequest, slot: int, result: DecodeResult
  ) -> None:
    """Appends a slot's new tokens to `request`, and finishes it where it must end."""
    drawn = result.tokens[:, slot]
    num_new = int(np.sum(drawn >= 0))
    logprobs = result.logprobs[:num_new, slot]
    if not np.isfinite(logprobs).all():
      # The cache may hold NaN as well, so the error resets the whole engine.
      raise FloatingPointError(
        f'request {request.request_id!r}: logits are not finite at token '
        f'{len(request.tokens)}, weights version {result.weights_version}'
      )
    tokens = drawn[:num_new].tolist()
    request.append_tokens(tokens, logprobs.tolist(), result.weights_version)
    if result.routed_experts is not None:
      request.routed_pieces.append(result.routed_experts[:num_new, slot])
    sampling = request.sampling
    stop_length = find_stop_string(
      self._tokenizer, request.generated_ids, num_new, sampling.stop
    )
    if stop_length is not None:
      request.truncate(stop_length - sampling.num_generated)
      self._finish(request, 'stop')
    elif tokens and tokens[-1] in sampling.stop_token_ids:
      self._finish(request, 'stop')
    elif len(request.tokens) >= request.max_new_tokens:
      self._finish(request, 'length')


def _to_host(array: AnyArray) -> np.ndarray | None:
  """Copies `[D, S, …]` results to the host; slots may come in several arrays."""
  pieces = jax.tree.leaves(array)
  return np.concatenate(pieces, axis=1) if pieces else None
