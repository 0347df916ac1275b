"""Chunked scoring equals plain scoring, in value and in gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.token_logprobs import token_logprobs


def inputs(batch=2, length=7, width=5, vocab=11):
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = 2 * jax.random.normal(keys[0], (batch, length, width))
  table = jax.random.normal(keys[1], (vocab, width))
  return hidden, table, jax.random.randint(keys[2], (batch, length), 0, vocab)


def plainly(hidden, table, targets, temperature):
  logits = hidden @ table.T
  logprobs = jax.nn.log_softmax(logits / temperature)
  chosen = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
  log_p = jax.nn.log_softmax(logits)
  return chosen, -(jnp.exp(log_p) * log_p).sum(-1)


@pytest.mark.parametrize('max_rows', [1, 6, None])
@pytest.mark.parametrize('entropy', [False, True])
def test_value_and_gradient_equal_the_plain_ones(max_rows, entropy):
  hidden, table, targets = inputs()
  weights = jax.random.normal(jax.random.key(1), (2, 2, 7))

  def total(function):
    def run(hidden, table, temperature):
      logprobs, entropies = function(hidden, table, targets, temperature)
      out = (weights[0] * logprobs).sum()
      return out + (weights[1] * entropies).sum() if entropy else out

    return jax.value_and_grad(run, argnums=(0, 1, 2))(hidden, table, 0.8)

  def chunked(hidden, table, targets, temperature):
    return token_logprobs(
      hidden,
      table,
      targets,
      temperature=temperature,
      entropy=entropy,
      max_rows=max_rows,
    )

  assert chunked(hidden, table, targets, 0.8)[1] is None or entropy
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    total(chunked),
    total(plainly),
  )


def test_huge_logits_stay_finite():
  hidden, table, targets = inputs()
  logprobs, entropy = token_logprobs(1e4 * hidden, table, targets, entropy=True)
  assert np.isfinite(logprobs).all() and np.isfinite(entropy).all()


@pytest.mark.parametrize('entropy', [False, True])
def test_the_whole_of_the_logits_is_never_held(entropy):
  hidden, table, targets = inputs(batch=2, length=64, width=8, vocab=1000)

  def total(hidden, table):
    logprobs, entropies = token_logprobs(
      hidden, table, targets, entropy=entropy, max_rows=8
    )
    return logprobs.sum() + (entropies.sum() if entropy else 0.0)

  program = jax.jit(jax.grad(total, argnums=(0, 1))).lower(hidden, table).compile()
  whole = 2 * 64 * 1000 * 4
  assert program.memory_analysis().temp_size_in_bytes < whole / 2
