"""What is summed over the vocabulary, block by block, and the slope of it.

With z the logits of a row, m the largest and d = z − m, a row's sums are eight numbers:
`m, Σ e^{d/τ}, Σ d·e^{d/τ}, Σ e^d, Σ d·e^d, Σ e^{2d}, Σ d·e^{2d}` and the target's z.
Sums of two parts of the vocabulary `merge` into those of both, so that blocks, and
shards of the table on several devices, are the same matter. In the backward pass a
row's slopes come down to eight numbers too, `Slopes`, of which `dlogits` makes the
gradient of any block's logits.

The columns are kept apart, as arrays `[n, 1]`: inside a TPU or GPU kernel that is what
vectors like.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # finite: what is masked gives e^d = 0 and d · e^d = −0, never NaN
WIDTH = 8  # columns of sums, and of slopes


class Kind(NamedTuple):
  """What is asked for. moments: entropy or nec. tempered: τ may differ from 1."""

  tempered: bool = True
  moments: bool = False


class Sums(NamedTuple):
  """A row's sums over a part of the vocabulary, each `[n, 1]` float32."""

  top: jax.Array
  total: jax.Array
  mean: jax.Array
  plain_total: jax.Array
  plain_mean: jax.Array
  square_total: jax.Array
  square_mean: jax.Array
  chosen: jax.Array


class Slopes(NamedTuple):
  """What a row's gradient needs, each `[n, 1]` float32.

  top: m. log_total, plain_log_total: log Σ e^{d/τ} and log Σ e^d. plain_mean: the mean
  of d. chosen: the slope of the logit in log p's. flat, tilt, square: those of the
  moments, see `dlogits`.
  """

  top: jax.Array
  log_total: jax.Array
  plain_log_total: jax.Array
  plain_mean: jax.Array
  chosen: jax.Array
  flat: jax.Array
  tilt: jax.Array
  square: jax.Array


def nothing(rows: int) -> Sums:
  """The sums over no vocabulary at all."""
  zero = jnp.zeros((rows, 1), jnp.float32)
  return Sums(jnp.full((rows, 1), NEGATIVE, jnp.float32), *(zero,) * (WIDTH - 1))


def sums(logits: jax.Array, hit: jax.Array, inverse: jax.Array, kind: Kind) -> Sums:
  """logits `[n, v]` float32, NEGATIVE where masked. hit: bool, at the target."""
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
  return Sums(top, *first, *second, *third, chosen)


def merge(a: Sums, b: Sums, inverse: jax.Array) -> Sums:
  """The sums over two parts of the vocabulary together."""
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
  return Sums(*[top, *both, a.chosen + b.chosen])


def finish(found: Sums, inverse: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Log p of the target at τ; entropy and Σ p²(H + log p) at temperature 1; `[n]`."""
  logprobs = (found.chosen - found.top) * inverse - jnp.log(found.total)
  total = jnp.where(found.plain_total > 0, found.plain_total, 1.0)
  mean = found.plain_mean / total
  entropy = jnp.log(total) - mean
  nec = (found.square_mean - mean * found.square_total) / (total * total)
  return logprobs[:, 0], entropy[:, 0], nec[:, 0]


def slopes(
  found: Sums, inverse: jax.Array, by: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[Slopes, jax.Array]:
  """What a row's gradient needs, and the slope of τ, a scalar.

  by: slopes `[n]` of what `finish` gives. With p at temperature 1, q = Σ p², N the
  third result and δ = z − Σ p·z: ∂H/∂z = −p·δ and
  ∂N/∂z = p²(1 + 2δ) − p(2N + q) − q·p·δ.
  """
  log, entropy, nec = (x[:, None] for x in by)
  total = jnp.where(found.plain_total > 0, found.plain_total, 1.0)
  mean = found.plain_mean / total
  square = found.square_total / (total * total)
  value = (found.square_mean - mean * found.square_total) / (total * total)
  of = Slopes(
    found.top,
    jnp.log(found.total),
    jnp.log(total),
    mean,
    log * inverse,
    -nec * (2 * value + square),
    -entropy - nec * square,
    nec,
  )
  expected = found.top + found.mean / found.total
  return of, (log * (expected - found.chosen)).sum() * inverse * inverse


def dlogits(
  logits: jax.Array, hit: jax.Array, of: Slopes, inverse: jax.Array, kind: Kind
) -> jax.Array:
  """The gradient `[n, v]` float32 of a block's logits; 0 where they are NEGATIVE."""
  d = logits - of.top
  scale = inverse if kind.tempered else 1.0
  out = of.chosen * (jnp.where(hit, 1.0, 0.0) - jnp.exp(d * scale - of.log_total))
  if kind.moments:
    p, d = jnp.exp(d - of.plain_log_total), d - of.plain_mean
    out += p * (of.flat + of.tilt * d + of.square * p * (1 + 2 * d))
  return out


def pack(columns: Sums | Slopes) -> jax.Array:
  """The columns side by side, `[n, 8]`."""
  return jnp.concatenate(columns, axis=1)


def columns(packed: jax.Array) -> list[jax.Array]:
  """`[n, 8]` → eight `[n, 1]`."""
  return [packed[:, i : i + 1] for i in range(WIDTH)]
