"""Policy losses with a clipped probability ratio."""

import jax.numpy as jnp

from jaxrl.functional.groups import exp, row_mean
from jaxrl.types import Array


def ppo_clip(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = 3.0,
  sequence_mask: float | None = None,
) -> tuple[Array, dict[str, Array]]:
  """The clipped surrogate of PPO, with dual clip and DAPO's two-sided range.

  L_t = max(−A r, −A·clip(r, 1−ε_low, 1+ε_high)), r = e^{p−o}; where A < 0 it is at
  most −cA, c = `dual_clip` (arXiv 1707.06347, 1912.09729, 2503.14476).

  logprobs, old_logprobs, advantages, mask: `[B, T]`. sequence_mask: δ; tokens with
  A < 0 in rows whose mean of o − p exceeds δ are zeroed. Returns loss `[B, T]`.
  """
  a = jnp.where(mask, advantages, 0)
  d = jnp.where(mask, logprobs - old_logprobs, 0)
  r = exp(d)
  plain = -a * r
  clipped = -a * jnp.clip(r, 1 - clip_low, 1 + clip_high)
  loss = jnp.maximum(plain, clipped)
  cut = clipped > plain
  if dual_clip is not None:
    ceiling = jnp.where(a < 0, -dual_clip * a, jnp.inf)
    cut |= loss > ceiling
    loss = jnp.minimum(loss, ceiling)
  if sequence_mask is not None:
    drifted = row_mean(-d, mask) > sequence_mask
    loss = jnp.where(drifted[:, None] & (a < 0), 0, loss)
  metrics = {
    'clip_fraction': cut.astype(jnp.float32),
    'ratio': r,
    'approx_kl': -d,
  }
  return jnp.where(mask, loss, 0), metrics
