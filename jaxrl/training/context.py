"""Long rows, cut over the mesh's context axis, and attention across the cuts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.training.sharding import RULES
from kernels import dispatch
from kernels.ring_attention import ring_attention, unzigzag, zigzag

BLOCK = 256  # queries whose scores a device holds at a time
AXIS = 'context'


@dataclasses.dataclass(frozen=True)
class Context:
  """Cuts rows into as many as the context axis has devices. Hashable.

  Between `cut` and `join` arrays are `[c · B, t, …]`, rows over 'batch' of the sharding
  rules; all that speaks of single tokens need not know. Only attention looks across.
  """

  mesh: Mesh

  def cut(self, x: jax.Array, length: int) -> jax.Array:
    """`[B, T', …]`, T' at most `length`, filled with 0 → `[c · B, t, …]`."""
    size = self.mesh.shape[AXIS]
    stretch = -(-length // (2 * size))
    if stretch > BLOCK:
      stretch = -(-stretch // BLOCK) * BLOCK
    more = 2 * size * stretch - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)))
    return zigzag(x, size)

  def join(self, x: jax.Array, length: int) -> jax.Array:
    """Undoes `cut`: `[c · B, t, …]` → `[B, length, …]`."""
    return unzigzag(x, self.mesh.shape[AXIS])[:, :length]

  def attention(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    prefix_ids: jax.Array | None = None,
  ) -> jax.Array:
    """As `kernels.attention.attention`, of arrays as `cut` gives them."""
    platform = dispatch.platform_of(self.mesh.devices.flat[0].platform)
    ways = {'reference': ring_attention}
    dispatch.choose('attention around a ring', ways, platform=platform)
    names = RULES['batch']
    shares = math.prod(self.mesh.shape[name] for name in names)
    rows = names if q.shape[0] % shares == 0 else (AXIS,)
    array, ids = P(rows, None, RULES['heads'], None), P(rows, None)

    def attend(q, k, v, segment_ids, prefix_ids):
      return ring_attention(
        q, k, v, segment_ids, axis=AXIS, prefix_ids=prefix_ids, block=BLOCK
      )

    return jax.shard_map(
      attend,
      mesh=self.mesh,
      in_specs=(array, array, array, ids, ids),
      out_specs=array,
      check_vma=False,
    )(q, k, v, segment_ids, prefix_ids)
