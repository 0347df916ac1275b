"""Policy losses without a ratio: policy gradients and maximum likelihood."""

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
