"""Softmax statistics reduce a row of logits block by block, and give its gradient.

Let z be the logits of a row, m their maximum and d = z − m. The statistics of a row are
eight numbers: `m, Σ e^{d/τ}, Σ d·e^{d/τ}, Σ e^d, Σ d·e^d, Σ e^{2d}, Σ d·e^{2d}` and the
logit z of the target. The statistics of two parts of the vocabulary can be merged into
those of both parts, so blocks of the table and its shards on several devices are
handled alike. In the backward pass, the gradients of a row also reduce to eight
numbers, `BackwardStats`, from which `logits_grad` computes the gradient of any block of
logits.

The columns are separate arrays `[n, 1]`, which suits the vector layouts of TPU and GPU
kernels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MASK_VALUE = -1e30  # finite: a masked logit has e^d = 0 and d · e^d = −0, never NaN
NUM_COLUMNS = 8  # columns of `SoftmaxStats`, and of `BackwardStats`


class StatsKind(NamedTuple):
  """Says which statistics are needed.

  Attributes:
    tempered: Whether τ may differ from 1.
    moments: Whether entropy or nec is needed.
  """

  tempered: bool = True
  moments: bool = False


class SoftmaxStats(NamedTuple):
  """Statistics of rows over a part of the vocabulary, each `[n, 1]` float32."""

  top: jax.Array
  total: jax.Array
  mean: jax.Array
  plain_total: jax.Array
  plain_mean: jax.Array
  square_total: jax.Array
  square_mean: jax.Array
  chosen: jax.Array


class BackwardStats(NamedTuple):
  """Numbers from which a row's gradient is computed, each `[n, 1]` float32.

  Attributes:
    top: Largest logit m.
    log_total: Normalizer log Σ e^{d/τ}.
    plain_log_total: Normalizer log Σ e^d.
    plain_mean: Mean of d at temperature 1.
    chosen: Incoming gradient of log p, divided by τ.
    flat: Constant coefficient of the gradient of the moments; see `logits_grad`.
    tilt: Coefficient of δ = d − mean in that gradient.
    square: Coefficient of p(1 + 2δ) in that gradient.
  """

  top: jax.Array
  log_total: jax.Array
  plain_log_total: jax.Array
  plain_mean: jax.Array
  chosen: jax.Array
  flat: jax.Array
  tilt: jax.Array
  square: jax.Array


def empty_stats(rows: int) -> SoftmaxStats:
  """Returns the statistics over an empty part of the vocabulary.

  Args:
    rows: Number of rows n.
  """
  zero = jnp.zeros((rows, 1), jnp.float32)
  return SoftmaxStats(
    jnp.full((rows, 1), MASK_VALUE, jnp.float32), *(zero,) * (NUM_COLUMNS - 1)
  )


def block_stats(
  logits: jax.Array, hit: jax.Array | None, inverse: jax.Array, kind: StatsKind
) -> SoftmaxStats:
  """Computes the statistics of a block of logits.

  Args:
    logits: Logits `[n, v]` float32, MASK_VALUE where masked.
    hit: Mask `[n, v]` bool, True at the target; None leaves `chosen` 0.
    inverse: Inverse temperature 1/τ, a float32 scalar.
    kind: Statistics to compute.
  """
  top = logits.max(1, keepdims=True)
  d = logits - top
  zero = jnp.zeros_like(top)

  def pair(weights):
    return weights.sum(1, keepdims=True), (weights * d).sum(1, keepdims=True)

  plain = jnp.exp(d)
  first = pair(jnp.exp(d * inverse)) if kind.tempered else pair(plain)
  second = pair(plain) if kind.moments else (zero, zero)
  third = pair(plain * plain) if kind.moments else (zero, zero)
  chosen = zero
  if hit is not None:
    chosen = jnp.where(hit, logits, 0.0).sum(1, keepdims=True)
  return SoftmaxStats(top, *first, *second, *third, chosen)


def merge_stats(a: SoftmaxStats, b: SoftmaxStats, inverse: jax.Array) -> SoftmaxStats:
  """Merges the statistics of two parts of the vocabulary.

  Args:
    a: Statistics of one part.
    b: Statistics of the other part.
    inverse: Inverse temperature 1/τ, a float32 scalar.
  """
  top = jnp.maximum(a.top, b.top)

  def moved(x):
    step = x.top - top
    tempered, plain = jnp.exp(step * inverse), jnp.exp(step)
    pairs = (
      (tempered, x.total, x.mean),
      (plain, x.plain_total, x.plain_mean),
      (plain * plain, x.square_total, x.square_mean),
    )
    return [y for c, s, m in pairs for y in (c * s, c * (m + step * s))]

  both = [p + q for p, q in zip(moved(a), moved(b), strict=True)]
  return SoftmaxStats(*[top, *both, a.chosen + b.chosen])


def scores_from_stats(
  stats: SoftmaxStats, inverse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Computes log p of the target at τ, and moments at temperature 1.

  Args:
    stats: Statistics over the whole vocabulary.
    inverse: Inverse temperature 1/τ, a float32 scalar.

  Returns:
    Four arrays `[n]`: log p, entropy H, nec = Σ p²(H + log p) and Σ p².
  """
  logprobs = (stats.chosen - stats.top) * inverse - jnp.log(stats.total)
  total = jnp.where(stats.plain_total > 0, stats.plain_total, 1.0)
  mean = stats.plain_mean / total
  entropy = jnp.log(total) - mean
  nec = (stats.square_mean - mean * stats.square_total) / (total * total)
  square = stats.square_total / (total * total)
  return logprobs[:, 0], entropy[:, 0], nec[:, 0], square[:, 0]


def backward_stats(
  stats: SoftmaxStats, inverse: jax.Array, by: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[BackwardStats, jax.Array]:
  """Computes the backward statistics of rows, and the gradient of τ.

  Let p be the probabilities at temperature 1, q = Σ p², N the nec and δ = z − Σ p·z.
  Then ∂H/∂z = −p·δ and ∂N/∂z = p²(1 + 2δ) − p(2N + q) − q·p·δ.

  Args:
    stats: Statistics over the whole vocabulary.
    inverse: Inverse temperature 1/τ, a float32 scalar.
    by: Gradients `[n]` of the first three outputs of `scores_from_stats`.

  Returns:
    The backward statistics, and the gradient of τ, a scalar.
  """
  log, entropy, nec = (x[:, None] for x in by)
  total = jnp.where(stats.plain_total > 0, stats.plain_total, 1.0)
  mean = stats.plain_mean / total
  square = stats.square_total / (total * total)
  value = (stats.square_mean - mean * stats.square_total) / (total * total)
  of = BackwardStats(
    stats.top,
    jnp.log(stats.total),
    jnp.log(total),
    mean,
    log * inverse,
    -nec * (2 * value + square),
    -entropy - nec * square,
    nec,
  )
  expected = stats.top + stats.mean / stats.total
  return of, (log * (expected - stats.chosen)).sum() * inverse * inverse


def logits_grad(
  logits: jax.Array,
  hit: jax.Array,
  of: BackwardStats,
  inverse: jax.Array,
  kind: StatsKind,
) -> jax.Array:
  """Computes the gradient of a block of logits.

  Args:
    logits: Logits `[n, v]` float32, MASK_VALUE where masked.
    hit: Mask `[n, v]` bool, True at the target.
    of: Backward statistics of the rows.
    inverse: Inverse temperature 1/τ, a float32 scalar.
    kind: Statistics that were computed.

  Returns:
    The gradient `[n, v]` float32; 0 where logits are MASK_VALUE.
  """
  d = logits - of.top
  scale = inverse if kind.tempered else 1.0
  out = of.chosen * (jnp.where(hit, 1.0, 0.0) - jnp.exp(d * scale - of.log_total))
  if kind.moments:
    p, d = jnp.exp(d - of.plain_log_total), d - of.plain_mean
    out += p * (of.flat + of.tilt * d + of.square * p * (1 + 2 * d))
  return out


def pack_columns(columns: SoftmaxStats | BackwardStats) -> jax.Array:
  """Concatenates the columns into one array.

  Args:
    columns: Eight arrays `[n, 1]`.

  Returns:
    An array `[n, 8]`.
  """
  return jnp.concatenate(columns, axis=1)


def unpack_columns(packed: jax.Array) -> list[jax.Array]:
  """Splits an array into its columns.

  Args:
    packed: Array `[n, 8]`.

  Returns:
    Eight arrays `[n, 1]`.
  """
  return [packed[:, i : i + 1] for i in range(NUM_COLUMNS)]
