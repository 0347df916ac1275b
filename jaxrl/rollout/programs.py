"""The compiled programs of the generator, all of fixed shape.

The state on the device is the cache and one `Rows` of per-slot numbers; every program
takes what it changes as a donated argument and updates it in place.

A prompt of n tokens is prefilled without its last token, which is the first one that
decode feeds. So prefill makes no logits, every sampled token comes from the one decode
program, and the cache behind a shared prompt is the same for all that share it.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import cache as caches
from jaxrl.models.cache import Cache
from jaxrl.models.model import Model
from jaxrl.models.unmerged import is_unmerged, merge
from jaxrl.rollout import sampling
from jaxrl.rollout.slots import Request
from jaxrl.types import Array, Params

log = logging.getLogger(__name__)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
  """What each of S slots is doing.

  tokens: `[S]` int32, the next token to feed; positions: `[S]` int32, where it goes.
  remaining: `[S]` int32, tokens still to draw, 0 when idle. counts: `[S]` int32, the
  place of the next token in its completion. temperature, top_p: `[S]` float32. top_k:
  `[S]` int32. keys: `[S, 2]` uint32. stop_ids: `[S, K]` int32, filled up with −1.
  """

  tokens: Any
  positions: Any
  remaining: Any
  counts: Any
  temperature: Any
  top_p: Any
  top_k: Any
  keys: Any
  stop_ids: Any

  @classmethod
  def empty(cls, slots: int, stop_ids: int) -> 'Rows':
    whole, real = functools.partial(np.zeros, dtype=np.int32), np.float32
    return cls(
      tokens=whole(slots),
      positions=whole(slots),
      remaining=whole(slots),
      counts=whole(slots),
      temperature=np.ones(slots, real),
      top_p=np.ones(slots, real),
      top_k=whole(slots),
      keys=np.zeros((slots, 2), np.uint32),
      stop_ids=np.full((slots, stop_ids), sampling.NO_TOKEN, np.int32),
    )

  def cut(self, span: slice) -> 'Rows':
    """Those of some slots."""
    return jax.tree.map(lambda x: x[span], self)

  def seat(self, slot: int, request: Request) -> None:
    """Writes the start of `request` into numpy row `slot`."""
    rules = request.sampling
    self.tokens[slot] = request.prompt[-1]
    self.positions[slot] = len(request.prompt) - 1
    self.remaining[slot] = request.budget
    self.counts[slot] = rules.first
    self.temperature[slot] = rules.temperature
    self.top_p[slot] = rules.top_p
    self.top_k[slot] = rules.top_k
    self.keys[slot] = rules.seed >> 32, rules.seed & 0xFFFFFFFF
    self.stop_ids[slot, : len(rules.stop_token_ids)] = rules.stop_token_ids


class Programs:
  """Prefill, copy, place and decode for one model and one set of shapes.

  prompt_buckets: padded prompt lengths, ascending. prefill_tokens: a bucket of length
  n is prefilled in batches of ⌈prefill_tokens / n⌉ rows, always that many, so that a
  prompt's bits depend on its own length alone.
  """

  def __init__(
    self,
    model: Model,
    *,
    num_slots: int,
    max_length: int,
    decode_steps: int,
    prompt_buckets: Sequence[int],
    prefill_tokens: int,
    max_stop_ids: int,
    sharding: jax.sharding.Sharding,
  ):
    self.model, self.num_slots, self.max_length = model, num_slots, max_length
    self.max_stop_ids, self._sharding = max_stop_ids, sharding
    if max(prompt_buckets) > max_length:
      raise ValueError(
        f'prompt bucket {max(prompt_buckets)} exceeds the window, '
        f'max_length={max_length}'
      )
    self.buckets = {
      bucket: min(num_slots, -(-prefill_tokens // bucket))
      for bucket in sorted(prompt_buckets)
    }
    # A partial is a function of its own, so that compilations are counted by engine.
    own = functools.partial
    self._decode = jax.jit(own(_decode, model, decode_steps), donate_argnums=(1, 2))
    self._prefill = jax.jit(own(_prefill, model), donate_argnums=1)
    self._copy = jax.jit(own(model.copy), donate_argnums=0)
    self._place = jax.jit(own(_place), donate_argnums=0)
    self._experts = jax.jit(own(caches.experts_of))
    self._merge = jax.jit(own(merge, dtype=model.dtype))
    self._unstack = jax.jit(own(model.unstack))
    self._warm: int | None = None  # programs, once they are warmed up

  @property
  def compile_count(self) -> int:
    """How many programs have been compiled so far."""
    jitted = (self._decode, self._prefill, self._copy, self._place, self._experts)
    return sum(program._cache_size() for program in jitted)  # pyright: ignore

  def fresh(self) -> tuple[Cache, Rows]:
    """An empty cache and idle rows, on the device."""
    rows = Rows.empty(self.num_slots, self.max_stop_ids)
    cache = self.model.init_cache(self.num_slots, self.max_length)
    return jax.device_put((cache, rows), self._sharding)

  def adopt(self, params: Params) -> Params:
    """Lays weights out as decode reads them fastest, on the engine's device; adapters
    that were sent beside them are merged.
    """
    params = jax.device_put(params, self._sharding)
    return self._unstack(self._merge(params) if is_unmerged(params) else params)

  def warmup(self, params: Params) -> None:
    """Compiles every program, on a state of its own."""
    cache, rows = self.fresh()
    for bucket in self.buckets:
      prompt = np.zeros(bucket + 1, np.int32)
      cache = self.prefill(params, cache, [(0, prompt)])
    cache = self.copy(cache, [(0, 0, 2)])
    self.experts(cache, 0)
    idle = np.zeros(self.num_slots, bool)
    rows = self.place(rows, idle, Rows.empty(self.num_slots, self.max_stop_ids))
    jax.block_until_ready(self.decode(params, cache, rows))
    self._warm = self.compile_count

  def tell_late(self, what: str) -> int:
    """How many programs were compiled since warm-up or the last call; logs them.

    All shapes are fixed when the engine is made, so it is weights that differ, in
    dtype, layout or shape, from those of the warm-up.
    """
    if self._warm is None:
      return 0
    late, self._warm = self.compile_count - self._warm, self.compile_count
    if late:
      log.warning(
        'the engine compiled %d programs after warm-up, for %s: weights of another '
        'dtype, shape or layout than it was warmed up with',
        *(late, what),
      )
    return late

  def prefill(
    self, params: Params, cache: Cache, prompts: list[tuple[int, np.ndarray]]
  ) -> Cache:
    """Writes keys and values of all but the last token of each (slot, prompt)."""
    sorted_in: dict[int, list[tuple[int, np.ndarray]]] = {}
    for slot, prompt in prompts:
      bucket = next(size for size in self.buckets if size >= len(prompt) - 1)
      sorted_in.setdefault(bucket, []).append((slot, prompt))
    for bucket, members in sorted_in.items():
      width = self.buckets[bucket]
      for start in range(0, len(members), width):
        tokens = np.zeros((width, bucket), np.int32)
        lengths = np.ones(width, np.int32)
        slots = np.full(width, self.num_slots, np.int32)
        for row, (slot, prompt) in enumerate(members[start : start + width]):
          tokens[row, : len(prompt) - 1] = prompt[:-1]
          lengths[row], slots[row] = len(prompt) - 1, slot
        cache = self._prefill(params, cache, tokens, lengths, slots)
    return cache

  def copy(self, cache: Cache, copies: list[tuple[int, int, int]]) -> Cache:
    """For each (source, target, length), in order: the source's first positions."""
    table = np.zeros((self.num_slots, 3), np.int32)
    table[: len(copies)] = copies
    return self._copy(cache, table, np.int32(len(copies)))

  def place(self, rows: Rows, where: np.ndarray, new: Rows) -> Rows:
    """`new` where `where` `[S]` bool is True."""
    return self._place(rows, where, new)

  def experts(self, cache: Cache, slot: int) -> Array | None:
    """`[C, L, k]` of a slot's tokens by position; None if the cache has them not."""
    return self._experts(cache, np.int32(slot)) if 'e' in cache else None

  def decode(
    self, params: Params, cache: Cache, rows: Rows
  ) -> tuple[Cache, Rows, Array, Array, Array | None]:
    """Up to `decode_steps` tokens D for every busy slot.

    Returns cache, rows, tokens `[D, S]` int32 (−1 where a slot was idle), logprobs
    `[D, S]` float32, and the experts that the tokens fed took, `[D, S, L, k]` int16, if
    the cache has them.
    """
    return self._decode(params, cache, rows)


def _prefill(model, params, cache, tokens, lengths, slots):
  _, kept = model.prefill(params, tokens, lengths)
  return model.insert(cache, kept, jnp.arange(tokens.shape[0]), slots)


def _place(rows: Rows, where: Array, new: Rows) -> Rows:
  def choose(old, value):
    return jnp.where(where.reshape(where.shape + (1,) * (old.ndim - 1)), value, old)

  return jax.tree.map(choose, rows, new)


def _decode(model: Model, steps: int, params, cache: Cache, rows: Rows):
  """Decodes until `steps` are done or no slot is busy."""
  slots, began = rows.tokens.shape[0], rows.positions
  scratch = caches.length(cache) - 1  # no request reaches it: idle slots write there
  tokens = jnp.full((steps, slots), sampling.NO_TOKEN, jnp.int32)
  logprobs = jnp.zeros((steps, slots), jnp.float32)
  # Before the loop: within it XLA finds sines anew for each head of each layer.
  rotations = model.rotation(began + jnp.arange(steps)[:, None])

  def unfinished(carry):
    step, _, rows, _, _ = carry
    return (step < steps) & jnp.any(rows.remaining > 0)

  def advance(carry):
    step, cache, rows, tokens, logprobs = carry
    busy = rows.remaining > 0
    limit = jnp.max(jnp.where(busy, rows.positions, 0)) + 1
    positions = jnp.where(busy, rows.positions, scratch)
    rotation = jax.tree.map(lambda x: x[step], rotations)
    logits, cache = model.decode(
      *(params, cache, rows.tokens, positions, limit, rotation)
    )
    drawn, drawn_logprobs = sampling.sample(
      logits, rows.keys, rows.counts, rows.temperature, rows.top_p, rows.top_k
    )
    if model.exact is not None:
      whole = (rows.top_p >= 1) & (rows.top_k <= 0)
      exact = model.exact.logprobs(logits, drawn, rows.temperature)
      drawn_logprobs = jnp.where(whole, exact, drawn_logprobs)
    stopped = jnp.any(drawn[:, None] == rows.stop_ids, axis=-1)
    left = jnp.where(stopped, 0, rows.remaining - 1)
    rows = dataclasses.replace(
      rows,
      tokens=jnp.where(busy, drawn, rows.tokens),
      positions=rows.positions + busy,
      remaining=jnp.where(busy, left, 0),
      counts=rows.counts + busy,
    )
    tokens = tokens.at[step].set(jnp.where(busy, drawn, sampling.NO_TOKEN))
    logprobs = logprobs.at[step].set(jnp.where(busy, drawn_logprobs, 0.0))
    return step + 1, cache, rows, tokens, logprobs

  start = (jnp.int32(0), cache, rows, tokens, logprobs)
  _, cache, rows, tokens, logprobs = jax.lax.while_loop(unfinished, advance, start)
  routed = caches.experts_from(cache, began, steps) if 'e' in cache else None
  return cache, rows, tokens, logprobs, routed
