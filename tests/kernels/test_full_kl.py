"""The full divergence, some positions at a time, equals the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.full_kl import full_kl, reference


def inputs(dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = (2, 7, 5), (11, 5), (2, 7, 6), (11, 6)
  made = [jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True)]
  return [x.astype(dtype) for x in made]


def exactly(given, temperature, reverse):
  """In float64: KL, and the gradients of the sum of its sines."""
  h, t, g, u = (np.asarray(x, np.float64) for x in given)

  def log_softmax(z):
    return z - np.log(np.exp(z).sum(-1, keepdims=True))

  pairs = [(h, t), (g, u)] if reverse else [(g, u), (h, t)]
  p, q = (log_softmax(x @ table.T / temperature) for x, table in pairs)
  kl = (np.exp(p) * (p - q)).sum(-1)
  slope = np.cos(kl)[..., None] / temperature
  of_p, of_q = np.exp(p) * (p - q - kl[..., None]), np.exp(q) - np.exp(p)
  found = [
    grad
    for (x, table), d in zip(pairs, (slope * of_p, slope * of_q), strict=True)
    for grad in (d @ table, np.einsum('btv,btd->vd', d, x))
  ]
  return kl, *(found if reverse else found[2:] + found[:2])


@pytest.mark.parametrize('max_rows', [1, 6, 128])
@pytest.mark.parametrize('reverse', [False, True])
def test_value_and_gradient_equal_float64(reverse, max_rows):
  given = inputs()

  def total(*given):
    options = {'temperature': 0.7, 'reverse': reverse, 'max_rows': max_rows}
    found = full_kl(*given, **options)
    return jnp.sin(found).sum(), found

  run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))
  (_, found), gradient = run(*given)
  wanted = exactly(given, 0.7, reverse)
  for a, b in zip((found, *gradient), wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
  assert (np.asarray(found) > 0).all()
  plain = reference(*given, temperature=0.7, reverse=reverse)
  np.testing.assert_allclose(plain, wanted[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('max_rows, entries', [(6, 4), (6, 1), (14, 4)])
def test_tables_of_another_type_are_cast_in_blocks(max_rows, entries):
  wide = inputs()
  given = [x.astype(jnp.bfloat16) if x.ndim == 3 else x for x in wide]

  def run(given, **options):
    def total(*given):
      found = full_kl(*given, temperature=0.7, max_rows=max_rows, **options)
      return jnp.sin(found).sum(), found

    (_, found), slopes = jax.jit(
      jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True)
    )(*given)
    return found, *slopes

  found = run(given, entries=entries)
  exact = exactly([x.astype(jnp.bfloat16) for x in wide], 0.7, False)
  np.testing.assert_allclose(found[0], exact[0], rtol=1e-5, atol=1e-6)
  for a, b, x in zip(found[1:], exact[1:], given, strict=True):
    assert a.dtype == x.dtype
    a = np.asarray(a, np.float64)
    np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2 * np.abs(b).max())
  whole = run(given, entries=None)
  np.testing.assert_array_equal(found[0], whole[0])


def test_one_model_is_not_far_from_itself():
  hidden, table, _, _ = inputs(jnp.bfloat16)
  found = full_kl(hidden, table, hidden, table)
  np.testing.assert_array_equal(found, jnp.zeros((2, 7)))


def test_two_vocabularies_are_refused():
  hidden, table, others, _ = inputs()
  with pytest.raises(ValueError, match='over one vocabulary'):
    full_kl(hidden, table, others, jnp.zeros((12, 6)))
