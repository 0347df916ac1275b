"""Splash attention for TPU, of whole rows and of rows with shared prompts.

The kernels are JAX's own (`jax.experimental.pallas.ops.tpu.splash_attention`). They see
keys of one segment's number alone, so a token that sees its own segment and a shared
prompt is attended for twice, and the two results become one by their logsumexp, as
blocks of keys do within such a kernel. Its backward pass takes the logsumexp and the
result of all keys, from which either half's share of the gradient follows (section 3.1
of FlashAttention-2, arXiv:2307.08691): nothing is approximated.
"""

import functools
import inspect
import typing
from typing import Any

import jax
import jax.numpy as jnp

from kernels.padding import BLOCK, pad, padded

NOWHERE = -1  # a segment that no key has
# What is taken of the library beyond what it promises, the backward pass: what it is
# given, and of how many parts its residuals are.
_BACKWARD = (
  'save_residuals mask_value is_mqa block_sizes residual_checkpoint_name mask_function '
  'attn_logits_soft_cap interpret res do'
).split()
_RESIDUALS = 9


def splash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None = None,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Splash attention, for TPU.

  q: `[B, T, H, d]`. k, v: `[B, T, K, d]`. segment_ids, prefix_ids: `[B, T]` int32, as
  `kernels.attention` has them. It goes through no block of keys that lies wholly after
  its queries. Returns `[B, T, H, d]`.
  """
  length, heads, dim = q.shape[1:]
  q, k, v, ids = pad((q * dim**-0.5, k, v, segment_ids), padded(length))
  run = _kernel(q.shape[1], heads, interpret, merged=prefix_ids is not None)
  q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
  if prefix_ids is None:
    out: Any = jax.vmap(run)(q, k, v, _library().SegmentIds(ids, ids))
  else:
    (prefix,) = pad((prefix_ids,), padded(length))
    out = _both(run, q, k, v, ids, jnp.where(prefix > 0, prefix, NOWHERE))
  return out.swapaxes(1, 2)[:, :length]


@functools.cache
def takes_prefixes() -> str:
  """Why rows with shared prompts cannot be attended by this jax; '' if they can."""
  backward = getattr(_library(), '_splash_attention_bwd', None)
  found = [] if backward is None else [*inspect.signature(backward).parameters]
  parts = len(typing.get_args(getattr(_library(), 'SplashResidualsType', None)))
  known = found == _BACKWARD and parts == _RESIDUALS
  return '' if known else 'does not take prefix_ids with this jax'


def _library() -> Any:
  """Imported where it is used: programs on the CPU need no Pallas."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

  return splash_attention_kernel


def _kernel(length: int, heads: int, interpret: bool, *, merged: bool) -> Any:
  """A row's. merged: it tells the logsumexp too, `[H, T]` float32."""
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  size = next(size for size in (512, 256, BLOCK) if length % size == 0)
  sizes = _library().BlockSizes(
    block_q=size,
    block_kv=size,
    block_kv_compute=size,
    block_q_dkv=size,
    block_kv_dkv=size,
    block_kv_dkv_compute=size,
    block_q_dq=size,
    block_kv_dq=size,
  )
  return _library().make_splash_mha(
    masks.MultiHeadMask([masks.CausalMask((length, length))] * heads),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
    save_residuals=merged,
    interpret=interpret,
  )


@jax.custom_vjp
def _both(
  run: Any, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, prefix: jax.Array
) -> jax.Array:
  """q: `[B, H, T, d]`. k, v: `[B, K, T, d]`. ids, prefix: `[B, T]`, segments seen."""
  return _forward(run, q, k, v, ids, prefix)[0]


def _forward(
  run: Any, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, prefix: jax.Array
) -> tuple[jax.Array, tuple]:
  def half(seen):
    out, (norm,) = jax.vmap(run)(q, k, v, _library().SegmentIds(seen, ids))
    return out.astype(jnp.float32), norm

  (own, own_norm), (shared, shared_norm) = half(ids), half(prefix)
  # One that sees no key has a logsumexp near the least number there is: it weighs 0.
  norm = jnp.logaddexp(own_norm, shared_norm)
  out = own * jnp.exp(own_norm - norm)[..., None]
  out += shared * jnp.exp(shared_norm - norm)[..., None]
  out = out.astype(q.dtype)
  return out, (run, q, k, v, ids, prefix, out, norm)


def _backward(kept: tuple, slope: jax.Array) -> tuple:
  run, q, k, v, ids, prefix, out, norm = kept

  def half(seen):
    def row(q, k, v, seen, ids, out, norm, slope):
      segments = _library().SegmentIds(seen, ids)
      masks = run.dq_mask_info, run.dkv_mask_info
      known = q, k, v, segments, None, out, norm, *masks
      found = _library()._splash_attention_bwd(**run.kwargs, res=known, do=slope)
      return found[3:6]

    return jax.vmap(row)(q, k, v, seen, ids, out, norm, slope)

  own, shared = half(ids), half(prefix)
  summed = (
    (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(x.dtype)
    for a, b, x in zip(own, shared, (q, k, v), strict=True)
  )
  return None, *summed, None, None


_both.defvjp(_forward, _backward)
