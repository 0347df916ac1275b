"""The paged cache has the layout that kernels of paged attention read.

Keys and values are `[K, S, T, d]` for S slots, one array per layer:
`cache['k_pages'][layer]`.
"""

from collections.abc import Mapping

from jaxrl.models.decoding.cache_layout import CacheLayout
from jaxrl.models.model_config import ModelConfig
from kernels.dispatch import REFERENCE
from kernels.paged_attention import PAGE, choose_kernel, paged_attention

LAYOUT = CacheLayout(
  names={'k_pages': 'k', 'v_pages': 'v'},
  order=('kv_heads', 'batch', 'position', 'width'),
  multiple=PAGE,
  attend=paged_attention,
)


def has_kernel(
  config: ModelConfig,
  dtype: str,
  *,
  obstacle: str,
  skipped: Mapping[str, str],
  kernels: str,
  platform: str | None,
) -> bool:
  """Returns whether a kernel of paged attention is used.

  Args:
    config: The model's shape.
    dtype: The type of keys and values.
    obstacle: Why the model cannot use one; '' for no reason.
    skipped: Kernels for other layouts of the cache, and why they are not used.
    kernels: As in `kernels.dispatch`.
    platform: As in `kernels.dispatch`.
  """
  return (
    choose_kernel(
      config.head_dim,
      dtype,
      obstacle=obstacle,
      skipped=skipped,
      kernels=kernels,
      platform=platform,
    )
    != REFERENCE
  )
