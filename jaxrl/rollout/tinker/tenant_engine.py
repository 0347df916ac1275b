"""Tenant engine: a `JaxEngine` whose requests each name the adapters that draw them.

Requests of several tenants are decoded in one dispatch. Adapters lie in a few places
beside the model; those that no request uses make room for others.
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.device_thread import DeviceThread
from jaxrl.models import layer_stack
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine import model_runner, token_sampling
from jaxrl.rollout.engine.engine_base import EngineRequest
from jaxrl.rollout.engine.jax_engine import DecodeResult, JaxEngine
from jaxrl.rollout.engine.model_runner import ModelRunner, SlotState
from jaxrl.rollout.engine.scheduler import SchedulerOutput
from jaxrl.rollout.tinker import row_adapters
from jaxrl.rollout.tinker.row_adapters import Adapters, DecodingStack
from jaxrl.rollout.tinker.tenant_programs import (
  TenantPrograms,
  TokenRows,
  buckets_to,
  num_targets,
)
from jaxrl.types import Params, PyTree, SamplingParams

BASE = ''  # the adapters' name of the model itself
MAX_WEIGHT = 1e30  # of adapters; in sums with larger ones, even 0 · B may be no number
MAX_TRIES = 3  # of a request whose logits are not finite
LoadAdapters = Callable[[], Awaitable[tuple[Adapters, float]]]


@dataclasses.dataclass(frozen=True)
class TenantSampling(SamplingParams):
  """Sampling parameters with the adapters that draw.

  Attributes:
    adapters: Their name; it never stands for other weights.
  """

  adapters: str = BASE


@dataclasses.dataclass(frozen=True)
class TenantWeights:
  """The weights of a tenant engine: of the model, and the stack of adapters."""

  params: Params
  stack: DecodingStack


class TenantModelRunner(ModelRunner):
  """Runs a model's programs with the adapters that each slot's request names."""

  def __init__(
    self,
    model: TransformerLM,
    *,
    num_adapters: int,
    decode_threads: int,
    drafting: Any = None,
    prompt_block: int = 0,
    **options: Any,
  ):
    """Creates the programs.

    Args:
      model: The model.
      num_adapters: Places for adapters.
      decode_threads: Not read: there is one.
      drafting: None; a row of a drafted token would need its own slot's adapters.
      prompt_block: 0, likewise.
      **options: As for `ModelRunner`.

    Raises:
      ValueError: If tokens are to be drafted, or prompts computed in blocks.
    """
    del decode_threads
    if prompt_block:
      raise ValueError(
        f'prompt_block={prompt_block}: an engine whose requests have adapters of their '
        'own computes prompts whole; leave prompt_block at 0'
      )
    if drafting is not None:
      raise ValueError(
        f'draft_tokens={drafting.tokens}: an engine whose requests have adapters of '
        'their own drafts no tokens; leave draft_tokens at 0'
      )
    super().__init__(model, **options)
    self.num_adapters = num_adapters
    self.adapter_of_slot = np.full(self.num_slots, num_adapters, np.int32)
    partial = functools.partial
    prefill = jax.jit(partial(_prefill, model), donate_argnums=2)
    self._prefill: Any = partial(self._run_prefill, prefill)
    self._prefill_program = prefill
    steps = options['decode_steps']
    needs = token_sampling.STATIC_NEEDS if self._is_static else (token_sampling.ANY,)
    self._decode: Any = {
      need: jax.jit(partial(_decode, model, steps, need), donate_argnums=(1, 2))
      for need in needs
    }

  @property
  def compile_count(self) -> int:
    """Returns the number of programs compiled so far."""
    jitted = *self._decode.values(), self._prefill_program, self._copy, self._update
    return sum(program._cache_size() for program in jitted)  # pyright: ignore

  def _run_prefill(
    self, program: Any, weights: TenantWeights, cache: PyTree, *rows: PyTree
  ):
    slots = rows[2]
    known = np.append(self.adapter_of_slot, self.num_adapters)  # of padding
    adapters = known[np.minimum(slots, self.num_slots)]
    return program(weights.params, weights.stack, cache, adapters, *rows)

  def prepare_params(self, params: PyTree) -> PyTree:
    """Moves weights to the engine's device, with layers apart.

    Args:
      params: The model's parameters.
    """
    params = jax.device_put(params, self._sharding)
    unstack = functools.partial(layer_stack.unstack, self.model.config)
    return jax.jit(unstack)(params)

  def decode(
    self,
    params: PyTree,
    cache: PyTree,
    slots: SlotState,
    needs: str = token_sampling.ANY,
  ):
    """Starts drawing tokens; see `ModelRunner.decode`.

    Args:
      params: The `TenantWeights`.
      cache: As there.
      slots: As there.
      needs: As there.
    """
    needs = needs if self._is_static else token_sampling.ANY
    adapters = jnp.asarray(self.adapter_of_slot)
    return self._decode[needs]((params.params, params.stack, adapters), cache, slots)


def _prefill(model, params, stack, cache, adapters, tokens, lengths, slots):
  with_rows = row_adapters.attach_decoding(params, stack, adapters)
  return model_runner.prefill_slots(model, with_rows, cache, tokens, lengths, slots)


def _decode(model, steps, needs, weights, cache, slots):
  params, stack, adapters = weights
  with_rows = row_adapters.attach_decoding(params, stack, adapters)
  return model_runner.decode_slots(model, steps, needs, with_rows, cache, slots)


class AdapterPlaces:
  """Knows which adapters lie in which place, and which of them are in use."""

  def __init__(self, number: int):
    """Creates empty places.

    Args:
      number: How many.
    """
    self.places: dict[str, int] = {}  # in the order of their last use
    self._free = list(range(number))
    self._users: dict[str, int] = {}
    self._changed = asyncio.Condition()
    self._tasks: set[asyncio.Task] = set()

  @contextlib.asynccontextmanager
  async def use(
    self, name: str, load: Callable[[int], Awaitable[None]]
  ) -> AsyncIterator[None]:
    """Keeps adapters in their place while entered; waits for a place if there is none.

    Args:
      name: The adapters' name.
      load: Loads them into a place.
    """
    async with self._changed:
      while True:
        if name in self.places:
          self.places[name] = self.places.pop(name)
          break
        if (place := self._make_room()) is not None:
          try:
            await load(place)
          except BaseException:
            self._free.append(place)
            self._changed.notify_all()
            raise
          self.places[name] = place
          break
        await self._changed.wait()
      self._users[name] = self._users.get(name, 0) + 1
    try:
      yield
    finally:
      # Not under the lock, which a load may hold for long: nothing here waits.
      self._users[name] -= 1
      if not self._users[name]:
        del self._users[name]
        task = asyncio.ensure_future(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

  async def _notify(self) -> None:
    async with self._changed:
      self._changed.notify_all()

  def _make_room(self) -> int | None:
    if self._free:
      return self._free.pop()
    idle = next((name for name in self.places if name not in self._users), None)
    return None if idle is None else self.places.pop(idle)


class TenantEngine(JaxEngine):
  """Generates tokens for many tenants at once.

  What a request draws depends on its prompt, its parameters and its adapters alone.
  Adapters that have diverged fail their own requests: what these left in the cache,
  where numbers that are not finite would reach the next request of the slot, is
  overwritten. A request that found some there begins again, and draws the same.
  """

  copies_weights = False  # they stay, and adapters change

  def __init__(
    self,
    model: TransformerLM,
    tokenizer: Any,
    *,
    device_thread: DeviceThread,
    max_adapters: int,
    max_rank: int,
    max_length: int,
    **options: Any,
  ):
    """Creates an engine without weights.

    Args:
      model: The model.
      tokenizer: Its tokenizer.
      device_thread: Runs the engine's device work.
      max_adapters: Adapters that lie beside the model at the same time.
      max_rank: Their largest rank.
      max_length: Context length in tokens.
      **options: As for `JaxEngine`.
    """
    self.make_runner = functools.partial(TenantModelRunner, num_adapters=max_adapters)
    super().__init__(
      model,
      tokenizer,
      device_thread=device_thread,
      max_length=max_length,
      decode_threads=1,
      **options,
    )
    self._max_adapters, self._max_rank = max_adapters, max_rank
    self._config = model.config
    self._programs = TenantPrograms(self._model_runner.model)
    self._buckets = buckets_to(max_length)
    self._places = AdapterPlaces(max_adapters)
    self._unclean: set[int] = set()  # slots with numbers that are not finite
    # By request: how often it was begun again, and when it was last.
    self._restarts: weakref.WeakKeyDictionary[EngineRequest, tuple[int, float]] = (
      weakref.WeakKeyDictionary()
    )

  async def load(self, version: int, params: Params, *, copy: bool = False) -> None:
    """Serves a model, with empty places for adapters.

    Args:
      version: The weights version.
      params: The model's parameters.
      copy: Refused.
    """
    if copy:
      raise ValueError('this engine copies no weights: hand it a copy')
    prepared = await self._device_thread.run(self._model_runner.prepare_params, params)
    empty = jax.device_put(
      row_adapters.decoding_stack(self._config, self._max_adapters, self._max_rank),
      jax.tree.leaves(prepared)[0].sharding,
    )
    self._weights = version, TenantWeights(prepared, empty)  # pyright: ignore
    self._places = AdapterPlaces(self._max_adapters)

  @contextlib.asynccontextmanager
  async def adapters(self, name: str, load: LoadAdapters) -> AsyncIterator[None]:
    """Keeps adapters beside the model while entered.

    Args:
      name: Their name, BASE for none.
      load: Reads them, and α / rank; called if they do not lie there yet.
    """
    if name == BASE:
      yield
      return

    async def put(place: int) -> None:
      adapters, scale = await load()
      await self._device_thread.run(self._put, place, adapters, scale)

    async with self._places.use(name, put):
      yield

  def _put(self, place: int, adapters: Adapters, scale: float) -> None:
    version, weights = self._tenant_weights()
    padded = row_adapters.pad_rank(adapters, self._max_rank)
    largest = max(float(np.abs(x).max()) for pair in padded.values() for x in pair)
    if not largest * max(scale, 1) <= MAX_WEIGHT:
      raise ValueError(f'weights of up to {largest:.1e}: the run has diverged')
    stack = row_adapters.put_adapters(
      weights.stack, np.int32(place), padded, np.float32(scale)
    )
    self._weights = version, dataclasses.replace(weights, stack=stack)  # pyright: ignore

  def _tenant_weights(self) -> tuple[int, TenantWeights]:
    return self._loaded_weights()  # pyright: ignore

  def place_of(self, name: str) -> int:
    """Returns the place of adapters that are in use."""
    return self._max_adapters if name == BASE else self._places.places[name]

  def _dispatch_decode(
    self, params: PyTree, scheduled: SchedulerOutput
  ) -> DecodeResult:
    # The weights of now: adapters may have been put beside them since the dispatch was
    # scheduled, and the arrays that were there before are gone.
    del params
    weights: Any = self._tenant_weights()[1]
    self._clean_slots(weights)
    for slot, request in scheduled.assignments:
      # Of a request that was given up since then, the adapters may be gone.
      place = self._places.places.get(request.cache_name, self._max_adapters)
      self._model_runner.adapter_of_slot[slot] = place
    return super()._dispatch_decode(weights, scheduled)

  def _clean_slots(self, weights: object) -> None:
    """Overwrites slots with the keys and values of some tokens. Device thread only."""
    if not self._unclean or self._state is None:
      return
    cache, slots = self._state
    tokens = np.zeros(self._max_length + 1, np.int32)
    while self._unclean:  # the event loop's thread may add to it meanwhile
      slot = self._unclean.pop()
      self._model_runner.adapter_of_slot[slot] = self._max_adapters
      cache = self._model_runner.prefill(weights, cache, [(slot, tokens)])
    self._state = cache, slots

  def _process_results(self, results: list[DecodeResult]) -> None:
    super()._process_results(results)
    for result in results:
      for slot, request in enumerate(result.owners):
        # Nobody has looked at what was drawn for requests that were given up.
        if request is None or not request.future.done():
          continue
        is_drawn = result.tokens[:, slot] >= 0
        if not np.isfinite(result.logprobs[is_drawn, slot]).all():
          self._forget_slot(slot)

  def _forget_slot(self, slot: int) -> None:
    if self._scheduler.is_vacant(slot):
      self._scheduler.forget_prompt(slot)
      self._unclean.add(slot)

  def _append_tokens(
    self, request: EngineRequest, slot: int, result: DecodeResult
  ) -> None:
    tries, begun = self._restarts.get(request, (0, 0.0))
    if result.dispatch_time < begun:
      return  # of the time before it was begun again
    try:
      super()._append_tokens(request, slot, result)
    except FloatingPointError:
      if tries + 1 == MAX_TRIES and request.cache_name == BASE:
        raise
      self._scheduler.remove(request)
      self._forget_slot(slot)
      if tries + 1 == MAX_TRIES:
        self._requests.pop(request.request_id, None)
        problem = 'its logits are not finite: its weights have diverged'
        request.fail(ValueError(f'request {request.request_id!r}: {problem}'))
        return
      self._restarts[request] = tries + 1, time.perf_counter()
      request.truncate(0)
      self._scheduler.add(request)

  def _submit(self, request_id, prompt, sampling, images=()) -> EngineRequest:
    request = super()._submit(request_id, prompt, sampling, images)
    # Prompts are cached by adapters too.
    request.cache_name = getattr(sampling, 'adapters', BASE)
    return request

  async def score(
    self,
    rows: Sequence[tuple[np.ndarray, np.ndarray]],
    adapters: str,
    *,
    top_k: int = 0,
    draws: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
  ) -> list[tuple[np.ndarray, ...]]:
    """Scores rows of tokens under adapters that are in use.

    Args:
      rows: Each row's tokens `[n]` and targets after each of them `[n, K]`.
      adapters: The adapters' name.
      top_k: How many of the likeliest tokens to tell.
      draws: How many tokens to draw after each position.
      temperature: Of the draws.
      seed: Of the draws.

    Returns:
      For each row: the targets' log-probs `[n, K]`, the likeliest tokens and their
      log-probs `[n, top_k]`, the tokens drawn and their log-probs `[n, draws]`.
    """
    results = []
    for tokens, targets in rows:
      results.append(
        await self._device_thread.run(
          self._score_row, tokens, targets, adapters, (top_k, draws), temperature, seed
        )
      )
    return results

  def _score_row(self, tokens, targets, adapters, sizes, temperature, seed):
    bucket = next(size for size in self._buckets if size >= len(tokens))
    n, width = targets.shape
    padded, padded_targets = (
      np.zeros((1, bucket, *size), np.int32) for size in ((), (num_targets(width),))
    )
    padded[0, :n], padded_targets[0, :n, :width] = tokens, targets
    place, scale = self.place_of(adapters), np.ones(1, np.float32)
    arrays = TokenRows(
      padded,
      np.full(1, n, np.int32),
      padded_targets,
      np.full(1, place, np.int32),
      scale,
    )
    weights = self._tenant_weights()[1]
    own, best, drawn = self._programs.score(
      *sizes,
      weights.params,
      weights.stack,
      arrays,
      np.full(1, temperature, np.float32),
      jax.random.key(seed),
    )
    own, *rest = (np.asarray(x)[0, :n] for x in (own, *best, *drawn))
    return own[:, :width], *rest
