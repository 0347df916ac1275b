"""Corrections weight tokens by the train-inference mismatch (TIS, MIS, IcePop).

w = π_train_old/π_rollout. A correction returns weights `[B, T]` that multiply a loss
whose own ratio is relative to recomputed `old_logprobs` ("decoupled"). No gradient
flows through a weight. Each returns (weights, metrics): 'weight', 'masked' and those of
`mismatch`, all `[B, T]`.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional.components import component
from jaxrl.functional.reductions import clipped_exp, row_mean, row_sum, turn_mean
from jaxrl.options import option_ranges
from jaxrl.types import Array

Level = Literal['token', 'segment', 'geometric', 'sequence']


def mismatch(
  old_logprobs: Array, rollout_logprobs: Array, mask: Array
) -> dict[str, Array]:
  """Computes the mismatch of each token.

  Args:
    old_logprobs: `[B, T]` the old log-probs o.
    rollout_logprobs: `[B, T]` log-probs by the engine that sampled.
    mask: `[B, T]` bool, True at action tokens.

  Returns:
    `[B, T]` each: 'logprob_difference' |Δlogp|, and 'kl', the k3 estimate of
    KL(rollout‖train).
  """
  d = jnp.where(mask, old_logprobs - rollout_logprobs, 0)
  return {'logprob_difference': jnp.abs(d), 'kl': clipped_exp(d) - 1 - d}


def effective_sample_size(weights: Array, mask: Array) -> Array:
  """Computes (Σw)²/(N·Σw²) over action tokens, the share of the sample that counts.

  Args:
    weights: `[B, T]` the weights w.
    mask: `[B, T]` bool, True at action tokens.

  Returns:
    A scalar.
  """
  w = jnp.where(mask, weights, 0)
  square = jnp.sum(mask) * jnp.sum(w * w)
  return jnp.square(jnp.sum(w)) / jnp.where(square > 0, square, 1)


def ratio(
  old_logprobs: Array, rollout_logprobs: Array, mask: Array, *, level: Level = 'token'
) -> Array:
  """Computes w of each token, or of the segment or row it belongs to.

  Args:
    old_logprobs: `[B, T]` the old log-probs o.
    rollout_logprobs: `[B, T]` log-probs by the engine that sampled.
    mask: `[B, T]` bool, True at action tokens.
    level: 'token', e^Δ; 'segment', e^{mean Δ} over the unbroken stretch of action
      tokens; 'geometric', e^{mean Δ} over the row; 'sequence', e^{Σ Δ} over the row.

  Returns:
    `[B, T]`, without gradient.
  """
  d = jnp.where(mask, old_logprobs - rollout_logprobs, 0)
  if level == 'segment':
    d = turn_mean(d, mask)
  elif level == 'geometric':
    d = jnp.broadcast_to(row_mean(d, mask)[:, None], d.shape)
  elif level == 'sequence':
    d = jnp.broadcast_to(row_sum(d, mask)[:, None], d.shape)
  elif level != 'token':
    raise ValueError(f'level is {level!r}; it must be one of {Level.__args__}')
  return jax.lax.stop_gradient(clipped_exp(d))


@component()
def tis(
  old_logprobs: Array,
  rollout_logprobs: Array,
  mask: Array,
  *,
  cap: float = 2.0,
  level: Level = 'token',
) -> tuple[Array, dict[str, Array]]:
  """Computes min(w, C), truncated importance weights (Yao et al., 2025).

  Args:
    old_logprobs: `[B, T]` the old log-probs o.
    rollout_logprobs: `[B, T]` log-probs by the engine that sampled.
    mask: `[B, T]` bool, True at action tokens.
    cap: The cap C.
    level: What w is of: 'token', 'segment', 'geometric' or 'sequence'; see `ratio`.

  Returns:
    Weights `[B, T]` and metrics.
  """
  w = ratio(old_logprobs, rollout_logprobs, mask, level=level)
  capped = jnp.where(mask, jnp.minimum(w, cap), 0)
  return _result(capped, w > jnp.inf, old_logprobs, rollout_logprobs, mask)


@component()
@option_ranges(ascending=('low', 'high'))
def mis(
  old_logprobs: Array,
  rollout_logprobs: Array,
  mask: Array,
  *,
  low: float = 0.5,
  high: float = 2.0,
  level: Level = 'geometric',
) -> tuple[Array, dict[str, Array]]:
  """Computes 1[low ≤ w ≤ high], a mask of tokens or rows (Liu et al., 2025).

  Args:
    old_logprobs: `[B, T]` the old log-probs o.
    rollout_logprobs: `[B, T]` log-probs by the engine that sampled.
    mask: `[B, T]` bool, True at action tokens.
    low: The lower bound of w.
    high: The upper bound of w.
    level: What w is of: 'token', 'segment', 'geometric' or 'sequence'; see `ratio`.

  Returns:
    Weights `[B, T]` and metrics.
  """
  w = ratio(old_logprobs, rollout_logprobs, mask, level=level)
  outside = (w < low) | (w > high)
  weights = jnp.where(mask, 1.0 - outside, 0)
  return _result(weights, outside, old_logprobs, rollout_logprobs, mask)


@component()
@option_ranges(ascending=('low', 'high'))
def icepop(
  old_logprobs: Array,
  rollout_logprobs: Array,
  mask: Array,
  *,
  low: float = 0.5,
  high: float = 5.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes w·1[low ≤ w ≤ high], token by token (Ring-1T, arXiv 2510.18855).

  Args:
    old_logprobs: `[B, T]` the old log-probs o.
    rollout_logprobs: `[B, T]` log-probs by the engine that sampled.
    mask: `[B, T]` bool, True at action tokens.
    low: The lower bound of w.
    high: The upper bound of w.

  Returns:
    Weights `[B, T]` and metrics.
  """
  w = ratio(old_logprobs, rollout_logprobs, mask)
  outside = (w < low) | (w > high)
  weights = jnp.where(outside, 0, jnp.where(mask, w, 0))
  return _result(weights, outside, old_logprobs, rollout_logprobs, mask)


@component()
def train_infer_correction(
  old_logprobs: Array,
  rollout_logprobs: Array,
  mask: Array,
  *,
  weight: Literal['none', 'token', 'segment', 'geometric', 'sequence'] = 'token',
  cap: float = 2.0,
  mask_level: Level = 'token',
  ratio_low: float | None = None,
  ratio_high: float | None = None,
  max_difference: float | None = None,
) -> tuple[Array, dict[str, Array]]:
  """Computes min(w, C)·1[low ≤ w′ ≤ high]·1[|Δπ| ≤ most] (ROLL, arXiv 2506.06122).

  Args:
    old_logprobs: `[B, T]` the old log-probs o.
    rollout_logprobs: `[B, T]` log-probs by the engine that sampled.
    mask: `[B, T]` bool, True at action tokens.
    weight: The level of w; 'none' for w = 1.
    cap: The cap C.
    mask_level: The level of w′.
    ratio_low: The lower bound of w′; None for none.
    ratio_high: The upper bound of w′; None for none.
    max_difference: The largest |π_train − π_rollout| of a token; None for none.

  Returns:
    Weights `[B, T]` and metrics.
  """
  w = jnp.ones(mask.shape, jnp.float32)
  if weight != 'none':
    w = ratio(old_logprobs, rollout_logprobs, mask, level=weight)
  judged = ratio(old_logprobs, rollout_logprobs, mask, level=mask_level)
  outside = jnp.zeros(mask.shape, bool)
  if ratio_low is not None:
    outside |= judged < ratio_low
  if ratio_high is not None:
    outside |= judged > ratio_high
  if max_difference is not None:
    gap = jnp.abs(clipped_exp(old_logprobs) - clipped_exp(rollout_logprobs))
    outside |= gap > max_difference
  weights = jnp.where(outside, 0, jnp.where(mask, jnp.minimum(w, cap), 0))
  return _result(weights, outside, old_logprobs, rollout_logprobs, mask)


def _result(weights, outside, old_logprobs, rollout_logprobs, mask):
  metrics = mismatch(old_logprobs, rollout_logprobs, mask)
  metrics |= {'weight': weights, 'masked': jnp.where(mask, 1.0 * outside, 0)}
  return jax.lax.stop_gradient(weights), metrics
