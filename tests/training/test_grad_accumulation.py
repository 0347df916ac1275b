"""Gradients are added within the backward pass, with the bits of a plain sum."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.training.batching import gradient_sums

LAYERS, WIDTH = 12, 64


def _params():
  draw = np.random.default_rng(0)
  layers = draw.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32)
  return {
    'layers': jnp.asarray(layers / 8),
    'gain': jnp.ones((LAYERS, WIDTH)),
    'head': jnp.asarray(draw.standard_normal(WIDTH), jnp.float32),
    'unused': jnp.ones(3),
  }


def _loss(params, x, *, unroll=1, twice=False, checkpoint=False):
  def layer(x, weights):
    kernel, gain = weights
    y = jnp.tanh(x @ kernel) * gain
    return y, y.sum()

  step = jax.checkpoint(layer) if checkpoint else layer
  xs = params['layers'], params['gain']
  x, sums = jax.lax.scan(step, x, xs, unroll=unroll)
  if twice:  # a second use, so that two gradients are added before the total is
    x, _ = jax.lax.scan(step, x, xs)
  return (x * params['head']).sum(), {'sums': sums, 'count': 1}


def _grad(params, **options):
  return jax.grad(functools.partial(_loss, **options), has_aux=True)


@pytest.mark.parametrize('platform', ['cpu', 'tpu', 'gpu'])
@pytest.mark.parametrize(
  'options', [{}, {'unroll': 2}, {'twice': True}, {'checkpoint': True}]
)
def test_sums_are_those_of_a_plain_addition(options, platform):
  params = _params()
  x = jnp.asarray(np.random.default_rng(1).standard_normal((4, WIDTH)), jnp.float32)
  total = jax.tree.map(lambda p: p + 3, params)
  grad = functools.partial(_grad(params, **options), params)
  sums, rest = gradient_sums.add(platform, grad, total, x)
  grads, expected = grad(x)
  jax.tree.map(np.testing.assert_array_equal, sums, jax.tree.map(jnp.add, total, grads))
  jax.tree.map(np.testing.assert_array_equal, rest, expected)


def test_gradients_that_are_constants_or_equal_are_added():
  def function(x):
    _, ys = jax.lax.scan(lambda c, y: (c, 2 * y), 0.0, x)
    return {'a': ys, 'b': ys, 'c': jnp.zeros(3), 'd': x}, ys.sum()

  x = jnp.arange(3.0)
  sums, rest = jax.jit(functools.partial(gradient_sums.add, 'cpu', function))(
    dict.fromkeys('abcd', jnp.ones(3)), x
  )
  expected = {'a': 1 + 2 * x, 'b': 1 + 2 * x, 'c': jnp.ones(3), 'd': 1 + x}
  jax.tree.map(np.testing.assert_array_equal, sums, expected)
  assert rest == 6


def test_a_carry_is_added_after_the_scan():
  def function(x):
    carry, _ = jax.lax.scan(lambda c, y: (c + y, None), jnp.zeros(2), x)
    return carry, None

  total, _ = gradient_sums.add('cpu', function, jnp.ones(2), jnp.ones((3, 2)))
  np.testing.assert_array_equal(total, [4, 4])


@pytest.mark.parametrize('total_type', [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_sum_has_the_type_of_a_plain_addition(total_type):
  def function(x):
    return jax.lax.scan(lambda c, y: (c, 2 * y), 0.0, x)[1], None

  x = jnp.arange(3.0, dtype=jnp.bfloat16)
  total = jnp.full(3, 0.125, total_type)
  added, _ = jax.jit(functools.partial(gradient_sums.add, 'cpu', function))(total, x)
  expected = total + 2 * x  # float32 of bfloat16 and float16
  assert added.dtype == expected.dtype
  np.testing.assert_array_equal(added, expected)


def test_no_second_array_as_large_as_the_layers_is_made():
  params = _params()
  xs = jnp.ones((3, 4, WIDTH))
  kernels = params['layers'].nbytes

  def temporary_bytes(add):
    def run(params, xs):
      start = jax.tree.map(jnp.zeros_like, params)
      grad = functools.partial(_grad(params), params)
      return jax.lax.fori_loop(0, 3, lambda i, total: add(grad, total, xs[i]), start)

    return jax.jit(run).lower(params, xs).compile().memory_analysis().temp_size_in_bytes

  def plain(grad, total, x):
    return jax.tree.map(jnp.add, total, grad(x)[0])

  def within(grad, total, x):
    return gradient_sums.add('cpu', grad, total, x)[0]

  added = temporary_bytes(within)
  assert added < kernels / 2
  assert temporary_bytes(plain) > kernels  # or this test cannot fail


@pytest.mark.parametrize('checkpoint', [False, True])
def test_unrolled_layers_have_sums_of_their_own_with_the_same_bits(checkpoint):
  params = _params()
  xs = jnp.asarray(np.random.default_rng(1).standard_normal((3, 4, WIDTH)), jnp.float32)
  options = {'unroll': LAYERS, 'checkpoint': checkpoint}
  grad = functools.partial(_grad(params, **options), params)
  total, rest = gradient_sums.zeros('cpu', grad, params, xs[0])
  split = [n for n, x in total.items() if isinstance(x, gradient_sums.LayerSums)]
  assert set(split) == {'layers', 'gain'} and rest['sums'].shape == (LAYERS,)
  plain = jax.tree.map(jnp.zeros_like, params)
  for x in xs:
    total, rest = gradient_sums.add('cpu', grad, total, x)
    grads, expected = grad(x)
    plain = jax.tree.map(jnp.add, plain, grads)
    jax.tree.map(np.testing.assert_array_equal, rest, expected)
  sums = gradient_sums.stack_layers(total)
  assert jax.tree.structure(sums) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, sums, plain)


@pytest.mark.parametrize(
  ('platform', 'options'),
  [('cpu', {}), ('cpu', {'unroll': 2}), ('tpu', {'unroll': LAYERS})],
)
def test_only_layers_unrolled_whole_on_a_cpu_have_sums_of_their_own(platform, options):
  params = _params()
  grad = functools.partial(_grad(params, **options), params)
  total, _ = gradient_sums.zeros(platform, grad, params, jnp.ones((4, WIDTH)))
  assert jax.tree.structure(total) == jax.tree.structure(params)


def test_the_sums_of_unrolled_layers_are_not_copied():
  params = _params()
  x = jnp.ones((4, WIDTH))
  grad = functools.partial(_grad(params, unroll=LAYERS), params)

  def copied_stacks(total):
    add = jax.jit(functools.partial(gradient_sums.add, 'cpu', grad), donate_argnums=0)
    program = add.lower(total, x).compile().as_text()
    shape = rf'f32\[({LAYERS},)?{WIDTH},{WIDTH}\]'
    return len(re.findall(rf'= {shape}\S* copy\(', program))

  total, _ = gradient_sums.zeros('cpu', grad, params, x)
  assert copied_stacks(total) == 0
  assert copied_stacks(params) > 0  # or this test cannot fail
