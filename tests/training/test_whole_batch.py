"""Columns that a part needs of the whole minibatch, however it is split."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.functional import aggregation, losses
from jaxrl.functional.components import component
from jaxrl.training import forward_pass
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from jaxrl.types import Algorithm
from tests.marks import slow
from tests.training import toy
from tests.training.test_train_step import rewards_everywhere, stacked
from tests.training.test_weights import logprobs

SPLITS = [slow(1), slow(2), 4]


async def update(algorithm, groups, **options):
  learner = toy.learner(
    algorithm, optimizer=make_optimizer(OptimizerOptions(learning_rate=0.1)), **options
  )
  return await learner.update(groups)


@pytest.mark.parametrize('num_micro_batches', SPLITS)
async def test_m2po_drops_what_the_whole_minibatch_says(num_micro_batches):
  groups = toy.groups()
  part = functools.partial(losses.m2po, threshold=0.01)
  algorithm = Algorithm(policy_loss=part, advantage=rewards_everywhere)
  metrics = await update(algorithm, groups, num_micro_batches=num_micro_batches)
  mask, p = stacked(groups, 'action_mask'), logprobs(groups)
  o = stacked(groups, 'rollout_logprobs')
  a = np.where(mask, stacked(groups, 'rewards').sum(-1, keepdims=True), 0)
  kept = np.asarray(losses.second_moment_keep(p, o, a, mask, threshold=0.01))
  share = (mask & ~kept).sum() / mask.sum()
  assert 0.02 < share < 0.9
  assert metrics['policy/clip_fraction'] == pytest.approx(share, rel=1e-4)
  want = -(a * np.exp(p - o) * (mask & kept)).sum() / mask.sum()
  assert metrics['loss/policy'] == pytest.approx(want, rel=1e-4)


def mixed(seed=0):
  """Six rollouts, and two expert rows that are longer than they."""
  groups = toy.groups(seed, sizes=(3, 3), lengths=(5, 9))
  expert = toy.groups(seed + 1, sizes=(1, 1), lengths=(14, 16), is_expert=True)
  blank = np.zeros_like
  return groups + [
    [dataclasses.replace(row, rollout_logprobs=blank(row.rollout_logprobs))]
    for (row,) in expert
  ]


@pytest.mark.parametrize('num_micro_batches', SPLITS)
@pytest.mark.parametrize('mode', ['token_mean', 'sequence_mean_token_mean'])
async def test_each_kind_of_row_has_a_mean_of_its_own(num_micro_batches, mode):
  """(1−μ)·⟨ppo_clip⟩ over rollouts + μ·⟨−p⟩ over expert rows."""
  groups = mixed()
  part = functools.partial(losses.mix, mu=0.3)
  algorithm = Algorithm(
    policy_loss=part, advantage=rewards_everywhere, aggregation=mode
  )
  metrics = await update(algorithm, groups, num_micro_batches=num_micro_batches)
  mask, p = stacked(groups, 'action_mask'), logprobs(groups)
  o = stacked(groups, 'rollout_logprobs')
  a = stacked(groups, 'rewards').sum(-1, keepdims=True) * np.ones(mask.shape)
  usual, expert = losses.ppo_clip(p, o, a, mask)[0], losses.sft(p, mask)[0]
  experts = np.array([row.is_expert for group in groups for row in group])
  mean = [
    np.sum(aggregation.token_weights(mask & rows[:, None], mode=mode) * x)
    for rows, x in ((~experts, usual), (experts, expert))
  ]
  want = float(0.7 * mean[0] + 0.3 * mean[1])
  assert metrics['loss/policy'] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize('num_micro_batches', SPLITS)
async def test_the_entropy_of_mix_is_a_mean_over_rollouts(num_micro_batches):
  groups, coef = mixed(), 0.1
  algorithm = registry.make('mix', {'entropy_coef': coef})
  metrics = await update(algorithm, groups, num_micro_batches=num_micro_batches)
  played = Algorithm(policy_loss=losses.sft)
  alone = await update(played, groups[:2], num_rows=8)
  want = -coef * alone['policy/entropy']
  assert metrics['loss/entropy'] == pytest.approx(want, rel=1e-4)


async def test_chords_share_follows_the_steps_without_compiling():
  options = {'warmup_steps': 2, 'decay_steps': 2, 'peak': 0.8, 'valley': 0.2}
  learner = toy.learner(registry.make('mix_chord', options), num_micro_batches=2)
  rows = [await learner.update(mixed()) for _ in range(5)]
  shares = [row['policy/mu'] for row in rows]
  assert shares == pytest.approx([0, 0.4, 0.8, 0.5, 0.2], abs=1e-5)
  assert all(row['compile/programs'] == 0 for row in rows[1:])


async def test_the_options_are_the_parts_own_and_scalars_are_shared():
  def make(mask, aggregation, *, level):
    return {'count': level * jnp.sum(mask), 'mode': 1.0 * (aggregation == 'token_mean')}

  @component(precompute=make)
  def loss(logprobs, mask, count, mode, *, level: float = 2.0):
    return -logprobs, {'count': count, 'mode': mode}

  groups = toy.groups()
  actions = sum(row.action_mask.sum() for group in groups for row in group)
  for level, part in ((2, loss), (5, functools.partial(loss, level=5.0))):
    algorithm = Algorithm(policy_loss=part)
    metrics = await update(algorithm, groups, num_micro_batches=4)
    assert metrics['policy/count'] == pytest.approx(level * actions)
    assert metrics['policy/mode'] == 1


@pytest.mark.parametrize(
  'name, num_micro_batches, passes',
  [slow('grpo', 4, 0), ('mix', 4, 0), slow('m2po', 1, 0), ('m2po', 4, 1)],
)
async def test_only_m2po_scores_a_split_minibatch_twice(
  name, num_micro_batches, passes
):
  calls = []

  class Counted(toy.Bigram):
    def policy_outputs(self, *args, **options):
      calls.append(options)
      return super().policy_outputs(*args, **options)

  options = {'kl_coef': 0.0} if name == 'grpo' else {}
  learner = toy.learner(
    registry.make(name, options), kind=Counted, num_micro_batches=num_micro_batches
  )
  await learner.update(mixed())
  assert len(calls) == 1 + passes


def test_rows_that_fill_up_a_minibatch_count_in_nothing():
  """What reads a whole minibatch, as m2po's threshold does, must not see them."""
  spec = toy.learner(registry.make('grpo'))._spec
  fields = {
    'mask': jnp.ones((3, 4), bool),
    'group_ids': jnp.arange(3),
    'episode_ids': jnp.arange(3),
  }
  weights = {'token': jnp.ones((3, 4))}
  index = jnp.array([2, -1])
  rows, weights = forward_pass.select_rows(spec, fields, weights, index)
  assert rows['mask'].any(axis=1).tolist() == [True, False]
  assert weights['token'].sum(axis=1).tolist() == [4, 0]
  for name in ('group_ids', 'episode_ids'):
    assert rows[name].tolist() == [2, -1]
