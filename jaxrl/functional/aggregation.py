"""Aggregation turns losses per token into one number, by weights made once per batch.

Losses never reduce. A mode becomes weights from the counts of the *whole* optimizer
batch, and the loss is Σ w·l. Splitting that batch into micro-batches or over devices
therefore changes nothing. Rows without action tokens count nowhere.
"""

from typing import Any

import jax.numpy as jnp

from jaxrl.options import ConfigError, OptionValues, unknown_name_error
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
  """Computes the weights of a loss per token.

  With m the mask, l the loss and B the number of rows with an action token, the modes
  are:

    token_mean: Σ m·l / Σ m.
    sequence_mean_token_sum: (1/B) Σ_rows Σ_t m·l.
    sequence_mean_token_mean: (1/B) Σ_rows (Σ_t m·l / Σ_t m).
    sequence_mean_token_sum_norm: Σ m·l / (B·L) (Dr. GRPO, arXiv 2503.20783).

  Args:
    mask: `[B, T]` action tokens of the whole optimizer batch.
    mode: The mode.
    length: L, a constant: never the padded width.
    row_valid: `[B]` bool; rows to leave out, counts included, are False.

  Returns:
    `[B, T]`; 0 wherever the mask is 0.
  """
  constant = check_mode(mode, length)
  m = jnp.asarray(mask, jnp.float32)
  if row_valid is not None:
    m = m * row_valid[:, None]
  if mode == 'token_mean':
    return m / jnp.maximum(jnp.sum(m), 1)
  tokens = jnp.sum(m, axis=-1, keepdims=True)
  rows = jnp.maximum(jnp.sum(tokens > 0), 1)
  if mode == 'sequence_mean_token_sum':
    return m / rows
  if mode == 'sequence_mean_token_mean':
    return m / (rows * jnp.maximum(tokens, 1))
  return m / (rows * constant)


def term_scale(mask: Array, expert_mask: Array, *, mode: str = 'token_mean') -> Array:
  """Computes what turns weights over all rows into weights over a row's own kind.

  It is for losses of two terms, one on expert rows and one on the others, each a mean
  over its own rows: token_weights(mask, mode=mode) · term_scale sums to 1 (in mode
  token_mean) over either kind.

  Args:
    mask: `[B, T]` bool, True at action tokens.
    expert_mask: `[B]` bool, True on an expert's rows.
    mode: As for `token_weights`.

  Returns:
    `[B]`.
  """
  check_mode(mode, length=1)
  tokens = jnp.sum(jnp.asarray(mask, jnp.float32), axis=-1)
  count = tokens if mode == 'token_mean' else 1.0 * (tokens > 0)
  experts = jnp.sum(jnp.where(expert_mask, count, 0))
  others = jnp.sum(jnp.where(expert_mask, 0, count))
  own_count = jnp.where(expert_mask, experts, others)
  return jnp.where(own_count > 0, (experts + others) / jnp.maximum(own_count, 1), 0)


def term_scale_field(
  mask: Array, expert_mask: Array, aggregation: str
) -> dict[str, Any]:
  """Computes the batch field `term_scale` from the whole optimizer batch.

  Args:
    mask: `[B, T]` bool, True at action tokens.
    expert_mask: `[B]` bool, True on an expert's rows.
    aggregation: The name of the aggregation mode.

  Returns:
    {'term_scale': `[B]`}.
  """
  return {'term_scale': term_scale(mask, expert_mask, mode=aggregation)}


def check_mode(mode: str, length: float | None = None) -> float:
  """Checks a mode.

  Args:
    mode: As for `token_weights`.
    length: L.

  Returns:
    The length, 0 if there is none.

  Raises:
    ConfigError: If there is no such mode, or it takes a length that is not positive.
  """
  if mode not in MODES:
    raise unknown_name_error(mode, MODES, 'mode', 'aggregation')
  wrong = length is None or isinstance(length, str | bool)
  if mode == 'sequence_mean_token_sum_norm' and (
    wrong or (isinstance(length, int | float) and length <= 0)
  ):
    raise ConfigError(
      'sequence_mean_token_sum_norm divides by a constant, positive length: '
      f'length={length!r}. Write sequence_mean_token_sum_norm(length=1024) in a '
      "config, or ComponentCall('sequence_mean_token_sum_norm', {'length': 1024})"
    )
  return length or 0


def check_aggregation(
  mode: str, options: OptionValues, length: float | None = None
) -> None:
  """Checks the aggregation of an algorithm: a mode, with the length it may take.

  Args:
    mode: One of MODES.
    options: The options of the mode, by name.
    length: L, where the options do not contain it.

  Raises:
    ConfigError: If there is no such mode, or its length is not positive.
  """
  takes = ('length',) if mode == 'sequence_mean_token_sum_norm' else ()
  for option in options if mode in MODES else ():
    if option not in takes:
      raise unknown_name_error(option, takes, 'option', f'aggregation={mode}')
  check_mode(mode, options.get('length', length))


def row_weights(mask: Array) -> Array:
  """Computes weights that average a loss per row over rows with an action token.

  Args:
    mask: `[B, T]` bool, True at action tokens.

  Returns:
    `[B]`.
  """
  rows = jnp.any(jnp.asarray(mask, bool), axis=-1)
  return rows / jnp.maximum(jnp.sum(rows), 1).astype(jnp.float32)


def pair_weights(pair_ids: Array) -> Array:
  """Computes weights that average a loss per pair, given on each pair's rows.

  A pair's weight is split evenly over its two rows.

  Args:
    pair_ids: `[B]` int32, equal for the two rows of a pair; −1 at padding rows.

  Returns:
    `[B]`.
  """
  rows = pair_ids >= 0
  return rows / jnp.maximum(jnp.sum(rows), 1).astype(jnp.float32)
