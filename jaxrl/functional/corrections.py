"""Weights for the gap between the engine that sampled and the learner's own policy.

w = π_train_old/π_rollout. A correction makes weights `[B, T]` that multiply a loss
whose own ratio starts from `old_logprobs` (behaviour "decoupled"). No gradient flows
through a weight. Each returns (weights, metrics): 'weight', 'masked' and what
`mismatch` reports, all `[B, T]`.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional.groups import exp, row_mean, row_sum
from jaxrl.functional.turns import turn_mean
from jaxrl.types import Array

Level = Literal['token', 'segment', 'geometric', 'sequence']


def mismatch(
  old_logprobs: Array, rollout_logprobs: Array, mask: Array
) -> dict[str, Array]:
  """`[B, T]` each: |Δlogp|, and the k3 estimate of KL(rollout‖train)."""
  d = jnp.where(mask, old_logprobs - rollout_logprobs, 0)
  return {'logprob_difference': jnp.abs(d), 'kl': exp(d) - 1 - d}


def effective_sample_size(weights: Array, mask: Array) -> Array:
  """(Σw)²/(N·Σw²) over action tokens: the share of the sample that still counts."""
  w = jnp.where(mask, weights, 0)
  square = jnp.sum(mask) * jnp.sum(w * w)
  return jnp.square(jnp.sum(w)) / jnp.where(square > 0, square, 1)


def ratio(
  old_logprobs: Array, rollout_logprobs: Array, mask: Array, *, level: Level = 'token'
) -> Array:
  """`[B, T]` w of each token, or of the segment or row it belongs to.

  token: e^Δ. segment: e^{mean Δ} over the unbroken stretch of action tokens.
  geometric: e^{mean Δ} over the row. sequence: e^{Σ Δ} over the row.
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
  return jax.lax.stop_gradient(exp(d))


def tis(
  old_logprobs: Array,
  rollout_logprobs: Array,
  mask: Array,
  *,
  cap: float = 2.0,
  level: Level = 'token',
) -> tuple[Array, dict[str, Array]]:
  """min(w, C), truncated importance weights of tokens or rows (Yao et al., 2025).

  old_logprobs, rollout_logprobs, mask: `[B, T]`.
  """
  w = ratio(old_logprobs, rollout_logprobs, mask, level=level)
  capped = jnp.where(mask, jnp.minimum(w, cap), 0)
  return _result(capped, w > jnp.inf, old_logprobs, rollout_logprobs, mask)


def mis(
  old_logprobs: Array,
  rollout_logprobs: Array,
  mask: Array,
  *,
  low: float = 0.5,
  high: float = 2.0,
  level: Level = 'geometric',
) -> tuple[Array, dict[str, Array]]:
  """1[low ≤ w ≤ high], a mask of tokens or rows (Liu et al., 2025). All `[B, T]`."""
  w = ratio(old_logprobs, rollout_logprobs, mask, level=level)
  outside = (w < low) | (w > high)
  weights = jnp.where(mask, 1.0 - outside, 0)
  return _result(weights, outside, old_logprobs, rollout_logprobs, mask)


def icepop(
  old_logprobs: Array,
  rollout_logprobs: Array,
  mask: Array,
  *,
  low: float = 0.5,
  high: float = 5.0,
) -> tuple[Array, dict[str, Array]]:
  """w·1[low ≤ w ≤ high], token by token (Ring-1T, arXiv 2510.18855). All `[B, T]`."""
  w = ratio(old_logprobs, rollout_logprobs, mask)
  outside = (w < low) | (w > high)
  weights = jnp.where(outside, 0, jnp.where(mask, w, 0))
  return _result(weights, outside, old_logprobs, rollout_logprobs, mask)


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
  """min(w, C)·1[low ≤ w′ ≤ high]·1[|Δπ| ≤ most], at levels (ROLL, arXiv 2506.06122).

  Tokens are left out where w at `mask_level` is under ratio_low or over ratio_high,
  or where |π_train − π_rollout| of the token exceeds max_difference. All `[B, T]`.
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
    gap = jnp.abs(exp(old_logprobs) - exp(rollout_logprobs))
    outside |= gap > max_difference
  weights = jnp.where(outside, 0, jnp.where(mask, jnp.minimum(w, cap), 0))
  return _result(weights, outside, old_logprobs, rollout_logprobs, mask)


def _result(weights, outside, old_logprobs, rollout_logprobs, mask):
  metrics = mismatch(old_logprobs, rollout_logprobs, mask)
  metrics |= {'weight': weights, 'masked': jnp.where(mask, 1.0 * outside, 0)}
  return jax.lax.stop_gradient(weights), metrics
