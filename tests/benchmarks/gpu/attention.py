"""Attention over packed rows, forward and backward, against jax.nn's and tokamax's."""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kernels.attention import attention
from tests.benchmarks.gpu import device

# Label → (rows, length, query heads, key heads, width of a head).
SHAPES = {
  '4 × 4,096': (4, 4096, 16, 8, 128),
  '1 × 16,384': (1, 16_384, 16, 8, 128),
}
TINY = {'tiny': (1, 64, 4, 2, 32)}
SEGMENTS = 4  # of each row, where segments are seen at all


def implementations(
  segment_ids: jax.Array,
) -> dict[str, Callable[..., Any] | str]:
  """By label: (q, k, v) → out; a text in the place of one that is not here."""
  whole, prefix = jnp.ones_like(segment_ids), jnp.where(segment_ids > 1, 1, 0)
  off = device.reference(attention)
  plain = off if isinstance(off, str) else lambda q, k, v: off(q, k, v, whole)
  library = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  functions: dict[str, Callable[..., Any] | str] = {
    'kernels': lambda q, k, v: attention(q, k, v, whole, row_segments=1),
    f'kernels, {SEGMENTS} segments': lambda q, k, v: attention(
      q, k, v, segment_ids, row_segments=SEGMENTS
    ),
    f'kernels, a prompt and {SEGMENTS - 1} segments that read it': lambda q, k, v: (
      attention(q, k, v, segment_ids, prefix_ids=prefix, row_segments=SEGMENTS)
    ),
    'kernels, rows unknown': lambda q, k, v: attention(q, k, v, whole),
    'reference': plain,
    'jax.nn, xla': functools.partial(library, implementation='xla'),
    'jax.nn, cudnn': functools.partial(library, implementation='cudnn'),
  }
  try:
    tokamax: Any = importlib.import_module('tokamax')
    other = functools.partial(tokamax.dot_product_attention, is_causal=True)
  except (ImportError, AttributeError) as error:
    return functions | {'tokamax': f'{type(error).__name__}: {error}'}
  return functions | {'tokamax': other}


def flops(shape: tuple[int, ...]) -> float:
  """Of a causal forward pass: the half that is seen counts."""
  rows, length, heads, _, dim = shape
  return 2 * rows * length**2 * heads * dim


def measure(tiny: bool = False) -> Iterator[dict[str, Any]]:
  """shape → implementation → 'forward' and 'both': 'ms', 'mib', 'share'; so far."""
  rates, tables = device.rates(tiny), {}
  for label, shape in (TINY if tiny else SHAPES).items():
    rows, length, heads, kv_heads, dim = shape
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (rows, length, heads, dim), jnp.bfloat16)
    k, v = (
      jax.random.normal(key, (rows, length, kv_heads, dim), jnp.bfloat16)
      for key in keys[1:]
    )
    ids = jnp.arange(length) * SEGMENTS // length + 1
    ids = jnp.broadcast_to(ids.astype(jnp.int32), (rows, length))
    table = tables[label] = {}
    for name, function in implementations(ids).items():
      if isinstance(function, str):
        table[name] = {'failed': function}
        continue
      table[name] = costs = device.both(function, (0, 1, 2), q, k, v)
      parts = 1.0
      if 'segments' in name:  # pairs: the triangles of all, and what reads the prompt
        reading = 2 * (SEGMENTS - 1) if 'prompt' in name else 0
        parts = SEGMENTS**2 / (SEGMENTS + reading)
      for key, times in (('forward', 1.0), ('both', 3.5)):
        if 'ms' in costs[key]:
          least = 1e3 * times * flops(shape) / parts / rates['flops']
          costs[key]['share'] = least / costs[key]['ms']
      yield {'shapes': tables, **rates}
