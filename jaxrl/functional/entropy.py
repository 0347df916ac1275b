"""The entropy bonus, and what entropy-guided clipping reads."""

import jax
import jax.numpy as jnp

from jaxrl.functional.aggregation import term_scale as scale_of
from jaxrl.functional.losses.mixed import own_scale
from jaxrl.functional.marks import over_batch
from jaxrl.types import Array


def entropy_loss(entropy: Array, *, coef: float = 0.0) -> Array:
  """−coef·H, H the distribution's at temperature 1 (arXiv 1602.01783). `[B, T]`."""
  return -coef * entropy


@over_batch(own_scale)
def mix(
  entropy: Array,
  mask: Array,
  expert_mask: Array,
  term_scale: Array | None = None,
  *,
  coef: float = 0.0,
) -> Array:
  """−coef·H on rollout rows, a mean over them alone (arXiv 2505.17826). `[B, T]`.

  0 on an expert's rows. expert_mask, term_scale: `[B]`, as in `losses.mix`.
  """
  if term_scale is None:
    term_scale = scale_of(mask, expert_mask)
  bonus = -coef * entropy * term_scale[:, None]
  return jnp.where(expert_mask[:, None], 0, bonus)


def nec(logits: Array) -> Array:
  """`[…]` Σ_v p_v²(H + log p_v) of logits `[…, V]`: the mean of e^p(H+p) under p."""
  logp = jax.nn.log_softmax(logits)
  p = jnp.exp(logp)
  entropy = -jnp.sum(p * logp, axis=-1, keepdims=True)
  return jnp.sum(p * p * (entropy + logp), axis=-1)
