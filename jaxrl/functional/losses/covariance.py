"""Covariance losses hold back the tokens that make the entropy collapse.

The entropy falls by the covariance of log-probability and advantage over a batch (arXiv
2505.22617). A few tokens make up most of it; clip-cov gives them no gradient, kl-cov a
penalty. Which they are is decided over the whole optimizer batch.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.functional import reductions
from jaxrl.functional.components import component
from jaxrl.functional.losses.clipped import ppo_clip
from jaxrl.functional.losses.importance_weighted import importance_sampling
from jaxrl.functional.reductions import zero_outside
from jaxrl.types import Array


def token_covariance(logprobs: Array, advantages: Array, mask: Array) -> Array:
  """Computes (A − mean A)(p − mean p), the means over action tokens.

  Args:
    logprobs: `[B, T]` the policy's log-probs p.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.

  Returns:
    `[B, T]` without gradient; 0 where the mask is not set.
  """
  mask = jnp.asarray(mask, bool)
  p, a = jax.lax.stop_gradient(zero_outside(mask, logprobs, advantages))
  centred = [x - reductions.masked_mean(x, mask) for x in (p, a)]
  return jnp.where(mask, centred[0] * centred[1], 0)


def _count(ratio: float, mask: Array) -> Array:
  return jnp.maximum(jnp.floor(ratio * jnp.sum(mask)), 1).astype(jnp.int32)


def clip_cov_fields(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  key: Array,
  *,
  clip_low: float,
  clip_high: float,
  ratio: float,
  cov_low: float,
  cov_high: float,
) -> dict[str, Array]:
  """Draws the tokens that clip-cov leaves out from the whole optimizer batch.

  Args:
    logprobs: `[B, T]` the policy's log-probs p.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    key: A JAX random key.
    clip_low: ε_low of PPO's clip.
    clip_high: ε_high of PPO's clip.
    ratio: The share of action tokens to leave out; one at least.
    cov_low: Only tokens whose covariance is greater are drawn.
    cov_high: Only tokens whose covariance is smaller are drawn.

  Returns:
    {'clip_cov_keep': `[B, T]` bool, False at the drawn tokens}.
  """
  _, metrics = ppo_clip(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    clip_low=clip_low,
    clip_high=clip_high,
    dual_clip=None,
  )
  covariance = token_covariance(logprobs, advantages, mask)
  drawable = (covariance > cov_low) & (covariance < cov_high)
  drawable &= jnp.asarray(mask, bool) & (metrics['clip_fraction'] == 0)
  lots = jax.random.uniform(key, mask.shape)
  return {'clip_cov_keep': ~reductions.largest_k(lots, drawable, _count(ratio, mask))}


@component(on_policy=True, precompute=clip_cov_fields)
def clip_cov(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  key: Array,
  clip_cov_keep: Array | None = None,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  ratio: float = 2e-4,
  cov_low: float = 1.0,
  cov_high: float = 5.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes keep·L of PPO's clip, keep = 0 at drawn covariances (arXiv 2505.22617).

  Among the tokens with cov_low < (A − mean A)(p − mean p) < cov_high that PPO does not
  clip, max(⌊ratio·tokens⌋, 1) are drawn at random and have no gradient. They stay in
  the denominator of the mean. There is no dual clip, as in verl.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    key: A JAX random key.
    clip_cov_keep: `[B, T]` from `clip_cov_fields` over the whole optimizer batch; None
      computes it from these rows, right only when they are all of them.
    clip_low: ε_low.
    clip_high: ε_high.
    ratio: The share of action tokens to leave out.
    cov_low: Only tokens whose covariance is greater are drawn.
    cov_high: Only tokens whose covariance is smaller are drawn.

  Returns:
    Loss `[B, T]` and the metrics of `ppo_clip`, 'clip_fraction' that of the drawn.
  """
  columns = logprobs, old_logprobs, advantages, mask
  bounds = {'clip_low': clip_low, 'clip_high': clip_high}
  keep: Any = clip_cov_keep
  if keep is None:
    limits = {'ratio': ratio, 'cov_low': cov_low, 'cov_high': cov_high}
    keep = clip_cov_fields(*columns, key, **bounds, **limits)['clip_cov_keep']
  loss, metrics = ppo_clip(*columns, **bounds, dual_clip=None)
  return jnp.where(keep, loss, 0), metrics | {'clip_fraction': 1.0 - keep}


def kl_cov_fields(
  logprobs: Array, advantages: Array, mask: Array, *, ratio: float
) -> dict[str, Array]:
  """Finds the tokens that kl-cov penalises in the whole optimizer batch.

  Args:
    logprobs: `[B, T]` the policy's log-probs p.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    ratio: The share of action tokens; one at least.

  Returns:
    {'kl_cov_penalised': `[B, T]` bool, True at those with the largest covariance}.
  """
  covariance = token_covariance(logprobs, advantages, mask)
  count = _count(ratio, mask)
  return {'kl_cov_penalised': reductions.largest_k(covariance, mask, count)}


@component(precompute=kl_cov_fields)
def kl_cov(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  kl_cov_penalised: Array | None = None,
  *,
  ratio: float = 2e-4,
  coef: float = 1.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·r + c·|p−o|·1[of the largest covariances] (arXiv 2505.22617).

  The penalised tokens are the max(⌊ratio·tokens⌋, 1) with the largest (A − mean A)(p −
  mean p), equal ones together. No token is clipped.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    kl_cov_penalised: `[B, T]` from `kl_cov_fields` over the whole optimizer batch; None
      computes it from these rows, right only when they are all of them.
    ratio: The share of action tokens to penalise.
    coef: The coefficient c.

  Returns:
    Loss `[B, T]` and the metrics 'ratio' and 'penalised'.
  """
  penalised: Any = kl_cov_penalised
  if penalised is None:
    fields = kl_cov_fields(logprobs, advantages, mask, ratio=ratio)
    penalised = fields['kl_cov_penalised']
  loss, metrics = importance_sampling(logprobs, old_logprobs, advantages, mask)
  (d,) = zero_outside(mask, logprobs - old_logprobs)
  loss = loss + jnp.where(penalised, coef * jnp.abs(d), 0)
  return loss, metrics | {'penalised': 1.0 * penalised}
