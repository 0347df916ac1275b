"""Softmax statistics of a row of logits, block by block, and their gradients.

With z the logits of a row, m the largest and d = z − m, a row's statistics are eight
numbers: `m, Σ e^{d/τ}, Σ d·e^{d/τ}, Σ e^d, Σ d·e^d, Σ e^{2d}, Σ d·e^{2d}` and the
target's z. Those of two parts of the vocabulary are merged into those of both, so that
blocks, and shards of the table on several devices, are treated alike. In the backward
pass a row's gradients reduce to eight numbers too, `BackwardStats`, from which
`logits_grad` computes the gradient of any block's logits.

The columns are separate arrays `[n, 1]`, which suits vectors inside a TPU or GPU
kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MASK_VALUE = -1e30  # finite: what is masked gives e^d = 0 and d · e^d = −0, never NaN
NUM_COLUMNS = 8  # columns of sums, and of slopes


class StatsKind(NamedTuple):
  """What is asked for.

  Attributes:
    tempered: Whether τ may differ from 1.
    moments: Whether entropy or nec is needed.
  """

  tempered: bool = True
  moments: bool = False


class SoftmaxStats(NamedTuple):
  """A row's statistics over a part of the vocabulary, each `[n, 1]` float32."""

  top: jax.Array
  total: jax.Array
  mean: jax.Array
  plain_total: jax.Array
  plain_mean: jax.Array
  square_total: jax.Array
  square_mean: jax.Array
  chosen: jax.Array


class BackwardStats(NamedTuple):
  """What a row's gradient needs, each `[n, 1]` float32.

  Attributes:
    top: m.
    log_total: log Σ e^{d/τ}.
    plain_log_total: log Σ e^d.
    plain_mean: The mean of d.
    chosen: The gradient of the target's logit through log p.
    flat: Of the moments; see `logits_grad`.
    tilt: Of the moments.
    square: Of the moments.
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
  """Returns the statistics over no vocabulary at all.

  Args:
    rows: n.
  """
  zero = jnp.zeros((rows, 1), jnp.float32)
  return SoftmaxStats(
    jnp.full((rows, 1), MASK_VALUE, jnp.float32), *(zero,) * (NUM_COLUMNS - 1)
  )


def block_stats(
  logits: jax.Array, hit: jax.Array, inverse: jax.Array, kind: StatsKind
) -> SoftmaxStats:
  """Computes the statistics of a block.

  Args:
    logits: `[n, v]` float32, MASK_VALUE where masked.
    hit: `[n, v]` bool, True at the target.
    inverse: 1/τ, a float32 scalar.
    kind: What is asked for.
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
  chosen = jnp.where(hit, logits, 0.0).sum(1, keepdims=True)
  return SoftmaxStats(top, *first, *second, *third, chosen)


def merge_stats(a: SoftmaxStats, b: SoftmaxStats, inverse: jax.Array) -> SoftmaxStats:
  """Merges the statistics of two parts of the vocabulary.

  Args:
    a: Those of one part.
    b: Those of the other.
    inverse: 1/τ, a float32 scalar.
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
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes log p of the target at τ, and entropy and nec at temperature 1.

  Args:
    stats: The statistics over the whole vocabulary.
    inverse: 1/τ, a float32 scalar.

  Returns:
    Three arrays `[n]`; nec is Σ p²(H + log p).
  """
  logprobs = (stats.chosen - stats.top) * inverse - jnp.log(stats.total)
  total = jnp.where(stats.plain_total > 0, stats.plain_total, 1.0)
  mean = stats.plain_mean / total
  entropy = jnp.log(total) - mean
  nec = (stats.square_mean - mean * stats.square_total) / (total * total)
  return logprobs[:, 0], entropy[:, 0], nec[:, 0]


def backward_stats(
  stats: SoftmaxStats, inverse: jax.Array, by: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[BackwardStats, jax.Array]:
  """Computes what a row's gradient needs, and the gradient of τ.

  With p at temperature 1, q = Σ p², N the third score and δ = z − Σ p·z: ∂H/∂z = −p·δ
  and ∂N/∂z = p²(1 + 2δ) − p(2N + q) − q·p·δ.

  Args:
    stats: The statistics over the whole vocabulary.
    inverse: 1/τ, a float32 scalar.
    by: Gradients `[n]` of what `scores_from_stats` returns.

  Returns:
    The backward statistics, and a scalar.
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
  """Computes the gradient of a block's logits.

  Args:
    logits: `[n, v]` float32, MASK_VALUE where masked.
    hit: `[n, v]` bool, True at the target.
    of: The rows' backward statistics.
    inverse: 1/τ, a float32 scalar.
    kind: What is asked for.

  Returns:
    `[n, v]` float32; 0 where logits are MASK_VALUE.
  """
  d = logits - of.top
  scale = inverse if kind.tempered else 1.0
  out = of.chosen * (jnp.where(hit, 1.0, 0.0) - jnp.exp(d * scale - of.log_total))
  if kind.moments:
    p, d = jnp.exp(d - of.plain_log_total), d - of.plain_mean
    out += p * (of.flat + of.tilt * d + of.square * p * (1 + 2 * d))
  return out


def pack_columns(columns: SoftmaxStats | BackwardStats) -> jax.Array:
  """Puts the columns side by side.

  Args:
    columns: Eight `[n, 1]`.

  Returns:
    `[n, 8]`.
  """
  return jnp.concatenate(columns, axis=1)


def unpack_columns(packed: jax.Array) -> list[jax.Array]:
  """Separates the columns.

  Args:
    packed: `[n, 8]`.

  Returns:
    Eight `[n, 1]`.
  """
  return [packed[:, i : i + 1] for i in range(NUM_COLUMNS)]
