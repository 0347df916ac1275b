"""What a step computes, by hand, on a bigram model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import kl, losses
from jaxrl.models import layer_stack, lora
from jaxrl.options import ConfigError
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from jaxrl.types import Advantages, Algorithm
from tests.calls import make_algorithm
from tests.training import toy


async def train(algorithm, *, steps=1, groups=None, **options):
  learner = toy.learner(
    algorithm, optimizer=make_optimizer(OptimizerOptions(learning_rate=0.1)), **options
  )
  groups = toy.groups() if groups is None else groups
  return [await learner.update(groups) for _ in range(steps)]


def stacked(groups, name):
  """A field of all rows, padded to 16."""
  rows = [getattr(row, name) for group in groups for row in group]
  return np.stack([np.pad(row, (0, 16 - len(row))) for row in rows])


async def test_a_step_is_the_gradient_of_the_loss_written_out():
  """−Σ A·p / Σ m by hand, one SGD-like step: Adam's first moment is 0.1·gradient."""
  groups = toy.groups()
  algorithm = Algorithm(policy_loss=losses.vanilla, advantage=rewards_everywhere)
  learner = toy.learner(
    algorithm, optimizer=make_optimizer(OptimizerOptions(max_grad_norm=None))
  )
  metrics = await learner.update(groups)
  tokens, mask = stacked(groups, 'tokens'), stacked(groups, 'action_mask')
  score = stacked(groups, 'rewards').sum(-1, keepdims=True)

  def loss(params):
    p = jax.nn.log_softmax(params['bigram']['table'][tokens[:, :-1]])
    p = jnp.take_along_axis(p, tokens[:, 1:, None], axis=-1)[..., 0]
    return -(p * mask[:, 1:] * score).sum() / mask.sum()

  start = jax.tree.map(jnp.asarray, toy.params(toy.Bigram))
  value, gradient = jax.jit(jax.value_and_grad(loss))(start)
  assert metrics['loss/total'] == pytest.approx(float(value), rel=1e-4)
  moments = learner._state.opt_state[0].mu
  jax.tree.map(
    lambda m, g: np.testing.assert_allclose(10 * m, g, atol=1e-6), moments, gradient
  )


def rewards_everywhere(rewards, mask) -> Advantages:
  return Advantages(jnp.where(mask, rewards.sum(-1, keepdims=True), 0))


def exact(metrics, name):
  return pytest.approx(metrics[name], rel=1e-6)


async def test_the_source_decides_whose_log_probs_are_old():
  grpo = make_algorithm('grpo', {'kl_coef': 0.0})
  decoupled = dataclasses.replace(grpo, old_logprobs_source='decoupled')
  (metrics,) = await train(decoupled)
  assert metrics['policy/ratio'] == pytest.approx(1, abs=1e-6)
  assert metrics['mismatch/logprob_difference'] > 0.01
  (rollouts,) = await train(grpo)
  assert abs(rollouts['policy/ratio'] - 1) > 0.01


async def test_the_kl_penalty_comes_off_the_rewards_of_any_advantage():
  """R_t − coef·(o − q)_t on action tokens, q another model's."""
  seen = []

  def spy(rewards, mask) -> Advantages:
    jax.debug.callback(lambda x: seen.append(np.asarray(x)), rewards)
    return Advantages(jnp.where(mask, rewards, 0))

  other = toy.params(toy.Bigram, seed=1)
  penalty = functools.partial(kl.k1, coef=0.5)
  algorithm = Algorithm(policy_loss=losses.vanilla, advantage=spy, kl_penalty=penalty)
  groups = toy.groups()
  await train(algorithm, groups=groups, ref_params=other)
  tokens, mask = stacked(groups, 'tokens'), stacked(groups, 'action_mask')
  q = toy.Bigram().policy_outputs(other, tokens, np.ones_like(tokens)).logprobs
  o = stacked(groups, 'rollout_logprobs')
  want = stacked(groups, 'rewards') - 0.5 * np.where(mask, o - q, 0)
  np.testing.assert_allclose(seen[0], want, atol=1e-5)


async def test_what_no_part_reads_is_not_scored():
  opmd = make_algorithm('opmd', {'kl_coef': 0.0})
  assert toy.learner(opmd)._ref_params is None
  assert not toy.learner(make_algorithm('sft'))._spec.has_advantage_step
  (metrics,) = await train(opmd, log_entropy=False)
  assert 'policy/entropy' not in metrics and 'kl/reference' not in metrics


async def test_an_entropy_part_gets_the_entropy():
  algorithm = make_algorithm(
    'opmd', {'kl_coef': 0.0, 'entropy_loss': 'entropy_loss(coef=2.)'}
  )
  (metrics,) = await train(algorithm, log_entropy=False)
  assert metrics['loss/entropy'] == pytest.approx(-2 * metrics['policy/entropy'])
  assert metrics['policy/entropy'] == pytest.approx(np.log(64), rel=0.01)


async def test_kept_out_tokens_count_nowhere():
  def half(rewards, mask) -> Advantages:
    keep = jnp.arange(mask.shape[0])[:, None] % 2 == 0
    return Advantages(jnp.where(mask, 1.0, 0), keep=keep & mask)

  algorithm = Algorithm(policy_loss=losses.vanilla, advantage=half)
  groups = toy.groups()
  (metrics,) = await train(algorithm, groups=groups)
  kept = [group[::2] for group in groups]
  (other,) = await train(algorithm, groups=[[r, r] for g in kept for r in g])
  assert metrics['policy/logprob'] == exact(other, 'policy/logprob')


async def test_a_state_is_carried_from_update_to_update():
  def prepare(state, mask):
    return {'state': state + 1}

  def loss(logprobs, mask, state):
    return -state * logprobs, {'state': state}

  algorithm = Algorithm(
    policy_loss=loss, prepare=prepare, init_state=lambda: jnp.zeros(())
  )
  metrics = await train(algorithm, steps=3, num_minibatches=2)
  assert [m['policy/state'] for m in metrics] == [1.5, 3.5, 5.5]


async def test_padding_changes_nothing():
  grpo = make_algorithm('grpo')
  (plain,) = await train(grpo)
  (padded,) = await train(grpo, num_rows=12, length_buckets=(32,))
  for name, value in plain.items():
    if not name.startswith(('time/', 'tokens/', 'compile/')):
      assert padded[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


async def test_row_losses_are_averaged_over_rows():
  def loss(logprobs, mask):
    return jnp.where(mask, -logprobs, 0).sum(-1), {}

  algorithm = Algorithm(policy_loss=loss)
  (metrics,) = await train(algorithm, num_micro_batches=2)
  want = make_algorithm('sft', {'aggregation': 'sequence_mean_token_sum'})
  (other,) = await train(want)
  assert metrics['loss/total'] == exact(other, 'loss/total')


@pytest.mark.parametrize('slot', ['policy_loss', 'entropy_loss'])
async def test_a_loss_that_has_reduced_is_refused(slot):
  """It would count once for each micro-batch, whatever the tokens in them."""

  def reduced(logprobs, mask):
    return -(logprobs * mask).sum() / mask.sum()

  algorithm = Algorithm(**{'policy_loss': losses.sft, slot: reduced})
  reason = {
    'policy_loss': r'shape \[\] for .*\[8, 16',
    'entropy_loss': 'does not read entropy or nec',  # which is found before a batch
  }
  with pytest.raises(ConfigError, match=f'{slot}=reduced .*{reason[slot]}'):
    await train(algorithm)


async def test_what_a_loss_says_of_rows_without_actions_is_not_read():
  def loss(logprobs, mask):
    count = mask.sum(-1)
    mean = (logprobs * mask).sum(-1) / jnp.maximum(count, 1)
    return -mean, {'inverse': 1 / count, 'count': count}

  (metrics,) = await train(Algorithm(policy_loss=loss), groups=toy.groups(sizes=(3, 3)))
  assert 1 / metrics['policy/count'] <= metrics['policy/inverse'] < 1


def casts_of_kernels(jaxpr, shapes, depth=0):
  """Yields, of casts of arrays that look like kernels, in how many scans they are."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'convert_element_type':
      x, y = eqn.invars[0].aval, eqn.outvars[0].aval
      if (x.dtype, y.dtype) == (jnp.float32, jnp.bfloat16) and x.shape in shapes:
        yield depth
    for value in eqn.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        if hasattr(inner := getattr(inner, 'jaxpr', inner), 'eqns'):
          yield from casts_of_kernels(
            inner, shapes, depth + (eqn.primitive.name == 'scan')
          )


@pytest.mark.parametrize('adapters', [None, lora.lora_adapters(rank=2)])
def test_matrices_are_cast_once_for_all_micro_batches(adapters):
  model = dataclasses.replace(toy.model(), dtype='bfloat16')
  params = toy.params()
  if adapters is not None:
    model = dataclasses.replace(model, config=model.config.replace(lora=adapters))
    params = lora.add_adapters(model, params, jax.random.key(0))
  learner = Learner(
    model,
    params,
    make_algorithm('sft'),
    num_rows=8,
    length_buckets=(16,),
    options=LearnerOptions(num_micro_batches=4),
  )
  jaxpr = learner.trace(16)[1]['train'].jaxpr.jaxpr
  kernel = model.init(jax.random.key(0))['layers']['mlp']['gate']['kernel']
  stacked, one = kernel.shape, kernel.shape[1:]
  # Of gate and up, before the scan over micro-batches; none in the scan over layers.
  assert [*casts_of_kernels(jaxpr, {stacked, one})] == [0, 0]


def test_only_kernels_of_products_are_cast():
  params = toy.params()
  cast = layer_stack.cast_kernels(params, 'bfloat16')
  kinds = {
    jax.tree_util.keystr(path, simple=True, separator='.')
    for path, x in jax.tree_util.tree_leaves_with_path(cast)
    if x.dtype == jnp.bfloat16
  }
  names = [f'attention.{name}' for name in 'qkvo']
  names += [f'mlp.{name}' for name in ('gate', 'up', 'down')]
  assert kinds == {f'layers.{name}.kernel' for name in names}
  same = layer_stack.cast_kernels(params, 'float32')
  assert all(x is y for x, y in zip(*map(jax.tree.leaves, (same, params)), strict=True))
