"""Policy losses with a clipped probability ratio."""

import jax
import jax.numpy as jnp

from jaxrl.functional.groups import exp, inside, row_mean
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
  """L_t = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high)), r = e^{p−o} (arXiv 1707.06347).

  Where A < 0 it is at most −cA, c = `dual_clip` (arXiv 1912.09729); ε_low and ε_high
  may differ, as in DAPO (arXiv 2503.14476).

  logprobs, old_logprobs, advantages, mask: `[B, T]`. sequence_mask: δ; tokens with
  A < 0 in rows whose mean of o − p exceeds δ are zeroed. Returns loss `[B, T]`.
  """
  a, d = inside(mask, advantages, logprobs - old_logprobs)
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
  return loss, metrics


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
  """L_t = −A·sg(clip(r, 1−ε_low, 1+ε_high)·keep)·p (MiniMax-M1, arXiv 2506.13585).

  Clips the importance weight, not the update: every token has a gradient.

  logprobs, old_logprobs, advantages, mask: `[B, T]`. mask_clipped: keep = 0 where
  PPO would clip, that is A > 0 and r > 1+ε_high, or A < 0 and r < 1−ε_low.
  """
  p, a, d = inside(mask, logprobs, advantages, logprobs - old_logprobs)
  r = jax.lax.stop_gradient(exp(d))
  weight = jnp.clip(r, 1 - clip_low, 1 + clip_high)
  up, down = r > 1 + clip_high, r < 1 - clip_low
  if mask_clipped:
    cut = (up & (a > 0)) | (down & (a < 0))
    weight = jnp.where(cut, 0, weight)
  metrics = {'clip_fraction': (up | down).astype(jnp.float32), 'ratio': r}
  return -a * weight * p, metrics


def sapo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  tau_positive: float = 1.0,
  tau_negative: float = 1.05,
) -> tuple[Array, dict[str, Array]]:
  """L_t = −A·f(r), f(r) = 4σ(τ(r−1))/τ, a soft gate for a clip (arXiv 2511.20347).

  τ is τ_positive where A > 0 and τ_negative elsewhere; the gradient weight is
  4σ(1−σ)·r, 1 at r = 1.

  logprobs, old_logprobs, advantages, mask: `[B, T]`. Returns loss `[B, T]`.
  """
  a, d = inside(mask, advantages, logprobs - old_logprobs)
  r = exp(d)
  tau = jnp.where(a > 0, tau_positive, tau_negative)
  gate = _sigmoid(tau * (r - 1))
  metrics = {'ratio': r}
  return -a * 4 * gate / tau, metrics


@jax.custom_jvp
def _sigmoid(x: Array) -> Array:
  return jax.nn.sigmoid(x)


@_sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
  # σ(x)σ(−x): the usual σ(x)(1−σ(x)) has no digits left where σ(x) is near 1.
  (x,), (dx,) = primals, tangents
  value = jax.nn.sigmoid(x)
  return value, value * jax.nn.sigmoid(-x) * dx
