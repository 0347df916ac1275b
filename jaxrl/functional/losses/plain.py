"""Policy losses without a ratio: policy gradients and maximum likelihood."""

import jax
import jax.numpy as jnp

from jaxrl.functional.groups import inside
from jaxrl.types import Array


def vanilla(
  logprobs: Array, advantages: Array, mask: Array
) -> tuple[Array, dict[str, Array]]:
  """L_t = −A·p, the plain policy gradient (Williams, 1992). All are `[B, T]`."""
  p, a = inside(mask, logprobs, advantages)
  return -a * p, {}


def opmd(
  logprobs: Array, advantages: Array, mask: Array, *, tau: float = 1.0
) -> tuple[Array, dict[str, Array]]:
  """L_t = −A·p/(1+τ), online policy mirror descent (arXiv 2505.17826). `[B, T]`."""
  p, a = inside(mask, logprobs, advantages)
  return -a * p / (1 + tau), {}


def sft(logprobs: Array, mask: Array) -> tuple[Array, dict[str, Array]]:
  """L_t = −p, maximum likelihood (arXiv 2203.02155). Both are `[B, T]`."""
  return jnp.where(mask, -logprobs, 0), {}


def sft_is(logprobs: Array, mask: Array) -> tuple[Array, dict[str, Array]]:
  """L_t = −sg(e^p)·p, weighted by probability (DFT, arXiv 2508.05629). `[B, T]`."""
  (p,) = inside(mask, logprobs)
  probability = jax.lax.stop_gradient(jnp.exp(jnp.minimum(p, 0)))
  return -probability * p, {'probability': probability}


def sft_phi(logprobs: Array, mask: Array) -> tuple[Array, dict[str, Array]]:
  """L_t = −sg(e^p(1−e^p))·p, CHORD's weight (arXiv 2508.11408).

  It is largest where the policy is undecided. logprobs, mask: `[B, T]`.
  """
  (p,) = inside(mask, logprobs)
  fixed = jax.lax.stop_gradient(jnp.minimum(p, 0))
  weight = -jnp.exp(fixed) * jnp.expm1(fixed)
  return -weight * p, {'weight': weight}
