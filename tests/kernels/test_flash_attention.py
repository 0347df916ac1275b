"""Kernels of attention against the plain one, interpreted, in value and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import attention as attentions
from kernels import cudnn_attention, flash_attention
from tests.marks import slow

KERNELS = {
  'splash': functools.partial(flash_attention.splash, interpret=True),
  'cudnn': functools.partial(cudnn_attention.masked, implementation='xla'),
}
# Of odd lengths; in each a segment of one token, padding, and a row of nothing else.
SHAPES = [(200, 8, 2, 16), (131, 2, 2, 32)]
WIDE = (131, 2, 1, 192)


def inputs(length, heads, kv_heads, dim, dtype):
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = [(2, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
  arrays = [
    jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)
  ]
  row = np.repeat([1, 2, 3, 0], [60, 1, 59, length - 120])
  return arrays, jnp.asarray(np.stack([row, np.zeros(length, np.int32)]))


def prefixed(length):
  """Two prompts with responses, a segment without, padding; a row of one segment."""
  spans = [50, 1, 40, 20, 30, 25, length - 166]
  ids = np.repeat([1, 2, 3, 4, 5, 6, 0], spans)
  prefix = np.repeat([0, 1, 1, 0, 4, 0, 0], spans)
  rows = np.stack([ids, np.ones_like(ids)]), np.stack([prefix, np.zeros_like(ids)])
  return [jnp.asarray(x, jnp.int32) for x in rows]


def value_and_gradient(function, arrays, *ids):
  *args, weights = arrays

  def total(q, k, v):
    out = function(q, k, v, *ids)
    return (out.astype(jnp.float32) * weights).sum(), out

  run = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
  (_, out), grads = run(*args)
  return out, *grads


@pytest.mark.parametrize('shape', [SHAPES[0], *map(slow, [*SHAPES[1:], WIDE])])
@pytest.mark.parametrize('name', KERNELS)
def test_value_and_gradient_equal_the_plain_ones(name, shape):
  arrays, ids = inputs(*shape, jnp.float32)
  actual = value_and_gradient(KERNELS[name], arrays, ids)
  expected = value_and_gradient(attentions.reference_attention, arrays, ids)
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize('shape', [SHAPES[0], slow((600, 4, 4, 32))])
@pytest.mark.parametrize('name', ['splash', 'cudnn'])
def test_shared_prompts_are_seen(name, shape):
  arrays, _ = inputs(*shape, jnp.float32)
  ids = prefixed(shape[0])
  actual = value_and_gradient(KERNELS[name], arrays, *ids)
  expected = value_and_gradient(attentions.reference_attention, arrays, *ids)
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


RULES = [
  ('splash', {'window': 70, 'softcap': 2.0, 'scale': 0.3}, True, False),
  ('splash', {'softcap': 2.0, 'scale': 0.3}, False, True),
  ('cudnn', {'window': 70, 'scale': 0.3}, False, True),
]


@pytest.mark.parametrize(
  'name, rules, has_sinks, shares',
  [slow(*rule) for rule in RULES],
)
def test_what_else_a_kernel_takes(name, rules, has_sinks, shares):
  arrays, ids = inputs(*SHAPES[0], jnp.float32)
  ids, more = [ids], {}
  if shares:
    ids = prefixed(SHAPES[0][0])
  if shares and 'window' in rules:
    steps = jnp.arange(SHAPES[0][0])
    more = {'positions': jnp.stack([steps, steps])}
  sinks = jnp.linspace(-1.0, 2.0, SHAPES[0][1])

  def run(function, q, k, v, *ids):
    options = more | rules | ({'sinks': sinks} if has_sinks else {})
    return function(q, k, v, *ids, **options)

  plain = functools.partial(run, attentions.reference_attention)
  expected = value_and_gradient(plain, arrays, *ids)
  actual = value_and_gradient(functools.partial(run, KERNELS[name]), arrays, *ids)
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
  if not has_sinks:
    return

  def of_sinks(function):
    def total(sinks):
      out = function(*arrays[:3], *ids, sinks=sinks, **rules)
      return (out.astype(jnp.float32) * arrays[3]).sum()

    return jax.grad(total)(sinks)

  np.testing.assert_allclose(
    of_sinks(KERNELS[name]), of_sinks(attentions.reference_attention), atol=1e-4
  )


@pytest.mark.slow
@pytest.mark.parametrize('shares', [False, True])
@pytest.mark.parametrize('name', KERNELS)
def test_bfloat16_is_as_near_to_the_truth_as_the_plain_one(name, shares):
  arrays, ids = inputs(*SHAPES[0], jnp.bfloat16)
  ids = prefixed(SHAPES[0][0]) if shares else [ids]
  plain = attentions.reference_attention
  truth = value_and_gradient(plain, [x.astype(jnp.float32) for x in arrays], *ids)
  bounds = value_and_gradient(plain, arrays, *ids)
  actual = value_and_gradient(KERNELS[name], arrays, *ids)
  for a, bound, true in zip(actual, bounds, truth, strict=True):
    assert a.dtype == jnp.bfloat16
    error, allowed = (
      np.sqrt(np.mean((np.asarray(x, np.float32) - true) ** 2)) for x in (a, bound)
    )
    assert error < 1.5 * allowed


def test_what_cannot_be_used_says_why():
  def candidates_of(
    platform, length=256, dim=64, dtype='bfloat16', prefix=None, **rules
  ):
    q, k = (jax.ShapeDtypeStruct((1, length, n, dim), dtype) for n in (4, 2))
    return flash_attention.candidates(q, k, prefix, platform=platform, **rules)

  assert candidates_of('cpu') == {}
  assert candidates_of('tpu') == {'splash': flash_attention.splash}
  assert 'not of 100' in candidates_of('tpu', length=100)['splash']
  assert 'float16' in candidates_of('tpu', dtype='float16')['splash']
  ones = jnp.ones((1, 256))
  assert candidates_of('tpu', prefix=ones) == {'splash': flash_attention.splash}
  gpu = candidates_of('gpu', length=16384, prefix=jnp.ones((1, 16384)))
  assert 'mask' in gpu['cudnn_masked']
  assert 'float32' in candidates_of('gpu', dtype='float32')['cudnn_causal']
  assert 'head_dim' in candidates_of('gpu', dim=8)['cudnn_causal']
  rules = {'window': 8, 'sinks': True, 'softcap': 3.0}
  assert candidates_of('tpu', **rules) == {'splash': flash_attention.splash}
  refused = 'does not take window and sinks beside shared prompts'
  assert candidates_of('tpu', prefix=ones, **rules) == {'splash': refused}
  gpu = candidates_of('gpu', **rules)
  assert gpu['cudnn_causal'] == 'does not take sinks and softcap'


@pytest.mark.parametrize(
  'name, value',
  [
    ('_splash_attention_bwd', None),
    ('_splash_attention_bwd', lambda res, do: None),
    ('SplashResidualsType', tuple[jax.Array, jax.Array]),
  ],
)
def test_another_backward_pass_than_is_known_is_not_used(monkeypatch, name, value):
  q, k = (jax.ShapeDtypeStruct((1, 256, n, 64), 'bfloat16') for n in (4, 2))
  monkeypatch.setattr(flash_attention._library(), name, value)
  flash_attention.prefix_obstacle.cache_clear()
  try:
    reason = flash_attention.candidates(q, k, jnp.ones((1, 256)), platform='tpu')[
      'splash'
    ]
  finally:
    flash_attention.prefix_obstacle.cache_clear()
  assert 'prefix_ids with this jax' in reason
