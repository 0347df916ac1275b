"""Each kernel's results and gradients on this card against float32 arithmetic."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import moe
from kernels import experts, paged_attention
from kernels.attention import attention
from kernels.token_logprobs import token_logprobs
from tests.benchmarks.gpu import device

Function = Callable[..., Any]
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


def attention_cases(
  sizes: tuple[int, ...],
) -> Iterator[tuple[str, Function, Function, list[jax.Array]]]:
  rows, length, heads, kv_heads, dim = sizes
  ids = jnp.broadcast_to(jnp.arange(length) * 4 // length + 1, (rows, length))
  whole = jnp.ones_like(ids)
  first = jnp.where(ids > 1, 1, 0)  # the second to the last segment see the first
  options: dict[str, dict[str, Any]] = {
    'four segments': {'segment_ids': ids},
    'shared prompt': {'segment_ids': ids, 'prefix_ids': first},
    'window of 100': {'window': 100},
  }
  for name, given in options.items():
    segments = given.pop('segment_ids', whole)

    def run(q, k, v, kernels, segments=segments, given=given):
      return attention(q, k, v, segments, kernels=kernels, **given)

    shapes = [(rows, length, count, dim) for count in (heads, kv_heads, kv_heads)]
    arrays = [normal(seed, *shape) for seed, shape in enumerate(shapes)]
    pair = (
      functools.partial(run, kernels=kernels) for kernels in ('auto', 'reference')
    )
    yield f'attention, {name}', *pair, arrays
  wide = [normal(seed, *shape[:-1], 3 * dim // 2) for seed, shape in enumerate(shapes)]
  wide[2] = wide[2][..., :dim]
  yield (
    'attention, keys wider than values',
    *(
      lambda q, k, v, kernels=kernels: attention(q, k, v, whole, kernels=kernels)
      for kernels in ('auto', 'reference')
    ),
    wide,
  )


def logprob_cases(sizes):
  tokens, width, vocab = sizes
  targets = jax.random.randint(jax.random.key(3), (1, tokens), 0, vocab)

  def run(hidden, table, kernels):
    options = {'temperature': 0.8, 'entropy': True, 'nec': True}
    scores = token_logprobs(hidden, table, targets, kernels=kernels, **options)
    return scores.logprobs, scores.entropy, 30 * scores.nec

  arrays = [normal(1, 1, tokens, width) / width**0.5, normal(2, vocab, width)]
  pair = (functools.partial(run, kernels=kernels) for kernels in ('auto', 'reference'))
  yield 'log-probs, entropy, nec', *pair, arrays


def expert_cases(sizes):
  tokens, width, inner, number, picks = sizes
  weights, chosen = jax.lax.top_k(jax.nn.sigmoid(normal(0, tokens, number)), picks)
  shapes = (number, width, inner), (number, width, inner), (number, inner, width)
  matrices = [normal(i + 1, *s) / s[1] ** 0.5 for i, s in enumerate(shapes)]
  x = normal(9, tokens, width)
  kernel = moe.select_implementation(x[None], 'auto', None)
  pair = (
    lambda x, *rest, way=way: way(x, chosen, *rest) for way in (kernel, experts.dense)
  )
  yield 'experts', *pair, [x, weights, *matrices]


def decode_cases(sizes):
  slots, room, heads, kv_heads, dim = sizes
  lengths = jax.random.randint(jax.random.key(3), (slots,), 1, room + 1)
  pages = normal(1, kv_heads, slots, room, dim), normal(2, kv_heads, slots, room, dim)
  pair = (
    functools.partial(paged_attention.paged_attention, lengths=lengths, kernels=kernels)
    for kernels in ('auto', 'reference')
  )
  yield 'decode attention', *pair, [normal(0, slots, heads, dim), *pages]


CASES = {
  'logprobs': logprob_cases,
  'experts': expert_cases,
  'decode': decode_cases,
  'attention': attention_cases,
}


def with_gradients(function: Function, learns: bool) -> Function:
  """Returns what computes the values and, if it learns, gradients of a sum of them."""

  def run(*arrays):
    values, pull = jax.vjp(function, *arrays)
    leaves, structure = jax.tree.flatten(values)
    weights = [normal(20 + i, *x.shape).astype(x.dtype) for i, x in enumerate(leaves)]
    return [*leaves, *pull(jax.tree.unflatten(structure, weights))]

  if learns:
    return jax.jit(run)
  return jax.jit(lambda *arrays: jax.tree.leaves(function(*arrays)))


def error(values: list[jax.Array], exact: list[jax.Array]) -> float:
  """The largest difference, by the largest number of the same array."""
  pairs = zip(values, exact, strict=True)
  return max(
    float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max()) for x, y in pairs
  )


def measure(tiny: bool = False) -> Iterator[dict[str, Any]]:
  """(kernel, case, type) → the largest error, beside the largest number; so far."""
  rates, figures = device.rates(tiny), {}
  for part, cases in CASES.items():
    for name, kernel, plain, arrays in cases((TINY if tiny else SIZES)[part]):
      run, exact = (with_gradients(way, part != 'decode') for way in (kernel, plain))
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
