"""Attention kernels of JAX's own libraries, fitted to `kernels.attention`.

Each takes what `attention` takes (Triton's no prefix_ids), and pads lengths to what it
can do: what comes after a sequence's end is seen by no token of it. Pallas is imported
where it is used, for programs on the CPU need none of it.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kernels.padding import BLOCK, pad, padded
from kernels.splash import splash, takes_prefixes

LONGEST_MASK = 8192  # a sequence whose [T, T] mask is still held


def triton(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Flash attention through Triton (`jax.experimental.pallas.ops.gpu`), for GPU.

  q: `[B, T, H, d]`. k, v: `[B, T, K, d]`, repeated for every query head.
  segment_ids: `[B, T]` int32. Returns `[B, T, H, d]`.
  """
  from jax.experimental.pallas.ops.gpu import attention as library

  length, heads, dim = q.shape[1:]
  k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
  q, k, v, segment_ids = pad((q, k, v, segment_ids), padded(length))
  # The backward pass holds sums of [64, d] in registers, which larger blocks exceed.
  sizes = library.BlockSizes(
    block_q=128,
    block_k=64,
    block_q_dkv=32,
    block_kv_dkv=64,
    block_q_dq=64,
    block_kv_dq=32,
  )
  out: Any = library.mha(
    q,
    k,
    v,
    segment_ids,
    sm_scale=dim**-0.5,
    causal=True,
    block_sizes=sizes,
    interpret=interpret,
  )
  return out[:, :length]


def cudnn(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None = None,
  *,
  implementation: Literal['cudnn', 'xla'] = 'cudnn',
) -> jax.Array:
  """cuDNN's attention (`jax.nn.dot_product_attention`), for GPU.

  q: `[B, T, H, d]`. k, v: `[B, T, K, d]`. segment_ids, prefix_ids: `[B, T]` int32, as
  `attention` has them. They become one mask for all heads, in memory. Returns
  `[B, T, H, d]`.
  """
  length = q.shape[1]
  prefix_ids = segment_ids if prefix_ids is None else prefix_ids
  arrays = pad((q, k, v, segment_ids, prefix_ids), padded(length))
  q, k, v, segment_ids, prefix_ids = arrays
  keys = segment_ids[:, None]
  seen = segment_ids[..., None] == keys
  seen |= (prefix_ids[..., None] == keys) & (prefix_ids[..., None] > 0)
  out = jax.nn.dot_product_attention(
    q, k, v, mask=seen[:, None], is_causal=True, implementation=implementation
  )
  return out[:, :length]


def candidates(
  q: jax.Array, k: jax.Array, prefix_ids: jax.Array | None, *, platform: str
) -> dict[str, Callable[..., jax.Array] | str]:
  """The kernels for `platform` by name, the best first, or why one cannot be used."""
  if platform == 'tpu':
    why = _unfit(q) or ('' if prefix_ids is None else takes_prefixes())
    return {'splash': why or splash}
  if platform == 'gpu':
    return {
      'cudnn': _unfit(q) or _no_cudnn(q, k) or cudnn,
      'triton': _unfit(q, prefix_ids) or triton,
    }
  return {}


def _unfit(q: jax.Array, prefix_ids: jax.Array | None = None) -> str:
  """Why no kernel takes these arrays; '' if one does."""
  length, dim = q.shape[1], q.shape[-1]
  if prefix_ids is not None:
    return 'does not take prefix_ids'
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    return f'does not take {q.dtype.name}'
  if length < BLOCK:
    return f'is for sequences from {BLOCK} tokens on, not of {length}'
  return 'needs a head_dim from 16 on' if dim < 16 else ''


def _no_cudnn(q: jax.Array, k: jax.Array) -> str:
  """Why cuDNN cannot be used on this machine with these arrays; '' if it can."""
  if q.shape[1] > LONGEST_MASK:
    return f'would hold a mask for every two of {q.shape[1]} tokens'
  if q.dtype != jnp.bfloat16:
    return f'does not take {q.dtype.name}'
  return _cudnn_says(q.shape, k.shape)


@functools.cache
def _cudnn_says(queries: tuple[int, ...], keys: tuple[int, ...]) -> str:
  q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (queries, keys))
  ids = jax.ShapeDtypeStruct(queries[:2], jnp.int32)
  try:  # JAX asks the library for its version, and the device, while it traces
    jax.eval_shape(cudnn, q, k, k, ids)
  except Exception as error:  # each check raises a class of its own
    return f'cannot be used: {error}'.splitlines()[0]
  return ''
