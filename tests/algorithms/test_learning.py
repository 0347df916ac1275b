"""From its name alone, every algorithm for rollouts learns a bandit-like toy.

The policy is a table of next-token logits. An answer is two tokens, and is paid for
if the first is from the lower half of the vocabulary: by chance, at first. Those who
learn from a teacher instead of rewards have one that knows this.
"""

import dataclasses

import numpy as np
import pytest

from jaxrl.algorithms import registry, requirements
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from jaxrl.training.parallelism.mesh import single_device_mesh
from jaxrl.training.teacher_scoring import Teachers
from jaxrl.types import Trajectory
from tests.marks import slow_except
from tests.training import toy

STEPS, TASKS, MEMBERS, LENGTH, VOCABULARY = 8, 2, 16, 3, 64
# A policy that teaches itself reads what it is shown, which a table of tokens cannot.
FOR_ROLLOUTS = [
  n
  for n in registry.names()
  if registry.make(n).data_format == 'rollout' and not registry.make(n).self_teacher
]


def by_formulas(names):
  """Every algorithm; those with the loss of an earlier one are slow."""
  first = {}
  for name in names:
    loss = registry.make(name).policy_loss
    first.setdefault(getattr(loss, 'func', loss), name)
  return slow_except(first.values(), names)


def play(table, rng, group, member):
  """One episode: a prompt token, then two drawn from the table."""
  tokens, logprobs = [group], [0.0]
  for _ in range(LENGTH - 1):
    row = table[tokens[-1]].astype(np.float64)
    p = np.exp(row - row.max())
    p /= p.sum()
    tokens.append(int(rng.choice(VOCABULARY, p=p)))
    logprobs.append(np.log(p[tokens[-1]]))
  rewards = np.zeros(LENGTH, np.float32)
  rewards[-1] = tokens[1] < VOCABULARY // 2
  mask = np.arange(LENGTH) > 0
  knows = np.array([0, 0.98 if rewards[-1] else 0.02, 1]) / (VOCABULARY / 2)
  knows[2] /= 2  # of the second token it thinks nothing
  teacher = np.log(knows, where=mask, out=np.zeros(LENGTH))
  return Trajectory(
    tokens=np.array(tokens, np.int32),
    action_mask=mask,
    rollout_logprobs=np.array(logprobs, np.float32),
    rewards=rewards,
    weights_version=np.where(mask, 0, -1).astype(np.int32),
    env_group=group,
    sample_index=member,
    extras={
      'state_hash': group,
      'role': 0,
      'teacher_logprobs': teacher.astype(np.float32),
    },
  )


@pytest.mark.parametrize('name', by_formulas(FOR_ROLLOUTS))
async def test_it_learns(name):
  changes = {'value_head': True} if name == 'ppo' else {}
  algorithm = requirements.with_length(registry.make(name), LENGTH - 1)
  greedy = 'greedy_mask' in requirements.needs(algorithm)
  learner = toy.learner(
    algorithm,
    changes=changes,
    num_rows=TASKS * (MEMBERS + greedy),
    length_buckets=(LENGTH,),
    optimizer=make_optimizer(OptimizerOptions(learning_rate=0.5)),
    teachers=Teachers(algorithm, mesh=single_device_mesh(), chunk_rows=8),
  )
  rng, scores = np.random.default_rng(0), []
  for _ in range(STEPS):
    table = np.asarray(learner.params['bigram']['table'])
    groups = [
      [play(table, rng, group, member) for member in range(MEMBERS)]
      for group in range(TASKS)
    ]
    scores.append(np.mean([row.score for group in groups for row in group]))
    if greedy:  # so sharp a table has but one answer
      for index, group in enumerate(groups):
        best = play(1e6 * table, rng, index, MEMBERS)
        group.append(dataclasses.replace(best, is_greedy=True))
    metrics = await learner.update(groups)
    assert np.isfinite(metrics['loss/policy'])
    assert metrics['mismatch/logprob_difference'] < 1e-4
  assert np.mean(scores[-2:]) > scores[0] + 0.15, scores
