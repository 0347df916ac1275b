"""With nothing but a name, each algorithm runs with the values of this table."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import registry, requirements
from jaxrl.component_calls import ComponentCall
from jaxrl.component_table import join_calls
from jaxrl.functional import components, entropy
from jaxrl.functional.aggregation import token_weights
from jaxrl.options import unwrap
from launch.settings import catalogue
from tests.calls import make_algorithm

# name: advantage, policy loss, aggregation, group size, KL as (use, estimator, coef)
K2 = ('loss', 'k2', 1e-3)
K3 = ('loss', 'k3', 1e-3)
K1 = ('penalty', 'k1', 1e-3)
PAPER_K3 = ('loss', 'k3', 0.04)
PRESETS = {
  'ppo': ('gae', 'ppo_clip', 'token_mean', 1, K1),
  'grpo': ('grpo', 'ppo_clip', 'token_mean', 8, K2),
  'grpo_paper': ('grpo', 'ppo_clip', 'sequence_mean_token_mean', 64, PAPER_K3),
  'gspo_paper': ('grpo', 'gspo', 'sequence_mean_token_mean', 8, None),
  'sapo_paper': ('grpo', 'sapo', 'sequence_mean_token_mean', 8, None),
  'topr_paper': ('reinforce', 'topr', 'token_mean', 8, None),
  'gigpo_paper': ('gigpo', 'ppo_clip', 'token_mean', 8, ('loss', 'k3', 0.01)),
  'opmd': ('opmd', 'opmd', 'token_mean', 2, K2),
  'sft': (None, 'sft', 'token_mean', 1, None),
  'cpt': (None, 'sft', 'token_mean', 1, None),
  'dpo': (None, 'dpo', 'token_mean', 1, None),
  'cdpo': (None, 'dpo', 'token_mean', 1, None),
  'ipo': (None, 'ipo', 'token_mean', 1, None),
  'drgrpo': ('grpo', 'ppo_clip', 'sequence_mean_token_sum_norm', 8, None),
  'dapo': ('grpo', 'ppo_clip', 'token_mean', 16, None),
  'lite_ppo': ('grpo', 'ppo_clip', 'token_mean', 8, None),
  'starpo': ('grpo', 'ppo_clip', 'token_mean', 8, K3),
  'reinforce': ('reinforce', 'vanilla', 'token_mean', 8, None),
  'reinforce_plus_plus': ('reinforce_plus_plus', 'ppo_clip', 'token_mean', 8, K1),
  'rloo': ('rloo', 'vanilla', 'token_mean', 8, K1),
  'remax': ('remax', 'vanilla', 'token_mean', 1, K1),
  'asymre': ('asymre', 'opmd', 'token_mean', 8, None),
  'topr': ('reinforce', 'topr', 'token_mean', 8, K2),
  'cispo': ('grpo', 'cispo', 'token_mean', 8, K2),
  'gspo': ('grpo', 'gspo', 'sequence_mean_token_mean', 8, K2),
  'sapo': ('grpo', 'sapo', 'sequence_mean_token_mean', 8, K2),
  'rec': ('rec', 'rec', 'token_mean', 8, K2),
  'sppo': ('opmd', 'sppo', 'token_mean', 8, None),
  'm2po': ('grpo', 'm2po', 'token_mean', 8, None),
  'mix': ('grpo', 'mix', 'token_mean', 8, None),
  'mix_chord': ('grpo', 'mix_chord', 'token_mean', 8, None),
  'kimi': ('opmd', 'kimi', 'token_mean', 8, None),
  'multi_step_grpo': ('step_wise_grpo', 'ppo_clip', 'token_mean', 8, K2),
  'gigpo': ('gigpo', 'ppo_clip', 'token_mean', 8, K2),
  'agentic_reinforce': ('agentic_reinforce', 'vanilla', 'token_mean', 8, None),
  'step_reinforce': ('step_reinforce', 'vanilla', 'token_mean', 8, None),
  'cod': ('cod', 'ppo_clip', 'token_mean', 8, None),
  'raft': ('best_of_group', 'sft', 'token_mean', 8, None),
  'raft_plus_plus': ('best_of_group', 'ppo_clip', 'token_mean', 8, None),
  'on_policy_distill': ('on_policy_distill', 'ppo_clip', 'token_mean', 8, None),
  'jsd': ('jsd', 'ppo_clip', 'token_mean', 8, None),
  'distill': (None, 'distill', 'token_mean', 1, None),
  'process_grpo': (
    'process_grpo',
    'ppo_clip',
    'sequence_mean_token_mean',
    64,
    PAPER_K3,
  ),
  'gdpo': ('gdpo', 'ppo_clip', 'token_mean', 8, None),
  'hierarchical_grpo': ('hierarchical_grpo', 'ppo_clip', 'token_mean', 8, None),
  'optimal_token_baseline': (
    'optimal_token_baseline',
    'ppo_clip',
    'token_mean',
    8,
    None,
  ),
  'rae': ('rae', 'vanilla', 'token_mean', 8, None),
  'a3po': ('grpo', 'a3po', 'token_mean', 8, None),
  'maxrl': ('maxrl', 'ppo_clip', 'token_mean', 8, None),
  'clip_v': ('clip_v', 'ppo_clip', 'token_mean', 8, K2),
  'dppo_tv': ('grpo', 'dppo_tv', 'token_mean', 8, None),
  'dppo_kl': ('grpo', 'dppo_kl', 'token_mean', 8, None),
  'probability_band': ('grpo', 'probability_band', 'token_mean', 8, None),
  'clip_cov': ('grpo', 'clip_cov', 'token_mean', 8, None),
  'kl_cov': ('grpo', 'kl_cov', 'token_mean', 8, None),
  'gmpo': ('grpo', 'gmpo', 'sequence_mean_token_mean', 8, None),
  'vespo': ('grpo', 'vespo', 'token_mean', 8, None),
  'luspo': ('grpo', 'gspo', 'sequence_mean_token_sum', 8, None),
  'dro': ('grpo', 'dro', 'token_mean', 8, None),
  'stable_reinforce': (
    'reinforce_plus_plus',
    'stable_reinforce',
    'sequence_mean_token_mean',
    8,
    None,
  ),
}


def read(algorithm):
  """The preset, off the running object."""
  uses = [('loss', algorithm.kl_loss), ('penalty', algorithm.kl_penalty)]
  terms = [
    (use, unwrap(part).__name__, part.keywords['coef'])
    for use, part in uses
    if part is not None
  ]
  assert len(terms) <= 1
  advantage = algorithm.advantage
  return (
    advantage and unwrap(advantage).__name__,
    unwrap(algorithm.policy_loss).__name__,
    algorithm.aggregation.name,
    algorithm.group_size,
    terms[0] if terms else None,
  )


def test_every_algorithm_has_a_row():
  assert set(registry.names()) == set(PRESETS)


@pytest.mark.parametrize('name', PRESETS)
def test_preset(name):
  algorithm = make_algorithm(name)
  assert read(algorithm) == PRESETS[name]
  assert algorithm.entropy_loss is None
  assert algorithm.provenance in catalogue.PROVENANCE
  assert algorithm.old_logprobs_source == 'rollout'


def test_defaults_are_a_papers_only_where_the_paper_states_them():
  """And else the page says what differs from the paper.

  DeepSeekMath 4.2; Dr. GRPO, its scripts; DAPO 4.1; M2PO, its scripts; DPO, B; GSPO
  5.1; GiGPO, its scripts; SAPO; TOPR.
  """
  provenance = {name: make_algorithm(name).provenance for name in PRESETS}
  names = {name for name, whose in provenance.items() if whose == 'paper'}
  papers = {f'{name}_paper' for name in ('grpo', 'gspo', 'gigpo', 'sapo', 'topr')}
  assert names == {'drgrpo', 'dapo', 'm2po', 'dpo', 'process_grpo', *papers}
  for name in set(PRESETS) - names:
    text = (inspect.getdoc(registry.builder(name)) or '').partition('Args:')[0]
    assert 'paper' in text, f'{name}: say what differs from the paper'


def test_defaults_are_trinitys_only_where_its_registry_has_them():
  """Its AlgorithmType of the name, with the default arguments of the parts it names."""
  provenance = {name: make_algorithm(name).provenance for name in PRESETS}
  names = {name for name, whose in provenance.items() if whose == 'trinity'}
  assert names == {
    *('grpo', 'gspo', 'opmd', 'asymre', 'mix', 'multi_step_grpo', 'rec', 'sppo'),
    'clip_v',  # the advantage of its registry, in its GRPO
  }


def test_defaults_are_another_packages_only_where_it_has_them():
  """The loss's own config in verl 0.9.1, TRL 1.16.0 and prime-rl."""
  provenance = {name: make_algorithm(name).provenance for name in PRESETS}
  names = {w: {n for n, v in provenance.items() if v == w} for w in PACKAGES}
  assert names == PACKAGES


PACKAGES = {
  'verl': {'dppo_tv', 'clip_cov', 'kl_cov', 'optimal_token_baseline'},
  'trl': {'gmpo', 'vespo', 'luspo'},
  'prime-rl': {'probability_band'},
}


@pytest.mark.parametrize(
  'name, slot, options',
  [
    ('rae', 'advantage', {'decay': 0.95}),
    ('gdpo', 'advantage', {'whiten': True}),
    ('a3po', 'policy_loss', {'clip_low': 0.2, 'clip_high': 0.2, 'cap': 5.0}),
    ('clip_v', 'advantage', {'mu': 8.5, 'max_frac': 1e-4, 'drop_zero': True}),
    ('dppo_tv', 'policy_loss', {'clip_low': 0.2, 'clip_high': 0.2, 'cap': 20.0}),
    ('probability_band', 'policy_loss', {'threshold': 0.1, 'regulariser_coef': 1e-3}),
    ('probability_band', 'advantage', {'scale_by_std': False}),
    ('clip_cov', 'policy_loss', {'ratio': 2e-4, 'cov_low': 1.0, 'cov_high': 5.0}),
    ('kl_cov', 'policy_loss', {'ratio': 2e-4, 'coef': 1.0}),
    ('gmpo', 'policy_loss', {'clip_low': 0.4, 'clip_high': 0.4}),
    ('vespo', 'policy_loss', {'power_positive': 2.0, 'decay_positive': 3.0}),
    ('vespo', 'policy_loss', {'power_negative': 3.0, 'decay_negative': 2.0}),
    ('luspo', 'policy_loss', {'clip_low': 2e-3, 'clip_high': 2.5e-3}),
    ('stable_reinforce', 'policy_loss', {'ratio_low': 1e-3, 'ratio_high': 1e3}),
    ('stable_reinforce', 'advantage', {'max_sigma': 3.0}),
    ('grpo', 'policy_loss', {'clip_low': 0.2, 'clip_high': 0.2}),
    ('dapo', 'policy_loss', {'clip_low': 0.2, 'clip_high': 0.28, 'dual_clip': None}),
    ('drgrpo', 'policy_loss', {'clip_low': 0.2, 'clip_high': 0.2, 'dual_clip': None}),
    ('grpo_paper', 'policy_loss', {'clip_high': 0.2, 'dual_clip': None}),
    ('gspo_paper', 'policy_loss', {'clip_low': 3e-4, 'clip_high': 4e-4}),
    ('gigpo_paper', 'policy_loss', {'clip_high': 0.2, 'dual_clip': None}),
    ('gigpo_paper', 'advantage', {'omega': 1.0, 'gamma': 0.95}),
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
    ('m2po', 'policy_loss', {'threshold': 0.04}),
    ('mix', 'policy_loss', {'mu': 0.1}),
    ('dpo', 'policy_loss', {'beta': 0.1, 'label_smoothing': 0.0}),
    ('cdpo', 'policy_loss', {'beta': 0.1, 'label_smoothing': 0.1}),
    ('ipo', 'policy_loss', {'beta': 0.1}),
    ('on_policy_distill', 'advantage', {'coef': 1.0}),
    ('jsd', 'advantage', {'beta': 0.5, 'coef': 1.0}),
    ('distill', 'policy_loss', {'kind': 'forward', 'top_k': 64, 'skew': 0.1}),
  ],
)
def test_parts_have_the_papers_numbers(name, slot, options):
  part = getattr(make_algorithm(name), slot)
  assert options.items() <= part.keywords.items()


def test_what_is_done_to_groups():
  """DAPO's dynamic sampling and overlong penalty; nothing elsewhere."""
  algorithms = {name: make_algorithm(name) for name in PRESETS}
  group_parts = {
    name: (join_calls(a.filters), join_calls(a.shapers))
    for name, a in algorithms.items()
  }
  assert group_parts.pop('dapo') == ('accuracy', 'overlong(cache=0.2)')
  assert set(group_parts.values()) == {('', '')}
  dapo = make_algorithm('dapo', {'overlong_length': 20480, 'overlong_cache': 4096.0})
  assert join_calls(dapo.shapers) == 'overlong(max_length=20480, cache=4096.0)'
  assert make_algorithm('dapo', {'shapers': 'none', 'filters': 'none'}).filters == ()


FILES = {
  'sft': ('messages', 'row'),
  'cpt': ('text', 'row'),
  'dpo': ('preference', 'pair'),
  'cdpo': ('preference', 'pair'),
  'ipo': ('preference', 'pair'),
  'distill': ('messages', 'row'),
}
RL = sorted(set(PRESETS) - set(FILES))


@pytest.mark.parametrize('name', PRESETS)
def test_what_is_read_from_files(name):
  algorithm = make_algorithm(name)
  expected = FILES.get(name, ('rollout', algorithm.batch_unit))
  assert (algorithm.data_format, algorithm.batch_unit) == expected
  pairs = {'ref_logprobs'} if algorithm.batch_unit == 'pair' else set()
  if name in FILES:  # pairs: a reference, and no term for it
    wanted = {'teacher_topk'} if name == 'distill' else pairs
    assert requirements.needs(algorithm) == wanted


@pytest.mark.parametrize('name', ['on_policy_distill', 'jsd'])
def test_a_teacher_is_asked_for_the_students_tokens(name):
  swapped = make_algorithm(name, {'policy_loss': 'importance_sampling'})
  for algorithm in (make_algorithm(name), swapped):
    assert requirements.needs(algorithm) == {'teacher_logprobs'}


@pytest.mark.parametrize('name', RL)
def test_parts_fit_together_and_push_the_right_way(name):
  """From its name alone: a finite loss whose gradient raises the better answer."""
  algorithm = requirements.with_length(make_algorithm(name), 2)
  static, numbers = requirements.split_hparams(algorithm)
  ids = jnp.arange(4)
  columns = {
    'mask': jnp.ones((4, 2), bool),
    'rewards': jnp.zeros((4, 2)).at[:, 1].set(jnp.array([1.0, 0, 0, 1])),
    'logprobs': jnp.full((4, 2), -1.0),
    'old_logprobs': jnp.full((4, 2), -1.0),
    'ref_logprobs': jnp.full((4, 2), -1.0),
    'rollout_logprobs': jnp.full((4, 2), -1.0),
    'teacher_logprobs': jnp.array([[-0.5] * 2, [-2] * 2, [-2] * 2, [-0.5] * 2]),
    'old_values': jnp.full((4, 2), 0.5),
    'group_ids': jnp.array([0, 0, 1, 1]),
    'episode_ids': ids,
    'turn_ids': 0 * ids,
    'state_hash': 0 * ids,
    'greedy_mask': ids < 0,
    'expert_mask': ids < 0,
    'step': jnp.int32(0),
    'entropy': jnp.full((4, 2), 1.0),
    'nec': jnp.zeros((4, 2)),
    'key': jax.random.key(0),
    'sum_pi_squared': jnp.full((4, 2), 0.4),
    'role_ids': 0 * ids,
    'reward_terms': jnp.array([[1.0, 0], [0, 0], [0, 1], [1, 1]]),
    'reward_weights': jnp.ones((4, 2)),
    'step_ends': jnp.ones((4, 2), bool),
    'state': requirements.init_state(algorithm).get('advantage'),
    'weights_version': jnp.zeros((4, 2), jnp.int32),
  }

  @functools.partial(jax.jit, static_argnums=0)
  def slope(algorithm, numbers, columns):
    out = components.call_component(algorithm.advantage, columns, numbers['advantage'])
    mask = columns['mask'] if out.keep is None else columns['mask'] & out.keep
    inputs = columns | {'advantages': out.advantages, 'mask': mask}

    def total(p):
      loss, _ = components.call_component(
        algorithm.policy_loss, inputs | {'logprobs': p}, numbers['policy_loss']
      )
      mode = algorithm.aggregation
      weights = token_weights(mask, mode=mode.name, **mode.options)
      return jnp.sum(weights * loss)

    return jax.value_and_grad(total)(columns['logprobs'])

  value, gradient = slope(static, numbers, columns)
  assert np.isfinite(value) and np.all(np.isfinite(gradient))
  per_row = -np.asarray(gradient).sum(axis=1)
  assert per_row[0] > per_row[1] and per_row[3] > per_row[2]


@pytest.mark.parametrize('name', ['mix', 'mix_chord'])
def test_mixtures_draw_on_experts_and_may_have_an_entropy_bonus(name):
  assert make_algorithm(name).sampler == ComponentCall('mixed')
  bonus = make_algorithm(name, {'entropy_coef': 0.1}).entropy_loss
  assert bonus.func is entropy.mix and bonus.keywords == {'coef': 0.1}


def test_the_critic_may_start_before_the_policy():
  assert make_algorithm('ppo').critic_warmup == 0
  assert make_algorithm('ppo', {'critic_warmup': 5}).critic_warmup == 5
