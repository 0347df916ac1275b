"""Snapshots of weights whose base is frozen: that leaves the devices once."""

import jax
import numpy as np

from jaxrl.models import lora, unmerged
from jaxrl.rollout.weights.layout import Shard, flatten, nest, snapshot
from jaxrl.types import Params

NONE = np.zeros(0, np.int64)


class Frozen:
  """Takes snapshots as `layout.snapshot` does, to the bit, of one run's weights.

  Of those that engines merge (`models.unmerged`) the base is copied once, and again if
  a checksum over its bits, taken on the devices each time, is another. Each shard of a
  base that was not copied tells that nothing of it changed.
  """

  def __init__(self, dtype: str | None = None):
    self._dtype = dtype
    self._base: dict[str, list[Shard]] = {}
    self._sum: int | None = None

  def snapshot(self, params: Params) -> list[Shard]:
    """When this returns, `params` may be donated."""
    if not unmerged.is_unmerged(params):
      return snapshot(params, self._dtype)
    frozen = {
      '.'.join(key.key for key in path)
      for path, _ in jax.tree_util.tree_leaves_with_path(params)
      if not lora.learns(path)
    }
    leaves = flatten(params)
    sum_ = int(_checksum({name: leaves[name] for name in sorted(frozen)}))
    known = frozen if sum_ == self._sum else set()
    fresh = nest({name: x for name, x in leaves.items() if name not in known})
    taken: dict[str, list[Shard]] = {}
    for shard in snapshot(fresh, self._dtype):
      taken.setdefault(shard.region.name, []).append(shard)
    whole = self._base | taken
    found = [shard for name in leaves for shard in whole[name]]
    if not known:
      self._base, self._sum = {}, sum_
      for s in found:
        if s.region.name in frozen:
          told = Shard(s.region, s.words, since=s.words, changed=NONE)
          self._base.setdefault(s.region.name, []).append(told)
    return found


@jax.jit
def _checksum(leaves: Params) -> jax.Array:
  return lora.fingerprint(leaves)
