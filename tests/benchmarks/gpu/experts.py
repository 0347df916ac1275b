"""A mixture of experts over a micro-batch's tokens, against plain ways of XLA."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import moe
from kernels import experts
from tests.benchmarks.gpu import device

# Label → (tokens, width, width of an expert, experts, those that a token takes).
SHAPES = {'Qwen3-30B-A3B, 16,384 tokens': (16_384, 2048, 768, 128, 8)}
TINY = {'tiny': (64, 32, 16, 4, 2)}


def implementations(x: jax.Array, chosen: jax.Array) -> dict[str, Callable[..., Any]]:
  """By label: (x, weights, gate, up, down) → y."""
  ways = {
    'kernels': moe.select_implementation(x[None], 'auto', None),
    'reference': experts.dense,
    'jax.lax.ragged_dot': experts.ragged,
  }
  return {
    name: lambda x, *rest, way=way: way(x, chosen, *rest) for name, way in ways.items()
  }


def measure(tiny: bool = False) -> Iterator[dict[str, Any]]:
  """shape → implementation → 'forward' and 'both': 'ms', 'mib', 'share'; so far."""
  rates, tables = device.rates(tiny), {}
  for label, (tokens, width, inner, number, picks) in (
    TINY if tiny else SHAPES
  ).items():
    keys = jax.random.split(jax.random.key(0), 5)
    scores = jax.random.uniform(keys[0], (tokens, number))
    weights, chosen = jax.lax.top_k(scores, picks)
    x = jax.random.normal(keys[1], (tokens, width), jnp.bfloat16)
    shapes = (number, width, inner), (number, width, inner), (number, inner, width)
    matrices = [
      0.02 * jax.random.normal(key, shape, jnp.bfloat16)
      for key, shape in zip(keys[2:], shapes, strict=True)
    ]
    table = tables[label] = {}
    for name, function in implementations(x, chosen).items():
      arrays = x, weights, *matrices
      table[name] = costs = device.both(function, tuple(range(5)), *arrays)
      for key, times in (('forward', 1), ('both', 3)):
        if 'ms' in costs[key]:  # of what is chosen
          flops = times * 6 * tokens * picks * width * inner
          costs[key]['share'] = 1e3 * flops / rates['flops'] / costs[key]['ms']
      yield {'shapes': tables, **rates}
