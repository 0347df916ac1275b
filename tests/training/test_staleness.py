"""What a bound on staleness does to a batch, on a bigram model, by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.functional import corrections, losses
from jaxrl.options import ConfigError
from jaxrl.training.monitoring import NothingLearnedError
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from jaxrl.training.staleness import drop, mask, recompute
from jaxrl.types import Advantages, Algorithm
from tests.training import toy
from tests.training.test_train_step import stacked


def rewards_everywhere(rewards, mask) -> Advantages:
  return Advantages(jnp.where(mask, rewards.sum(-1, keepdims=True), 0))


def aged():
  """At step 5, every other row has its last two tokens, the reward's too, of step 1."""
  groups = toy.groups()
  for number, row in enumerate(row for group in groups for row in group):
    row.weights_version[row.action_mask] = 5
    if number % 2:
      row.weights_version[-2:] = 1
  return groups


def logprobs(tokens):
  table = toy.params(toy.Bigram)['bigram']['table']
  p = jax.nn.log_softmax(table[tokens[:, :-1]])
  return np.pad(
    np.take_along_axis(np.asarray(p), tokens[:, 1:, None], axis=-1)[..., 0],
    ((0, 0), (1, 0)),
  )


async def update(algorithm, bound, groups=None):
  learner = toy.learner(
    algorithm,
    optimizer=make_optimizer(OptimizerOptions(max_grad_norm=None)),
    staleness_limit=bound,
    log_entropy=False,
  )
  learner.step = 5
  await learner.warmup()
  metrics = await learner.update(groups or aged())
  assert metrics['compile/programs'] == 0
  return learner, metrics


async def test_masked_tokens_leave_the_loss_but_not_the_rewards():
  algorithm = Algorithm(policy_loss=losses.vanilla, advantage=rewards_everywhere)
  groups = aged()
  learner, metrics = await update(algorithm, mask(max=3), groups)
  fresh = stacked(groups, 'action_mask') & (stacked(groups, 'weights_version') != 1)
  all_actions = stacked(groups, 'action_mask').sum()
  score = stacked(groups, 'rewards').sum(-1, keepdims=True)
  p = logprobs(stacked(groups, 'tokens'))
  want = -(p * fresh * score).sum() / fresh.sum()
  assert metrics['loss/total'] == pytest.approx(want, rel=1e-4)
  assert metrics['staleness/masked'] == pytest.approx(8 / all_actions)
  assert (metrics['staleness/max'], metrics['staleness/share']) == (4, 0.5)
  assert metrics['tokens/action'] == all_actions
  plain, _ = await update(algorithm, None, groups)
  moved, still = (x.params['bigram']['table'] for x in (learner, plain))
  assert not np.array_equal(moved, still)


async def test_what_is_young_enough_is_as_without_a_bound():
  algorithm = registry.make('grpo', {'old_logprobs_source': 'decoupled'})
  tables = []
  for bound in (None, drop(max=0), mask(max=4), recompute(max=0)):
    learner, metrics = await update(algorithm, bound)
    tables.append(np.asarray(learner.params['bigram']['table']))
  np.testing.assert_array_equal(tables[0], tables[1])
  np.testing.assert_array_equal(tables[0], tables[2])
  assert not np.array_equal(tables[0], tables[3])
  assert metrics['staleness/recomputed'] == 0.5


async def test_recomputed_rows_alone_start_from_the_learners_log_probs():
  grpo = registry.make('grpo', {'kl_coef': 0.0, 'old_logprobs_source': 'decoupled'})
  corrected = dataclasses.replace(
    grpo, correction=functools.partial(corrections.tis, cap=1.5)
  )
  groups = aged()
  _, metrics = await update(corrected, recompute(max=3), groups)
  there = stacked(groups, 'action_mask')
  ratio = np.exp(
    logprobs(stacked(groups, 'tokens')) - stacked(groups, 'rollout_logprobs')
  )
  stale = (np.arange(8) % 2 == 1)[:, None]

  def mean(x):
    return (np.where(there, x, 0)).sum() / there.sum()

  close = functools.partial(pytest.approx, rel=1e-4)
  assert metrics['policy/ratio'] == close(mean(np.where(stale, 1, ratio)))
  weight = np.where(stale, np.minimum(ratio, 1.5), 1)
  assert metrics['correction/weight'] == close(mean(weight))
  assert metrics['staleness/recomputed'] == 0.5


async def test_mismatch_is_told_apart_by_age():
  groups = aged()
  _, metrics = await update(
    registry.make('grpo', {'old_logprobs_source': 'decoupled'}), None, groups
  )
  gap = logprobs(stacked(groups, 'tokens')) - stacked(groups, 'rollout_logprobs')
  version = np.where(
    stacked(groups, 'action_mask'), stacked(groups, 'weights_version'), -1
  )
  for name, wanted in (('fresh', 5), ('stale', 1)):
    want = np.abs(gap[version == wanted]).mean()
    assert metrics[f'mismatch/{name}'] == pytest.approx(want, rel=1e-4)
  _, metrics = await update(registry.make('grpo'), None, groups)
  assert 'mismatch/stale' not in metrics  # nothing was scored


def test_there_must_be_something_to_recompute():
  with pytest.raises(ConfigError, match="old_logprobs_source='decoupled'"):
    toy.learner(registry.make('grpo'), staleness_limit=recompute())


async def test_tokens_after_older_ones_count_as_stale():
  """Weights are replaced in the middle of a reply, and the cache keeps its keys."""
  groups = toy.groups()
  for row in (row for group in groups for row in group):
    row.weights_version[row.action_mask] = 5
  first = groups[0][0]
  actions = np.flatnonzero(first.action_mask)
  first.weights_version[actions[0]] = 4
  algorithm = registry.make('grpo', {'old_logprobs_source': 'decoupled'})
  _, metrics = await update(algorithm, None, groups)
  gap = logprobs(stacked(groups, 'tokens')) - stacked(groups, 'rollout_logprobs')
  action = stacked(groups, 'action_mask')
  stale = np.zeros_like(action)
  stale[0] = action[0]
  for name, which in (('fresh', action & ~stale), ('stale', stale)):
    want = np.abs(gap[which]).mean()
    assert metrics[f'mismatch/{name}'] == pytest.approx(want, rel=1e-4)


async def test_a_limit_that_leaves_no_token_is_told_at_once_and_stops_the_run(caplog):
  groups = toy.groups()
  for row in (row for group in groups for row in group):
    row.weights_version[row.action_mask] = 1
  algorithm = registry.make('grpo', {'old_logprobs_source': 'decoupled'})
  learner, metrics = await update(algorithm, mask(max=1), groups)
  assert metrics['staleness/masked'] == 1 and metrics['optimizer/grad_norm'] == 0
  # Nothing was compared, and nothing has an entropy: no healthy 0 is reported.
  compared = [name for name in metrics if name.startswith(('mismatch/', 'policy/'))]
  assert compared == ['mismatch/stale']  # measured before the limit is applied
  (record,) = [r for r in caplog.records if 'learns nothing' in r.message]
  assert 'step 5' in record.message and 'rollout.staleness_policy' in record.message
  await learner.update(groups)
  with pytest.raises(NothingLearnedError, match=r'steps 5 to 7 .*async_ratio'):
    await learner.update(groups)


async def test_groups_without_spread_are_told_and_do_not_stop_the_run(caplog):
  groups = toy.groups()
  for row in (row for group in groups for row in group):
    row.rewards[:] = 0
  learner, metrics = await update(registry.make('dapo'), None, groups)
  for _ in range(4):
    metrics = await learner.update(groups)
  assert metrics['optimizer/grad_norm'] == 0
  (record,) = [r for r in caplog.records if 'learns nothing' in r.message]
  assert 'same reward' in record.message
