"""Kernels on this card, values and gradients, against float32 arithmetic."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import moe
from kernels import cudnn_attention, experts, paged_attention
from kernels.attention import attention
from kernels.token_logprobs import token_logprobs
from tests.benchmarks.gpu import device

Function = Callable[..., Any]
Case = tuple[
  str, Function, Function, list[jax.Array]
]  # name, kernel, plain jnp, inputs
# (rows, length, query heads, key heads, width of a head) of attention; (tokens, width,
# vocabulary) of log-probs; (tokens, width, width of an expert, experts, chosen ones) of
# experts; (slots, room, query heads, key heads, width of a head) of decode.
SIZES = {
  'attention': (2, 1024, 16, 8, 128),
  'logprobs': (2048, 1024, 32_768),
  'experts': (2048, 512, 256, 16, 4),
  'decode': (32, 1024, 16, 8, 128),
}
TINY = {
  'attention': (1, 64, 4, 2, 32),
  'logprobs': (16, 32, 512),
  'experts': (64, 32, 16, 4, 2),
  'decode': (3, 64, 4, 2, 32),
}


def normal(seed: int, *shape: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), shape)


def both_ways(run: Function) -> tuple[Function, ...]:
  """Returns `run` with kernels, and with plain jnp."""
  return tuple(functools.partial(run, kernels=way) for way in ('auto', 'reference'))


def attention_cases(sizes: tuple[int, ...]) -> Iterator[Case]:
  rows, length, heads, kv_heads, dim = sizes
  ids = jnp.broadcast_to(jnp.arange(length) * 4 // length + 1, (rows, length))
  whole = jnp.ones_like(ids)
  first = jnp.where(ids > 1, 1, 0)  # the second to the last segment see the first
  known = {'prefix_ids': first, 'row_segments': 4}
  for name, key_dim, segments, options in (
    ('four segments', dim, ids, {}),
    ('four known segments', dim, ids, {'row_segments': 4}),
    ('one segment', dim, whole, {'row_segments': 1}),
    ('shared prompt', dim, ids, {'prefix_ids': first}),
    ('shared prompt, known segments', dim, ids, known),
    ('window of 100', dim, whole, {'window': 100, 'row_segments': 1}),
    ('keys wider than values', 3 * dim // 2, whole, {}),
  ):
    shapes = (heads, key_dim), (kv_heads, key_dim), (kv_heads, dim)
    arrays = [normal(seed, rows, length, *shape) for seed, shape in enumerate(shapes)]
    run = functools.partial(attention, segment_ids=segments, **options)
    yield f'attention, {name}', *both_ways(run), arrays


def logprob_cases(sizes: tuple[int, ...]) -> Iterator[Case]:
  tokens, width, vocab = sizes
  targets = jax.random.randint(jax.random.key(3), (1, tokens), 0, vocab)

  def run(hidden, table, kernels):
    options = {'temperature': 0.8, 'entropy': True, 'nec': True}
    scores = token_logprobs(hidden, table, targets, kernels=kernels, **options)
    return scores.logprobs, scores.entropy, 30 * scores.nec

  arrays = [normal(1, 1, tokens, width) / width**0.5, normal(2, vocab, width)]
  yield 'log-probs, entropy, nec', *both_ways(run), arrays


def expert_cases(sizes: tuple[int, ...]) -> Iterator[Case]:
  tokens, width, inner, number, picks = sizes
  weights, chosen = jax.lax.top_k(jax.nn.sigmoid(normal(0, tokens, number)), picks)
  shapes = (number, width, inner), (number, width, inner), (number, inner, width)
  matrices = [normal(i + 1, *s) / s[1] ** 0.5 for i, s in enumerate(shapes)]
  x = normal(9, tokens, width)
  kernel = moe.select_implementation(x[None], 'auto', None)
  kernel, plain = (
    lambda x, *rest, way=way: way(x, chosen, *rest) for way in (kernel, experts.dense)
  )
  yield 'experts', kernel, plain, [x, weights, *matrices]


def decode_cases(sizes: tuple[int, ...]) -> Iterator[Case]:
  slots, room, heads, kv_heads, dim = sizes
  lengths = jax.random.randint(jax.random.key(3), (slots,), 1, room + 1)
  pages = normal(1, kv_heads, slots, room, dim), normal(2, kv_heads, slots, room, dim)
  run = functools.partial(paged_attention.paged_attention, lengths=lengths)
  arrays = [normal(0, slots, heads, dim), *pages]
  yield 'decode attention', *both_ways(run), arrays

  def of_slots(q, keys, values):
    kept = (pages.transpose(1, 2, 0, 3) for pages in (keys, values))
    return cudnn_attention.decode(q, *kept, lengths)

  if not cudnn_attention.decode_obstacle(heads, kv_heads, dim, 'bfloat16'):
    yield 'decode attention, cudnn', of_slots, both_ways(run)[1], arrays


CASES = {
  'logprobs': logprob_cases,
  'experts': expert_cases,
  'decode': decode_cases,
  'attention': attention_cases,
}


def with_gradients(function: Function) -> Function:
  """Returns a function of the values and of the gradients of a weighted sum of them."""

  def run(*arrays):
    values, pull = jax.vjp(function, *arrays)
    leaves, structure = jax.tree.flatten(values)
    weights = [normal(20 + i, *x.shape).astype(x.dtype) for i, x in enumerate(leaves)]
    return [*leaves, *pull(jax.tree.unflatten(structure, weights))]

  return run


def error(values: Any, exact: Any) -> float:
  """Returns the largest difference, divided by the largest value of the same array."""
  pairs = zip(jax.tree.leaves(values), jax.tree.leaves(exact), strict=True)
  return max(
    float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max()) for x, y in pairs
  )


def measure(tiny: bool = False) -> Iterator[dict[str, Any]]:
  """Yields by case and type the error, each time with those measured before."""
  rates, figures = device.rates(tiny), {}
  for part, cases in CASES.items():
    for name, kernel, plain, arrays in cases((TINY if tiny else SIZES)[part]):
      if part != 'decode':  # which is not differentiated
        kernel, plain = with_gradients(kernel), with_gradients(plain)
      run, exact = jax.jit(kernel), jax.jit(plain)
      for dtype in ('bfloat16', 'float32'):
        typed = [x.astype(dtype) for x in arrays]
        try:
          with jax.default_matmul_precision('highest'):
            wanted = exact(*(x.astype(jnp.float32) for x in typed))
          figures[f'{name}, {dtype}'] = {'error': error(run(*typed), wanted)}
        except Exception as caught:  # the next kernel may run
          why = f'{type(caught).__name__}: {str(caught).strip()[:160]}'
          figures[f'{name}, {dtype}'] = {'failed': why}
        yield {'cases': figures, **rates}
