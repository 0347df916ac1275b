import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.training import optimizer


def numpy_adamw(params, gradients, steps, *, lr, b1, b2, eps, decay, clip):
  """The paper's algorithm 2 with the gradient scaled to norm ≤ clip first."""
  params = {k: v.astype(np.float64) for k, v in params.items()}
  m = {k: 0 * v for k, v in params.items()}
  v = {k: 0 * x for k, x in params.items()}
  for t in range(1, steps + 1):
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    for k in params:
      g = gradients[k].astype(np.float64) * min(1.0, clip / norm)
      m[k] = b1 * m[k] + (1 - b1) * g
      v[k] = b2 * v[k] + (1 - b2) * g**2
      step = m[k] / (1 - b1**t) / (np.sqrt(v[k] / (1 - b2**t)) + eps)
      step = step + (decay * params[k] if k == 'kernel' else 0)
      params[k] = params[k] - lr * step
  return params


def test_adamw_is_the_papers():
  rng = np.random.default_rng(0)
  params = {'kernel': rng.normal(size=(3, 4)), 'bias': rng.normal(size=4)}
  gradients = {'kernel': 3 * rng.normal(size=(3, 4)), 'bias': rng.normal(size=4)}
  made = optimizer.adamw(learning_rate=0.1, weight_decay=0.3, clip_norm=2.0)
  tree = jax.tree.map(jnp.float32, params)
  grads, state = jax.tree.map(jnp.float32, gradients), optimizer.init(tree)
  for step in range(3):
    tree, state, metrics = optimizer.update(tree, state, grads, made.numbers(step))
  want = numpy_adamw(
    params, gradients, 3, lr=0.1, b1=0.9, b2=0.999, eps=1e-8, decay=0.3, clip=2.0
  )
  for name in params:
    np.testing.assert_allclose(tree[name], want[name], atol=1e-5)
  norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
  assert metrics['grad_norm'] == pytest.approx(norm, rel=1e-5)


def test_a_small_gradient_and_a_zero_one_are_not_clipped():
  params = {'bias': jnp.ones(2)}
  numbers = optimizer.adamw(learning_rate=1.0).numbers(0)
  for gradient in (jnp.array([0.3, 0.0]), jnp.zeros(2)):
    grads, state = {'bias': gradient}, optimizer.init(params)
    _, state, _ = optimizer.update(params, state, grads, numbers)
    np.testing.assert_allclose(state[0].mu['bias'], 0.1 * gradient, rtol=1e-6)


@pytest.mark.parametrize(
  'options, want',
  [
    ({}, [2, 2, 2, 2]),
    ({'warmup_steps': 2}, [1, 2, 2, 2]),
    ({'schedule': 'linear(decay_steps=4)'}, [2, 1.5, 1, 0.5]),
    ({'schedule': 'linear(decay_steps=2, final_fraction=.5)'}, [2, 1.5, 1, 1]),
    ({'schedule': 'cosine(decay_steps=2)'}, [2, 1, 0, 0]),
    ({'schedule': 'cosine(decay_steps=3)', 'warmup_steps': 1}, [2, 2, 1, 0]),
  ],
)
def test_schedules(options, want):
  made = optimizer.adamw(learning_rate=2.0, **options)
  rates = [made.learning_rate_at(step) for step in range(4)]
  np.testing.assert_allclose(rates, want, atol=1e-6)


def test_schedules_are_those_of_optax():
  cosine = optimizer.adamw(
    learning_rate=3.0,
    schedule='cosine(decay_steps=20, final_fraction=.1)',
    warmup_steps=5,
  )
  want = optax.join_schedules(
    [optax.linear_schedule(0.0, 3.0, 5), optax.cosine_decay_schedule(3.0, 15, 0.1)], [5]
  )
  for step in range(25):
    count = step + 1 if step < 5 else step  # the first step is not a step of 0
    assert cosine.learning_rate_at(step) == pytest.approx(float(want(count)), rel=1e-5)


@pytest.mark.parametrize(
  'options, message',
  [
    ({'schedule': 'cosin'}, "no schedule 'cosin'. Did you mean 'cosine'"),
    ({'schedule': 'cosine(final=1.0)'}, "no option 'final'"),
    ({'schedule': 'cosine'}, 'needs decay_steps'),
    ({'clip_norm': 0.0}, 'clip_norm=0.0 must be positive'),
  ],
)
def test_wrong_options_say_what_to_do(options, message):
  with pytest.raises(ValueError, match=message):
    optimizer.adamw(**options)
