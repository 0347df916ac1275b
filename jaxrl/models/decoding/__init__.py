"""Decoding runs a model for one token of every slot, over caches laid out for it."""

from typing import Any

from jaxrl.models import kv_cache
from jaxrl.models.model_config import ModelConfig
from kernels.dispatch import platform_of


def choose_layout(
  config: ModelConfig, dtype: str, *, kernels: str, platform: str | None
) -> Any:
  """Chooses the module of the layout that the best kernel of decode reads.

  Args:
    config: The model's shape.
    dtype: The type of keys and values.
    kernels: As in `kernels.dispatch`.
    platform: As in `kernels.dispatch`.

  Returns:
    `slot_cache` or `paged_cache`; None if no kernel is used.
  """
  from jaxrl.models.decoding import paged_cache, slot_cache

  obstacle = kv_cache.paging_obstacle(config)
  options: dict[str, Any] = {'kernels': kernels, 'platform': platform_of(platform)}
  why = obstacle or slot_cache.obstacle(config, dtype, **options)
  if not why:
    return slot_cache
  skipped = {'cudnn': why} if options['platform'] == 'gpu' else {}
  options |= {'obstacle': obstacle, 'skipped': skipped}
  return paged_cache if paged_cache.has_kernel(config, dtype, **options) else None
