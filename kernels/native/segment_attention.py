"""Causal attention within segments on a CPU, as `segment_attention.c` computes it.

Each query meets only the blocks of keys that it may see, so that packed rows need not
be taken apart. The backward pass computes the weights again: of the forward pass it
keeps two numbers of each query and head.
"""

import functools
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels.dispatch import Candidate
from kernels.native import library

TARGET = 'jaxrl_attention'  # that of gradients ends in '_back'
MAX_WIDTH, PARTS = 512, 2  # as in segment_attention.c
MOST_LANES, MOST_QUERIES, NUM_LINES = 16, 8, 12  # at most: what scratch memory is for


def candidate(
  q: jax.Array, k: jax.Array, v: jax.Array, asked: Collection[str]
) -> Candidate:
  """Returns `segment_attention`, or why it cannot be used.

  Args:
    q: As for `segment_attention`.
    k: As there.
    v: As there.
    asked: The options of `kernels.attention.attention` that are set.
  """
  if others := set(asked) - {'prefix_ids', 'scale'}:
    return f'takes no {", ".join(sorted(others))}'
  if any(x.dtype != jnp.float32 for x in (q, k, v)):
    return f'takes float32, not {q.dtype}'
  if v.shape != k.shape:
    return 'takes values as wide as keys'
  if why := library.obstacle():
    return why
  lanes, width = library.widths().lanes, q.shape[-1]
  if width % lanes or width > MAX_WIDTH:
    return f'takes a head_dim up to {MAX_WIDTH} that {lanes} divides, not {width}'
  return segment_attention


def segment_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None = None,
  *,
  scale: float | None = None,
) -> jax.Array:
  """Computes `kernels.attention.attention` in float32.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    v: Values `[B, T, K, d]`.
    segment_ids: `[B, T]` int32, 0 at padding.
    prefix_ids: `[B, T]` int32, or None.
    scale: Factor on scores; None for d^−½.

  Returns:
    `[B, T, H, d]`, 0 at padding.

  Raises:
    OSError: If the kernel cannot be compiled or loaded here.
  """
  library.widths()
  if prefix_ids is None:
    prefix_ids = jnp.zeros_like(segment_ids)
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  return _attend(q, k, v, segment_ids, prefix_ids, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array,
  scale: float,
) -> jax.Array:
  return _forward(q, k, v, segment_ids, prefix_ids, scale)[0]


def _forward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array,
  scale: float,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  batch, length, heads, _ = q.shape
  shapes = [q.shape, (batch, heads, length, 2), _scratch(q, k, parts=PARTS)]
  inputs = q, k, v, segment_ids, prefix_ids
  out, stats, _ = _call(TARGET, (*inputs, jnp.float32(scale)), shapes)
  # Policies that keep the output of attention keep this, and compute nothing again.
  return out, (*inputs, checkpoint_name(stats, 'attention'))


def _backward(
  scale: float, kept: tuple[jax.Array, ...], of_out: jax.Array
) -> tuple[jax.Array | None, ...]:
  *inputs, stats = kept
  arrays = *inputs, jnp.float32(scale), stats, of_out
  shapes = [x.shape for x in inputs[:3]] + [_scratch(*inputs[:2], has_gradients=True)]
  return *_call(TARGET + '_back', arrays, shapes)[:3], None, None


_attend.defvjp(_forward, _backward)


def _scratch(
  q: jax.Array, k: jax.Array, *, parts: int = 1, has_gradients: bool = False
) -> tuple[int, int]:
  """Returns the shape of scratch memory, float32, that is enough on any processor."""
  (rows, length, heads, width), kv_heads = q.shape, k.shape[2]
  group, padded = heads // kv_heads, -(-length // MOST_LANES) * MOST_LANES
  arrays, weights = (4, 2) if has_gradients else (1, 1)
  floats = padded * (arrays * width + weights * group * MOST_QUERIES)
  floats += 4 * padded  # segments of keys and what is known of blocks
  pointers = 4 * group * MOST_QUERIES
  return rows * kv_heads * parts, floats + pointers + NUM_LINES * MOST_LANES


def _call(
  target: str, arrays: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]]
) -> Sequence[jax.Array]:
  out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return jax.ffi.ffi_call(target, out, vmap_method='sequential')(*arrays)
