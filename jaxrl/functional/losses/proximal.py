"""Proximal losses bound the step from a policy between the sampler's and the current.

With stale rollouts PPO's ratio bounds two things at once: how far the data are off, and
how far an update goes. The decoupled loss (arXiv 2110.00641) takes the second from a
proximal policy of its own.
"""

import jax
import jax.numpy as jnp

from jaxrl.functional.components import component
from jaxrl.functional.losses.clipped import ppo_clip
from jaxrl.functional.reductions import clipped_exp, zero_outside
from jaxrl.types import Array


def proximal_logprobs(
  logprobs: Array, old_logprobs: Array, weights_version: Array, step: Array
) -> Array:
  """Interpolates the proximal policy's log-probs, without its forward pass.

  prox = p + (o − p)/max(d, 1), d being the token's staleness in steps: the sampler's
  own while it is at most a step old, and the nearer to the policy the older it is.

  Args:
    logprobs: `[B, T]` the policy's log-probs p.
    old_logprobs: `[B, T]` the sampler's log-probs o.
    weights_version: `[B, T]` int32, the step whose weights sampled a token; −1 where
      none did.
    step: The step, an integer scalar, or `[B]` of them.

  Returns:
    `[B, T]` without gradient.
  """
  p, o = jax.lax.stop_gradient((logprobs, old_logprobs))
  now = jnp.reshape(step, (-1, 1))
  age = jnp.where(weights_version < 0, 1, now - weights_version)
  share = 1 / jnp.maximum(age, 1).astype(jnp.float32)
  return jnp.where(share == 1, o, p + (o - p) * share)


@component()
def a3po(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  weights_version: Array,
  step: Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  cap: float = 5.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes PPO's clip of e^(p−q), q = α·o + (1−α)·p (A-3PO, arXiv 2512.06547).

  L_t = sg(w)·max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high)) with w = e^{prox − o} and r =
  e^{p − prox}; tokens with w > C are left out. prox is that of `proximal_logprobs`, so
  that no log-probs are scored before the update, as old_logprobs_source='decoupled'
  does. Tokens that are no more than a step old have PPO's own loss.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the sampler's log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    weights_version: `[B, T]` int32, the step whose weights sampled a token.
    step: The step, an integer scalar, or `[B]` of them.
    clip_low: ε_low.
    clip_high: ε_high.
    cap: C; tokens whose weight w is greater have no gradient.

  Returns:
    Loss `[B, T]` and the metrics of `ppo_clip`, and 'weight'.
  """
  p, o = zero_outside(mask, logprobs, old_logprobs)
  prox = proximal_logprobs(p, o, weights_version, step)
  weight = clipped_exp(prox - o)
  loss, metrics = ppo_clip(
    p, prox, advantages, mask, clip_low=clip_low, clip_high=clip_high, dual_clip=None
  )
  metrics = metrics | {'weight': weight}
  return jnp.where(weight > cap, 0, weight * loss), metrics
