"""Model runner: compiled prefill and decode programs of fixed shape, and slot state.

The device state consists of the cache and one `SlotState`. Every program takes what it
changes as a donated argument and updates it in place.

A prompt of n tokens is prefilled without its last token, which is the first token that
decode feeds. Prefill therefore computes no logits, every sampled token comes from the
one decode program, and the cache behind a shared prompt is the same for all requests
that share it.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import kv_cache as caches
from jaxrl.models import layer_stack
from jaxrl.models.kv_cache import Cache
from jaxrl.models.lora import is_transfer, merge_transfer
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine import token_sampling
from jaxrl.rollout.engine.engine_base import EngineRequest
from jaxrl.rollout.weights.weight_store import cast_copy
from jaxrl.types import AnyArray, Array, Params, Pixels, PyTree
from kernels.dispatch import platform_of

if TYPE_CHECKING:
  from kernels.block_rounding import BlockFormat

log = logging.getLogger(__name__)

MIN_PROMPT_BUCKET = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SlotState:
  """Holds what each of S cache slots is doing, as numpy or device arrays.

  Attributes:
    tokens: `[S]` int32, the next token to feed.
    positions: `[S]` int32, where that token goes in the sequence.
    remaining: `[S]` int32, tokens still to draw; 0 when idle.
    token_indices: `[S]` int32, the index of the next token in its completion.
    temperature: `[S]` float32.
    top_p: `[S]` float32.
    top_k: `[S]` int32.
    keys: `[S, 2]` uint32, the data of each request's random key.
    stop_ids: `[S, K]` int32 stop token ids, padded with −1.
    position_shift: `[S]` int32, what a token's position differs by from its index; None
      for a model that sees no images.
    drafts: What drafts are made from, a `DraftState`; None if there are none.
  """

  tokens: AnyArray
  positions: AnyArray
  remaining: AnyArray
  token_indices: AnyArray
  temperature: AnyArray
  top_p: AnyArray
  top_k: AnyArray
  keys: AnyArray
  stop_ids: AnyArray
  position_shift: AnyArray = None
  drafts: AnyArray = None

  @classmethod
  def idle(
    cls,
    num_slots: int,
    num_stop_ids: int,
    *,
    sees_images: bool = False,
    drafts: PyTree = None,
  ) -> 'SlotState':
    """Makes a numpy state in which every slot is idle.

    Args:
      num_slots: The number of slots S.
      num_stop_ids: Most stop token ids of a request, K.
      sees_images: Whether the model does.
      drafts: The idle `DraftState`, if there are drafts.
    """
    return cls(
      tokens=np.zeros(num_slots, np.int32),
      positions=np.zeros(num_slots, np.int32),
      remaining=np.zeros(num_slots, np.int32),
      token_indices=np.zeros(num_slots, np.int32),
      temperature=np.ones(num_slots, np.float32),
      top_p=np.ones(num_slots, np.float32),
      top_k=np.zeros(num_slots, np.int32),
      keys=np.zeros((num_slots, 2), np.uint32),
      stop_ids=np.full((num_slots, num_stop_ids), token_sampling.NO_TOKEN, np.int32),
      position_shift=np.zeros(num_slots, np.int32) if sees_images else None,
      drafts=drafts,
    )

  def select(self, slots: slice) -> 'SlotState':
    """Returns the state of a range of slots."""
    return jax.tree.map(lambda x: x[slots], self)

  def assign(self, slot: int, request: EngineRequest) -> None:
    """Writes the start of `request` into a slot of a numpy state.

    Args:
      slot: The slot's number.
      request: A request without generated tokens.
    """
    sampling = request.sampling
    self.tokens[slot] = request.prompt[-1]
    self.positions[slot] = len(request.prompt) - 1
    self.remaining[slot] = request.max_new_tokens
    self.token_indices[slot] = sampling.num_generated
    self.temperature[slot] = sampling.temperature
    self.top_p[slot] = sampling.top_p
    self.top_k[slot] = sampling.top_k
    self.keys[slot] = sampling.seed >> 32, sampling.seed & 0xFFFFFFFF
    self.stop_ids[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
    if self.position_shift is not None:
      self.position_shift[slot] = request.position_shift
    if self.drafts is not None:
      self.drafts.history[slot, : len(request.prompt)] = request.prompt


class ModelRunner:
  """Runs prefill, copy, update and decode for one model and one set of shapes.

  Attributes:
    model: The model.
    num_slots: Number of cache slots S.
    max_stop_ids: Most stop token ids of a request.
    prompt_buckets: Prefill batch size by padded prompt length, in ascending order.
    num_partitions: Ranges of slots between which prompts are not copied: 1.
  """

  num_partitions = 1

  def __init__(
    self,
    model: TransformerLM,
    *,
    num_slots: int,
    max_length: int,
    decode_steps: int,
    prompt_buckets: Sequence[int],
    prefill_tokens: int,
    max_stop_ids: int,
    sharding: jax.sharding.Sharding,
    weights_format: 'BlockFormat | None' = None,
    drafting: Any = None,
    prompt_block: int = 0,
  ):
    """Creates the programs; they are compiled when they are first used.

    Args:
      model: The model.
      num_slots: Number of cache slots.
      max_length: Context length C, in tokens.
      decode_steps: Most tokens D that one dispatch draws for a slot.
      prompt_buckets: Padded prompt lengths.
      prefill_tokens: A bucket of length n is prefilled in batches of
        ⌈prefill_tokens / n⌉ rows. The batch size never varies, so that the bits of a
        prompt's cache depend on its own length alone.
      max_stop_ids: Most stop token ids of a request.
      sharding: Where weights and cache lie.
      weights_format: How matrices are kept in 8 bits; None keeps their type.
      drafting: How tokens are drafted, a `Drafting`; None drafts none.
      prompt_block: Tokens of a block of `prefill_staged`; 0 if prompts are whole.

    Raises:
      ValueError: If a bucket is longer than the context.
    """
    if max(prompt_buckets) > max_length:
      raise ValueError(
        f'prompt bucket {max(prompt_buckets)} exceeds the window, '
        f'max_length={max_length}'
      )
    self.model = model
    self.num_slots = num_slots
    self.max_stop_ids = max_stop_ids
    self._max_length = max_length
    self._sharding = sharding
    self._drafting = drafting
    self.prompt_buckets = {
      bucket: min(num_slots, -(-prefill_tokens // bucket))
      for bucket in sorted(prompt_buckets)
    }
    # Each partial is a function of its own, so that every runner has a compilation
    # cache of its own and counts only its own compilations.
    partial = functools.partial
    # A loop of unknown length and branches cost a CPU or TPU nothing, and save steps
    # once all slots have ended. On a GPU the host waits for the device at each of them.
    self._is_static = platform_of(model.platform) == 'gpu'
    self._decode = _decode_programs(
      model, decode_steps, drafting, is_static=self._is_static
    )
    self._prefill = jax.jit(partial(prefill_slots, model), donate_argnums=1)
    self._blocks: Any = None
    if prompt_block:
      # Imported here because most engines compute prompts whole.
      from jaxrl.rollout.engine.prompt_blocks import BlockPrefill

      rows = min(num_slots, -(-prefill_tokens // prompt_block))
      self._blocks = BlockPrefill(model, prompt_block, rows, num_slots)
    self._copy = jax.jit(partial(caches.copy), donate_argnums=0)
    self._update = jax.jit(partial(_update_slots), donate_argnums=0)
    self._experts = jax.jit(partial(caches.experts_of))
    self._merge = jax.jit(partial(merge_transfer, dtype=model.dtype))
    self._is_on_cpu = platform_of(model.platform) == 'cpu'
    arrange = partial(_arrange, model, weights_format, sharding.num_devices)
    self._arrange = arrange if self._is_on_cpu else jax.jit(arrange)
    self._has_arranged = False
    self._num_warm_programs: int | None = None  # None before the warm-up
    self._image_features: Any = None
    if model.config.vision is not None:
      from jaxrl.rollout.engine.image_features import ImageFeatures  # few models do

      self._image_features = ImageFeatures(model, sharding)

  @property
  def compile_count(self) -> int:
    """Returns the number of programs compiled so far."""
    jitted = (
      *self._decode.values(),
      self._prefill,
      self._copy,
      self._update,
      self._experts,
      *([self._blocks.program] if self._blocks else []),
    )
    return sum(program._cache_size() for program in jitted)  # pyright: ignore

  def init_state(self) -> tuple[Cache, SlotState]:
    """Returns an empty cache and idle slots, on the device."""
    slots = self.idle_slots()
    cache = self.model.init_cache(self.num_slots, self._max_length)
    return jax.device_put((cache, slots), self._sharding)

  def idle_slots(self) -> SlotState:
    """Makes a numpy state in which every slot is idle."""
    drafts = None
    if self._drafting is not None:
      from jaxrl.rollout.engine.speculative_decode import DraftState

      drafts = DraftState.idle(self.num_slots, self._max_length)
    options: Any = {'sees_images': self._image_features is not None, 'drafts': drafts}
    return SlotState.idle(self.num_slots, self.max_stop_ids, **options)

  def prepare_params(
    self, params: Params, copy: bool = False, old: Params | None = None
  ) -> Params:
    """Moves weights to the engine's device, in the layout that decode reads fastest.

    Args:
      params: The model's parameters. Adapters beside them are merged.
      copy: Whether the result must share no array with `params`.
      old: What `spent_panels` returned of earlier weights.

    Returns:
      Parameters for `prefill` and `decode`.
    """
    if copy and not is_transfer(params):  # a stack of layers is copied as it is cut
      params = params | cast_copy(layer_stack.without_stack(params))
    params = jax.device_put(params, self._sharding)
    params = self._merge(params) if is_transfer(params) else params
    if not self._is_on_cpu:
      return jax.block_until_ready(self._arrange(params))
    if old is None and not self._has_arranged:  # compiles what later versions run
      old = self.spent_panels(self._arrange(params))
    self._has_arranged = True
    return jax.block_until_ready(self._arrange(params, old=old))

  def spent_panels(self, params: Params | None) -> Params | None:
    """Returns what new weights overwrite of those that nobody needs any more."""
    if params is None or not self._is_on_cpu:
      return None
    from jaxrl.models.decoding import weight_layout

    return weight_layout.spent_panels(params)

  def warmup(self, params: Params) -> None:
    """Compiles every program, on a state that is then dropped.

    Args:
      params: What `prepare_params` returned.
    """
    cache, slots = self.init_state()
    if self._blocks:
      cache = self._blocks.warmup(params, cache)
    for bucket in () if self._blocks else self.prompt_buckets:
      cache = self.prefill(params, cache, [(0, np.zeros(bucket + 1, np.int32))])
    cache = self.copy_prompts(cache, [(0, 0, 2)])
    self.routed_experts(cache, 0)
    none_updated = np.zeros(self.num_slots, bool)
    idle = self.idle_slots()
    slots = self.update_slots(slots, none_updated, idle)
    for needs in self._decode:
      cache, slots, *_ = self.decode(params, cache, slots, needs)
    jax.block_until_ready(slots)
    self._num_warm_programs = self.compile_count

  def log_recompiles(self, description: str) -> int:
    """Logs a warning if programs were compiled since the warm-up or the last call.

    All shapes are fixed when the engine is created, so the cause is weights whose
    dtype, layout or shape differs from those of the warm-up.

    Args:
      description: What the programs were compiled for.

    Returns:
      The number of programs.
    """
    if self._num_warm_programs is None:
      return 0
    num_recompiled = self.compile_count - self._num_warm_programs
    self._num_warm_programs += num_recompiled
    if num_recompiled:
      log.warning(
        'the engine compiled %d programs after warm-up, for %s: weights of another '
        'dtype, shape or layout than it was warmed up with',
        num_recompiled,
        description,
      )
    return num_recompiled

  def prefill(
    self,
    params: Params,
    cache: Cache,
    prompts: Sequence[tuple[int, np.ndarray]],
    images: Mapping[int, Sequence[Pixels]] | None = None,
    version: int = 0,
  ) -> Cache:
    """Computes keys and values of prompts, except for their last tokens.

    Args:
      params: What `prepare_params` returned.
      cache: The cache; it is donated.
      prompts: (slot, prompt) pairs.
      images: The images of those prompts that have any, by slot.
      version: The weights version of `params`, if there are images.

    Returns:
      The updated cache.
    """
    images = images or {}
    # Prompts with images run in another program: bits depend on no other prompt.
    alike: dict[tuple[int, bool], list[tuple[int, np.ndarray]]] = {}
    for slot, prompt in prompts:
      bucket = next(size for size in self.prompt_buckets if size >= len(prompt) - 1)
      alike.setdefault((bucket, slot in images), []).append((slot, prompt))
    for (bucket, has_images), in_bucket in alike.items():
      batch_size = self.prompt_buckets[bucket]
      for start in range(0, len(in_bucket), batch_size):
        tokens = np.zeros((batch_size, bucket), np.int32)
        lengths = np.ones(batch_size, np.int32)
        slots = np.full(batch_size, self.num_slots, np.int32)  # out of range: dropped
        for row, (slot, prompt) in enumerate(in_bucket[start : start + batch_size]):
          tokens[row, : len(prompt) - 1] = prompt[:-1]
          lengths[row], slots[row] = len(prompt) - 1, slot
        inputs = tokens, lengths, slots
        if has_images:
          row_images = [images.get(int(slot), ()) for slot in slots]
          run = self._image_features.prefill
          cache = run(params, version, cache, inputs, row_images)
        else:
          cache = self._prefill(params, cache, *inputs)
    return cache

  def prefill_staged(
    self, params: Params, cache: Cache, staged: Sequence[Sequence[object]]
  ) -> Cache:
    """Computes prompts in blocks; see `BlockPrefill.run`."""
    return self._blocks.run(params, cache, staged, self.copy_prompts)

  def copy_prompts(self, cache: Cache, copies: Sequence[tuple[int, int, int]]) -> Cache:
    """Copies cached prompts from slot to slot.

    Args:
      cache: The cache; it is donated.
      copies: (source slot, target slot, prompt length), copied in order.

    Returns:
      The updated cache.
    """
    if not copies:
      return cache
    table = np.zeros((self.num_slots, 3), np.int32)
    table[: len(copies)] = copies
    arguments = table, np.int32(len(copies))
    if not self._is_on_cpu:
      return self._copy(cache, *arguments)
    # A program for one layer, not for all, which XLA would take nearly as long to
    # compile as a decode step.
    done = []
    for i in range(self.model.config.num_layers):
      layer = {name: layers[i : i + 1] for name, layers in cache.items()}
      done.append(self._copy(layer, *arguments))
    return {name: sum((layer[name] for layer in done), ()) for name in cache}

  def update_slots(
    self, slots: SlotState, is_updated: np.ndarray, new_state: SlotState
  ) -> SlotState:
    """Overwrites the state of slots.

    Args:
      slots: The device state; it is donated.
      is_updated: `[S]` bool, True for the slots to overwrite.
      new_state: Their new state.

    Returns:
      The updated device state.
    """
    return self._update(slots, is_updated, new_state)

  def routed_experts(self, cache: Cache, slot: int) -> Array | None:
    """Returns the experts that the tokens in a slot took.

    Args:
      cache: The cache.
      slot: The slot's number.

    Returns:
      `[C, L, k]` int16 by position; None if the cache does not record them.
    """
    return self._experts(cache, np.int32(slot)) if 'e' in cache else None

  def decode(
    self,
    params: Params,
    cache: Cache,
    slots: SlotState,
    needs: str = token_sampling.TRUNCATED,
  ) -> tuple[Cache, SlotState, Array, Array, Array | None, Array | None]:
    """Starts drawing up to D tokens for every busy slot; does not wait for them.

    Args:
      params: What `prepare_params` returned.
      cache: The cache; it is donated.
      slots: The device state of the slots; it is donated.
      needs: What sampling needs, one of `token_sampling.STATIC_NEEDS`. On a GPU it
        chooses the program; elsewhere there is one for all.

    Returns:
      The updated cache and slots, tokens `[D, S]` int32 (−1 where a slot was idle),
      logprobs `[D, S]` float32, the experts that the tokens fed took, `[D, S, L, k]`
      int16, or None if the cache does not record them, and None; or, where tokens are
      drafted, `[3, S]` int32: steps, drafted tokens and accepted ones of each slot.
    """
    needs = needs if self._is_static else token_sampling.ANY
    return self._decode[needs](params, cache, slots)


def default_buckets(max_length: int) -> list[int]:
  """Returns prompt buckets: powers of two from 32, and the context length itself.

  Args:
    max_length: The context length, in tokens.
  """
  powers = [MIN_PROMPT_BUCKET << i for i in range(max_length.bit_length())]
  return [*(size for size in powers if size < max_length), max_length]


def prefill_slots(
  model: TransformerLM,
  params: Params,
  cache: Cache,
  tokens: Array,
  lengths: Array,
  slots: Array,
) -> Cache:
  """Computes keys and values of prompts and puts them into slots.

  Args:
    model: The model.
    params: Its parameters.
    cache: The cache.
    tokens: `[P, T]` int32.
    lengths: `[P]` int32, at least 1.
    slots: `[P]` int32; those outside the cache are skipped.

  Returns:
    The cache.
  """
  _, keys_and_values = model.prefill(params, tokens, lengths)
  return caches.insert(cache, keys_and_values, jnp.arange(tokens.shape[0]), slots)


def _update_slots(slots: SlotState, is_updated: Array, new_state: SlotState):
  def choose(old, new):
    mask = is_updated.reshape(is_updated.shape + (1,) * (old.ndim - 1))
    return jnp.where(mask, new, old)

  return jax.tree.map(choose, slots, new_state)


def _arrange(*arguments: Any, **options: Any) -> Params:
  # Imported here because no weights are laid out before the first are there.
  from jaxrl.models.decoding import weight_layout

  return weight_layout.arrange(*arguments, **options)


def _decode_programs(
  model: TransformerLM, decode_steps: int, drafting: Any, *, is_static: bool
) -> dict[str, Callable[..., Any]]:
  """Returns the programs of decode, by what the requests in slots need of a draw."""
  if drafting is not None:
    from jaxrl.rollout.engine import speculative_decode  # most engines draft nothing

    decode = functools.partial(
      speculative_decode.decode_with_drafts, model, decode_steps, drafting
    )
    return {token_sampling.ANY: jax.jit(decode, donate_argnums=(1, 2))}
  programs = {}
  for needs in token_sampling.STATIC_NEEDS if is_static else (token_sampling.ANY,):
    decode = functools.partial(decode_slots, model, decode_steps, needs)
    programs[needs] = jax.jit(decode, donate_argnums=(1, 2))
  return programs


def decode_slots(
  model: TransformerLM,
  num_steps: int,
  needs: str,
  params: Params,
  cache: Cache,
  slots: SlotState,
) -> tuple[Cache, SlotState, Array, Array, Array | None, None]:
  """Decodes until `num_steps` steps are done or, if `needs` is ANY, no slot is busy.

  Args:
    model: The model.
    num_steps: Most tokens of a slot.
    needs: What sampling needs; see `token_sampling`.
    params: The model's parameters.
    cache: The cache.
    slots: The slots.

  Returns:
    As `ModelRunner.decode`.
  """
  num_slots, start_positions = slots.tokens.shape[0], slots.positions
  # No request reaches the last position, so idle slots write there.
  scratch_position = caches.length(cache) - 1
  tokens = jnp.full((num_steps, num_slots), token_sampling.NO_TOKEN, jnp.int32)
  logprobs = jnp.zeros((num_steps, num_slots), jnp.float32)
  # Inside the loop, XLA would compute the sines again for each head of each layer.
  turned = start_positions
  if slots.position_shift is not None:
    turned = start_positions + slots.position_shift
  rotations = model.rotations(turned + jnp.arange(num_steps)[:, None])

  def is_unfinished(carry):
    step, _, slots, _, _ = carry
    return (step < num_steps) & jnp.any(slots.remaining > 0)

  def advance(carry):
    step, cache, slots, tokens, logprobs = carry
    is_busy = slots.remaining > 0
    limit = jnp.max(jnp.where(is_busy, slots.positions, 0)) + 1
    positions = jnp.where(is_busy, slots.positions, scratch_position)
    step_rotations = jax.tree.map(lambda x: x[step], rotations)
    logits, cache = model.decode(
      params, cache, slots.tokens, positions, limit, step_rotations
    )
    drawn, drawn_logprobs = token_sampling.draw_tokens(model, needs, logits, slots)
    has_stopped = jnp.any(drawn[:, None] == slots.stop_ids, axis=-1)
    remaining = jnp.where(has_stopped, 0, slots.remaining - 1)
    slots = dataclasses.replace(
      slots,
      tokens=jnp.where(is_busy, drawn, slots.tokens),
      positions=slots.positions + is_busy,
      remaining=jnp.where(is_busy, remaining, 0),
      token_indices=slots.token_indices + is_busy,
    )
    drawn = jnp.where(is_busy, drawn, token_sampling.NO_TOKEN)
    tokens = tokens.at[step].set(drawn)
    logprobs = logprobs.at[step].set(jnp.where(is_busy, drawn_logprobs, 0.0))
    return step + 1, cache, slots, tokens, logprobs

  carry = (jnp.int32(0), cache, slots, tokens, logprobs)
  if needs == token_sampling.ANY:
    carry = jax.lax.while_loop(is_unfinished, advance, carry)
  else:
    carry = jax.lax.fori_loop(0, num_steps, lambda _, carry: advance(carry), carry)
  _, cache, slots, tokens, logprobs = carry
  routed = (
    caches.experts_from(cache, start_positions, num_steps) if 'e' in cache else None
  )
  return cache, slots, tokens, logprobs, routed, None
