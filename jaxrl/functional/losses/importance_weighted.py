"""Importance-weighted losses for data that another policy wrote."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional.components import component
from jaxrl.functional.reductions import (
  clipped_exp,
  float_order_bits,
  largest_float_where,
  row_mean,
  row_sum,
  zero_outside,
)
from jaxrl.types import Array


@component()
def importance_sampling(
  logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·r, the unclipped surrogate (arXiv 1502.05477).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.

  Returns:
    Loss `[B, T]` and the metric 'ratio'.
  """
  a, d = zero_outside(mask, advantages, logprobs - old_logprobs)
  r = clipped_exp(d)
  return -a * r, {'ratio': r}


@component()
def tis(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  cap: float = 2.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·sg(min(r, C))·p, truncated weights (Ionides, 2008).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    cap: The cap C.

  Returns:
    Loss `[B, T]` and the metrics 'ratio' and 'clip_fraction'.
  """
  p, a, d = zero_outside(mask, logprobs, advantages, logprobs - old_logprobs)
  r = jax.lax.stop_gradient(clipped_exp(d))
  return -a * jnp.minimum(r, cap) * p, {'ratio': r, 'clip_fraction': 1.0 * (r > cap)}


@component()
def topr(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  ratio: Literal['sequence', 'token'] = 'sequence',
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −sg(α)·A·p, tapered off-policy REINFORCE (arXiv 2503.14286).

  α = 1 where A > 0 and clip(r, 0, 1) elsewhere.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    ratio: r of the whole row ('sequence'), e to the sum of p − o over its action
      tokens, or of each 'token' alone.

  Returns:
    Loss `[B, T]` and the metric 'taper'.
  """
  p, a, d = zero_outside(mask, logprobs, advantages, logprobs - old_logprobs)
  if ratio == 'sequence':
    d = row_sum(d, mask)[:, None]
  elif ratio != 'token':
    raise ValueError(f"ratio is {ratio!r}; it must be 'sequence' or 'token'")
  taper = jnp.minimum(clipped_exp(d), 1)
  alpha = jax.lax.stop_gradient(jnp.where(a > 0, 1, taper))
  return -alpha * a * p, {'taper': alpha}


@component()
def sppo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  epsilon: float = 0.3,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·(p−o)·1[1/(1+ε) ≤ r ≤ 1+ε] (arXiv 2108.05828).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    epsilon: ε.

  Returns:
    Loss `[B, T]` and the metrics 'clip_fraction' and 'ratio'.
  """
  a, d = zero_outside(mask, advantages, logprobs - old_logprobs)
  r = clipped_exp(d)
  keep = (r >= 1 / (1 + epsilon)) & (r <= 1 + epsilon)
  metrics = {'clip_fraction': 1.0 - keep, 'ratio': r}
  return jnp.where(keep, -a * d, 0), metrics


@component()
def kimi(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  tau: float = 1.0,
  level: Literal['token', 'sequence'] = 'token',
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·p + (τ/2)(p−o)², with a squared log-ratio (arXiv 2501.12599).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    tau: The strength τ of the regulariser.
    level: 'token' as above; 'sequence' is the paper's (τ/2)(Σ_t(p−o))² per row, split
      evenly over the row's action tokens: use it with sequence_mean_token_sum.

  Returns:
    Loss `[B, T]` and the metric 'square'.
  """
  p, a, d = zero_outside(mask, logprobs, advantages, logprobs - old_logprobs)
  if level == 'token':
    square = jnp.square(d)
  elif level == 'sequence':
    count = jnp.maximum(jnp.sum(mask, axis=-1), 1)
    square = (jnp.square(row_sum(d, mask)) / count)[:, None]
  else:
    raise ValueError(f"level is {level!r}; it must be 'token' or 'sequence'")
  loss = -a * p + 0.5 * tau * square
  return jnp.where(mask, loss, 0), {'square': jnp.broadcast_to(square, d.shape)}


def second_moment_keep(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  threshold: float,
) -> Array:
  """Returns which tokens M2PO keeps.

  Candidates push the policy further off: A > 0 and r > 1, or A < 0 and r < 1. Those
  with the largest (p−o)² are dropped until the mean over the rest is at most
  `threshold`; equal ones are dropped together.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    threshold: The largest mean second moment.

  Returns:
    `[B, T]` bool, False at dropped tokens.
  """
  d = jax.lax.stop_gradient(jnp.where(mask, logprobs - old_logprobs, 0))
  candidate = jnp.asarray(mask, bool) & (advantages * d > 0)
  square = jnp.where(candidate, jnp.square(d), jnp.inf)
  place = float_order_bits(square)

  def is_within_threshold(bound):
    return jnp.sum(jnp.where(place <= bound, square - threshold, 0)) <= 0

  return ~candidate | (place <= largest_float_where(is_within_threshold))


def m2po_fields(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  threshold: float,
) -> dict[str, Array]:
  """Computes the batch field `m2po_keep` from the whole optimizer batch.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    threshold: The largest mean second moment.

  Returns:
    {'m2po_keep': `[B, T]` bool}.
  """
  keep = second_moment_keep(
    logprobs, old_logprobs, advantages, mask, threshold=threshold
  )
  return {'m2po_keep': keep}


@component(precompute=m2po_fields)
def m2po(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  m2po_keep: Array | None = None,
  *,
  threshold: float = 0.04,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·r·1[keep], a trust region on second moments (arXiv 2510.01161).

  Dropped tokens stay in the denominator of the mean.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    m2po_keep: `[B, T]` from `second_moment_keep` over the whole optimizer batch; None
      computes it from these rows, right only when they are all of them.
    threshold: The largest mean second moment.

  Returns:
    Loss `[B, T]` and the metrics 'ratio' and 'clip_fraction'.
  """
  if m2po_keep is None:
    m2po_keep = second_moment_keep(
      logprobs, old_logprobs, advantages, mask, threshold=threshold
    )
  loss, metrics = importance_sampling(logprobs, old_logprobs, advantages, mask)
  metrics = metrics | {'clip_fraction': 1.0 - m2po_keep}
  return jnp.where(m2po_keep, loss, 0), metrics


Keep = Literal['none', 'two_side', 'one_side', 'gspo_one_side', 'ring']
Weight = Literal['none', 'importance', 'gspo', 'advantage']


@component()
def rec(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  keep: Keep = 'one_side',
  weight: Weight = 'importance',
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  ring_low: float = 0.6,
  ring_high: float = 2.0,
  temperature: float = 1.0,
  regulariser: Literal['none', 'k2', 'forward'] = 'none',
  regulariser_coef: float = 0.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·sg(w)·p·1[keep] + regulariser, the REC family (arXiv 2509.24203).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    keep: 'none'; 'two_side', 1−ε_low ≤ r ≤ 1+ε_high; 'one_side', what PPO lets through,
      r ≤ 1+ε_high where A ≥ 0 and r ≥ 1−ε_low where A ≤ 0; 'gspo_one_side', the same of
      e^{mean_t(p−o)}; or 'ring', two_side, or A ≥ 0 and r ≤ 1−ε′_low, or A ≤ 0 and r ≥
      1+ε′_high.
    weight: w: 'none' for 1, 'importance' for r, 'gspo' for e^{mean_t(p−o)}, 'advantage'
      for e^{A/temperature}.
    clip_low: ε_low.
    clip_high: ε_high.
    ring_low: ε′_low.
    ring_high: ε′_high.
    temperature: Divides A in weight='advantage'.
    regulariser: 'k2' adds c(p−o)², 'forward' adds −c·p, on all action tokens.
    regulariser_coef: The coefficient c.

  Returns:
    Loss `[B, T]` and the metrics 'clip_fraction' and 'ratio'.
  """
  p, a, d = zero_outside(mask, logprobs, advantages, logprobs - old_logprobs)
  r = jax.lax.stop_gradient(clipped_exp(d))
  s = jax.lax.stop_gradient(clipped_exp(row_mean(d, mask)))[:, None]
  is_kept = _kept(keep, r, s, a, (clip_low, clip_high, ring_low, ring_high))
  if weight == 'none':
    w = 1.0
  elif weight in ('importance', 'gspo'):
    w = r if weight == 'importance' else s
  elif weight == 'advantage':
    w = clipped_exp(a / temperature)
  else:
    raise ValueError(f'weight is {weight!r}; it must be one of {Weight.__args__}')
  loss = jnp.where(is_kept, -a * w * p, 0)
  if regulariser == 'k2':
    loss = loss + regulariser_coef * jnp.square(d)
  elif regulariser == 'forward':
    loss = loss - regulariser_coef * p
  elif regulariser != 'none':
    raise ValueError(f'regulariser is {regulariser!r}; it must be k2, forward or none')
  return loss, {'clip_fraction': 1.0 - is_kept, 'ratio': r}


def _kept(keep: str, r: Array, s: Array, a: Array, bounds: tuple) -> Array:
  low, high, ring_low, ring_high = bounds
  if keep == 'none':
    return jnp.ones(r.shape, bool)
  if keep in ('one_side', 'gspo_one_side'):
    x = jnp.broadcast_to(r if keep == 'one_side' else s, r.shape)
    return ((a >= 0) & (x <= 1 + high)) | ((a <= 0) & (x >= 1 - low))
  within = (r >= 1 - low) & (r <= 1 + high)
  if keep == 'two_side':
    return within
  if keep != 'ring':
    raise ValueError(f'keep is {keep!r}; it must be one of {Keep.__args__}')
  return within | ((a >= 0) & (r <= 1 - ring_low)) | ((a <= 0) & (r >= 1 + ring_high))


@component(on_policy=True)
def cispo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  clip_low: float = 1.0,
  clip_high: float = 0.28,
  mask_clipped: bool = False,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·sg(clip(r, 1−ε_low, 1+ε_high)·keep)·p (arXiv 2506.13585).

  It clips the importance weight, not the update: every token has a gradient.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    clip_low: ε_low.
    clip_high: ε_high.
    mask_clipped: Whether keep = 0 where PPO would clip, that is where A > 0 and r >
      1+ε_high, or A < 0 and r < 1−ε_low.

  Returns:
    Loss `[B, T]` and the metrics 'clip_fraction' and 'ratio'.
  """
  p, a, d = zero_outside(mask, logprobs, advantages, logprobs - old_logprobs)
  r = jax.lax.stop_gradient(clipped_exp(d))
  weight = jnp.clip(r, 1 - clip_low, 1 + clip_high)
  up, down = r > 1 + clip_high, r < 1 - clip_low
  if mask_clipped:
    cut = (up & (a > 0)) | (down & (a < 0))
    weight = jnp.where(cut, 0, weight)
  metrics = {'clip_fraction': (up | down).astype(jnp.float32), 'ratio': r}
  return -a * weight * p, metrics
