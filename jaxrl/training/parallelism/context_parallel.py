"""Context parallelism shards long rows over the mesh's context axis.

Attention is the only operation that reads other shards; it is computed around a ring of
devices.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.options import ConfigError
from jaxrl.training.parallelism.sharding import (
  LOGICAL_AXIS_RULES,
  ShardingConstraint,
)
from kernels import dispatch
from kernels.ring_attention import ring_attention, unzigzag, zigzag

QUERY_BLOCK = 256  # queries whose scores a device holds at a time
CONTEXT_AXIS = 'context'


@dataclasses.dataclass(frozen=True)
class ContextParallel:
  """Splits rows into as many shards as the context axis has devices; hashable.

  Between `shard` and `unshard`, arrays are `[c · B, t, …]`, with rows over 'batch' of
  the sharding rules. Operations on single tokens work on them unchanged.

  Attributes:
    mesh: The mesh, with a context axis of size c.
  """

  mesh: Mesh

  def shard(self, x: jax.Array, length: int) -> jax.Array:
    """Splits rows into shards.

    Args:
      x: `[B, T', …]`, with T' at most `length`; it is padded with 0.
      length: Tokens of a row.

    Returns:
      `[c · B, t, …]`.
    """
    size = self.mesh.shape[CONTEXT_AXIS]
    shard_length = -(-length // (2 * size))
    if shard_length > QUERY_BLOCK:
      shard_length = -(-shard_length // QUERY_BLOCK) * QUERY_BLOCK
    padding = 2 * size * shard_length - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
    return zigzag(x, size)

  def refuse(self, what: str) -> None:
    """Raises ConfigError for what a model needs and only whole rows can have.

    Args:
      what: What it is.
    """
    raise ConfigError(
      f'mesh: context={self.mesh.shape[CONTEXT_AXIS]} splits rows, but '
      f'attention around a ring does not take {what}, which this model needs: use '
      'data, fsdp or tensor'
    )

  def cut(self, x: jax.Array, length: int) -> jax.Array:
    """Splits rows as `shard` does, each shard to its devices."""
    x = self.shard(x, length)
    return ShardingConstraint(self.mesh)(x, 'batch', *(None,) * (x.ndim - 1))

  def unshard(self, x: jax.Array, length: int) -> jax.Array:
    """Undoes `shard`: `[c · B, t, …]` → `[B, length, …]`."""
    return unzigzag(x, self.mesh.shape[CONTEXT_AXIS])[:, :length]

  def attention(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    prefix_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    **rules: object,
  ) -> jax.Array:
    """Computes attention as `kernels.attention.attention` does, on sharded arrays.

    Args:
      q: Queries `[c · B, t, heads, head_dim]`.
      k: Keys `[c · B, t, kv_heads, head_dim]`.
      v: Values `[c · B, t, kv_heads, value_dim]`.
      segment_ids: `[c · B, t]` int32.
      prefix_ids: `[c · B, t]` int32, or None.
      positions: Not read.
      **rules: What else a model asks of attention, such as a window.

    Returns:
      `[c · B, t, heads, value_dim]`.

    Raises:
      ConfigError: If there are such rules.
    """
    del positions
    if rules:
      self.refuse(' and '.join(sorted(rules)))
    platform = dispatch.platform_of(self.mesh.devices.flat[0].platform)
    implementations = {'reference': ring_attention}
    dispatch.choose('attention around a ring', implementations, platform=platform)
    batch_axes = LOGICAL_AXIS_RULES['batch']
    num_shards = math.prod(self.mesh.shape[axis] for axis in batch_axes)
    row_axes = batch_axes if q.shape[0] % num_shards == 0 else (CONTEXT_AXIS,)
    array_spec = P(row_axes, None, LOGICAL_AXIS_RULES['heads'], None)
    ids_spec = P(row_axes, None)

    def attend(
      q: jax.Array,
      k: jax.Array,
      v: jax.Array,
      segment_ids: jax.Array,
      prefix_ids: jax.Array | None,
    ) -> jax.Array:
      return ring_attention(
        q,
        k,
        v,
        segment_ids,
        axis=CONTEXT_AXIS,
        prefix_ids=prefix_ids,
        block=QUERY_BLOCK,
      )

    return jax.shard_map(
      attend,
      mesh=self.mesh,
      in_specs=(array_spec, array_spec, array_spec, ids_spec, ids_spec),
      out_specs=array_spec,
      check_vma=False,
    )(q, k, v, segment_ids, prefix_ids)
