"""Penalties added to rewards before any advantage sees them."""

import jax.numpy as jnp

from jaxrl.types import Array


def overlong_penalty(lengths: Array, *, max_length: float, cache: float = 0.0) -> Array:
  """`[B]` DAPO's soft penalty on long answers (arXiv 2503.14476).

  0 up to L − c tokens, then linear down to −1 at L, and −1 beyond; L = max_length,
  c = cache. With c = 0 it is a step: 0 up to L, −1 beyond. lengths: `[B]`.
  """
  over = lengths - (max_length - cache)
  slope = jnp.clip(over / jnp.where(cache > 0, cache, 1), 0, 1)
  return -jnp.where(cache > 0, slope, jnp.where(over > 0, 1.0, 0.0))
