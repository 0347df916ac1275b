"""Rotary positions: frequencies with their scalings, and the rotation.

RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753, of which
only the factors of sequences up to the first length that a model was trained with.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.model_config import ModelConfig
from kernels.dispatch import platform_of

# What each scaling must be told, and what it may be told.
REQUIRED = {
  'linear': {'factor'},
  'llama3': {'factor', 'low_freq_factor', 'high_freq_factor'},
  'yarn': {'factor'},
  'proportional': set(),
  'longrope': {'short_factor', 'long_factor', 'original_max_position_embeddings'},
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
  'proportional': {'factor', 'partial_rotary_factor'},
  'longrope': {'attention_factor', 'factor'},
}


def check_scaling(kind: str, settings: Mapping[str, object]) -> None:
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
    config: A layer's shape.

  Returns:
    `[n / 2]` float32, n the elements of a head that are rotated, and the factor on
    cosine and sine that some scalings ask for.
  """
  dim = config.rotated_dim
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
    elif kind == 'proportional':  # only the fastest turn
      count = int(settings.get('partial_rotary_factor', 1.0) * dim // 2)
      inverse = np.where(np.arange(dim // 2) < count, inverse, 0.0)
      inverse = inverse / settings.get('factor', 1.0)
    elif kind == 'longrope':
      inverse = inverse / np.array(settings['short_factor'], np.float64)
      factor = _longrope_factor(window, **settings)
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


def _longrope_factor(
  window: int,
  *,
  factor: float,
  attention_factor: float | None = None,
  short_factor: tuple[float, ...],
  long_factor: tuple[float, ...],
) -> float:
  """Returns the factor on cosine and sine for a model with an extended context."""
  del short_factor, long_factor
  if attention_factor is not None:
    return attention_factor
  return math.sqrt(1 + math.log(factor) / math.log(window)) if factor > 1 else 1.0


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

  if attention_factor is None:
    attention_factor = _yarn_scale(factor, 1.0)
    if mscale and mscale_all_dim:
      attention_factor = _yarn_scale(factor, mscale)
      attention_factor /= _yarn_scale(factor, mscale_all_dim)
  return inverse / factor * slowed + inverse * (1 - slowed), attention_factor


def _yarn_scale(factor: float, weight: float) -> float:
  return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def latent_score_factor(config: ModelConfig) -> float:
  """Computes what latent attention multiplies all scores by, beside head_dim^−½.

  Args:
    config: A layer's shape. YaRN's setting mscale_all_dim asks for a factor.
  """
  settings = dict(config.rope_scaling or ())
  weight = settings.get('mscale_all_dim') or 0.0
  return _yarn_scale(settings['factor'], weight) ** 2 if weight else 1.0


# What rotates a layer's queries and keys: cosines and sines `[…, n / 2]`, and a factor
# `[…, 1]` for queries where they grow; () for a layer without rotary positions.
Rotation = tuple[jax.Array, ...]


def axis_of_frequencies(config: ModelConfig) -> np.ndarray:
  """Returns by which of three positions each frequency turns, interleaved.

  Args:
    config: A layer's shape, with `rope_sections`.

  Returns:
    `[n / 2]` int: 0 for time, 1 for the row, 2 for the column.
  """
  size = int(config.head_dim * config.rope_fraction) // 2
  axes = np.zeros(size, np.int64)
  for axis in (1, 2):
    axes[axis : 3 * config.rope_sections[axis] : 3] = axis
  return axes


def rotation(
  config: ModelConfig, positions: jax.Array, by_axis: bool = False
) -> Rotation:
  """Computes what rotates queries and keys at positions.

  Args:
    config: A layer's shape.
    positions: `[…]` int32; with `by_axis`, `[…, 3]`: in time, row and column.
    by_axis: Whether tokens have three positions.

  Returns:
    Cosines and sines `[…, n / 2]` float32, n the elements of a head that are rotated;
    with `query_growth` a factor `[…, 1]` float32 for queries too.
  """
  inverse, factor = frequencies(config)
  chosen = axis_of_frequencies(config) if by_axis else None
  positions = positions[..., chosen]
  angles = positions.astype(jnp.float32) * inverse
  cos_sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
  if not config.query_growth:
    return cos_sin
  size = dict(config.rope_scaling or ()).get('original_max_position_embeddings')
  turns = jnp.floor(positions[..., :1] / (size or config.max_position))
  return *cos_sin, 1 + config.query_growth * jnp.log(1 + turns)


def rotation_key(config: ModelConfig) -> str:
  """Returns a name that layers with the same rotation share; '' for none.

  Args:
    config: A layer's shape.
  """
  if not config.use_rope:
    return ''
  names = 'rotated_dim', 'rope_theta', 'rope_scaling', 'query_growth'
  return str([getattr(config, name) for name in names])


def rotations(
  config: ModelConfig,
  positions: jax.Array,
  by_axis: bool = False,
  *,
  platform: str | None = None,
) -> dict[str, Rotation]:
  """Computes the rotations of all layers.

  Args:
    config: The model's shape.
    positions: As in `rotation`.
    by_axis: As in `rotation`.
    platform: The platform to compile for; None for this process's own.

  Returns:
    By `rotation_key`, those of `rotation`.
  """
  kinds = {rotation_key(layer): layer for layer in config.layer_configs}
  found = {
    key: rotation(layer, positions, by_axis) if key else ()
    for key, layer in kinds.items()
  }
  return (
    jax.tree.map(_computed_once, found) if platform_of(platform) == 'cpu' else found
  )


def _computed_once(x: jax.Array) -> jax.Array:
  """Returns `[…, n]` float32, by a product with the identity.

  XLA's CPU backend heeds no optimization barrier, and fuses cosines into each layer
  that it unrolls, where they are computed again for every head, forward and backward.
  It fuses nothing into a product.
  """
  return jnp.matmul(x, np.eye(x.shape[-1], dtype=x.dtype), precision='highest')


def rotate(
  x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False
) -> jax.Array:
  """Rotates heads; halves of what is rotated of a head are pairs.

  Args:
    x: `[…, heads, head_dim]`.
    cos: `[…, n / 2]`, for the first n elements of each head.
    sin: `[…, n / 2]`.
    interleaved: Whether neighbours are pairs instead. In the result halves are.
  """
  size = 2 * cos.shape[-1]
  turned = x if size == x.shape[-1] else x[..., :size]
  first, second = jnp.split(turned, 2, axis=-1)
  if interleaved:
    first, second = turned[..., ::2], turned[..., 1::2]
  cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
  parts = [first * cos - second * sin, second * cos + first * sin]
  if size < x.shape[-1]:
    parts.append(x[..., size:])
  return jnp.concatenate(parts, axis=-1)
