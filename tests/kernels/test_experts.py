"""Both ways of mixing experts, against loops over tokens in float64."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import moe
from kernels import experts
from launch.planning import targets
from tests.marks import slow

TOKENS, WIDTH, INNER, EXPERTS, PICKS = 11, 6, 5, 4, 3
NAMES = ('x', 'weights', 'gate', 'up', 'down')


def arrays(seed=0):
  draw = np.random.default_rng(seed)
  chosen = draw.permuted(np.tile(np.arange(EXPERTS), (TOKENS, 1)), axis=1)[:, :PICKS]
  chosen[chosen == 2] = 1  # an expert of no one, and tokens that take one twice
  chosen[3], chosen[4, 1] = EXPERTS, -1  # and some of nobody here
  shapes = {
    'x': (TOKENS, WIDTH),
    'weights': (TOKENS, PICKS),
    'gate': (EXPERTS, WIDTH, INNER),
    'up': (EXPERTS, WIDTH, INNER),
    'down': (EXPERTS, INNER, WIDTH),
  }
  return chosen, {k: draw.standard_normal(shape) for k, shape in shapes.items()}


def by_hand(chosen, x, weights, gate, up, down):
  y = np.zeros_like(x)
  for n, j in np.ndindex(chosen.shape):
    e = chosen[n, j]
    if 0 <= e < EXPERTS:
      a = x[n] @ gate[e]
      inner = a / (1 + np.exp(-a)) * (x[n] @ up[e])
      y[n] += weights[n, j] * (inner @ down[e])
  return y


RANK = 2


def adapted(inputs, seed=5):
  """`inputs` with low-rank matrices beside each, and with these merged."""
  draw, merged, apart = np.random.default_rng(seed), dict(inputs), dict(inputs)
  for name in ('gate', 'up', 'down'):
    kernel = inputs[name]
    a = draw.standard_normal((*kernel.shape[:2], RANK))
    b = draw.standard_normal((EXPERTS, RANK, kernel.shape[2]))
    apart[name] = experts.Adapted(kernel, a, b)
    merged[name] = kernel + a @ b
  return apart, merged


def of(way, chosen, inputs, dtype='float32'):
  cast = jax.tree.map(lambda x: jnp.asarray(x, dtype), inputs)
  cast['weights'] = jnp.asarray(inputs['weights'], jnp.float32)
  return jax.jit(way)(cast.pop('x'), jnp.asarray(chosen, jnp.int32), **cast)


@pytest.mark.parametrize('way', [experts.dense, experts.ragged, experts.grouped])
@pytest.mark.parametrize(('dtype', 'atol'), [('float32', 2e-5), ('bfloat16', 0.4)])
def test_values(way, dtype, atol):
  chosen, inputs = arrays()
  y = of(way, chosen, inputs, dtype)
  assert y.dtype == dtype
  np.testing.assert_allclose(y.astype(float), by_hand(chosen, **inputs), atol=atol)


@pytest.mark.parametrize(
  'way',
  [
    experts.dense,
    experts.ragged,
    slow(experts.grouped),
  ],
)
def test_adapted_matrices_are_as_merged_ones(way):
  chosen, inputs = arrays()
  apart, merged = adapted(inputs)
  toward = np.random.default_rng(2).standard_normal((TOKENS, WIDTH))

  def loss(inputs):
    y = of(way, chosen, inputs)
    return (y * toward).sum(), y

  slope = jax.jit(jax.grad(loss, has_aux=True))
  grads, y = slope(jax.tree.map(np.float32, apart))
  want, _ = slope(jax.tree.map(np.float32, merged))
  np.testing.assert_allclose(y, by_hand(chosen, **merged), rtol=1e-4, atol=1e-4)
  for name in ('gate', 'up', 'down'):
    whole, (_, a, b) = want[name], apart[name]
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-3)
    close(grads[name].kernel, whole)
    close(grads[name].a, whole @ b.swapaxes(1, 2))
    close(grads[name].b, a.swapaxes(1, 2) @ whole)


@pytest.mark.parametrize('way', [experts.dense, experts.ragged, experts.grouped])
def test_gradients_against_differences(way):
  chosen, inputs = arrays(1)
  toward = np.random.default_rng(2).standard_normal((TOKENS, WIDTH))
  loss = jax.jit(jax.grad(lambda inputs: (of(way, chosen, inputs) * toward).sum()))
  grads = loss({k: jnp.float32(v) for k, v in inputs.items()})
  draw, step = np.random.default_rng(3), 1e-6
  for name in NAMES:
    direction = draw.standard_normal(inputs[name].shape)
    up = by_hand(chosen, **inputs | {name: inputs[name] + step * direction})
    down = by_hand(chosen, **inputs | {name: inputs[name] - step * direction})
    expected = ((up - down) * toward).sum() / (2 * step)
    np.testing.assert_allclose((grads[name] * direction).sum(), expected, rtol=2e-4)


def test_a_token_of_the_dense_way_has_the_same_bits_in_any_company():
  chosen, inputs = arrays()
  whole = of(experts.dense, chosen, inputs)
  other = inputs | {'x': np.where(np.arange(TOKENS)[:, None] == 5, inputs['x'], 9.0)}
  np.testing.assert_array_equal(of(experts.dense, chosen, other)[5], whole[5])


def compiled(machine, run, dtype=jnp.bfloat16):
  """`run` as compiled for 1024 rows, 2 picks each of 512 tokens, 256 wide."""
  if why := targets.missing_compiler(targets.parse_target(machine)):
    pytest.skip(f'{why} is not installed: make env-targets')
  one = jax.sharding.SingleDeviceSharding(targets.target_devices(machine)[0])
  shapes = {
    'x': (512, 256),
    'chosen': (512, 2),
    'weights': (512, 2),
    'gate': (EXPERTS, 256, 128),
    'up': (EXPERTS, 256, 128),
    'down': (EXPERTS, 128, 256),
  }
  dtypes = {'chosen': jnp.int32, 'weights': jnp.float32}
  args = {
    name: jax.ShapeDtypeStruct(shape, dtypes.get(name, dtype), sharding=one)
    for name, shape in shapes.items()
  }
  return jax.jit(run).lower(**args).compile()


@pytest.mark.targets
def test_on_a_tpu_a_grouped_product_does_the_chosen_work():
  chosen = 2 * 1024 * 3 * 256 * 128
  flops = compiled('v5p:1x1x1', experts.ragged).cost_analysis()['flops']
  assert 1 <= flops / chosen < 1.1


@pytest.mark.targets
def test_on_a_gpu_xla_multiplies_every_row_by_every_expert():
  """Why GPUs have a way of their own; once this fails, they can have XLA's."""
  text = compiled('h200:1', experts.ragged).as_text()
  product_shapes = re.findall(r'= \w+\[([\d,]+)\]\S* dot\(', text)
  sizes = [math.prod(map(int, shape.split(','))) for shape in product_shapes]
  assert sum(sizes) >= EXPERTS * 1024 * (128 + 128 + 256)


def products(text):
  """Of a program, the elements of each matrix product and the line that names it."""
  found = re.findall(r'= \w+\[([\d,]+)\]\S* dot\((.*)', text)
  return [(math.prod(map(int, shape.split(','))), line) for shape, line in found]


@pytest.mark.targets
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_on_a_gpu_products_are_of_a_tile_of_each_group(dtype):
  """Two products, for the value of the third is not asked for, and the gradients of
  all three by rows and by matrices.
  """

  def slope(x, chosen, weights, gate, up, down):
    way = moe.select_implementation(
      jax.ShapeDtypeStruct((1, *x.shape), x.dtype), 'auto', 'cuda'
    )

    def total(x, gate, up, down):
      return way(x, chosen, weights, gate, up, down).astype(jnp.float32).sum()

    return jax.grad(total, (0, 1, 2, 3))(x, gate, up, down)

  text = compiled('h200:1', slope, dtype).as_text()
  assert 'xla.gpu.triton' not in text  # no kernel but XLA's own
  tile = 2 * 1024 // (2 * EXPERTS)
  by_rows, by_matrices = EXPERTS * tile * 256, EXPERTS * 256 * 128
  sizes = sorted(size for size, _ in products(text))
  assert len(sizes) == 8 and sizes[-1] <= max(by_rows, by_matrices)
  outer = [size for size, line in products(text) if 'grouped_outer' in line]
  assert outer == [by_matrices] * 3


@pytest.mark.targets
@pytest.mark.parametrize(
  ('machine', 'way'), [('v5p:1x1x1', experts.ragged), ('h200:1', experts.grouped)]
)
def test_of_frozen_matrices_with_adapters_no_gradient_is_computed(machine, way):
  """By the compiler's count, or of GPUs by the products: one each of what learns."""

  def slope(x, chosen, weights, gate, up, down):
    def beside(kernel):
      experts_, inputs, outputs = kernel.shape
      a = jnp.full((experts_, inputs, 16), 0.5, kernel.dtype)
      return a, jnp.full((experts_, 16, outputs), 0.5, kernel.dtype)

    def total(pairs):
      parts = [
        experts.Adapted(kernel, *pair)
        for kernel, pair in zip((gate, up, down), pairs, strict=True)
      ]
      return way(x, chosen, weights, *parts).astype(jnp.float32).sum()

    return jax.grad(total)([beside(kernel) for kernel in (gate, up, down)])

  program = compiled(machine, slope)
  if machine == 'h200:1':
    lines = [line for _, line in products(program.as_text())]
    assert sum('grouped_outer' in line for line in lines) == 6
  else:  # three products with what is frozen, which would have three gradients more
    assert program.cost_analysis()['flops'] < 5 * 2 * 1024 * 256 * 128
