"""Tenants in training: gradients, their sums, steps, and who shares a program."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl import model_loading
from jaxrl.component_calls import parse_call
from jaxrl.functional import losses
from jaxrl.models.model_config import Lora
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.tinker import row_adapters, tenant_losses
from jaxrl.rollout.tinker.pending_results import RequestError
from jaxrl.rollout.tinker.tenant_learner import (
  ALPHA,
  TenantLearner,
  TenantSnapshot,
  TrainingRow,
)
from jaxrl.rollout.tinker.tenant_programs import buckets_to, num_targets
from jaxrl.rollout.tinker.training_service import check_optimizer
from tests.tinker import tiny

CONFIG = model_loading.random_config(**tiny.SIZES)
MODEL = TransformerLM(CONFIG)
PARAMS = jax.device_put(MODEL.init(jax.random.key(0)), jax.devices()[0])
ADAM = {
  'learning_rate': 0.01,
  'beta1': 0.9,
  'beta2': 0.95,
  'eps': 1e-8,
  'weight_decay': 0.1,
  'grad_clip_norm': 0.0,
}
ALL = frozenset(row_adapters.layer_sizes(CONFIG))


@pytest.fixture(scope='module')
def learner():
  return TenantLearner(
    MODEL, PARAMS, max_tenants=3, max_rank=8, max_length=64, step_tokens=128
  )


def adapters(seed, rank=4, layers=ALL):
  """Adapters whose B is not zero, so that A has a gradient."""
  rng = np.random.default_rng(seed)
  fresh = row_adapters.init_adapters(CONFIG, rank, seed, layers)
  return {
    name: (a, rng.normal(0, 0.05, b.shape).astype(np.float32) if name in layers else b)
    for name, (a, b) in fresh.items()
  }


def row(seed, length=12, loss='cross_entropy', **inputs):
  rng = np.random.default_rng(seed)
  tokens, targets = rng.integers(0, CONFIG.vocab_size, (2, length)).astype(np.int32)
  weights = rng.uniform(0, 1 / length, (length, 1)).astype(np.float32)
  inputs.setdefault('weights', weights)
  if loss != 'cross_entropy':
    inputs['logprobs'] = rng.uniform(-7, -4, length).astype(np.float32)
    inputs['advantages'] = rng.normal(size=length).astype(np.float32)
  options = tenant_losses.check_loss(loss, {}, 'r1_reward')
  return TrainingRow(tokens, targets[:, None], loss, options, inputs)


def gradients(learner, tenant):
  totals = jax.tree.map(np.asarray, learner._state.totals)
  own = {
    name: tuple(np.take(x, tenant.place, row_adapters.tenant_axis(name)) for x in pair)
    for name, pair in totals.items()
  }
  return row_adapters.cut_rank(own, tenant.rank)


@pytest.fixture
def tenants(learner):
  made = [
    learner.add(TenantSnapshot(adapters(1))),
    learner.add(TenantSnapshot(adapters(2, 8))),
  ]
  yield made
  for tenant in made:
    learner.remove(tenant)


def plain_logprobs(lora, data, model, base):
  """What our own model with `config.lora` says, and the head's adapters beside it."""
  inner = tuple(row_adapters.PART_OF)
  rank = lora['q'][0].shape[-1]
  config = CONFIG.replace(lora=Lora(rank, ALPHA, inner, 'float32'))
  params, layers = dict(base), dict(base['layers'])
  for name, part in row_adapters.PART_OF.items():
    a, b = lora[name]
    kernel = base['layers'][part][name]['kernel']
    inputs = 2 if name == 'o' else 1
    a = a.reshape(*kernel.shape[: 1 + inputs], rank)
    b = b.reshape(kernel.shape[0], rank, *kernel.shape[1 + inputs :])
    own = {**layers[part][name], 'lora_a': a, 'lora_b': b}
    layers[part] = {**layers[part], name: own}
  params['layers'] = layers
  hidden = TransformerLM(config, dtype=model.dtype).hidden(
    params, data.tokens[None], jnp.ones((1, len(data.tokens)), jnp.int32)
  )[0]
  a, b = lora[row_adapters.HEAD]
  logits = model.logits(base, hidden) + ALPHA / rank * (hidden @ a) @ b
  logprobs = jax.nn.log_softmax(logits)
  return jnp.take_along_axis(logprobs, data.targets, axis=1)[:, 0]


def plain_loss(name, lora, data, model, base):
  logprobs = plain_logprobs(lora, data, model, base)[None]
  mask = jnp.ones(logprobs.shape, bool)
  weights = data.inputs['weights'][:, 0]
  if name == 'cross_entropy':
    return jnp.sum(losses.sft(logprobs, mask)[0] * weights)
  old, advantages = (data.inputs[x][None] for x in ('logprobs', 'advantages'))
  arguments = logprobs, old, advantages, mask
  # The learner holds thresholds in float32.
  clip: dict[str, Any] = {
    'clip_low': 1 - np.float32(0.8),
    'clip_high': np.float32(1.2) - 1,
  }
  loss = {
    'importance_sampling': lambda: losses.importance_sampling(*arguments),
    'ppo': lambda: losses.ppo_clip(*arguments, **clip, dual_clip=None),
    'cispo': lambda: losses.cispo(*arguments, **clip),
    'dro': lambda: losses.kimi(*arguments, tau=float(np.float32(0.05))),
    'gspo': lambda: losses.gspo(*arguments, clip_low=3e-4, clip_high=4e-4),
    'stable_reinforce': lambda: losses.stable_reinforce(*arguments, **clip),
  }[name]()[0]
  return jnp.sum(loss * weights)


@contextlib.contextmanager
def float64():
  """Makes what the code calls float32 float64; yields what widens a tree."""
  narrow = jnp.float32
  with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
    patch.setattr(jnp, 'float32', jnp.float64)
    yield lambda tree: jax.tree.map(
      lambda x: x.astype(np.float64) if x.dtype == narrow else x, tree
    )


def distance(own, expected):
  """The norm of a difference, as a share of what is expected."""
  pairs = zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True)
  apart = sum(np.sum((np.float64(x) - np.float64(y)) ** 2) for x, y in pairs)
  norm = sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(expected))
  return (apart / norm) ** 0.5


@pytest.mark.parametrize('name', tenant_losses.LOSSES)
def test_gradients_equal_those_of_our_own_functions(learner, tenants, name):
  """In float64 and in float32: there each rounds in its own way, and ours no less.

  With this row, others, and programs compiled with optimizations and without, on
  processors with AVX2 and AVX-512, the server was up to 1.9e-6 of the norm from
  float64, ours up to 1.9e-6, and one from the other too. In float64 they agree to 12
  digits, as the next test has it.
  """
  tenant, data = tenants[0], row(5, loss=name)
  learner.discard_gradients(tenant)
  ((logprobs, loss),) = learner.run([(tenant, data)], backward=True)
  own = gradients(learner, tenant)
  with float64() as wide:
    model, params = TransformerLM(CONFIG, dtype='float64'), wide(PARAMS)
    value = lambda lora: plain_loss(name, lora, data, model, params)  # noqa: E731
    expected_loss, expected = jax.value_and_grad(value)(wide(adapters(1)))
    expected_logprobs = plain_logprobs(wide(adapters(1)), data, model, params)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
  np.testing.assert_allclose(logprobs[:, 0], expected_logprobs, atol=1e-5)
  assert jax.tree.leaves(expected)[0].dtype == np.float64
  assert distance(own, expected) <= 3e-6
  plain = jax.grad(lambda lora: plain_loss(name, lora, data, MODEL, PARAMS))
  assert distance(own, plain(adapters(1))) <= 3e-6


def test_gradients_differ_from_our_own_by_rounding_alone():
  """In float64 the server's and ours have 12 digits in common."""
  with float64() as wide:
    model, params = TransformerLM(CONFIG, dtype='float64'), wide(PARAMS)
    sizes = {'max_tenants': 1, 'max_rank': 8, 'max_length': 32, 'step_tokens': 32}
    learner = TenantLearner(model, params, **sizes)
    tenant = learner.add(TenantSnapshot(wide(adapters(1))))
    for name in ('cross_entropy', 'ppo', 'gspo'):
      data = row(5, loss=name)
      learner.discard_gradients(tenant)
      learner.run([(tenant, data)], backward=True)
      value = lambda lora: plain_loss(name, lora, data, model, params)  # noqa: B023, E731
      expected = jax.grad(value)(wide(adapters(1)))
      assert distance(gradients(learner, tenant), expected) <= 1e-12, name


def test_calls_that_accumulate_equal_one(learner, tenants):
  tenant, data = tenants[0], [row(i) for i in range(4)]
  learner.discard_gradients(tenant)
  learner.run([(tenant, x) for x in data], backward=True)
  together = gradients(learner, tenant)
  learner.discard_gradients(tenant)
  for one in data:
    learner.run([(tenant, one)], backward=True)
  apart = gradients(learner, tenant)
  jax.tree.map(np.testing.assert_array_equal, together, apart)


@pytest.mark.parametrize('optimizer', ['adamw', 'dimuon'])
def test_tenants_that_share_steps_get_what_each_gets_alone(learner, optimizer):
  """Bit for bit: rows in other places, of other steps, beside another tenant."""

  def train(seed, rank, other=None):
    tenant = learner.add(TenantSnapshot(adapters(seed, rank)))
    logprobs = []
    for step in range(2):
      rows = [(tenant, row(10 * step + i, 10 + i)) for i in range(3)]
      if other is None:
        results = learner.run(rows, backward=True)
      else:
        beside = [(other, row(90 + i)) for i in range(3)]
        results = learner.run([beside[0], rows[0], beside[1]], backward=True)[1:2]
        results += learner.run([rows[1], beside[2], rows[2]], backward=True)[::2]
        learner.adam_step(other, ADAM)
      logprobs += [own for own, _ in results]
      step, options = learner.adam_step, ADAM
      if optimizer == 'dimuon':
        step, options = learner.muon_step, MUON
      step(tenant, options)
    snapshot = learner.snapshot(tenant)
    learner.remove(tenant)
    return logprobs, snapshot.adapters, snapshot.mu

  alone = train(7, 4)
  other = learner.add(TenantSnapshot(adapters(8, 8)))
  beside = train(7, 4, other)
  learner.remove(other)
  jax.tree.map(np.testing.assert_array_equal, alone, beside)


def test_a_diverged_tenant_harms_no_other(learner, tenants):
  broken = jax.tree.map(lambda x: np.full_like(x, np.nan), adapters(2, 8))
  learner.load(tenants[1], TenantSnapshot(broken))
  learner.discard_gradients(tenants[0])
  learner.run([(tenants[1], row(1)), (tenants[0], row(2))], backward=True)
  beside = gradients(learner, tenants[0])
  learner.discard_gradients(tenants[0])
  learner.run([(tenants[0], row(2))], backward=True)
  jax.tree.map(np.testing.assert_array_equal, beside, gradients(learner, tenants[0]))


def test_forward_leaves_gradients_alone(learner, tenants):
  before = gradients(learner, tenants[0])
  learner.run([(tenants[0], row(3))], backward=False)
  jax.tree.map(np.testing.assert_array_equal, before, gradients(learner, tenants[0]))


def test_several_targets_of_a_position(learner, tenants):
  data = row(4)
  both = np.concatenate([data.targets, (data.targets + 1) % 300], axis=1)
  weights = np.ones(both.shape, np.float32)
  wide = dataclasses.replace(data, targets=both, inputs={'weights': weights})
  ((logprobs, loss),) = learner.run([(tenants[0], wide)], backward=False)
  for i in range(2):
    one = dataclasses.replace(data, targets=both[:, i : i + 1])
    ((own, _),) = learner.run([(tenants[0], one)], backward=False)
    np.testing.assert_allclose(logprobs[:, i], own[:, 0], atol=1e-6)
  np.testing.assert_allclose(loss, -logprobs.sum(), rtol=1e-6)


@pytest.mark.parametrize('clip', [0.0, 0.5])
def test_steps_equal_those_of_optax(learner, clip):
  lora = adapters(3)
  tenant = learner.add(TenantSnapshot(lora))
  options = ADAM | {'grad_clip_norm': clip}
  adamw = optax.adamw(0.01, 0.9, 0.95, eps=1e-8, weight_decay=0.1)
  optimizer = optax.chain(
    optax.clip_by_global_norm(clip) if clip else optax.identity(), adamw
  )
  state = optimizer.init(lora)
  for step in range(3):
    learner.run([(tenant, row(step))], backward=True)
    own = gradients(learner, tenant)
    norm = learner.adam_step(tenant, options)
    np.testing.assert_allclose(norm, optax.tree.norm(own), rtol=1e-5)
    updates, state = optimizer.update(own, state, lora)
    lora = optax.apply_updates(lora, updates)
  trained = learner.snapshot(tenant)
  learner.remove(tenant)
  compare = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6)  # noqa: E731
  jax.tree.map(compare, trained.adapters, jax.device_get(lora))
  assert trained.count == 3 and not any(map(np.any, gradients_left(learner, tenant)))


@pytest.mark.parametrize('optimizer', ['adamw', 'dimuon'])
def test_a_step_without_a_finite_gradient_is_not_taken(learner, optimizer):
  tenant = learner.add(TenantSnapshot(adapters(3)))
  step, options = learner.adam_step, ADAM
  if optimizer == 'dimuon':
    step, options = learner.muon_step, MUON
  before = learner.snapshot(tenant)
  huge = np.full((12, 1), 1e38, np.float32)
  learner.run([(tenant, row(1, weights=huge))], backward=True)
  assert not np.isfinite(step(tenant, options))
  after = learner.snapshot(tenant)
  jax.tree.map(np.testing.assert_array_equal, before.adapters, after.adapters)
  jax.tree.map(np.testing.assert_array_equal, before.mu, after.mu)
  learner.run([(tenant, row(1))], backward=True)
  assert 0 < step(tenant, options) < np.inf
  assert after.count == 0 and learner.snapshot(tenant).count == 1
  learner.remove(tenant)


MUON = {'learning_rate': 0.1, 'beta1': 0.9, 'grad_clip_norm': 0.0}


def matrices(tree):
  """Every layer's matrices apart from each other."""
  return [
    matrix
    for name in sorted(tree)
    for x in tree[name]
    for matrix in (x if x.ndim == 3 else [x])
  ]


@pytest.mark.parametrize('clip', [0.0, 0.5])
def test_steps_of_muon_equal_those_of_optax(learner, clip):
  """Its own on each matrix alone, without the ranks that pad it."""
  lora = matrices(adapters(3))
  tenant = learner.add(TenantSnapshot(adapters(3)))
  optimizer = optax.chain(
    optax.clip_by_global_norm(clip) if clip else optax.identity(),
    optax.contrib.scale_by_muon(
      beta=0.9,
      weight_dimension_numbers=[optax.contrib.MuonDimensionNumbers() for _ in lora],
    ),
    optax.scale(-0.1),
  )
  state = optimizer.init(lora)
  for step in range(3):
    learner.run([(tenant, row(step))], backward=True)
    own = gradients(learner, tenant)
    norm = learner.muon_step(tenant, MUON | {'grad_clip_norm': clip})
    np.testing.assert_allclose(norm, optax.tree.norm(own), rtol=1e-5)
    updates, state = optimizer.update(matrices(own), state)
    lora = optax.apply_updates(lora, updates)
  trained = learner.snapshot(tenant)
  learner.remove(tenant)
  for x, y in zip(matrices(trained.adapters), lora, strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5)
  assert trained.count == 3 and not any(map(np.any, gradients_left(learner, tenant)))
  assert not any(np.any(x) for x in jax.tree.leaves(trained.nu))


def test_a_step_of_muon_maps_singular_values(learner):
  """From the definition, in float64: U·p(p(p(p(p(S / |S|)))))·Vᵀ of the gradient."""
  before, layers = adapters(3, layers=frozenset('qkvo')), frozenset('qkvo')
  tenant = learner.add(TenantSnapshot(before))
  learner.run([(tenant, row(1))], backward=True)
  own = gradients(learner, tenant)
  learner.muon_step(tenant, MUON)
  after = learner.snapshot(tenant).adapters
  learner.remove(tenant)
  for name, pair in own.items():
    for x, y, g in zip(before[name], after[name], pair, strict=True):
      if name not in layers:
        assert not np.any(y)
        continue
      u, s, v = np.linalg.svd(np.float64(g), full_matrices=False)
      s = s / np.sqrt(np.sum(s * s, -1, keepdims=True))
      for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
      np.testing.assert_allclose(x - y, 0.1 * (u * s[..., None, :]) @ v, atol=2e-5)


def gradients_left(learner, tenant):
  return jax.tree.leaves(gradients(learner, tenant))


def test_layers_that_are_not_trained_stay_zero(learner):
  layers = frozenset('qkvo')
  tenant = learner.add(TenantSnapshot(adapters(4, layers=layers)))
  learner.run([(tenant, row(1))], backward=True)
  learner.adam_step(tenant, ADAM | {'eps': 0.0})
  trained = learner.snapshot(tenant)
  learner.remove(tenant)
  for name, pair in trained.adapters.items():
    assert all(np.any(x) == (name in layers) for x in pair), name
    assert all(np.isfinite(x).all() for x in pair)


def test_a_snapshot_continues_as_if_nothing_had_been(learner):
  first = learner.add(TenantSnapshot(adapters(5)))
  learner.run([(first, row(1))], backward=True)
  learner.adam_step(first, ADAM)
  second = learner.add(learner.snapshot(first))
  for tenant in (first, second):
    learner.run([(tenant, row(2))], backward=True)
    learner.adam_step(tenant, ADAM)
  ends = [learner.snapshot(tenant) for tenant in (first, second)]
  for tenant in (first, second):
    learner.remove(tenant)
  jax.tree.map(np.testing.assert_array_equal, ends[0].adapters, ends[1].adapters)
  assert ends[0].count == ends[1].count == 2


def test_there_is_room_for_so_many(learner):
  made = [learner.add(TenantSnapshot(adapters(i))) for i in range(3)]
  assert learner.num_free == 0
  with pytest.raises(RuntimeError, match='room for 3'):
    learner.add(TenantSnapshot(adapters(9)))
  for tenant in made:
    learner.remove(tenant)
  assert learner.num_free == 3


def test_padded_sizes():
  assert buckets_to(100) == [32, 64, 128]
  assert [num_targets(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
  'family, problem',
  [
    ('qwen3_moe(num_experts=4, num_experts_per_token=2)', 'experts'),
    ('qwen3_5', 'latent or linear'),
  ],
)
def test_models_whose_rows_cannot_have_adapters(family, problem):
  config = model_loading.random_config(family=parse_call(family))
  with pytest.raises(ValueError, match=problem):
    row_adapters.check_model(config)


def test_ranks_are_padded_with_zeros():
  small = adapters(1, 3)
  padded = row_adapters.pad_rank(small, 8)
  assert padded['q'][0].shape[-1] == 8 and not padded['q'][0][..., 3:].any()
  jax.tree.map(np.testing.assert_array_equal, row_adapters.cut_rank(padded, 3), small)


def test_seeds_make_adapters():
  one, same, other = (
    row_adapters.init_adapters(CONFIG, 4, seed, frozenset('q')) for seed in (1, 1, 2)
  )
  np.testing.assert_array_equal(one['q'][0], same['q'][0])
  assert np.abs(one['q'][0] - other['q'][0]).max() > 0.01
  assert np.abs(one['q'][0]).max() <= CONFIG.hidden_size**-0.5
  assert not one['k'][0].any() and not one['q'][1].any()


@pytest.mark.parametrize(
  'config, dimuon, problem',
  [
    ({'type': 'dimuon', 'version': 1}, '', '--dimuon=muon'),
    ({'type': 'dimuon', 'version': 2}, 'muon', "version '2'"),
    ({'type': ['muon']}, 'muon', 'is not supported'),
  ],
)
def test_optimizers_that_cannot_be(config, dimuon, problem):
  with pytest.raises(RequestError, match=problem):
    check_optimizer(config, dimuon)


@pytest.mark.parametrize(
  'name, config, problem',
  [
    ('stable_reinforce', {}, 'not been published'),
    ('reinforce', {}, 'there are cross_entropy'),
    ('ppo', {'clip': 0.2}, 'no option'),
    ('ppo', {'clip_low_threshold': 'low'}, 'finite number'),
    ('ppo', {'clip_low_threshold': 2.0}, 'above'),
    ('dro', {'beta': -1.0}, '0 or more'),
    ('dro', {'beta': float('nan')}, 'finite'),
  ],
)
def test_losses_that_cannot_be(name, config, problem):
  with pytest.raises(ValueError, match=problem):
    tenant_losses.check_loss(name, config)
