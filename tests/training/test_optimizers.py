import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.training import optimizers
from tests import calls

apply_gradients = jax.jit(optimizers.apply_gradients, static_argnames='state_spec')


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
  return params, m


def test_adamw_is_the_papers():
  rng = np.random.default_rng(0)
  params = {'kernel': rng.normal(size=(3, 4)), 'bias': rng.normal(size=4)}
  gradients = {'kernel': 3 * rng.normal(size=(3, 4)), 'bias': rng.normal(size=4)}
  optimizer = calls.make_optimizer(
    learning_rate=0.1, name='adamw(weight_decay=.3)', max_grad_norm=2.0
  )
  tree = jax.tree.map(jnp.float32, params)
  grads, state = (
    jax.tree.map(jnp.float32, gradients),
    optimizers.init_optimizer_state(tree),
  )
  for step in range(3):
    tree, state, metrics = apply_gradients(tree, state, grads, optimizer.hparams(step))
  want, mean = numpy_adamw(
    params, gradients, 3, lr=0.1, b1=0.9, b2=0.999, eps=1e-8, decay=0.3, clip=2.0
  )
  for name in params:
    np.testing.assert_allclose(tree[name], want[name], atol=1e-5)
    # The steps are the same whatever the gradient's scale; its mean is not.
    np.testing.assert_allclose(state[0].mu[name], mean[name], rtol=1e-5)
  norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
  assert metrics['grad_norm'] == pytest.approx(norm, rel=1e-5)


def test_a_small_gradient_and_a_zero_one_are_not_clipped():
  params = {'bias': jnp.ones(2)}
  numbers = calls.make_optimizer(learning_rate=1.0).hparams(0)
  for gradient in (jnp.array([0.3, 0.0]), jnp.zeros(2)):
    grads, state = {'bias': gradient}, optimizers.init_optimizer_state(params)
    _, state, _ = apply_gradients(params, state, grads, numbers)
    np.testing.assert_allclose(state[0].mu['bias'], 0.1 * gradient, rtol=1e-6)


@pytest.mark.parametrize(
  'options, want',
  [
    ({}, [2, 2, 2, 2]),
    ({'warmup_steps': 2}, [1, 2, 2, 2]),
    ({'lr_schedule': 'linear(decay_steps=4)'}, [2, 1.5, 1, 0.5]),
    ({'lr_schedule': 'linear(decay_steps=2, final_fraction=.5)'}, [2, 1.5, 1, 1]),
    ({'lr_schedule': 'cosine(decay_steps=2)'}, [2, 1, 0, 0]),
    ({'lr_schedule': 'cosine(decay_steps=3)', 'warmup_steps': 1}, [2, 2, 1, 0]),
  ],
)
def test_schedules(options, want):
  optimizer = calls.make_optimizer(learning_rate=2.0, **options)
  rates = [optimizer.learning_rate_at(step) for step in range(4)]
  np.testing.assert_allclose(rates, want, atol=1e-6)


def test_schedules_are_those_of_optax():
  cosine = calls.make_optimizer(
    learning_rate=3.0,
    lr_schedule='cosine(decay_steps=20, final_fraction=.1)',
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
    ({'lr_schedule': 'cosin'}, "no schedule 'cosin'. Did you mean 'cosine'"),
    ({'lr_schedule': 'cosine(final=1.0)'}, "no option 'final'"),
    ({'lr_schedule': 'cosine'}, 'needs decay_steps'),
    ({'max_grad_norm': 0.0}, 'max_grad_norm=0.0: must be above 0'),
    ({'name': 'adam'}, "no kind of optimizer 'adam'. Did you mean 'adamw'"),
    ({'name': 'adamw(beta1=.9)'}, "no option 'beta1'"),
    ({'name': "adamw(state_dtype='float16')"}, 'one of float32, bfloat16'),
    ({'name': 'lion(b2=1.0)'}, r'b2=1.0 of lion must be in \[0, 1\)'),
    ({'name': 'sgd(weight_decay=-1)'}, 'must be at least 0'),
  ],
)
def test_wrong_options_say_what_to_do(options, message):
  with pytest.raises(ValueError, match=message):
    calls.make_optimizer(**options)


def numpy_adafactor(gradient, *, steps, clip):
  """Algorithms 4 and 5 of the paper on one matrix, decay rate 1 − t^−.8; updates."""
  rows, columns = (np.zeros(size) for size in gradient.shape)
  updates = []
  for t in range(1, steps + 1):
    decay = 1 - t**-0.8
    square = (t * gradient.astype(np.float64)) ** 2 + 1e-30
    rows = decay * rows + (1 - decay) * square.mean(1)
    columns = decay * columns + (1 - decay) * square.mean(0)
    u = t * gradient / np.sqrt(np.outer(rows, columns) / rows.mean())
    updates.append(u / max(1, np.sqrt((u**2).mean()) / clip))
  return updates


def test_adafactor_is_the_papers_layer_by_layer():
  rng = np.random.default_rng(0)
  gradients = rng.normal(size=(2, 5, 6)) ** 3
  kind = calls.make_optimizer_spec('adafactor(clip_threshold=.7, min_size=4)')
  wanted = [numpy_adafactor(g, steps=3, clip=0.7) for g in gradients]
  params = {'layers': {'kernel': jnp.zeros((2, 5, 6))}}
  state = optimizers.init_optimizer_state(params, kind.state_spec)
  numbers = kind.hparams | {'learning_rate': 1.0, 'max_grad_norm': np.inf}
  for step in range(3):
    now = {'layers': {'kernel': jnp.float32((step + 1) * gradients)}}
    after, state, _ = apply_gradients(params, state, now, numbers, kind.state_spec)
    moved = -after['layers']['kernel']
    for layer in range(2):
      np.testing.assert_allclose(moved[layer], wanted[layer][step], rtol=1e-4)


def test_lion_and_sgd_step_as_defined():
  gradient = {'bias': jnp.array([0.5, -3.0])}
  for kind, want in (('lion', [1.0, -1.0]), ('sgd', [0.5, -3.0])):
    optimizer = calls.make_optimizer(learning_rate=1.0, name=kind, max_grad_norm=None)
    memory, params = optimizer.spec.state_spec, {'bias': jnp.zeros(2)}
    state = optimizers.init_optimizer_state(params, memory)
    params, _, _ = apply_gradients(
      params, state, gradient, optimizer.hparams(0), memory
    )
    np.testing.assert_allclose(-params['bias'], want)


def test_rounding_by_chance_is_right_on_average_and_seeded():
  x = jnp.float32([1.001, -0.3, 1e-12, 0.0, 2.0])
  keys = jax.random.split(jax.random.key(0), 4000)
  rounded = jax.vmap(optimizers._round_stochastically, (None, 0))(x, keys)
  assert rounded.dtype == jnp.bfloat16
  mean = np.mean(np.float64(rounded), 0)
  np.testing.assert_allclose(mean, x, rtol=3e-4)
  assert (np.float32(rounded[:, 3:]) == [0, 2]).all()  # what bfloat16 holds, stays
  again = jax.vmap(optimizers._round_stochastically, (None, 0))(x, keys)
  assert (rounded == again).all()


def test_a_second_moment_in_bfloat16_still_forgets():
  """A step of b2=.999 moves it by less than bfloat16 resolves, yet it falls by half."""
  optimizer = calls.make_optimizer(
    name="adamw(state_dtype='bfloat16')", max_grad_norm=None
  )
  memory, params = optimizer.spec.state_spec, {'kernel': jnp.zeros((32, 32))}
  _, start, _ = apply_gradients(
    params,
    optimizers.init_optimizer_state(params, memory),
    {'kernel': jnp.ones((32, 32))},
    optimizer.hparams(0), memory,
  )  # fmt: skip

  def step(state, _):
    gradient = {'kernel': jnp.zeros((32, 32))}
    hparams = optimizer.hparams(0)
    _, state, _ = apply_gradients(params, state, gradient, hparams, memory)
    return state, None

  state, _ = jax.lax.scan(step, start, length=693)
  left = np.float32(state[0].nu['kernel']).mean() / 0.001
  assert left == pytest.approx(0.999**693, rel=0.03)


def num_bytes(tree):
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_what_each_kind_keeps():
  params = {
    'layers': {'kernel': jnp.zeros((3, 128, 256)), 'scale': jnp.ones((3, 256))},
    'table': jnp.zeros((512, 128)),
  }
  size = num_bytes(params)

  def kept(text):
    return num_bytes(
      optimizers.init_optimizer_state(
        params, calls.make_optimizer_spec(text).state_spec
      )
    )

  assert kept('adamw') == 2 * size + 4
  assert kept("adamw(state_dtype='bfloat16')") == size + 4
  assert kept('lion') == size + 4
  assert kept("lion(state_dtype='bfloat16')") == size // 2 + 4
  assert kept('sgd') == 0
  rows = 3 * (128 + 256) + 3 * 256 + 512 + 128  # and a placeholder for what is not kept
  assert kept('adafactor') == 4 * (rows + 1 + 4)


def test_a_kind_of_the_same_state_has_its_own_numbers():
  kind = calls.make_optimizer_spec(
    "adamw(b2=.98, weight_decay=1, state_dtype='bfloat16')"
  )
  assert kind.hparams['weight_decay'] == 1.0
  assert isinstance(kind.hparams['weight_decay'], float)
  assert kind.with_default_hparams() == calls.make_optimizer_spec(
    "adamw(state_dtype='bfloat16')"
  )
