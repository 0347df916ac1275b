"""What multiplies the policy loss: corrections, and weights of rows."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.functional import corrections, losses
from jaxrl.options import ConfigError
from jaxrl.types import Algorithm
from tests.training import toy
from tests.training.test_train_step import rewards_everywhere, stacked, train


def logprobs(groups):
  tokens = stacked(groups, 'tokens')
  there = stacked([[ones(row) for row in group] for group in groups], 'tokens')
  out = toy.Bigram().policy_outputs(toy.params(toy.Bigram), tokens, there)
  return np.asarray(out.logprobs)


def ones(row):
  return dataclasses.replace(row, tokens=np.ones_like(row.tokens))


def by_hand(groups):
  """(mask, log-probs, w = e^{p−rollout}, the row's reward at each token)."""
  mask, p = stacked(groups, 'action_mask'), logprobs(groups)
  w = np.exp(p - stacked(groups, 'rollout_logprobs'))
  return mask, p, w, stacked(groups, 'rewards').sum(-1, keepdims=True)


async def test_a_loss_without_a_ratio_starts_from_the_policy_as_it_is():
  """Σ −A·p·min(e^{p−rollout}, C) / Σ m, and no pass to score old log-probs."""
  algorithm = Algorithm(
    policy_loss=losses.vanilla,
    advantage=rewards_everywhere,
    correction=functools.partial(corrections.tis, cap=0.9),
  )
  assert 'old_logprobs' not in toy.learner(algorithm)._spec.scored_fields
  groups = toy.groups()
  (metrics,) = await train(algorithm, groups=groups)
  mask, p, w, a = by_hand(groups)
  w = np.minimum(w, np.float32(0.9))
  assert 0.05 < np.mean(w[mask] == np.float32(0.9)) < 0.95
  want = -(mask * a * p * w).sum() / mask.sum()
  assert metrics['loss/policy'] == pytest.approx(want, rel=1e-4)
  assert metrics['correction/weight'] == pytest.approx(w[mask].mean(), rel=1e-4)
  ess = w[mask].mean() ** 2 / (w[mask] ** 2).mean()
  assert metrics['correction/ess'] == pytest.approx(ess, rel=1e-4)


async def test_a_ratio_starts_from_the_learners_own_log_probs():
  """Before the first update r is 1: Σ −A·w / Σ m, w inside the band."""
  part = functools.partial(corrections.icepop, low=0.9, high=1.1)
  algorithm = Algorithm(
    policy_loss=losses.ppo_clip, advantage=rewards_everywhere, correction=part
  )
  groups = toy.groups()
  (metrics,) = await train(algorithm, groups=groups, num_micro_batches=2)
  mask, _, w, a = by_hand(groups)
  inside = (w >= 0.9) & (w <= 1.1)
  want = -(mask * a * w * inside).sum() / mask.sum()
  assert metrics['policy/ratio'] == pytest.approx(1, abs=1e-5)
  assert metrics['loss/policy'] == pytest.approx(want, rel=1e-4)
  share = 1 - inside[mask].mean()
  assert 0.05 < share < 0.95
  assert metrics['correction/masked'] == pytest.approx(share, rel=1e-4)


async def test_expert_rows_are_not_corrected():
  groups = toy.groups(is_expert=True)
  plain, corrected = [
    (await train(Algorithm(policy_loss=losses.sft, correction=part), groups=groups))[0]
    for part in (None, corrections.tis)
  ]
  assert corrected['loss/policy'] == pytest.approx(plain['loss/policy'], rel=1e-6)


async def test_a_number_a_row_cannot_be_corrected():
  def loss(logprobs, mask):
    return (logprobs * mask).sum(-1), {}

  with pytest.raises(ConfigError, match='loss has no loss per token'):
    await train(Algorithm(policy_loss=loss, correction=corrections.tis))


def weighed(groups):
  rng = np.random.default_rng(0)
  return [
    [dataclasses.replace(row, weight=float(rng.integers(0, 4))) for row in group]
    for group in groups
  ]


async def test_rows_count_by_their_weight():
  groups = weighed(toy.groups())
  algorithm = Algorithm(policy_loss=losses.vanilla, advantage=rewards_everywhere)
  (metrics,) = await train(algorithm, groups=groups, num_micro_batches=2)
  mask, p, _, a = by_hand(groups)
  rows = np.array([row.weight for group in groups for row in group])[:, None]
  assert len(set(rows.ravel())) > 2
  want = -(rows * mask * a * p).sum() / mask.sum()
  assert metrics['loss/policy'] == pytest.approx(want, rel=1e-4)


async def test_the_first_weights_compile_nothing():
  learner = toy.learner(registry.make('grpo'))
  await learner.update(toy.groups())
  metrics = await learner.update(weighed(toy.groups()))
  assert metrics['compile/programs'] == 0
