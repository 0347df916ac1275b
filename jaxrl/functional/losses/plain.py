"""Policy losses without a ratio: policy gradients and maximum likelihood."""

import jax
import jax.numpy as jnp

from jaxrl.types import Array


def vanilla(
  logprobs: Array, advantages: Array, mask: Array
) -> tuple[Array, dict[str, Array]]:
  """The plain policy gradient, L_t = −A·p (Williams, 1992). All are `[B, T]`."""
  return jnp.where(mask, -advantages * logprobs, 0), {}


def opmd(
  logprobs: Array, advantages: Array, mask: Array, *, tau: float = 1.0
) -> tuple[Array, dict[str, Array]]:
  """L_t = −A·p/(1+τ): online policy mirror descent (arXiv 2505.17826). `[B, T]`."""
  return jnp.where(mask, -advantages * logprobs / (1 + tau), 0), {}


def sft(logprobs: Array, mask: Array) -> tuple[Array, dict[str, Array]]:
  """Maximum likelihood, L_t = −p. logprobs, mask: `[B, T]`."""
  return jnp.where(mask, -logprobs, 0), {}


def sft_is(logprobs: Array, mask: Array) -> tuple[Array, dict[str, Array]]:
  """L_t = −sg(e^p)·p: likelihood weighted by the token's probability. `[B, T]`."""
  probability = jax.lax.stop_gradient(jnp.exp(jnp.minimum(logprobs, 0)))
  return jnp.where(mask, -probability * logprobs, 0), {'probability': probability}


def sft_phi(logprobs: Array, mask: Array) -> tuple[Array, dict[str, Array]]:
  """L_t = −sg(e^p(1−e^p))·p: CHORD's weight, largest where the policy is undecided.

  logprobs, mask: `[B, T]` (arXiv 2508.11408).
  """
  p = jax.lax.stop_gradient(jnp.minimum(logprobs, 0))
  weight = -jnp.exp(p) * jnp.expm1(p)
  return jnp.where(mask, -weight * logprobs, 0), {'weight': weight}
