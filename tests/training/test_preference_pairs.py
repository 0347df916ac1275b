"""Pairs of answers, through the learner: never parted, checked on the host."""

import functools

import numpy as np
import pytest

from jaxrl.functional import losses
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from jaxrl.types import Algorithm
from tests.marks import slow
from tests.training import toy

DPO = Algorithm(
  policy_loss=functools.partial(losses.dpo, beta=0.1),
  batch_unit='pair',
  data_format='preference',
)


def pairs(count, seed=0):
  groups = toy.groups(seed, sizes=(2,) * count, is_expert=True)
  for pair in groups:
    for row, reward in zip(pair, (0.0, 1.0), strict=True):
      row.rewards[:] = 0
      row.rewards[-1] = reward
  return groups


@pytest.mark.parametrize(
  ('num_micro_batches', 'num_minibatches'), [(2, 1), (1, 4), slow(1, 1), slow(2, 4)]
)
async def test_the_chosen_answer_gains_on_the_other(num_minibatches, num_micro_batches):
  learner = toy.learner(
    DPO,
    num_rows=16,
    num_minibatches=num_minibatches,
    num_micro_batches=num_micro_batches,
    optimizer=make_optimizer(OptimizerOptions(learning_rate=0.02)),
  )
  metrics = [await learner.update(pairs(8)) for _ in range(8)]
  if num_minibatches == 1:  # the policy is still its reference
    assert metrics[0]['loss/policy'] == pytest.approx(np.log(2), rel=1e-5)
  assert metrics[-1]['policy/accuracy'] == 1
  assert metrics[-1]['policy/margin'] > metrics[1]['policy/margin'] > 0


async def test_what_is_no_pair_is_named():
  learner = toy.learner(DPO)
  with pytest.raises(ValueError, match=r'pair 1 has 3 rows, \[2, 3, 4\]; it needs 2'):
    await learner.update([*pairs(1), toy.groups(sizes=(3,))[0]])
  equal = pairs(2)
  equal[1][0].rewards[-1] = 1
  with pytest.raises(ValueError, match=r'pair 1, rows .*: both have reward 1'):
    await learner.update(equal)
