"""Token sampling: draws one token per row, with each row's own parameters and key.

The result of a row is a function of that row alone. Every step is either elementwise
or a reduction along the vocabulary at a fixed shape, and a branch that is skipped when
no row needs it would not have changed the bits of the other rows.

Inverse-CDF sampling on two levels (a block of the vocabulary, then a token in it) takes
two 24-bit uniforms per row, where the Gumbel trick takes one per vocabulary entry. The
second level keeps rare tokens of rare blocks from being rounded away.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.types import Array, PyTree, SamplingParams

NO_TOKEN = -1
# What rows may need of a program. 'any' asks the device, and branches: on a GPU, the
# host would wait for the answer at every token. There the host chooses one of the
# others before it starts a program; each can do what those before it can.
ANY, GREEDY, PLAIN, TRUNCATED = 'any', 'greedy', 'plain', 'truncated'
STATIC_NEEDS = (GREEDY, PLAIN, TRUNCATED)


def needs_of(requests: Iterable[SamplingParams]) -> str:
  """Returns the least of `STATIC_NEEDS` that serves all requests.

  Args:
    requests: Their sampling parameters.
  """
  drawn = [rules for rules in requests if rules.temperature > 0]
  if any(rules.top_p < 1 or rules.top_k > 0 for rules in drawn):
    return TRUNCATED
  return PLAIN if drawn else GREEDY


def sample_tokens(
  logits: Array,
  keys: Array,
  token_indices: Array,
  temperature: Array,
  top_p: Array,
  top_k: Array,
  *,
  needs: str = ANY,
) -> tuple[Array, Array]:
  """Draws a token from each row of `logits`.

  Args:
    logits: `[S, V]` float32.
    keys: `[S, 2]` uint32, the data of key(seed).
    token_indices: `[S]` int32, the index t of the token to draw in its completion. The
      token's key is fold_in(key(seed), t).
    temperature: `[S]` float32; 0 takes the most likely token.
    top_p: `[S]` float32; 1 keeps all tokens. Ties with the last token kept are kept.
    top_k: `[S]` int32; 0 keeps all tokens. Ties with the last token kept are kept.
    needs: What the program can do: all that any row needs. Rows that are of no interest
      may need more.

  Returns:
    Tokens `[S]` int32, and their logprobs `[S]` float32 under the distribution they
    were drawn from, including temperature and truncation. The log-probs of greedy rows
    are at temperature 1.
  """
  is_greedy = temperature <= 0
  scaled = logits / jnp.where(is_greedy, 1.0, temperature)[:, None]
  if needs in (ANY, TRUNCATED):
    threshold = _thresholds(scaled, is_greedy, top_p, top_k, branches=needs == ANY)
    scaled = jnp.where(scaled < threshold[:, None], -jnp.inf, scaled)
  max_logit = jnp.max(scaled, axis=-1)
  weights = _split_into_blocks(jnp.exp(scaled - max_logit[:, None]))
  block_weights = jnp.sum(weights, axis=-1)

  def likeliest() -> Array:
    return jnp.argmax(scaled, axis=-1).astype(jnp.int32)

  if needs == GREEDY:
    tokens = likeliest()
  else:
    tokens = _draw(weights, block_weights, _uniforms(keys, token_indices))
    if needs == ANY:
      tokens = jax.lax.cond(
        jnp.any(is_greedy),
        lambda: jnp.where(is_greedy, likeliest(), tokens),
        lambda: tokens,
      )
    else:
      tokens = jnp.where(is_greedy, likeliest(), tokens)
  # NaN logits leave nothing to draw; the caller notices the NaN log-prob.
  tokens = jnp.clip(tokens, 0, logits.shape[1] - 1)
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen - max_logit - jnp.log(jnp.sum(block_weights, axis=-1))


def draw_tokens(
  model: Any, needs: str, logits: Array, slots: PyTree
) -> tuple[Array, Array]:
  """Draws a token for each slot; in exact mode with the learner's log-probs.

  Args:
    model: The `TransformerLM`.
    needs: What sampling needs; see above.
    logits: `[S, V]` float32.
    slots: The `SlotState`.

  Returns:
    Tokens `[S]` int32 and their log-probs `[S]` float32.
  """
  drawn, logprobs = sample_tokens(
    logits,
    slots.keys,
    slots.token_indices,
    slots.temperature,
    slots.top_p,
    slots.top_k,
    needs=needs,
  )
  if model.exact is not None:
    is_untruncated = (slots.top_p >= 1) & (slots.top_k <= 0)
    exact_logprobs = model.exact.logprobs(logits, drawn, slots.temperature)
    logprobs = jnp.where(is_untruncated, exact_logprobs, logprobs)
  return drawn, logprobs


def _thresholds(
  scaled: Array, is_greedy: Array, top_p: Array, top_k: Array, *, branches: bool
) -> Array:
  """Returns the lowest scaled logit `[S]` that each row may draw, −∞ for no bound."""
  is_truncated = ~is_greedy & ((top_p < 1) | (top_k > 0))

  def compute() -> Array:
    lowest = _truncation_threshold(scaled, top_p, top_k)
    return jnp.where(is_truncated, lowest, -jnp.inf)

  if not branches:
    return compute()
  return jax.lax.cond(
    jnp.any(is_truncated),
    compute,
    lambda: jnp.full(scaled.shape[:1], -jnp.inf, scaled.dtype),
  )


def _truncation_threshold(scaled: Array, top_p: Array, top_k: Array) -> Array:
  """Returns the lowest scaled logit `[S]` that may be drawn: top-k, then top-p."""
  ordered = -jnp.sort(-scaled, axis=-1)
  rank = jnp.arange(scaled.shape[-1])
  is_kept = rank < jnp.where(top_k > 0, top_k, scaled.shape[-1])[:, None]
  probs = jax.nn.softmax(jnp.where(is_kept, ordered, -jnp.inf), axis=-1)
  mass_before = jnp.cumsum(probs, axis=-1) - probs
  # A token stays while those before it hold less than top_p; the first always does.
  is_kept &= (mass_before < top_p[:, None]) | (top_p >= 1)[:, None]
  last = jnp.maximum(jnp.sum(is_kept, axis=-1) - 1, 0)
  return jnp.take_along_axis(ordered, last[:, None], axis=-1)[:, 0]


def _uniforms(keys: Array, token_indices: Array) -> Array:
  """Returns `[S, 2]` uniforms in [0, 1) from fold_in(key, token index) of each row."""

  def random_bits(key_data: Array, token_index: Array) -> Array:
    key = jax.random.wrap_key_data(key_data, impl='threefry2x32')
    return jax.random.bits(jax.random.fold_in(key, token_index), (2,), jnp.uint32)

  bits = jax.vmap(random_bits)(keys, token_indices)
  return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _split_into_blocks(weights: Array) -> Array:
  """Reshapes `[S, V]` to `[S, N, W]`, zero-padded, with N and W near the root of V."""
  vocab_size = weights.shape[1]
  width = 8
  while width * width < vocab_size:
    width *= 2
  num_blocks = -(-vocab_size // width)
  weights = jnp.pad(weights, ((0, 0), (0, num_blocks * width - vocab_size)))
  return weights.reshape(weights.shape[0], num_blocks, width)


def _draw(weights: Array, block_weights: Array, uniforms: Array) -> Array:
  """Draws a block by its weight and a token in it by its own; `[S]` int32."""
  block = _inverse_cdf(block_weights, uniforms[:, 0])
  in_block = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
  return block * weights.shape[-1] + _inverse_cdf(in_block, uniforms[:, 1])


def _inverse_cdf(weights: Array, uniform: Array) -> Array:
  """Returns the first index `[S]` whose running sum exceeds uniform · total.

  An index of weight 0 is never returned, whatever rounding does to the running sums of
  `weights` `[S, N]`.
  """
  sums = jnp.cumsum(weights, axis=-1)
  index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
  is_positive = weights > 0
  is_past = is_positive & (sums > (uniform * sums[:, -1])[:, None])
  first_past = jnp.min(jnp.where(is_past, index, weights.shape[-1]), axis=-1)
  last_positive = jnp.max(jnp.where(is_positive, index, 0), axis=-1)
  return jnp.minimum(first_past, last_positive)
