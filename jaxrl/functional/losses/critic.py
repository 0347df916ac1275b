"""The critic's loss."""

import jax.numpy as jnp

from jaxrl.types import Array


def value_loss(
  values: Array,
  old_values: Array,
  returns: Array,
  mask: Array,
  *,
  clip: float | None = 0.2,
  coef: float = 1.0,
) -> tuple[Array, dict[str, Array]]:
  """coef·½·max((V−G)², (clip(V, V_old±ε)−G)²) (PPO's, arXiv 1707.06347).

  values: V `[B, T]`, with gradient. old_values, returns: V_old and G `[B, T]`.
  clip: ε; None for a plain ½(V−G)².
  """
  v, old, g = (jnp.where(mask, x, 0) for x in (values, old_values, returns))
  square = jnp.square(v - g)
  metrics = {'value': v, 'value_error': jnp.abs(v - g)}
  if clip is not None:
    clipped = jnp.square(jnp.clip(v, old - clip, old + clip) - g)
    metrics['value_clip_fraction'] = (clipped > square).astype(jnp.float32)
    square = jnp.maximum(square, clipped)
  return jnp.where(mask, coef * 0.5 * square, 0), metrics
