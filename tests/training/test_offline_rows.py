"""Expert rows among rollouts: no statistic of the rollouts feels them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import registry, requirements
from jaxrl.functional import components, losses
from jaxrl.training import batch_fields, monitoring
from jaxrl.training.batching.batch_builder import collate
from jaxrl.types import Advantages, Algorithm
from tests.calls import make_algorithm
from tests.marks import slow, slow_except
from tests.training import toy

PLAYED, EXPERTS, TOKENS = 8, 3, 6
# An algorithm for each advantage, with its options, that is made from rollouts.
NAMES = list(
  {
    components.call_string(preset.advantage): name
    for name in reversed(registry.names())
    if (preset := make_algorithm(name)).advantage is not None
    and preset.data_format == 'rollout'
  }.values()
)
# With statistics of groups, of the batch, of neither, and by turns.
FAST = ('drgrpo', 'reinforce', 'ppo', 'gigpo')
every_advantage = pytest.mark.parametrize('name', slow_except(FAST, NAMES))


def columns(seed=0, played=PLAYED):
  """Two groups of rollouts, the rewards of which differ, and then expert rows."""
  rng = np.random.default_rng(seed)
  rows = played + EXPERTS
  shape = (rows, TOKENS)
  mask = np.arange(TOKENS) >= rng.integers(1, TOKENS, rows)[:, None]
  arrays = {
    name: rng.normal(size=shape).astype(np.float32)
    for name in (
      *('logprobs', 'old_logprobs', 'rollout_logprobs', 'ref_logprobs'),
      *('teacher_logprobs', 'values', 'old_values', 'entropy', 'nec'),
      'sum_pi_squared',
    )
  }
  rewards = np.zeros(shape, np.float32)
  rewards[:, -1] = rng.normal(size=rows)
  expert_groups = np.arange(EXPERTS) + 2 * (played > 0)
  arrays |= {
    'mask': mask,
    'rewards': rewards,
    'group_ids': np.concatenate([np.arange(played) % 2, expert_groups]),
    'episode_ids': np.arange(rows),
    'turn_ids': np.zeros(rows, int),
    'state_hash': rng.integers(0, 3, rows),
    'role_ids': rng.integers(0, 2, rows),
    'reward_terms': rewards[:, -1:],
    'reward_weights': np.ones((rows, 1), np.float32),
    'expert_mask': np.arange(rows) >= played,
    'greedy_mask': (np.arange(rows) < 2) & (played > 2),
    'step_ends': mask,
  }
  return {name: jnp.asarray(x) for name, x in arrays.items()}


def advantage(algorithm, inputs):
  inputs = inputs | {'key': jnp.array([0, 7], jnp.uint32), 'step': jnp.int32(0)}
  inputs['state'] = requirements.init_state(algorithm).get('advantage')
  run = functools.partial(components.call_component, algorithm.advantage)
  return jax.jit(run)(inputs)


def whole(algorithm, inputs):
  lone = batch_fields.singleton_rows(algorithm, inputs)
  result = advantage(algorithm, batch_fields.mask_out_rows(inputs, lone))
  return batch_fields.restore_rows(result, lone, inputs['rewards'], inputs['mask'])


@every_advantage
def test_rollouts_have_the_advantages_they_have_without_experts(name):
  algorithm, inputs = make_algorithm(name), columns()
  result = whole(algorithm, inputs)
  without = {k: x[:PLAYED] for k, x in inputs.items()}
  wanted = advantage(algorithm, without)
  close(result.advantages[:PLAYED], wanted.advantages)
  if wanted.returns is not None:
    close(result.returns[:PLAYED], wanted.returns)
  if wanted.keep is not None:
    np.testing.assert_array_equal(result.keep[:PLAYED], wanted.keep)
    assert result.keep[PLAYED:].all()
  expert_rewards = np.where(inputs['mask'], inputs['rewards'][:, -1:], 0)[PLAYED:]
  close(result.advantages[PLAYED:], expert_rewards)
  for key, value in wanted.metrics.items():
    if jnp.ndim(value) == 0:
      close(result.metrics[key], value)


@every_advantage
def test_a_batch_of_experts_alone_is_finite(name):
  inputs = columns(played=0)
  result = whole(make_algorithm(name), inputs)
  expert_rewards = np.where(inputs['mask'], inputs['rewards'][:, -1:], 0)
  close(result.advantages, expert_rewards)
  for value in result.metrics.values():
    assert np.isfinite(value).all()


def test_the_statistics_of_a_batch_would_feel_them():
  """The whole matter: whitening over the batch, with an expert of reward 100."""
  algorithm, inputs = make_algorithm('reinforce_plus_plus'), columns()
  inputs['rewards'] = inputs['rewards'].at[-1, -1].set(100.0)
  felt = advantage(algorithm, inputs).advantages[:PLAYED]
  unfelt = whole(algorithm, inputs).advantages[:PLAYED]
  assert np.abs(np.asarray(felt - unfelt)).max() > 0.1


def test_rated_rows_of_one_prompt_and_runs_of_files_stay_in():
  inputs = columns()
  inputs['group_ids'] = inputs['group_ids'].at[-1].set(inputs['group_ids'][-2])
  lone = batch_fields.singleton_rows(make_algorithm('grpo'), inputs)
  np.testing.assert_array_equal(np.flatnonzero(lone), [PLAYED])
  of_files = Algorithm(policy_loss=losses.sft, data_format='messages')
  assert not batch_fields.singleton_rows(of_files, inputs).any()


def test_what_an_advantage_leaves_open_stays_open():
  inputs = columns()
  lone = batch_fields.singleton_rows(make_algorithm('grpo'), inputs)
  zeros = jnp.zeros_like(inputs['rewards'])
  restored = batch_fields.restore_rows(
    Advantages(zeros, state=3), lone, inputs['rewards'], inputs['mask']
  )
  assert (restored.returns, restored.keep, restored.state) == (None, None, 3)


def with_experts(seed=0):
  """Groups of rollouts, and two expert rows that end in reward 1."""
  played = toy.groups(seed)
  rows = [row for (row,) in toy.groups(seed + 1, sizes=(1, 1), is_expert=True)]
  for row in rows:
    row.rewards[:] = 0
    row.rewards[-1] = 1
    row.rollout_logprobs[:] = 0
    row.weights_version[:] = -1
  for group in played:
    for row in group:
      row.weights_version[:] = np.where(row.action_mask, 3, -1)
  return played, [[row] for row in rows]


async def test_the_learner_reports_rollouts_alone():
  """Policy off by nothing, so all that is told of the mismatch is of rollouts."""
  played, written = with_experts()
  options = {'old_logprobs_source': 'decoupled'}
  history = []
  for groups in (played, played + written):
    learner = toy.learner(make_algorithm('grpo', options), num_rows=10)
    history.append(await learner.update(groups))
  alone, both = history
  names = [n for n in alone if n.split('/')[0] in ('reward', 'mismatch', 'advantage')]
  assert len(names) > 8
  for name in names:
    assert both[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
  assert both['tokens/rows'] == alone['tokens/rows'] + 2
  advantages = np.asarray(learner.advantages)
  rows = [row for (row,) in written]
  for i, row in enumerate(rows, start=8):
    np.testing.assert_allclose(
      advantages[i, : len(row.tokens)], row.action_mask, atol=1e-6
    )


async def test_the_advantages_of_experts_do_not_enter_mix():
  """Whatever reward expert rows are given, mix learns the same from them."""
  losses = []
  for reward in (0.0, 1.0, 50.0):
    played, written = with_experts()
    for (row,) in written:
      row.rewards[-1] = reward
    algorithm = make_algorithm('grpo', {'policy_loss': 'mix(mu=.3)'})
    learner = toy.learner(algorithm, num_rows=10)
    metrics = await learner.update(played + written)
    losses.append((metrics['loss/policy'], metrics['optimizer/grad_norm']))
  assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize('num_micro_batches', [slow(1), 2])
@pytest.mark.parametrize('name', ['mix', slow('mix_chord')])
async def test_what_mix_says_of_ratios_is_of_rollouts_alone(name, num_micro_batches):
  played, written = with_experts()
  history = []
  for groups in (played, played + written, written):
    learner = toy.learner(
      make_algorithm(name), num_rows=10, num_micro_batches=num_micro_batches
    )
    history.append(await learner.update(groups))
  alone, both, experts_only = history
  for metric in ('ratio', 'clip_fraction', 'approx_kl'):
    assert both[f'policy/{metric}'] == pytest.approx(
      alone[f'policy/{metric}'], rel=1e-5
    )
  if name == 'mix_chord':  # μ is of all rows
    assert [row['policy/mu'] for row in history] == pytest.approx([0.9] * 3)
  assert experts_only['policy/ratio'] == 0


async def test_rows_that_nobody_sampled_steer_no_coefficient():
  """As in the first steps of the sampler `warmup`."""
  options = {'kl_controller': 'adaptive(target=1e-9, horizon=100.)', 'kl_coef': 0.1}
  reference = toy.params(toy.Bigram, seed=1)
  learner = toy.learner(
    make_algorithm('opmd', options), num_rows=10, ref_params=reference
  )
  played, written = with_experts()
  steps = (written, played + written, played)
  coefs = [(await learner.update(groups))['kl/coef'] for groups in steps]
  coefs.append(0.1 * float(learner.algorithm_state['kl_controller']['scale']))
  grown = [0.1, 0.1, 0.1 * (1 + 0.2 * 8 / 100), 0.1 * (1 + 0.2 * 8 / 100) ** 2]
  assert coefs == pytest.approx(grown, rel=1e-5)


def test_rows_from_files_have_no_staleness():
  played, written = with_experts()
  batch = collate(played + written, (64,))
  metrics = monitoring.batch_metrics(batch, step=5)
  assert (metrics['staleness/mean'], metrics['staleness/max']) == (2, 2)
  assert 'staleness/mean' not in monitoring.batch_metrics(
    collate(written, (64,)), step=5
  )


def close(actual, wanted):
  np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)
