"""Sequence-weighted losses give all tokens of a row one weight, made of ratios."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional.components import component
from jaxrl.functional.reductions import (
  clipped_exp,
  row_mean,
  row_sum,
  turn_mean,
  zero_outside,
)
from jaxrl.types import Array

SMALLEST_WEIGHT = math.log(1e-8)  # of a sequence, as in the code of VESPO's authors


@component(on_policy=True)
def gmpo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  clip_low: float = 0.4,
  clip_high: float = 0.4,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·e^{mean_t d}, the geometric mean of ratios (arXiv 2507.20673).

  d is p − o, clipped for every token alone, and as PPO's minimum does: from above by
  ε_high where A > 0, from below by −ε_low where A < 0. So one token far off moves the
  row's weight by no more than its share. Aggregate it with sequence_mean_token_mean.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    clip_low: ε_low, of log-ratios.
    clip_high: ε_high, of log-ratios.

  Returns:
    Loss `[B, T]` and the metrics 'clip_fraction', 'ratio' and 'approx_kl'.
  """
  a, d = zero_outside(mask, advantages, logprobs - old_logprobs)
  clipped = jnp.where(
    a > 0, jnp.minimum(d, clip_high), jnp.where(a < 0, jnp.maximum(d, -clip_low), 0)
  )
  ratio = clipped_exp(row_mean(clipped, mask))[:, None]
  ratio = jnp.broadcast_to(ratio, d.shape)
  cut = ((a > 0) & (d > clip_high)) | ((a < 0) & (d < -clip_low))
  metrics = {'clip_fraction': 1.0 * cut, 'ratio': ratio, 'approx_kl': -d}
  return -a * ratio, metrics


@component()
def vespo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  power_positive: float = 2.0,
  decay_positive: float = 3.0,
  power_negative: float = 3.0,
  decay_negative: float = 2.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·sg(φ(w))·p, φ(w) = w^k·e^{λ(1−w)} (VESPO, arXiv 2602.10693).

  w = e^{Σ_t(p−o)} is the row's ratio without a normalisation by length. φ is 1 at w =
  1, and falls to 0 on both sides, so that rows of another policy count less.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    power_positive: k where A ≥ 0.
    decay_positive: λ where A ≥ 0.
    power_negative: k where A < 0.
    decay_negative: λ where A < 0.

  Returns:
    Loss `[B, T]` and the metric 'weight'.
  """
  p, a, d = zero_outside(mask, logprobs, advantages, logprobs - old_logprobs)
  d = jax.lax.stop_gradient(jnp.clip(d, -20, 20))
  log_w = jnp.clip(row_sum(d, mask), SMALLEST_WEIGHT, 20)[:, None]
  k = jnp.where(a >= 0, power_positive, power_negative)
  decay = jnp.where(a >= 0, decay_positive, decay_negative)
  weight = jnp.exp(decay + k * log_w - decay * jnp.exp(log_w))
  return -a * weight * p, {'weight': jnp.where(mask, weight, 0)}


@component(on_policy=True)
def gspo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  level: Literal['sequence', 'turn'] = 'sequence',
  gradient: Literal['token', 'mean'] = 'token',
) -> tuple[Array, dict[str, Array]]:
  """Computes PPO's clip of a sequence ratio (GSPO, arXiv 2507.18071).

  L_t = max(−A·s, −A·clip(s, 1−ε_low, 1+ε_high)) with the length-normalised ratio s =
  e^{p − sg(p) + sg(mean_t(p−o))}: a sequence's ratio with a token's gradient. Aggregate
  it with sequence_mean_token_mean.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    clip_low: ε_low.
    clip_high: ε_high.
    level: The mean is over the row ('sequence') or over each unbroken stretch of action
      tokens ('turn').
    gradient: 'token' as above; 'mean' is the plain form s = e^{mean_t(p−o)}.

  Returns:
    Loss `[B, T]` and the metrics 'clip_fraction', 'ratio' and 'approx_kl'.
  """
  p, a, d = zero_outside(mask, logprobs, advantages, logprobs - old_logprobs)
  if level == 'sequence':
    mean = jnp.broadcast_to(row_mean(d, mask)[:, None], d.shape)
  elif level == 'turn':
    mean = turn_mean(d, mask)
  else:
    raise ValueError(f"level is {level!r}; it must be 'sequence' or 'turn'")
  if gradient == 'token':
    mean = p - jax.lax.stop_gradient(p) + jax.lax.stop_gradient(mean)
  elif gradient != 'mean':
    raise ValueError(f"gradient is {gradient!r}; it must be 'token' or 'mean'")
  s = clipped_exp(mean)
  plain = -a * s
  clipped = -a * jnp.clip(s, 1 - clip_low, 1 + clip_high)
  metrics = {
    'clip_fraction': (clipped > plain).astype(jnp.float32),
    'ratio': s,
    'approx_kl': -d,
  }
  return jnp.maximum(plain, clipped), metrics
