"""Losses without a ratio: policy gradients and maximum likelihood."""

import jax
import jax.numpy as jnp

from jaxrl.functional.components import component
from jaxrl.functional.reductions import zero_outside
from jaxrl.types import Array


@component(on_policy=True)
def vanilla(
  logprobs: Array, advantages: Array, mask: Array
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·p, the plain policy gradient (Williams, 1992).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.

  Returns:
    Loss `[B, T]` and no metrics.
  """
  p, a = zero_outside(mask, logprobs, advantages)
  return -a * p, {}


@component()
def opmd(
  logprobs: Array, advantages: Array, mask: Array, *, tau: float = 1.0
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −A·p/(1+τ), online policy mirror descent (arXiv 2505.17826).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    advantages: `[B, T]` the advantages A.
    mask: `[B, T]` bool, True at action tokens.
    tau: The temperature τ.

  Returns:
    Loss `[B, T]` and no metrics.
  """
  p, a = zero_outside(mask, logprobs, advantages)
  return -a * p / (1 + tau), {}


@component()
def sft(logprobs: Array, mask: Array) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −p, maximum likelihood (arXiv 2203.02155).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    mask: `[B, T]` bool, True at action tokens.

  Returns:
    Loss `[B, T]` and no metrics.
  """
  return jnp.where(mask, -logprobs, 0), {}


@component()
def sft_is(logprobs: Array, mask: Array) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −sg(e^p)·p, weighted by probability (DFT, arXiv 2508.05629).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    mask: `[B, T]` bool, True at action tokens.

  Returns:
    Loss `[B, T]` and the metric 'probability'.
  """
  (p,) = zero_outside(mask, logprobs)
  probability = jax.lax.stop_gradient(jnp.exp(jnp.minimum(p, 0)))
  return -probability * p, {'probability': probability}


@component()
def sft_phi(logprobs: Array, mask: Array) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = −sg(e^p(1−e^p))·p, CHORD's weight (arXiv 2508.11408).

  The weight is largest where the policy is undecided.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    mask: `[B, T]` bool, True at action tokens.

  Returns:
    Loss `[B, T]` and the metric 'weight'.
  """
  (p,) = zero_outside(mask, logprobs)
  fixed = jax.lax.stop_gradient(jnp.minimum(p, 0))
  weight = -jnp.exp(fixed) * jnp.expm1(fixed)
  return -weight * p, {'weight': weight}
