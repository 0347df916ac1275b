"""Rotary positions: frequencies with their scalings, and the rotation.

RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.model_config import ModelConfig

# What each scaling must be told, and what it may be told.
REQUIRED = {
  'linear': {'factor'},
  'llama3': {'factor', 'low_freq_factor', 'high_freq_factor'},
  'yarn': {'factor'},
}
OPTIONAL = {
  'linear': set(),
  'llama3': {'original_max_position_embeddings'},
  'yarn': {
    'attention_factor',
    'beta_fast',
    'beta_slow',
    'mscale',
    'mscale_all_dim',
    'original_max_position_embeddings',
    'truncate',
  },
}


def check_scaling(kind: str, settings: Mapping[str, Any]) -> None:
  """Checks that a scaling is known with just these settings.

  Args:
    kind: Its rope_type.
    settings: Its settings.

  Raises:
    ValueError: If it is not.
  """
  if kind not in REQUIRED:
    raise ValueError(
      f'rope scaling {kind!r} is not supported; these are: {", ".join(REQUIRED)}'
    )
  missing = sorted(REQUIRED[kind] - set(settings))
  if missing:
    raise ValueError(f'rope scaling {kind!r} lacks {", ".join(missing)}')
  unknown = sorted(set(settings) - REQUIRED[kind] - OPTIONAL[kind])
  if unknown:
    raise ValueError(f'rope scaling {kind!r} does not know {", ".join(unknown)}')


def frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
  """Computes the angular frequencies.

  Args:
    config: The model's shape.

  Returns:
    `[head_dim / 2]` float32, and the factor on cosine and sine that some scalings ask
    for.
  """
  dim = config.head_dim
  inverse = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
  factor = 1.0
  if config.rope_scaling is not None:
    settings = {k: v for k, v in config.rope_scaling if v is not None}
    kind = settings.pop('rope_type')
    check_scaling(kind, settings)
    window = settings.pop('original_max_position_embeddings', config.max_position)
    if kind == 'linear':
      inverse = inverse / settings['factor']
    elif kind == 'llama3':
      inverse = _llama3(inverse, window, **settings)
    else:
      inverse, factor = _yarn(inverse, window, config.rope_theta, **settings)
  return inverse.astype(np.float32), factor


def _llama3(
  inverse: np.ndarray,
  window: int,
  *,
  factor: float,
  low_freq_factor: float,
  high_freq_factor: float,
) -> np.ndarray:
  """Slows what turns rarely within the first window, blends in between."""
  turns = window * inverse / (2 * math.pi)
  blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
  blend = np.clip(blend, 0.0, 1.0)
  return (1 - blend) * inverse / factor + blend * inverse


def _yarn(
  inverse: np.ndarray,
  window: int,
  theta: float,
  *,
  factor: float,
  attention_factor: float | None = None,
  beta_fast: float = 32.0,
  beta_slow: float = 1.0,
  mscale: float = 0.0,
  mscale_all_dim: float = 0.0,
  truncate: bool = True,
) -> tuple[np.ndarray, float]:
  """Slows the dimensions that turn fewer than beta_slow times; keeps the fast ones."""
  dim = 2 * len(inverse)

  def dimension(turns):  # of the frequency that turns so often within the window
    return dim * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(theta))

  low, high = dimension(beta_fast), dimension(beta_slow)
  if truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  width = high - low or 1e-3
  slowed = np.clip((np.arange(len(inverse)) - low) / width, 0.0, 1.0)

  def scale(weight):
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

  if attention_factor is None:
    attention_factor = scale(1.0)
    if mscale and mscale_all_dim:
      attention_factor = scale(mscale) / scale(mscale_all_dim)
  return inverse / factor * slowed + inverse * (1 - slowed), attention_factor


def rotation(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes cosines and sines.

  Args:
    config: The model's shape.
    positions: `[…]` int32.

  Returns:
    Each `[…, head_dim / 2]` float32.
  """
  inverse, factor = frequencies(config)
  angles = positions[..., None].astype(jnp.float32) * inverse
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates heads; halves of a head are pairs.

  Args:
    x: `[…, heads, head_dim]`.
    cos: `[…, head_dim / 2]`.
    sin: `[…, head_dim / 2]`.
  """
  first, second = jnp.split(x, 2, axis=-1)
  cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
