"""Chunked scoring equals plain scoring, in value and in gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import token_logprobs as kernels
from kernels.token_logprobs import TokenScores
from tests.marks import slow

token_logprobs = functools.partial(kernels.token_logprobs, kernels='reference')


def inputs(batch=2, length=7, width=5, vocab=11):
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = 2 * jax.random.normal(keys[0], (batch, length, width))
  table = jax.random.normal(keys[1], (vocab, width))
  return hidden, table, jax.random.randint(keys[2], (batch, length), 0, vocab)


def plainly(hidden, table, targets, temperature, topk_ids):
  """Entropy and nec are of temperature 1, the rest of `temperature`."""
  logits = hidden @ table.T
  logprobs = jax.nn.log_softmax(logits / temperature)
  log_p = jax.nn.log_softmax(logits)
  entropy = -(jnp.exp(log_p) * log_p).sum(-1)
  return TokenScores(
    logprobs=jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0],
    entropy=entropy,
    nec=(jnp.exp(log_p) ** 2 * (entropy[..., None] + log_p)).sum(-1),
    sum_pi_squared=jax.lax.stop_gradient((jnp.exp(log_p) ** 2).sum(-1)),
    topk_logprobs=jnp.take_along_axis(logprobs, topk_ids, -1),
  )


MOMENTS = dict.fromkeys(('entropy', 'nec', 'sum_pi_squared'), True)
WANTED = {
  'logprobs': {},
  'entropy': {'entropy': True},
  'nec': {'nec': True},
  'sum_pi_squared': {'sum_pi_squared': True},
  'topk_logprobs': {'topk_ids': True},
}


@pytest.mark.parametrize(
  'name, max_rows',
  [
    *(('all', 1), slow('all', None), ('logprobs', 6)),
    *(slow(name, 6) for name in WANTED if name != 'logprobs'),
  ],
)
def test_value_and_gradient_equal_the_plain_ones(name, max_rows):
  hidden, table, targets = inputs()
  topk_ids = jax.random.randint(jax.random.key(2), (2, 7, 3), 0, 11)
  options = {
    k: v for n, one in WANTED.items() if name in (n, 'all') for k, v in one.items()
  }
  if options.pop('topk_ids', False):
    options['topk_ids'] = topk_ids
  names = [n for n in WANTED if name in (n, 'all')]

  def total(function):
    def run(hidden, table, temperature):
      scores = function(hidden, table, temperature)
      keys = jax.random.split(jax.random.key(1), len(WANTED))
      values = {n: getattr(scores, n) for n in names}
      weighted = (
        (jax.random.normal(key, values[n].shape) * values[n]).sum()
        for key, n in zip(keys, names, strict=False)
      )
      return sum(weighted), values

    run = jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True)
    return jax.jit(run)(hidden, table, 0.8)

  def chunked(hidden, table, temperature):
    return token_logprobs(
      hidden, table, targets, temperature=temperature, max_rows=max_rows, **options
    )

  def plain(hidden, table, temperature):
    return plainly(hidden, table, targets, temperature, topk_ids)

  returned = {
    n for n, x in chunked(hidden, table, 0.8)._asdict().items() if x is not None
  }
  assert returned == {'logprobs', *names}
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    total(chunked),
    total(plain),
  )


@pytest.mark.parametrize('max_rows', [6, None])
def test_the_likeliest_are_found_and_scored(max_rows):
  hidden, table, targets = inputs()

  def score(hidden, **options):
    return token_logprobs(
      hidden, table, targets, temperature=0.8, max_rows=max_rows, **options
    )

  scores = score(hidden, top_k=4)
  logprobs = np.asarray(jax.nn.log_softmax(hidden @ table.T / 0.8))
  order = np.argsort(-logprobs, axis=-1)[..., :4]
  np.testing.assert_array_equal(scores.topk_ids, order)
  best = np.take_along_axis(logprobs, order, -1)
  np.testing.assert_allclose(scores.topk_logprobs, best, rtol=1e-5, atol=1e-5)
  rescored = score(hidden, topk_ids=scores.topk_ids)
  np.testing.assert_allclose(rescored.topk_logprobs, scores.topk_logprobs, rtol=1e-6)

  def total(hidden, **options):
    return jnp.sin(score(hidden, **options).topk_logprobs).sum()

  slope = jax.jit(jax.grad(total), static_argnames='top_k')
  gradient = slope(hidden, top_k=4)
  np.testing.assert_allclose(gradient, slope(hidden, topk_ids=order), rtol=1e-5)
  assert np.abs(gradient).max() > 0.1


def test_top_k_that_cannot_be_is_refused():
  hidden, table, targets = inputs()
  with pytest.raises(ValueError, match='top_k=12 is more than the 11 tokens'):
    token_logprobs(hidden, table, targets, top_k=12)
  with pytest.raises(ValueError, match='not both'):
    token_logprobs(hidden, table, targets, top_k=1, topk_ids=targets[..., None])


def test_nec_of_certainty_and_of_ignorance():
  """One sure token: p = 1, H = 0, so 0. V equal ones: H + log p = 0, so 0."""
  hidden, table, targets = inputs()
  measure = jax.jit(functools.partial(token_logprobs, nec=True))
  for scale in (1e4, 0.0):
    scores = measure(scale * hidden, table, targets)
    np.testing.assert_allclose(scores.nec, 0, atol=1e-4)
  # Three logits 0, 0, log 2 → p = ¼, ¼, ½ and H = 1.5·log 2:
  # 2·(1/16)·(1.5 − 2)·log 2 + ¼·(1.5 − 1)·log 2 = log 2 / 16.
  scores = measure(
    jnp.ones((1, 1, 1)), jnp.log(jnp.array([[1.0], [1], [2]])), targets[:1, :1]
  )
  np.testing.assert_allclose(scores.nec, np.log(2) / 16, rtol=1e-5)


def test_huge_logits_stay_finite():
  hidden, table, targets = inputs()

  def total(hidden):
    scores = token_logprobs(hidden, table, targets, **MOMENTS, top_k=3)
    return sum(
      x.sum() for x in (scores.logprobs, scores.nec, scores.topk_logprobs)
    ), scores

  gradient, scores = jax.jit(jax.grad(total, has_aux=True))(1e4 * hidden)
  assert all(np.isfinite(x).all() for x in (gradient, *scores))


@pytest.mark.parametrize('name', WANTED)
def test_the_whole_of_the_logits_is_never_held(name):
  hidden, table, targets = inputs(batch=2, length=64, width=8, vocab=1000)
  topk_ids = targets[..., None] * jnp.ones(4, jnp.int32)
  options = {k: topk_ids if k == 'topk_ids' else v for k, v in WANTED[name].items()}

  def total(hidden, table):
    scores = token_logprobs(hidden, table, targets, max_rows=8, **options)
    return getattr(scores, name).sum()

  program = jax.jit(jax.grad(total, argnums=(0, 1))).lower(hidden, table).compile()
  whole = 2 * 64 * 1000 * 4
  assert program.memory_analysis().temp_size_in_bytes < whole / 2
