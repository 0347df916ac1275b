"""GRPO that leaves out tokens whose update would collapse the entropy.

S_t = e^p(H + p) tells how a token's update moves the entropy (arXiv 2602.03392).
Only tokens with a negative advantage are ever dropped.
"""

import jax.numpy as jnp

from jaxrl.functional import groups
from jaxrl.functional.advantages.group import grpo
from jaxrl.types import Advantages, Array


def clip_b(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  old_logprobs: Array,
  entropy: Array,
  *,
  mu: float = 2.5,
) -> Advantages:
  """GRPO without tokens with A < 0 and S < mean(S) − μσ (arXiv 2602.03392).

  rewards, mask, old_logprobs, entropy: `[B, T]`. task_ids, run_ids: `[B]`. σ is the
  population standard deviation of S over action tokens.
  """
  out = grpo(rewards, mask, task_ids, run_ids)
  mask = jnp.asarray(mask, bool)
  s = jnp.where(mask, groups.exp(old_logprobs) * (entropy + old_logprobs), 0)
  centred = jnp.where(mask, s - groups.masked_mean(s, mask), 0)
  sigma = groups.safe_sqrt(groups.masked_mean(centred**2, mask))
  drop = mask & (out.advantages < 0) & (centred < -mu * sigma)
  return _without(out, drop, mask)


def clip_v(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  old_logprobs: Array,
  entropy: Array,
  nec: Array,
  *,
  mu: float = 8.5,
  max_frac: float = 1e-4,
) -> Advantages:
  """GRPO without tokens with A < 0 and D = NEC − S > μσ (arXiv 2602.03392).

  At most `max_frac` of all tokens go.

  nec: `[B, T]` Σ_v p_v²(H + log p_v), the mean of S under the policy; see
  `entropy.nec`. σ is the population standard deviation of D over action tokens.
  When too many would go, the max(⌊max_frac·tokens⌋, 1) with the largest D do.
  """
  out = grpo(rewards, mask, task_ids, run_ids)
  mask = jnp.asarray(mask, bool)
  s = groups.exp(old_logprobs) * (entropy + old_logprobs)
  d = jnp.where(mask, nec - s, 0)
  centred = jnp.where(mask, d - groups.masked_mean(d, mask), 0)
  sigma = groups.safe_sqrt(groups.masked_mean(centred**2, mask))
  drop = mask & (out.advantages < 0) & (d > mu * sigma)
  most = jnp.maximum(jnp.floor(max_frac * jnp.sum(mask)), 1).astype(jnp.int32)
  place = jnp.where(drop, groups.order(d), -1)  # d > 0 where it is dropped
  drop &= place >= groups.last(lambda bound: jnp.sum(place >= bound) >= most)
  return _without(out, drop, mask)


def _without(out: Advantages, drop: Array, mask: Array) -> Advantages:
  metrics = out.metrics | {'dropped': groups.masked_mean(1.0 * drop, mask)}
  return Advantages(out.advantages, None, ~drop, metrics)
