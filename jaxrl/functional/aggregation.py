"""How per-token losses become one number: as weights, made once per optimizer batch.

Losses never reduce. A mode becomes weights from the counts of the *whole* optimizer
batch, and the loss is Σ w·l. Splitting that batch into micro-batches or over devices
therefore changes nothing. Rows without action tokens count nowhere.
"""

import jax.numpy as jnp

from jaxrl.signature import ConfigError, parse_call, unknown
from jaxrl.types import Array

MODES = (
  'token_mean',
  'sequence_mean_token_sum',
  'sequence_mean_token_mean',
  'sequence_mean_token_sum_norm',
)


def token_weights(
  mask: Array,
  *,
  mode: str = 'token_mean',
  length: float | None = None,
  row_valid: Array | None = None,
) -> Array:
  """Weights `[B, T]` for a loss per token; 0 wherever the mask is 0.

  mask: `[B, T]` action tokens of the whole optimizer batch.
  mode, with m the mask, l the loss and B the number of rows with an action token:
    token_mean: Σ m·l / Σ m.
    sequence_mean_token_sum: (1/B) Σ_rows Σ_t m·l.
    sequence_mean_token_mean: (1/B) Σ_rows (Σ_t m·l / Σ_t m).
    sequence_mean_token_sum_norm: Σ m·l / (B·L) (Dr. GRPO, arXiv 2503.20783); L is
      `length`, a constant: never the padded width. May be written into the mode,
      `'sequence_mean_token_sum_norm(length=1024)'`.
  row_valid: `[B]` bool; rows to leave out, counts included, are False.
  """
  name, constant = check(mode, length)
  m = jnp.asarray(mask, jnp.float32)
  if row_valid is not None:
    m = m * row_valid[:, None]
  if name == 'token_mean':
    return m / jnp.maximum(jnp.sum(m), 1)
  tokens = jnp.sum(m, axis=-1, keepdims=True)
  rows = jnp.maximum(jnp.sum(tokens > 0), 1)
  if name == 'sequence_mean_token_sum':
    return m / rows
  if name == 'sequence_mean_token_mean':
    return m / (rows * jnp.maximum(tokens, 1))
  return m / (rows * constant)


def term_scale(mask: Array, expert_mask: Array, *, mode: str = 'token_mean') -> Array:
  """`[B]` turns weights over all rows into weights over a row's own kind.

  For losses of two terms, one on expert rows and one on the others, each a mean over
  its own: token_weights(mask, mode=mode) · term_scale sums to 1 (in mode token_mean)
  over either kind. mask: `[B, T]`. expert_mask: `[B]` bool.
  """
  name, _ = check(mode, length=1)
  tokens = jnp.sum(jnp.asarray(mask, jnp.float32), axis=-1)
  count = tokens if name == 'token_mean' else 1.0 * (tokens > 0)
  experts = jnp.sum(jnp.where(expert_mask, count, 0))
  others = jnp.sum(jnp.where(expert_mask, 0, count))
  own = jnp.where(expert_mask, experts, others)
  return jnp.where(own > 0, (experts + others) / jnp.maximum(own, 1), 0)


def check(mode: str, length: float | None = None) -> tuple[str, float]:
  """The mode's name and its length, 0 if it has none; ConfigError when wrong."""
  name, options = parse_call(mode)
  if name not in MODES:
    raise unknown(name, MODES, 'mode', 'aggregation')
  takes = ('length',) if name == 'sequence_mean_token_sum_norm' else ()
  for option in options:
    if option not in takes:
      raise unknown(option, takes, 'option', f'aggregation={mode!r}')
  length = options.get('length', length)
  wrong = length is None or isinstance(length, str | bool)
  if takes and (wrong or (isinstance(length, int | float) and length <= 0)):
    raise ConfigError(
      'sequence_mean_token_sum_norm divides by a constant, positive length: write '
      "aggregation='sequence_mean_token_sum_norm(length=1024)'"
    )
  return name, length or 0


def row_weights(mask: Array) -> Array:
  """Weights `[B]` that average a loss per row over rows with an action token."""
  rows = jnp.any(jnp.asarray(mask, bool), axis=-1)
  return rows / jnp.maximum(jnp.sum(rows), 1).astype(jnp.float32)


def pair_weights(pair_ids: Array) -> Array:
  """Weights `[B]` that average a loss per pair, given on each pair's rows.

  pair_ids: `[B]` int32, both rows of a pair alike, −1 at padding rows. A pair's
  weight is split evenly over its two rows.
  """
  rows = pair_ids >= 0
  return rows / jnp.maximum(jnp.sum(rows), 1).astype(jnp.float32)
