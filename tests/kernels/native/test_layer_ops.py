"""Norms and gated activations on a CPU, against the same in plain jnp."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.layers import ACTIVATIONS
from kernels.native import layer_ops, library
from tests.marks import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
SHAPES = [(1, 1), (3, 5), (2, 7, 16), (5, 300), (2, 90, 3, 64), (700, 576)]
EPSILON = 1e-5


def draw(*shapes, scale=2.0):
  rng = np.random.default_rng(0)
  return [jnp.asarray(scale * rng.standard_normal(s), jnp.float32) for s in shapes]


def plain_norm(x, scale):
  square = jnp.mean(x * x, axis=tuple(range(-scale.ndim, 0)), keepdims=True)
  return scale * x / jnp.sqrt(square + EPSILON)


def plain_gate(gate, up, activation):
  return ACTIVATIONS[activation](gate) * up


def gradients(function, *arrays):
  """The gradients of the sum of what it computes, each element weighed by its own."""
  shape = jax.eval_shape(function, *arrays).shape
  (weights,) = draw(shape, scale=1.0)
  loss = lambda *x: (function(*x) * weights).sum()  # noqa: E731
  return jax.jit(jax.grad(loss, tuple(range(len(arrays)))))(*arrays)


def exactly(function, *arrays):
  """What a function gives in float64: the plain ones lose digits in float32."""
  with jax.enable_x64(True):
    wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in arrays]
    return jax.tree.map(np.asarray, function(*wide))


def plain_gradients(function, *arrays):
  return exactly(functools.partial(gradients, function), *arrays)


def assert_all_close(found, wanted, **tolerances):
  for x, y in zip(found, wanted, strict=True):
    np.testing.assert_allclose(x, y, **tolerances)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('axes', [1, 2])
def test_a_norm_and_its_gradient_equal_the_plain_ones(shape, axes):
  x, scale = draw(shape, shape[-axes:])
  norm = lambda x, scale: layer_ops.rms_norm(x, scale, EPSILON)  # noqa: E731
  tolerances = {'rtol': 2e-6, 'atol': 2e-6}
  assert_all_close([norm(x, scale)], [exactly(plain_norm, x, scale)], **tolerances)
  found, wanted = gradients(norm, x, scale), plain_gradients(plain_norm, x, scale)
  assert_all_close(found[:1], wanted[:1], rtol=2e-5, atol=5e-6)
  assert_all_close(found[1:], wanted[1:], rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_an_activation_and_its_gradient_equal_the_plain_ones(shape, activation):
  gate, up = draw(shape, shape)
  native = functools.partial(layer_ops.gated, activation=activation)
  plain = functools.partial(plain_gate, activation=activation)
  tolerances = {'rtol': 3e-6, 'atol': 1e-6}
  assert_all_close([native(gate, up)], [exactly(plain, gate, up)], **tolerances)
  found, wanted = gradients(native, gate, up), plain_gradients(plain, gate, up)
  assert_all_close(found, wanted, rtol=1e-5, atol=1e-5)
  both = jnp.concatenate([gate, up], axis=-1)
  joined = layer_ops.gated_joined(both, activation)
  np.testing.assert_array_equal(joined, native(gate, up))


@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_a_product_after_it_has_the_same_gradients(activation):
  arrays = draw((2, 9, 48), (2, 9, 48), (48, 20))
  native = functools.partial(layer_ops.gated_product, activation=activation)

  def plain(gate, up, matrix):
    return plain_gate(gate, up, activation) @ matrix

  assert_all_close([native(*arrays)], [exactly(plain, *arrays)], rtol=1e-5, atol=2e-5)
  found, wanted = gradients(native, *arrays), plain_gradients(plain, *arrays)
  assert_all_close(found, wanted, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_activations_are_right_from_far_left_to_far_right(activation):
  values = np.concatenate([np.linspace(-100, 100, 40_001), np.linspace(-1, 1, 2001)])
  gate = jnp.asarray(values, jnp.float32)
  found = layer_ops.gated(gate[None], jnp.ones((1, len(gate))), activation)[0]
  wanted = exactly(ACTIVATIONS[activation], gate)
  np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-7)


def test_not_a_number_is_not_hidden():
  x, scale, up = draw((4, 40), (40,), (4, 40))
  x = x.at[2, 3].set(jnp.nan)
  normed = layer_ops.rms_norm(x, scale, EPSILON)
  gated = layer_ops.gated(x, up, 'silu')
  assert np.isnan(normed[2]).all() and np.isnan(gated[2, 3])
  assert np.isfinite(np.delete(normed, 2, axis=0)).all()
  assert np.isfinite(np.delete(gated.ravel(), 2 * 40 + 3)).all()


def test_a_row_has_the_same_bits_alone():
  x, scale, up = draw((700, 576), (576,), (700, 576))
  norm = functools.partial(layer_ops.rms_norm, scale=scale, epsilon=EPSILON)
  np.testing.assert_array_equal(norm(x)[50:51], norm(x[50:51]))
  gate = functools.partial(layer_ops.gated, activation='silu')
  np.testing.assert_array_equal(gate(x, up)[50:51], gate(x[50:51], up[50:51]))


def test_rows_may_be_mapped():
  x, scale, up = draw((3, 4, 20), (20,), (3, 4, 20))
  norm = functools.partial(layer_ops.rms_norm, scale=scale, epsilon=EPSILON)
  np.testing.assert_array_equal(jax.vmap(norm)(x), norm(x))
  gate = functools.partial(layer_ops.gated, activation='silu')
  np.testing.assert_array_equal(jax.vmap(gate)(x, up), gate(x, up))


def test_only_what_it_takes_is_given_to_it():
  assert not layer_ops.obstacle('cpu', 'float32')
  assert layer_ops.obstacle('cpu', 'bfloat16') == 'takes float32, not bfloat16'
  assert layer_ops.obstacle('tpu', 'float32') == 'is for cpu, not tpu'
  assert layer_ops.obstacle('cpu', 'float32', kernels='reference') == 'not asked for'


def misfits():
  """Targets, arguments and shapes of results that do not fit together."""
  x, scale, one = np.ones((3, 5), np.float32), np.ones(5, np.float32), np.float32(1)
  back, gate, gate_back = 'jaxrl_norm_back', 'jaxrl_gate_silu', 'jaxrl_gate_silu_back'
  return {
    'scale': ('jaxrl_norm', (x, scale[:4], one), [(3, 5)]),
    'epsilon': ('jaxrl_norm', (x, scale, scale), [(3, 5)]),
    'type of x': ('jaxrl_norm', (x.astype('bfloat16'), scale, one), [(3, 5)]),
    'axes of x': ('jaxrl_norm', (x[None], scale, one), [(3, 5)]),
    'norm': ('jaxrl_norm', (x, scale, one), [(3, 4)]),
    'number for a norm': ('jaxrl_norm', (x, scale), [(3, 5)]),
    'sums of the scale': (back, (x, scale, one, x), [(3, 5), (2, 5)]),
    'gradient of the norm': (back, (x, scale, one, x[:2]), [(3, 5), (1, 5)]),
    'up': (gate, (x, x[:2]), [(3, 5)]),
    'type of up': (gate, (x, x.astype(np.int32)), [(3, 5)]),
    'joined': (gate, (x,), [(3, 3)]),
    'product': (gate, (x, x), [(3, 5, 1)]),
    'gradient of the product': (gate_back, (x, x, x[:2]), [(3, 5)] * 3),
    'gradient of up': (gate_back, (x, x, x), [(3, 5), (3, 4), (3, 5)]),
    'number for a gate': (gate_back, (x, x), [(3, 5)] * 3),
  }


@pytest.mark.parametrize('name', misfits())
def test_arrays_that_do_not_fit_are_refused(name):
  library.widths()
  target, arguments, shapes = misfits()[name]
  out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  kind = re.match('jaxrl_(norm|gate)', target)
  with pytest.raises(jax.errors.JaxRuntimeError, match=kind[0]):
    jax.block_until_ready(jax.jit(jax.ffi.ffi_call(target, out))(*arguments))
