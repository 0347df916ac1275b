"""The KL penalty reaches every advantage there is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import registry, requirements
from jaxrl.functional import advantages, components, kl, losses
from jaxrl.training import advantage_step
from jaxrl.training.batching.batch_builder import collate
from jaxrl.training.train_state import StepSpec
from jaxrl.types import Algorithm
from tests.marks import slow_except
from tests.training import toy

COEF = 0.5
# One of each kind: of tokens with a critic, of groups, of turns, of steps, of the whole
# batch, against a greedy attempt, and of a teacher's tokens.
FAST = (
  'agentic_reinforce',
  'gae',
  'gigpo',
  'grpo',
  'on_policy_distill',
  'reinforce_plus_plus',
  'remax',
)
NAMES = slow_except(FAST, sorted(registry.components_in(advantages)))


def batch():
  """Two tasks of three runs, of two rows each; two rows of the first are greedy."""
  groups = toy.groups(sizes=(6, 6))
  for group in groups:
    for i, row in enumerate(group):
      row.sample_index, row.turn = i // 2, i % 2
      row.extras['state_hash'] = row.extras['role'] = i % 2
  groups[0][-1].is_greedy = groups[0][-2].is_greedy = True
  packed = collate(groups, (16,))
  rng = np.random.default_rng(0)
  teacher = packed.rollout_logprobs + rng.normal(size=packed.tokens.shape)
  return packed.replace(
    expert_mask=np.zeros(12, bool),
    teacher_logprobs=teacher.astype(np.float32),
    loss_weights=np.ones(12, np.float32),
  )


@pytest.mark.parametrize('name', NAMES)
def test_it_comes_off_the_rewards_of_every_advantage(name):
  """As if the rewards had been R_t − coef·(o − q)_t, but for greedy rows."""
  penalty = functools.partial(kl.k1, coef=COEF)
  penalised, wanted, plain = (
    outcome(name, kl_penalty, by_hand=by_hand)
    for kl_penalty, by_hand in ((penalty, False), (None, True), (None, False))
  )
  np.testing.assert_allclose(penalised, wanted, atol=2e-5)
  assert np.abs(penalised - plain).max() > 1e-3


def outcome(name, kl_penalty, *, by_hand):
  part = getattr(advantages, name)
  algorithm = Algorithm(
    policy_loss=losses.vanilla, advantage=part, kl_penalty=kl_penalty
  )
  model = toy.Bigram(toy.CONFIG.replace(value_head=True))
  params = toy.params(toy.Bigram, value_head=True)
  reference = toy.params(toy.Bigram, seed=1, value_head=True)
  static, numbers = requirements.split_hparams(algorithm)
  spec, host = StepSpec(model, static), batch()
  off = 0
  if by_hand:
    q = model.policy_outputs(reference, host.tokens, host.segment_ids).logprobs
    sampled = host.action_mask & ~host.greedy_mask[:, None]
    off = np.where(sampled, COEF * (host.rollout_logprobs - np.asarray(q)), 0)
    host = host.replace(rewards=(host.rewards - off).astype(np.float32))
  numbers = {
    'parts': numbers,
    'temperature': jnp.float32(1),
    'step': jnp.int32(0),
    'seed': jnp.uint32(0),
  }
  run = jax.jit(functools.partial(advantage_step.score_and_compute_advantages, spec, 2))
  changed, _, metrics = run(
    params, reference, spec.init_algorithm_state(), host, numbers
  )
  if kl_penalty is not None:
    assert abs(float(metrics['kl/penalty'])) > 1e-3
  a = np.asarray(changed['advantages'])
  # Where a token is judged by itself, so is its penalty.
  return a - off if by_hand and 'rewards' not in components.fields_of(part) else a
