"""Rotary positions: frequencies with their scalings, and the rotation."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.config import ModelConfig


def frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
  """Returns the angular frequencies `[head_dim / 2]` float32, and the factor on
  cosine and sine that some scalings ask for.
  """
  dim = config.head_dim
  inverse = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
  return inverse.astype(np.float32), 1.0


def rotation(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """positions `[...]` int32 → (cos, sin), each `[..., head_dim / 2]` float32."""
  inverse, factor = frequencies(config)
  angles = positions[..., None].astype(jnp.float32) * inverse
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates `[..., heads, head_dim]` by `[..., head_dim / 2]`; halves are pairs."""
  first, second = jnp.split(x, 2, axis=-1)
  cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
