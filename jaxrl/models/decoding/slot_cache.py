"""The slot cache has the layout that cuDNN's attention reads, for GPUs.

Keys and values are `[S, T, K, d]` for S slots of T positions, one array per layer:
`cache['k_slots'][layer]`. A slot's positions lie one behind the other, and cuDNN is
told how many of them count.
"""

import jax

from jaxrl.models.decoding.cache_layout import CacheLayout, Shard
from jaxrl.models.model_config import ModelConfig
from kernels import cudnn_attention, dispatch

MULTIPLE = 64  # of positions: what cuDNN reads at a time


def _attend(
  q: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  lengths: jax.Array,
  *,
  kernels: str,
  platform: str | None,
  shard: Shard | None,
) -> jax.Array:
  """Runs cuDNN, the one kernel that reads this layout."""
  del kernels, platform
  attend = cudnn_attention.decode
  if shard is not None:
    heads, rows = ('batch', 'heads', None), ('batch',)
    attend = shard(attend, (heads, LAYOUT.axes, LAYOUT.axes, rows), heads)
  return attend(q, keys, values, lengths)


LAYOUT = CacheLayout(
  names={'k_slots': 'k', 'v_slots': 'v'},
  order=('batch', 'position', 'kv_heads', 'width'),
  multiple=MULTIPLE,
  attend=_attend,
)


def obstacle(config: ModelConfig, dtype: str, *, kernels: str, platform: str) -> str:
  """Returns why cuDNN does not read the cache; '' if it does, which is logged.

  Args:
    config: The model's shape, which no other obstacle keeps from using kernels.
    dtype: The type of keys and values.
    kernels: As in `kernels.dispatch`.
    platform: 'cpu', 'gpu' or 'tpu'.
  """
  if platform != 'gpu':
    return f'is for gpu, not {platform}'
  if kernels == dispatch.REFERENCE:
    return 'not asked for'
  heads = config.num_heads, config.num_kv_heads, config.head_dim
  why = cudnn_attention.decode_obstacle(*heads, dtype)
  if not why:
    candidates = {'cudnn': cudnn_attention.decode}
    dispatch.choose('decode attention', candidates, platform=platform)
  return why
