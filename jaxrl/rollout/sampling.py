"""Draws one token per row, each row by its own rules and its own key.

A row's result is a function of that row alone: every step is either elementwise or
a reduction along the vocabulary at a fixed shape, and the branches skipped when no
row needs them leave untouched rows the bits they would have had.

Inverse-CDF sampling in two levels (a block of the vocabulary, then a token in it)
takes two 24-bit uniforms a row, where the Gumbel trick takes one a vocabulary entry;
the second level keeps rare tokens of rare blocks from being rounded away.
"""

import jax
import jax.numpy as jnp

from jaxrl.types import Array

NO_TOKEN = -1


def sample(
  logits: Array,
  keys: Array,
  counts: Array,
  temperature: Array,
  top_p: Array,
  top_k: Array,
) -> tuple[Array, Array]:
  """Draws a token from each row of `logits`.

  logits: `[S, V]` float32. keys: `[S, 2]` uint32, the data of key(seed). counts: `[S]`
  int32, the index t of the token to draw: its key is fold_in(key(seed), t).
  temperature: `[S]` float32, 0 for the likeliest token. top_p: `[S]` float32, 1 keeps
  all. top_k: `[S]` int32, 0 keeps all. Both keep what ties with the last one kept.

  Returns tokens `[S]` int32 and logprobs `[S]` float32, under the distribution drawn
  from, temperature and truncation included; a greedy row's are at temperature 1.
  """
  greedy = temperature <= 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  truncated = ~greedy & ((top_p < 1) | (top_k > 0))
  floor = jax.lax.cond(
    jnp.any(truncated),
    lambda: jnp.where(truncated, _floor(scaled, top_p, top_k), -jnp.inf),
    lambda: jnp.full(scaled.shape[:1], -jnp.inf, scaled.dtype),
  )
  scaled = jnp.where(scaled < floor[:, None], -jnp.inf, scaled)
  top = jnp.max(scaled, axis=-1)
  weights = _blocks(jnp.exp(scaled - top[:, None]))
  masses = jnp.sum(weights, axis=-1)
  tokens = _draw(weights, masses, _uniforms(keys, counts))
  tokens = jax.lax.cond(
    jnp.any(greedy),
    lambda: jnp.where(greedy, jnp.argmax(scaled, axis=-1).astype(jnp.int32), tokens),
    lambda: tokens,
  )
  # Not-a-number logits leave nothing to draw; the caller sees it in the log-prob.
  tokens = jnp.clip(tokens, 0, logits.shape[1] - 1)
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen - top - jnp.log(jnp.sum(masses, axis=-1))


def _floor(scaled: Array, top_p: Array, top_k: Array) -> Array:
  """The least scaled logit `[S]` that a row may draw: top-k first, then top-p."""
  order = -jnp.sort(-scaled, axis=-1)
  rank = jnp.arange(scaled.shape[-1])
  kept = rank < jnp.where(top_k > 0, top_k, scaled.shape[-1])[:, None]
  probs = jax.nn.softmax(jnp.where(kept, order, -jnp.inf), axis=-1)
  before = jnp.cumsum(probs, axis=-1) - probs
  # A token stays while those before it hold less than top_p; the first always does.
  kept &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
  last = jnp.maximum(jnp.sum(kept, axis=-1) - 1, 0)
  return jnp.take_along_axis(order, last[:, None], axis=-1)[:, 0]


def _uniforms(keys: Array, counts: Array) -> Array:
  """`[S, 2]` uniforms in [0, 1) from fold_in(key, count) of each row."""

  def row(data: Array, count: Array) -> Array:
    key = jax.random.wrap_key_data(data, impl='threefry2x32')
    return jax.random.bits(jax.random.fold_in(key, count), (2,), jnp.uint32)

  bits = jax.vmap(row)(keys, counts)
  return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _blocks(weights: Array) -> Array:
  """`[S, V]` → `[S, N, W]`, zeros appended, N and W near the root of V."""
  vocab = weights.shape[1]
  width = 8
  while width * width < vocab:
    width *= 2
  count = -(-vocab // width)
  weights = jnp.pad(weights, ((0, 0), (0, count * width - vocab)))
  return weights.reshape(weights.shape[0], count, width)


def _draw(weights: Array, masses: Array, uniforms: Array) -> Array:
  """A block by its mass, a token in it by its weight; `[S]` int32."""
  block = _pick(masses, uniforms[:, 0])
  inside = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
  return block * weights.shape[-1] + _pick(inside, uniforms[:, 1])


def _pick(weights: Array, uniform: Array) -> Array:
  """The first index `[S]` whose running sum of `weights` `[S, N]` passes the mark.

  An index of weight 0 is never picked, whatever rounding does to the running sums.
  """
  sums = jnp.cumsum(weights, axis=-1)
  index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
  some = weights > 0
  passed = some & (sums > (uniform * sums[:, -1])[:, None])
  first = jnp.min(jnp.where(passed, index, weights.shape[-1]), axis=-1)
  last = jnp.max(jnp.where(some, index, 0), axis=-1)
  return jnp.minimum(first, last)
