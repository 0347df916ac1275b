"""With nothing but a name, each algorithm runs with the values of its paper's table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import signature
from jaxrl.algorithms import compose
from jaxrl.functional.aggregation import token_weights

# name: advantage, policy loss, aggregation, group size, KL as (use, estimator, coef)
K2 = ('loss', 'k2', 1e-3)
K3 = ('loss', 'k3', 1e-3)
K1 = ('penalty', 'k1', 1e-3)
PRESETS = {
  'ppo': ('gae', 'ppo_clip', 'token_mean', 1, K1),
  'grpo': ('grpo', 'ppo_clip', 'token_mean', 8, K2),
  'opmd': ('opmd', 'opmd', 'token_mean', 2, K2),
  'sft': (None, 'sft', 'token_mean', 1, None),
  'drgrpo': ('grpo', 'ppo_clip', 'sequence_mean_token_sum_norm(length=1024)', 8, None),
  'dapo': ('grpo', 'ppo_clip', 'token_mean', 16, None),
  'lite_ppo': ('grpo', 'ppo_clip', 'token_mean', 8, None),
  'starpo': ('grpo', 'ppo_clip', 'token_mean', 8, K3),
  'reinforce': ('reinforce', 'vanilla', 'token_mean', 8, None),
  'reinforce_plus_plus': ('reinforce_plus_plus', 'ppo_clip', 'token_mean', 8, K1),
  'rloo': ('rloo', 'vanilla', 'token_mean', 8, K1),
  'asymre': ('asymre', 'opmd', 'token_mean', 8, None),
  'topr': ('reinforce', 'topr', 'token_mean', 8, K2),
  'cispo': ('grpo', 'cispo', 'token_mean', 8, K2),
  'gspo': ('grpo', 'gspo', 'sequence_mean_token_mean', 8, K2),
  'sapo': ('grpo', 'sapo', 'sequence_mean_token_mean', 8, K2),
  'rec': ('rec', 'rec', 'token_mean', 8, K2),
  'sppo': ('opmd', 'sppo', 'token_mean', 8, None),
  'kimi': ('opmd', 'kimi', 'token_mean', 8, None),
  'multi_step_grpo': ('step_wise_grpo', 'ppo_clip', 'token_mean', 8, K2),
  'gigpo': ('gigpo', 'ppo_clip', 'token_mean', 8, K2),
  'agentic_reinforce': ('agentic_reinforce', 'vanilla', 'token_mean', 8, None),
  'step_reinforce': ('step_reinforce', 'vanilla', 'token_mean', 8, None),
  'cod': ('cod', 'ppo_clip', 'token_mean', 8, None),
  'raft': ('best', 'sft', 'token_mean', 8, None),
  'raft_plus_plus': ('best', 'ppo_clip', 'token_mean', 8, None),
}


def read(algorithm):
  """The preset, off the running object."""
  uses = [('loss', algorithm.kl_loss), ('penalty', algorithm.kl_penalty)]
  terms = [
    (use, signature.unwrap(part).__name__, part.keywords['coef'])
    for use, part in uses
    if part is not None
  ]
  assert len(terms) <= 1
  advantage = algorithm.advantage
  return (
    advantage and signature.unwrap(advantage).__name__,
    signature.unwrap(algorithm.policy_loss).__name__,
    algorithm.aggregation,
    algorithm.group_size,
    terms[0] if terms else None,
  )


def test_every_algorithm_has_a_row():
  assert set(compose.names()) == set(PRESETS)


@pytest.mark.parametrize('name', PRESETS)
def test_preset(name):
  algorithm = compose.make(name)
  assert read(algorithm) == PRESETS[name]
  assert algorithm.entropy_loss is None
  assert algorithm.behaviour == 'rollout'


@pytest.mark.parametrize(
  'name, slot, options',
  [
    ('grpo', 'policy_loss', {'clip_low': 0.2, 'clip_high': 0.2}),
    ('dapo', 'policy_loss', {'clip_low': 0.2, 'clip_high': 0.28}),
    ('drgrpo', 'advantage', {'scale_by_std': False}),
    ('lite_ppo', 'advantage', {'std_over': 'batch'}),
    ('gspo', 'policy_loss', {'clip_low': 3e-4, 'clip_high': 4e-4}),
    ('cispo', 'policy_loss', {'clip_low': 1.0, 'clip_high': 0.28}),
    ('sapo', 'policy_loss', {'tau_positive': 1.0, 'tau_negative': 1.05}),
    ('sppo', 'policy_loss', {'epsilon': 0.3}),
    ('asymre', 'advantage', {'shift': -0.1}),
    ('opmd', 'policy_loss', {'tau': 1.0}),
    ('topr', 'policy_loss', {'ratio': 'sequence'}),
    ('gigpo', 'advantage', {'omega': 1.0, 'gamma': 1.0}),
  ],
)
def test_parts_have_the_papers_numbers(name, slot, options):
  part = getattr(compose.make(name), slot)
  assert options.items() <= part.keywords.items()


RL = sorted(set(PRESETS) - {'sft'})


@pytest.mark.parametrize('name', RL)
def test_parts_fit_together_and_push_the_right_way(name):
  """From its name alone: a finite loss whose gradient raises the better answer."""
  algorithm = compose.make(name)
  static, numbers = compose.split_numbers(algorithm)
  ids = jnp.arange(4)
  columns = {
    'mask': jnp.ones((4, 2), bool),
    'rewards': jnp.zeros((4, 2)).at[:, 1].set(jnp.array([1.0, 0, 0, 1])),
    'logprobs': jnp.full((4, 2), -1.0),
    'old_logprobs': jnp.full((4, 2), -1.0),
    'ref_logprobs': jnp.full((4, 2), -1.0),
    'rollout_logprobs': jnp.full((4, 2), -1.0),
    'old_values': jnp.full((4, 2), 0.5),
    'task_ids': jnp.array([0, 0, 1, 1]),
    'run_ids': ids,
    'step_ids': 0 * ids,
    'state_hash': 0 * ids,
  }

  @functools.partial(jax.jit, static_argnums=0)
  def slope(algorithm, numbers, columns):
    out = compose.call_part(algorithm.advantage, columns, numbers['advantage'])
    mask = columns['mask'] if out.keep is None else columns['mask'] & out.keep
    given = columns | {'advantages': out.advantages, 'mask': mask}

    def total(p):
      loss, _ = compose.call_part(
        algorithm.policy_loss, given | {'logprobs': p}, numbers['policy_loss']
      )
      weights = token_weights(mask, mode=algorithm.aggregation)
      return jnp.sum(weights * loss)

    return jax.value_and_grad(total)(columns['logprobs'])

  value, gradient = slope(static, numbers, columns)
  assert np.isfinite(value) and np.all(np.isfinite(gradient))
  per_row = -np.asarray(gradient).sum(axis=1)
  assert per_row[0] > per_row[1] and per_row[3] > per_row[2]
