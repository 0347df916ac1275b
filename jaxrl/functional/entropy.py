"""The entropy bonus, and what entropy-guided clipping reads."""

import jax
import jax.numpy as jnp

from jaxrl.types import Array


def entropy_loss(entropy: Array, *, coef: float = 0.0) -> Array:
  """`[B, T]` −coef·H, H `[B, T]` the full distribution's entropy at temperature 1."""
  return -coef * entropy


def mix(entropy: Array, expert_mask: Array, *, coef: float = 0.0) -> Array:
  """`[B, T]` −coef·H on rollout rows, 0 on expert rows (expert_mask `[B]` True)."""
  return jnp.where(expert_mask[:, None], 0, -coef * entropy)


def nec(logits: Array) -> Array:
  """`[…]` Σ_v p_v²(H + log p_v) of logits `[…, V]`: the mean of e^p(H+p) under p."""
  logp = jax.nn.log_softmax(logits)
  p = jnp.exp(logp)
  entropy = -jnp.sum(p * logp, axis=-1, keepdims=True)
  return jnp.sum(p * p * (entropy + logp), axis=-1)
