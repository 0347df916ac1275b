"""Entropy terms: bonuses that a loss adds, and `nec` for entropy-guided clipping."""

import jax
import jax.numpy as jnp

from jaxrl.functional.aggregation import term_scale as scale_of
from jaxrl.functional.aggregation import term_scale_field
from jaxrl.functional.components import component
from jaxrl.types import Array


@component()
def entropy_loss(entropy: Array, *, coef: float = 0.0) -> Array:
  """Computes −coef·H (arXiv 1602.01783).

  Args:
    entropy: `[B, T]` entropy of the distribution at temperature 1.
    coef: The coefficient.

  Returns:
    `[B, T]`.
  """
  return -coef * entropy


@component(precompute=term_scale_field)
def mix(
  entropy: Array,
  mask: Array,
  expert_mask: Array,
  term_scale: Array | None = None,
  *,
  coef: float = 0.0,
) -> Array:
  """Computes −coef·H on rollout rows, a mean over them alone (arXiv 2505.17826).

  Args:
    entropy: `[B, T]` entropy of the distribution at temperature 1.
    mask: `[B, T]` bool, True at action tokens.
    expert_mask: `[B]` bool, True on an expert's rows.
    term_scale: `[B]` from `aggregation.term_scale` over the whole optimizer batch; None
      computes it from these rows, right when they are all there are.
    coef: The coefficient.

  Returns:
    `[B, T]`; 0 on an expert's rows.
  """
  if term_scale is None:
    term_scale = scale_of(mask, expert_mask)
  bonus = -coef * entropy * term_scale[:, None]
  return jnp.where(expert_mask[:, None], 0, bonus)


def nec(logits: Array) -> Array:
  """Computes Σ_v p_v²(H + log p_v), the mean of e^p(H+p) under p.

  Args:
    logits: `[…, V]`.

  Returns:
    `[…]`.
  """
  logp = jax.nn.log_softmax(logits)
  p = jnp.exp(logp)
  entropy = -jnp.sum(p * logp, axis=-1, keepdims=True)
  return jnp.sum(p * p * (entropy + logp), axis=-1)
