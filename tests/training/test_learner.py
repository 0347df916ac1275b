import dataclasses
import logging

import jax
import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.functional import advantages, losses
from jaxrl.options import ConfigError
from jaxrl.training.learner import Learner
from jaxrl.training.monitoring import CompileCounter, EmptyBatchError
from jaxrl.training.optimizers import OptimizerOptions
from jaxrl.training.parallelism.mesh import single_device_mesh
from jaxrl.training.teacher_scoring import Teachers
from jaxrl.types import Algorithm
from tests.calls import make_optimizer
from tests.training import toy


async def test_nothing_compiles_after_warm_up():
  grpo = registry.make('grpo')
  # These lengths are used nowhere else: programs are shared within a process.
  learner = toy.learner(
    grpo,
    length_buckets=(18, 26),
    optimizer=make_optimizer(OptimizerOptions(warmup_steps=2)),
  )
  warm = await learner.warmup()
  assert warm['compile/programs'] == 4  # prepare and train, two lengths
  await learner.update(toy.groups())
  with CompileCounter() as counter:
    for seed, lengths in enumerate([(5, 15), (17, 20), (5, 15), (4, 24)]):
      sizes = [(4, 4), (3, 2), (1, 4), (4, 3)][seed]
      await learner.update(toy.groups(seed, sizes=sizes, lengths=lengths))
    learner.optimizer = make_optimizer(
      OptimizerOptions(
        learning_rate=1e-3, name='adamw(weight_decay=.1)', max_grad_norm=None
      )
    )
    learner.temperature = 0.7
    learner.set_algorithm(registry.make('grpo', {'clip_high': 0.28, 'kl_coef': 0.1}))
    metrics = await learner.update(toy.groups())
  assert counter.count == 0
  assert metrics['compile/programs'] == 0
  assert metrics['optimizer/learning_rate'] == pytest.approx(1e-3)


async def test_an_equal_learner_compiles_nothing_anew():
  for rate in (1e-3, 1e-4):
    learner = toy.learner(
      registry.make('opmd', {'tau': rate}),
      optimizer=make_optimizer(OptimizerOptions(learning_rate=rate)),
    )
    warm = await learner.warmup()
  assert warm['compile/programs'] == 0


async def test_options_take_effect_without_compiling():
  learner = toy.learner(registry.make('opmd'))
  one = await learner.update(toy.groups())
  learner.set_algorithm(registry.make('opmd', {'tau': 3.0}))
  two = await learner.update(toy.groups())
  assert two['loss/policy'] == pytest.approx(one['loss/policy'] / 2, rel=1e-3)
  with pytest.raises(ValueError, match='only the numeric options'):
    learner.set_algorithm(registry.make('grpo'))


async def test_the_counter_is_deaf_once_closed():
  with CompileCounter() as counter:
    jax.jit(lambda x: x + 1)(np.ones(3))
  seen = counter.count
  jax.jit(lambda x: x + 2)(np.ones(3))
  assert seen == counter.count >= 1


async def test_the_state_is_donated_and_the_callers_parameters_are_not():
  params = jax.tree.map(jax.numpy.asarray, toy.params(toy.Bigram))
  grpo = registry.make('grpo')
  learner = Learner(toy.Bigram(), params, grpo, num_rows=8, length_buckets=(16,))
  before = learner.params
  await learner.update(toy.groups())
  assert all(x.is_deleted() for x in jax.tree.leaves(before))
  assert not any(x.is_deleted() for x in jax.tree.leaves(params))
  moved = jax.tree.map(lambda a, b: bool((a != b).any()), params, learner.params)
  assert any(jax.tree.leaves(moved))


async def test_minibatches_are_updates_of_their_own():
  sft, groups = registry.make('sft'), toy.groups(is_expert=True)
  learner = toy.learner(sft, num_minibatches=4, ppo_epochs=2)
  await learner.update(groups)
  assert int(learner._state.opt_state[0].count) == 8
  assert learner.step == 1


async def test_an_empty_minibatch_is_no_update():
  learner = toy.learner(registry.make('sft'), num_minibatches=4)
  await learner.update(toy.groups(sizes=(3,), is_expert=True))
  assert int(learner._state.opt_state[0].count) == 3


async def test_two_runs_are_equal_bit_for_bit_and_seeds_differ():
  results = []
  for seed in (0, 0, 1):
    learner = toy.learner(registry.make('grpo'), num_minibatches=2, seed=seed)
    for step in range(3):
      await learner.update(toy.groups(step))
    results.append(np.asarray(learner.params['bigram']['table']))
  np.testing.assert_array_equal(results[0], results[1])
  assert (results[0] != results[2]).any()


async def test_more_rows_than_usual_are_taken_in_one_piece():
  learner = toy.learner(registry.make('sft'))
  metrics = await learner.update(toy.groups(sizes=(9, 10), is_expert=True))
  assert metrics['tokens/rows'] == 19


async def test_groups_stay_whole_where_the_algorithm_says_so():
  """A loss that sees 4 rows of every group it sees, or the test fails."""

  def loss(logprobs, mask, group_ids):
    same = (group_ids[:, None] == group_ids) & (group_ids >= 0)
    members = same.sum(-1)[:, None] * jax.numpy.ones_like(logprobs)
    return -logprobs, {'members': members}

  algorithm = Algorithm(policy_loss=loss, batch_unit='group', group_size=4)
  learner = toy.learner(algorithm, num_rows=16, num_minibatches=2, num_micro_batches=2)
  metrics = await learner.update(toy.groups(sizes=(4,) * 4))
  assert metrics['policy/members'] == pytest.approx(4)


async def test_expert_rows_have_no_mismatch_and_no_reward():
  learner = toy.learner(registry.make('sft'))
  metrics = await learner.update(toy.groups(is_expert=True))
  assert not any(name.startswith(('mismatch/', 'reward/')) for name in metrics)
  assert metrics['loss/policy'] == pytest.approx(np.log(64), rel=0.05)


async def test_a_step_without_action_tokens_stops_before_anything_is_updated():
  learner = toy.learner(registry.make('grpo'))
  before = jax.device_get(learner.params)
  empty = [
    [dataclasses.replace(row, action_mask=row.action_mask & False) for row in group]
    for group in toy.groups()
  ]
  with pytest.raises(EmptyBatchError, match='none of the 8 rows has an action'):
    await learner.update(empty)
  assert learner.step == 0
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(learner.params))


async def test_mismatch_is_measured_and_warned_of_once(caplog):
  learner = toy.learner(registry.make('grpo'), logprob_mismatch_warn=0.05)
  with caplog.at_level(logging.WARNING, 'jaxrl'):
    metrics = [await learner.update(toy.groups()) for _ in range(2)]
  assert len([r for r in caplog.records if 'disagree' in r.message]) == 1
  assert metrics[0]['mismatch/alarm'] == 1
  groups, score = toy.groups(), jax.jit(toy.Bigram().policy_outputs)
  differences, ratios = [], []
  for row in [row for group in groups for row in group]:
    p = score(
      toy.params(toy.Bigram), row.tokens[None], np.ones((1, len(row.tokens)))
    ).logprobs
    d = (np.asarray(p)[0] - row.rollout_logprobs)[row.action_mask]
    differences.append(np.abs(d))
    ratios.append(np.exp(d))
  want, w = np.concatenate(differences).mean(), np.concatenate(ratios)
  assert metrics[0]['mismatch/logprob_difference'] == pytest.approx(want, rel=1e-4)
  ess = w.mean() ** 2 / (w**2).mean()
  assert metrics[0]['mismatch/ess'] == pytest.approx(ess, rel=1e-4)


async def test_rewards_tokens_and_staleness_are_reported():
  groups = toy.groups()
  learner = toy.learner(registry.make('grpo'))
  await learner.update(groups)
  metrics = await learner.update(groups)
  rows = [row for group in groups for row in group]
  scores = [row.score for row in rows]
  assert metrics['reward/mean'] == pytest.approx(np.mean(scores))
  assert metrics['tokens/total'] == sum(len(row.tokens) for row in rows)
  assert metrics['tokens/action'] == sum(row.action_mask.sum() for row in rows)
  assert metrics['staleness/mean'] == 1


async def test_what_is_not_finite_stops_the_run():
  def loss(logprobs, mask):
    return logprobs / 0.0, {}

  learner = toy.learner(Algorithm(policy_loss=loss))
  with pytest.raises(FloatingPointError, match='at step 0'):
    await learner.update(toy.groups())


async def test_a_row_longer_than_every_bucket_is_an_error():
  learner = toy.learner(registry.make('grpo'))
  with pytest.raises(ValueError, match='longer than the largest length bucket, 16'):
    await learner.update(toy.groups(lengths=(17, 18)))
  assert learner.step == 0


def test_parameters_of_another_shape_are_named():
  params = toy.params(toy.Bigram)
  params = {'bigram': {'table': np.zeros((3, 64), np.float32)}}
  algorithm = registry.make('grpo')
  with pytest.raises(ValueError, match=r'bigram.table: .* given is \(3, 64\)'):
    Learner(toy.Bigram(), params, algorithm, num_rows=8, length_buckets=(16,))


@pytest.mark.parametrize('loss', [losses.distill, losses.sft])
def test_what_speaks_for_a_teacher_needs_one(loss):
  algorithm = Algorithm(policy_loss=loss, advantage=advantages.on_policy_distill)
  with pytest.raises(ConfigError, match=r'reads teacher_.*teacher.checkpoint'):
    toy.learner(algorithm)


async def test_the_width_of_a_teachers_columns_stays():
  algorithm = registry.make('distill')
  teachers = Teachers(algorithm, mesh=single_device_mesh(), chunk_rows=8)
  learner = toy.learner(algorithm, teachers=teachers)
  learner.set_algorithm(registry.make('distill', {'skew': 0.2}))
  with pytest.raises(ValueError, match='only the numeric options'):
    learner.set_algorithm(registry.make('distill', {'top_k': 3}))


def test_a_critic_needs_a_value_head():
  with pytest.raises(ValueError, match='value_head=True'):
    toy.learner(registry.make('ppo'))


async def test_a_learned_value_lowers_the_value_error():
  algorithm = registry.make('ppo', {'kl_coef': 0.0, 'value_clip': None})
  learner = toy.learner(
    algorithm,
    changes={'value_head': True},
    optimizer=make_optimizer(OptimizerOptions(learning_rate=0.05)),
  )
  metrics = [await learner.update(toy.groups()) for _ in range(20)]
  assert metrics[-1]['value/value_error'] < 0.8 * metrics[0]['value/value_error']


async def test_policy_gradient_raises_the_log_prob_of_what_paid():
  algorithm = Algorithm(policy_loss=losses.sft)
  learner = toy.learner(
    algorithm, optimizer=make_optimizer(OptimizerOptions(learning_rate=0.05))
  )
  first = await learner.update(toy.groups())
  last = [await learner.update(toy.groups()) for _ in range(10)][-1]
  assert last['policy/logprob'] > first['policy/logprob'] + 0.1


def test_wrong_counts_are_refused():
  with pytest.raises(ValueError, match='num_micro_batches=0'):
    toy.learner(dataclasses.replace(registry.make('grpo')), num_micro_batches=0)


async def test_greedy_attempts_are_in_no_statistic_of_advantages():
  groups = toy.groups(sizes=(2, 2, 2, 2))
  for _, greedy in groups:
    greedy.is_greedy = True
  metrics = await toy.learner(registry.make('remax', {'kl_coef': 0.0})).update(groups)
  gains = [row.score - greedy.score for row, greedy in groups]
  counts = [row.action_mask.sum() for row, _ in groups]
  mean = np.average(gains, weights=counts)
  std = np.sqrt(np.average((gains - mean) ** 2, weights=counts))
  assert metrics['advantage/mean'] == pytest.approx(mean, rel=1e-4)
  assert metrics['advantage/std'] == pytest.approx(std, rel=1e-4)
