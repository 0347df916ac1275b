"""Cached attention attends from one query per slot to that slot's cache, on a CPU.

`cached_attention.c` computes what `attention.decode_attention` does, without windows,
soft caps and sinks, in one pass over the cache.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kernels.native import library

TARGET = 'jaxrl_cached_attention'
MULTIPLE, MOST_CHUNKS = 32, 64  # positions of a chunk; chunks


def fits(k_chunks: Sequence[jax.Array], v_chunks: Sequence[jax.Array]) -> bool:
  """Returns whether the kernel reads such a cache.

  Args:
    k_chunks: As in `attend`.
    v_chunks: As in `attend`, or () where the keys are also the values.
  """
  arrays = *k_chunks, *v_chunks
  return (
    len(k_chunks) == len(v_chunks) <= MOST_CHUNKS
    and all(x.dtype == jnp.float32 for x in arrays)
    and all(k.shape[-1] % MULTIPLE == 0 for k in k_chunks)
  )


def attend(
  q: jax.Array,
  k_chunks: Sequence[jax.Array],
  v_chunks: Sequence[jax.Array],
  positions: jax.Array,
) -> jax.Array:
  """Computes attention from one query per slot to that slot's cache.

  The bits of a slot depend neither on other slots nor on the sizes of the chunks.

  Args:
    q: Scaled queries `[S, H, d]` float32.
    k_chunks: Keys of consecutive chunks of C positions, each `[S, K, d, C]` float32; C
      is a multiple of 32.
    v_chunks: Their values, each `[S, K, C, d]` float32.
    positions: Position of each query, `[S]` int32, at least 0: it sees the cache up to
      there.

  Returns:
    Output `[S, H, d]` float32.

  Raises:
    OSError: If the kernel cannot be compiled or loaded here.
  """
  library.panel_columns()  # raises
  out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
  positions = positions.astype(jnp.int32)
  return jax.ffi.ffi_call(TARGET, out)(q, positions, *k_chunks, *v_chunks)
