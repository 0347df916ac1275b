"""Clipped losses bound the policy ratio: PPO and its critic, and SAPO."""

import jax
import jax.numpy as jnp

from jaxrl.functional.components import component
from jaxrl.functional.reductions import clipped_exp, row_mean, zero_outside
from jaxrl.types import Array


@component(on_policy=True)
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
  """Computes PPO's L_t = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high)) (arXiv 1707.06347).

  Where A < 0 it is at most −cA with c = `dual_clip` (arXiv 1912.09729). ε_low and
  ε_high may differ, as in DAPO (arXiv 2503.14476).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    clip_low: ε_low.
    clip_high: ε_high.
    dual_clip: The factor c; None for no bound.
    sequence_mask: δ; tokens with A < 0 in rows whose mean of o − p exceeds δ have loss
      0. None for no such mask.

  Returns:
    Loss `[B, T]` and the metrics 'clip_fraction', 'ratio' and 'approx_kl'.
  """
  a, d = zero_outside(mask, advantages, logprobs - old_logprobs)
  r = clipped_exp(d)
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


@component(on_policy=True)
def sapo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  tau_positive: float = 1.0,
  tau_negative: float = 1.05,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·f(r), f(r) = 4σ(τ(r−1))/τ, a soft clip (arXiv 2511.20347).

  The gradient weight is 4σ(1−σ)·r, 1 at r = 1.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    old_logprobs: `[B, T]` the old log-probs o.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    tau_positive: τ where A > 0.
    tau_negative: τ elsewhere.

  Returns:
    Loss `[B, T]` and the metric 'ratio'.
  """
  a, d = zero_outside(mask, advantages, logprobs - old_logprobs)
  r = clipped_exp(d)
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


@component()
def value_loss(
  values: Array,
  old_values: Array,
  returns: Array,
  mask: Array,
  *,
  clip: float | None = 0.2,
  coef: float = 1.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes coef·½·max((V−G)², (clip(V, V_old±ε)−G)²) (PPO, arXiv 1707.06347).

  Args:
    values: `[B, T]` V, with gradient.
    old_values: `[B, T]` V_old.
    returns: `[B, T]` G.
    mask: `[B, T]` bool, True at action tokens.
    clip: ε; None for a plain ½(V−G)².
    coef: The coefficient.

  Returns:
    Loss `[B, T]` and the metrics 'value', 'value_error' and 'value_clip_fraction'.
  """
  v, old, g = (jnp.where(mask, x, 0) for x in (values, old_values, returns))
  square = jnp.square(v - g)
  metrics = {'value': v, 'value_error': jnp.abs(v - g)}
  if clip is not None:
    clipped = jnp.square(jnp.clip(v, old - clip, old + clip) - g)
    metrics['value_clip_fraction'] = (clipped > square).astype(jnp.float32)
    square = jnp.maximum(square, clipped)
  return jnp.where(mask, coef * 0.5 * square, 0), metrics
