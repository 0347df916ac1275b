"""Attention from one query per slot to a cache in chunks, on a CPU.

`chunk_attention.c` reads each key and value once, up to the slot's own position. Where
it cannot be compiled or does not take a cache, `obstacle` says so, and
`kernels.attention.decode_attention` computes the same in plain jnp.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kernels.attention import decode_attention
from kernels.dispatch import REFERENCE, choose, only_on, platform_of
from kernels.native import library

TARGET = 'jaxrl_chunk_attention'
DTYPES = ('float32', 'bfloat16')
MAX_WIDTH, MAX_CHUNKS, MULTIPLE = 512, 16, 32  # as in chunk_attention.c

Chunks = tuple[jax.Array, ...]


def obstacle(
  platform: str | None,
  k_chunks: Sequence[jax.Array],
  v_chunks: Sequence[jax.Array],
  *,
  sinks: jax.Array | None = None,
  window: int = 0,
  softcap: float = 0.0,
  scale: float | None = None,
  kernels: str = 'auto',
) -> str:
  """Returns why the kernel does not read a cache; '' if it does, which is logged.

  Args:
    platform: The platform to compile for; None for this process's own.
    k_chunks: As for `decode`.
    v_chunks: As for `decode`; () if the keys are also the values.
    sinks: As in `decode_attention`, like window and softcap.
    window: As there.
    softcap: As there.
    scale: As for `decode`. The kernel takes any.
    kernels: As in `kernels.dispatch`.
  """
  del scale
  platform = platform_of(platform)
  able = only_on('cpu', decode, platform=platform)
  if not isinstance(able, str) and kernels != REFERENCE:
    has_extras = sinks is not None or bool(window) or bool(softcap)
    able = 'takes neither sinks nor a window nor a softcap' if has_extras else ''
    able = able or _obstacle(k_chunks, v_chunks) or decode
  candidates = {'native': able, REFERENCE: decode_attention}
  name = choose('cached attention', candidates, platform=platform, option=kernels)
  if name == 'native':
    return ''
  return able if isinstance(able, str) else 'not asked for'


def _obstacle(k_chunks: Sequence[jax.Array], v_chunks: Sequence[jax.Array]) -> str:
  width, dtype = k_chunks[0].shape[2], k_chunks[0].dtype
  if len(v_chunks) != len(k_chunks):
    return 'takes no keys that are also the values'
  if len(k_chunks) > MAX_CHUNKS or any(k.shape[3] % MULTIPLE for k in k_chunks):
    return f'takes up to {MAX_CHUNKS} chunks of multiples of {MULTIPLE} positions'
  if dtype.name not in DTYPES:
    return f'takes {" or ".join(DTYPES)}, not {dtype}'
  if why := library.obstacle():
    return why
  lanes = library.widths().lanes
  if width % lanes or width > MAX_WIDTH:
    return f'takes a head_dim up to {MAX_WIDTH} that {lanes} divides, not {width}'
  return ''


def decode(
  q: jax.Array,
  k_chunks: Sequence[jax.Array],
  v_chunks: Sequence[jax.Array],
  positions: jax.Array,
  limit: jax.Array | None,
  *,
  scale: float | None = None,
) -> jax.Array:
  """Computes attention, on a CPU.

  A slot's bits depend neither on other slots nor on the number of threads. There is no
  gradient.

  Args:
    q: Queries `[S, H, d]`.
    k_chunks: Keys of consecutive chunks of C positions, each `[S, K, d, C]`.
    v_chunks: Values of the chunks, each `[S, K, C, d]`.
    positions: Position of each query, `[S]` int32, at least 0.
    limit: Scalar int32. A slot whose position is not below it is idle: nothing of its
      cache is read, and its output is 0. None for no limit.
    scale: Factor on the products of queries and keys; None for d^−½.

  Returns:
    Output `[S, H, d]` float32.
  """
  out, *_ = _call(q, (), k_chunks, v_chunks, positions, limit, scale)
  return out


def write_and_decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_chunks: Sequence[jax.Array],
  v_chunks: Sequence[jax.Array],
  positions: jax.Array,
  limit: jax.Array | None,
  *,
  scale: float | None = None,
) -> tuple[jax.Array, Chunks, Chunks]:
  """Writes the key and value of each query's position, and then computes attention.

  Args:
    q: As for `decode`.
    k: Keys `[S, K, d]`.
    v: Values `[S, K, d]`.
    k_chunks: As for `decode`. They are overwritten in place if nothing else reads them.
    v_chunks: Likewise.
    positions: As for `decode`. Nothing is written at one outside of all chunks.
    limit: As for `decode`.
    scale: As for `decode`.

  Returns:
    Output `[S, H, d]` float32, and the chunks.
  """
  dtype, count = k_chunks[0].dtype, len(k_chunks)
  new = k.astype(dtype), v.astype(dtype)
  out, *chunks = _call(q, new, k_chunks, v_chunks, positions, limit, scale)
  return out, tuple(chunks[:count]), tuple(chunks[count:])


def _call(
  q: jax.Array,
  new: Sequence[jax.Array],
  k_chunks: Sequence[jax.Array],
  v_chunks: Sequence[jax.Array],
  positions: jax.Array,
  limit: jax.Array | None,
  scale: float | None,
) -> Sequence[jax.Array]:
  """Returns the output, and the chunks if there are new keys and values."""
  library.widths()
  chunks = (*k_chunks, *v_chunks)
  if limit is None:
    limit = jnp.int32(sum(k.shape[3] for k in k_chunks))
  q = q.astype(jnp.float32) * (q.shape[-1] ** -0.5 if scale is None else scale)
  before = q, positions.astype(jnp.int32), jnp.asarray(limit, jnp.int32), *new
  written = chunks if new else ()
  call = jax.ffi.ffi_call(
    TARGET,
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *written)],
    input_output_aliases={len(before) + i: 1 + i for i in range(len(written))},
  )
  return call(*before, *chunks)
