"""Flash attention adapts the kernels of JAX's own libraries to `kernels.attention`.

Each kernel takes the arguments of `attention`. It pads sequences to a length that it
supports; no token attends to the padding. Pallas is imported inside the functions,
because programs on CPU do not need it.

In splash attention, a query attends to the keys of one segment only. If a token also
attends to a shared prompt, the kernel runs twice, once for the token's own segment and
once for the prompt. The two outputs are combined by their logsumexp, in the same way as
a flash attention kernel combines blocks of keys. The backward pass of each run gets the
combined output and logsumexp, which makes its gradients exact (section 3.1 of
FlashAttention-2, arXiv 2307.08691).
"""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

MIN_LENGTH = 128  # lengths are multiples of it; shorter ones are not worth a kernel


def padded_length(length: int) -> int:
  """Rounds a length up to a multiple of the block size.

  Longer sequences have larger blocks.

  Args:
    length: Number of tokens.

  Returns:
    The padded length.
  """
  block = MIN_LENGTH if length <= 8 * MIN_LENGTH else 4 * MIN_LENGTH
  return -(-length // block) * block


def pad_to_length(arrays: tuple[jax.Array, ...], length: int) -> list[jax.Array]:
  """Pads arrays with zeros at the end of axis 1.

  Args:
    arrays: Arrays `[B, T, …]`.
    length: New length.

  Returns:
    Arrays `[B, length, …]`.
  """

  def wide(x):
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))

  return [wide(x) for x in arrays]


NO_SEGMENT = -1  # a segment that no key has
# Shared prompts call the library's private backward pass. These are the parameters and
# the number of residuals that this file expects; `prefix_obstacle` checks them.
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
  sinks: jax.Array | None = None,
  window: int = 0,
  softcap: float = 0.0,
  scale: float | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Computes splash attention, for TPU.

  The kernel skips blocks of keys that lie entirely after its queries or entirely
  outside their windows.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    v: Values `[B, T, K, d]`.
    segment_ids: Segments `[B, T]` int32; 0 is padding.
    prefix_ids: Another segment that each token attends to, `[B, T]` int32, or None. It
      cannot be combined with sinks or a window.
    sinks: As in `attention`.
    window: As in `attention`.
    softcap: As in `attention`.
    scale: As in `attention`.
    interpret: Whether to run the kernel in Pallas's interpreter, without an
      accelerator.

  Returns:
    Output `[B, T, H, d]`.
  """
  length, heads, dim = q.shape[1:]
  q = q * (dim**-0.5 if scale is None else scale)
  q, k, v, ids = pad_to_length((q, k, v, segment_ids), padded_length(length))
  rules = {'merged': prefix_ids is not None, 'window': window, 'softcap': softcap}
  run = _kernel(q.shape[1], heads, interpret, **rules)
  q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
  if prefix_ids is None:
    segments = _library().SegmentIds(ids, ids)
    sink_args = () if sinks is None else (sinks,)
    axes = (0, 0, 0, 0, *(None for _ in sink_args))
    out: Any = jax.vmap(run, axes)(q, k, v, segments, *sink_args)
  else:
    (prefix,) = pad_to_length((prefix_ids,), padded_length(length))
    out = _attend_twice(run, q, k, v, ids, jnp.where(prefix > 0, prefix, NO_SEGMENT))
  return out.swapaxes(1, 2)[:, :length]


@functools.cache
def prefix_obstacle() -> str:
  """Returns why splash attention cannot take prefix_ids with this jax; '' if it can."""
  backward = getattr(_library(), '_splash_attention_bwd', None)
  parameters = [] if backward is None else [*inspect.signature(backward).parameters]
  parts = len(typing.get_args(getattr(_library(), 'SplashResidualsType', None)))
  known = parameters == _BACKWARD and parts == _RESIDUALS
  return '' if known else 'does not take prefix_ids with this jax'


def _library() -> Any:
  """Imports splash attention lazily, because programs on CPU need no Pallas."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

  return splash_attention_kernel


def _kernel(
  length: int,
  heads: int,
  interpret: bool,
  *,
  merged: bool,
  window: int = 0,
  softcap: float = 0.0,
) -> Any:
  """Builds the splash attention kernel for one row.

  Args:
    length: Padded length of the row.
    heads: Number of query heads.
    interpret: As in `splash`.
    merged: Whether the kernel also returns the logsumexp, `[H, T]` float32.
    window: As in `attention`.
    softcap: As in `attention`.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  size = next(size for size in (512, 256, MIN_LENGTH) if length % size == 0)
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
  shape = (length, length)
  mask = masks.CausalMask(shape)
  if window:
    mask = masks.LocalMask(shape, (window - 1, 0), 0)
  return _library().make_splash_mha(
    masks.MultiHeadMask([mask] * heads),
    attn_logits_soft_cap=softcap or None,
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
    save_residuals=merged,
    interpret=interpret,
  )


@jax.custom_vjp
def _attend_twice(
  run: Any,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  ids: jax.Array,
  prefix: jax.Array,
) -> jax.Array:
  """Computes attention to a token's own segment and to a prefix segment.

  Args:
    run: Kernel from `_kernel`, with `merged`.
    q: Queries `[B, H, T, d]`.
    k: Keys `[B, K, T, d]`.
    v: Values `[B, K, T, d]`.
    ids: Own segments `[B, T]`.
    prefix: Prefix segments `[B, T]`; NO_SEGMENT for none.
  """
  return _forward(run, q, k, v, ids, prefix)[0]


def _forward(
  run: Any, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, prefix: jax.Array
) -> tuple[jax.Array, tuple]:
  def half(seen):
    out, (norm,) = jax.vmap(run)(q, k, v, _library().SegmentIds(seen, ids))
    return out.astype(jnp.float32), norm

  (own_out, own_norm), (shared_out, shared_norm) = half(ids), half(prefix)
  # If a query has no keys in a segment, its logsumexp there is close to the smallest
  # float32, so that the output gets weight 0.
  norm = jnp.logaddexp(own_norm, shared_norm)
  out = own_out * jnp.exp(own_norm - norm)[..., None]
  out += shared_out * jnp.exp(shared_norm - norm)[..., None]
  out = out.astype(q.dtype)
  return out, (run, q, k, v, ids, prefix, out, norm)


def _backward(kept: tuple, slope: jax.Array) -> tuple:
  run, q, k, v, ids, prefix, out, norm = kept

  def half(seen):
    def row(q, k, v, seen, ids, out, norm, slope):
      segments = _library().SegmentIds(seen, ids)
      masks = run.dq_mask_info, run.dkv_mask_info
      known = q, k, v, segments, None, out, norm, *masks
      grads = _library()._splash_attention_bwd(**run.kwargs, res=known, do=slope)
      return grads[3:6]

    return jax.vmap(row)(q, k, v, seen, ids, out, norm, slope)

  own_grads, shared = half(ids), half(prefix)
  summed = (
    (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(x.dtype)
    for a, b, x in zip(own_grads, shared, (q, k, v), strict=True)
  )
  return None, *summed, None, None


_attend_twice.defvjp(_forward, _backward)


def candidates(
  q: jax.Array,
  k: jax.Array,
  prefix_ids: jax.Array | None,
  *,
  platform: str,
  row_segments: int = 0,
  sinks: bool = False,
  window: int = 0,
  softcap: float = 0.0,
  scale: float | None = None,
) -> dict[str, Callable[..., jax.Array] | str]:
  """Returns the kernels for a platform.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    prefix_ids: Another segment that each token attends to, `[B, T]` int32, or None.
    platform: Platform to compile for: 'cpu', 'gpu' or 'tpu'.
    row_segments: As in `attention`.
    sinks: Whether there are sinks.
    window: As in `attention`.
    softcap: As in `attention`.
    scale: As in `attention`. Every kernel supports it.

  Returns:
    The kernels by name, the best first. A string in place of a function is the reason
    why that kernel cannot be used.
  """
  del scale
  has_prefix = prefix_ids is not None
  if platform == 'tpu':
    why = _shape_obstacle(q) or (prefix_obstacle() if has_prefix else '')
    if has_prefix:
      why = why or _lacks('beside shared prompts', window=window, sinks=sinks)
    return {'splash': why or splash}
  if platform == 'gpu':
    from kernels import cudnn_attention  # for GPUs alone

    rows = {'has_prefix': has_prefix, 'row_segments': row_segments, 'window': window}
    found = cudnn_attention.candidates(q, k, **rows)
    if has_prefix:
      from kernels import cudnn_shared_prompts  # for packed rows alone

      del rows['has_prefix']
      found = cudnn_shared_prompts.candidates(q, k, **rows) | found
    if why := _shape_obstacle(q) or _lacks(sinks=sinks, softcap=softcap):
      found = dict.fromkeys(found, why)
    return dict(found)
  return {}


def _lacks(where: str = '', **features: object) -> str:
  """Names the requested features, as ones that a kernel lacks; '' if there are none."""
  names = [name for name, value in features.items() if value]
  return f'does not take {" and ".join(names)} {where}'.rstrip() if names else ''


def _shape_obstacle(q: jax.Array) -> str:
  """Returns why a kernel cannot take these arrays; '' if it can."""
  length, dim = q.shape[1], q.shape[-1]
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    return f'does not take {q.dtype.name}'
  if length < MIN_LENGTH:
    return f'is for sequences from {MIN_LENGTH} tokens on, not of {length}'
  return 'needs a head_dim from 16 on' if dim < 16 else ''
