"""Gradients are added within the backward pass, with the bits of a plain sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.training.forward_pass import add_grads

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
  sums, rest = add_grads(platform, grad, total, x)
  grads, expected = grad(x)
  jax.tree.map(np.testing.assert_array_equal, sums, jax.tree.map(jnp.add, total, grads))
  jax.tree.map(np.testing.assert_array_equal, rest, expected)


def test_gradients_that_are_constants_or_equal_are_added():
  def function(x):
    _, ys = jax.lax.scan(lambda c, y: (c, 2 * y), 0.0, x)
    return {'a': ys, 'b': ys, 'c': jnp.zeros(3), 'd': x}, ys.sum()

  x = jnp.arange(3.0)
  sums, rest = jax.jit(functools.partial(add_grads, 'cpu', function))(
    dict.fromkeys('abcd', jnp.ones(3)), x
  )
  expected = {'a': 1 + 2 * x, 'b': 1 + 2 * x, 'c': jnp.ones(3), 'd': 1 + x}
  jax.tree.map(np.testing.assert_array_equal, sums, expected)
  assert rest == 6


def test_a_carry_is_added_after_the_scan():
  def function(x):
    carry, _ = jax.lax.scan(lambda c, y: (c + y, None), jnp.zeros(2), x)
    return carry, None

  total, _ = add_grads('cpu', function, jnp.ones(2), jnp.ones((3, 2)))
  np.testing.assert_array_equal(total, [4, 4])


@pytest.mark.parametrize('total_type', [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_sum_has_the_type_of_a_plain_addition(total_type):
  def function(x):
    return jax.lax.scan(lambda c, y: (c, 2 * y), 0.0, x)[1], None

  x = jnp.arange(3.0, dtype=jnp.bfloat16)
  total = jnp.full(3, 0.125, total_type)
  added, _ = jax.jit(functools.partial(add_grads, 'cpu', function))(total, x)
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

  added = temporary_bytes(lambda grad, total, x: add_grads('cpu', grad, total, x)[0])
  assert added < kernels / 2
  assert temporary_bytes(plain) > kernels  # or this test cannot fail
