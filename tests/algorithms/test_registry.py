"""Algorithms by name: presets, swapped parts, needs, traced numbers, errors."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import consistency, registry, requirements
from jaxrl.functional import (
  advantages,
  components,
  corrections,
  kl,
  kl_controllers,
  losses,
)
from jaxrl.options import ConfigError, unwrap
from jaxrl.types import Algorithm
from tests.calls import make_algorithm

USERS = """
from functools import partial
from jaxrl.functional import advantages
from jaxrl.types import Algorithm


def my_loss(logprobs, advantages, ref_logprobs, mask, *, slope: float = 2.0):
  return -slope * advantages * logprobs * mask, {}


def mine(*, slope: float = 2.0, group_size: int = 3) -> Algorithm:
  return Algorithm(
    policy_loss=partial(my_loss, slope=slope),
    advantage=advantages.grpo,
    group_size=group_size,
  )
"""


def test_call_strings_swap_parts():
  algorithm = make_algorithm('grpo', {'policy_loss': 'opmd(tau=.5)', 'kl_loss': 'none'})
  assert algorithm.policy_loss.func is losses.opmd
  assert algorithm.policy_loss.keywords == {'tau': 0.5}
  assert algorithm.kl_loss is None
  assert requirements.needs(algorithm) == frozenset()
  same = make_algorithm('grpo', {'policy_loss': '', 'aggregation': ''})
  assert unwrap(same.policy_loss) is losses.ppo_clip


def test_options_reach_their_parts():
  algorithm = make_algorithm('opmd', {'tau': 0.25, 'group_size': 4})
  assert algorithm.advantage.keywords['tau'] == 0.25
  assert algorithm.policy_loss.keywords['tau'] == 0.25
  assert algorithm.group_size == 4


@pytest.mark.parametrize(
  'spec, options, words',
  [
    ('grop', {}, "no algorithm 'grop'. Did you mean 'grpo'"),
    ('grpo', {'clp_low': 1.0}, "no option 'clp_low'. Did you mean 'clip_low'"),
    ('grpo', {'clip_low': 'x'}, "clip_low='x': must be a number"),
    ('opmd', {'baseline': 'median'}, 'is not one of mean, logavgexp'),
    ('grpo', {'policy_loss': 'ppo_clp'}, "Did you mean 'ppo_clip'"),
    ('grpo', {'policy_loss': 'opmd(ta=1)'}, r"no option 'ta'.*There are: tau"),
    ('grpo', {'advantage': 'grpo(std_over=3)'}, 'is not one of group, batch'),
    ('grpo', {'aggregation': 'token_sum'}, "Did you mean 'token_mean'"),
    ('grpo', {'aggregation': 'sequence_mean_token_sum_norm(length=0)'}, 'length=1024'),
    ('grpo', {'old_logprobs_source': 'rolout'}, "Did you mean 'rollout'"),
  ],
)
def test_errors_name_the_place_and_what_exists(spec, options, words):
  with pytest.raises(ConfigError, match=words):
    make_algorithm(spec, options)


def test_a_users_own_file_and_part(tmp_path):
  file = tmp_path / 'lab.py'
  file.write_text(USERS)
  algorithm = make_algorithm(f'{file}:mine', {'slope': 3.0})
  assert algorithm.group_size == 3
  assert requirements.needs(algorithm) == {'ref_logprobs'}
  assert registry.builder_options(f'{file}:mine')['slope'] == 2.0
  swapped = make_algorithm('grpo', {'policy_loss': f'{file}:my_loss(slope=1.5)'})
  assert swapped.policy_loss.keywords == {'slope': 1.5}
  with pytest.raises(ConfigError, match="Did you mean 'slope'"):
    make_algorithm(f'{file}:mine', {'slop': 1.0})


def test_maker_options_hold_the_defaults_and_empty_slots():
  options = registry.builder_options('grpo')
  assert options['clip_low'] == 0.2 and options['group_size'] == 8
  assert options['policy_loss'] == '' and options['aggregation'] == ''
  assert make_algorithm('grpo', options).group_size == 8


def test_needs_follow_from_the_parts():
  assert requirements.needs(make_algorithm('grpo')) == {'ref_logprobs'}
  assert requirements.needs(make_algorithm('grpo', {'kl_coef': 0.0})) == frozenset()
  assert requirements.needs(make_algorithm('ppo')) == {'ref_logprobs', 'values'}
  assert requirements.needs(make_algorithm('sft')) == frozenset()
  decoupled = make_algorithm('grpo', {'old_logprobs_source': 'decoupled', 'kl_coef': 0})
  assert requirements.needs(decoupled) == {'old_logprobs'}
  bonus = make_algorithm('sft', {'entropy_loss': 'entropy_loss(coef=.01)'})
  assert requirements.needs(bonus) == {'entropy'}


def test_columns_in_order_and_optional_ones():
  def part(logprobs, mask, teacher_logprobs=None, *, tau=1.0):
    return logprobs

  assert components.fields_of(part) == ('logprobs', 'mask', 'teacher_logprobs')
  assert components.fields_of(functools.partial(part, tau=2.0), required=True) == (
    'logprobs',
    'mask',
  )
  assert components.call_component(part, {'logprobs': 1, 'mask': 2}) == 1
  with pytest.raises(ConfigError, match="part reads the batch field 'mask'"):
    components.call_component(part, {'logprobs': 1, 'mask': None})


def test_numbers_are_traced_and_the_rest_is_hashable():
  """Two makings that differ in numbers alone share one compiled program."""
  traces = []

  @functools.partial(jax.jit, static_argnums=0)
  def run(algorithm, numbers, columns):
    traces.append(algorithm)
    loss, _ = components.call_component(
      algorithm.policy_loss, columns, numbers['policy_loss']
    )
    return loss + components.call_component(
      algorithm.kl_loss, columns, numbers['kl_loss']
    )

  one = jnp.ones((1, 1))
  columns = {
    'logprobs': -one,
    'old_logprobs': -2 * one,
    'ref_logprobs': 0 * one,
    'advantages': one,
    'mask': one > 0,
  }
  results = [
    run(*requirements.split_hparams(make_algorithm('grpo', options)), columns)
    for options in ({}, {'clip_high': 0.5}, {'kl_coef': 1})
  ]
  np.testing.assert_allclose(np.ravel(results), [-1.1995, -1.4995, -0.7], rtol=1e-6)
  assert len(traces) == 1


def test_kl_terms_by_reference_to_the_preset():
  algorithm = make_algorithm('ppo')
  assert algorithm.kl_penalty.func is kl.k1
  assert algorithm.kl_penalty.keywords == {'coef': 1e-3}


def test_k1_as_a_loss_is_warned_of():
  with pytest.warns(UserWarning, match='zero in expectation'):
    make_algorithm('grpo', {'kl_loss': 'k1(coef=.01)'})


def test_every_swappable_part_answers_to_its_name():
  for slot, module in registry.COMPONENT_MODULES.items():
    offered = registry.components_in(module)
    assert offered and not {'term', 'init_moments', 'check_pairs'} & set(offered)
    for name in offered:
      assert registry.make_component(slot, name) is offered[name]


def test_prepare_keeps_its_own_options_and_hashes():
  def prepare(mask, *, level: float = 1.0):
    return {'mask': mask}

  first, second = (
    requirements.split_hparams(
      dataclasses.replace(
        make_algorithm('grpo'), prepare=functools.partial(prepare, level=2.0)
      )
    )[0]
    for _ in range(2)
  )
  assert first == second and hash(first) == hash(second)
  assert components.options_of(first.prepare) == {'level': 2.0}


def test_a_correction_is_decoupled_and_scores_only_what_it_must():
  with_ratio = make_algorithm('grpo', {'correction': 'tis(cap=3.)', 'kl_coef': 0.0})
  assert with_ratio.old_logprobs_source == 'decoupled'
  assert requirements.needs(with_ratio) == {'old_logprobs'}
  without = make_algorithm('reinforce', {'correction': 'icepop'})
  assert (
    without.old_logprobs_source == 'decoupled'
    and requirements.needs(without) == frozenset()
  )
  for options in ({'old_logprobs_source': 'decoupled'}, {'correction': 'tis'}):
    penalised = make_algorithm('rloo', options)  # its k1 is of the old policy
    assert requirements.needs(penalised) == {'old_logprobs', 'ref_logprobs'}
  same = {'correction': 'mis', 'old_logprobs_source': 'decoupled'}
  assert make_algorithm('grpo', same).correction is corrections.mis
  by_hand = Algorithm(policy_loss=losses.ppo_clip, correction=corrections.tis)
  assert requirements.split_hparams(by_hand)[0].old_logprobs_source == 'decoupled'


@pytest.mark.parametrize(
  'spec, options, words',
  [
    ('grpo', {'correction': 'tis', 'old_logprobs_source': 'rollout'}, 'count it twice'),
    ('grpo', {'correction': 'tas'}, "Did you mean 'tis'"),
    ('grpo', {'policy_loss': 'dpo'}, "batch_unit='row' may separate them"),
    ('grpo', {'kl_controller': 'adaptive', 'kl_coef': 0.0}, 'there is neither'),
    ('sft', {'kl_penalty': 'k1'}, 'no advantage reads them'),
    ('sft', {'correction': 'tis'}, 'correction judges what'),
    ('cpt', {'kl_loss': 'k2', 'kl_controller': 'adaptive'}, 'kl_controller judges'),
    ('sft', {'advantage': 'reinforce', 'kl_penalty': 'k1'}, 'kl_penalty judges'),
    ('grpo', {'critic_warmup': 3}, 'there is none'),
    ('grpo', {'critic_warmup': -1}, 'at least 0'),
    ('grpo', {'critic_warmup': '3'}, 'must be a whole number'),
    ('grpo', {'data_format': 'roll'}, "Did you mean 'rollout'"),
    ('grpo', {'filters': 'a(x=1) + b(y)'}, 'options go by name'),
    ('grpo', {'sampler': 'mixed(0.1)'}, 'options go by name'),
  ],
)
def test_what_does_not_fit_together_is_refused(spec, options, words):
  with pytest.raises(ConfigError, match=words):
    make_algorithm(spec, options)


def test_pairs_have_one_mean_and_no_correction():
  pairs = Algorithm(policy_loss=losses.dpo, batch_unit='pair', data_format='preference')
  consistency.validate(pairs)
  with pytest.raises(ConfigError, match='a mean over pairs'):
    consistency.validate(pairs, chosen=['aggregation'])
  corrected = dataclasses.replace(pairs, correction=corrections.tis)
  with pytest.raises(ConfigError, match='one number per pair'):
    consistency.validate(corrected)


def test_only_parts_that_hand_a_state_on_may_carry_one():
  @components.component(init_state=dict)
  def loss(logprobs, mask, state):
    return -logprobs, {}

  with pytest.raises(ConfigError, match='loss declares an init_state'):
    consistency.validate(Algorithm(policy_loss=loss))


def test_a_controller_that_carries_nothing_is_refused():
  def still(kl, num_rows):
    return {'scale': jnp.ones(())}

  algorithm = Algorithm(policy_loss=losses.vanilla, kl_loss=kl.k2, kl_controller=still)
  with pytest.raises(
    ConfigError, match='kl_controller=still has no initial state: decorate'
  ):
    consistency.validate(algorithm)


@pytest.mark.parametrize('spec', ['grpo', 'rloo', 'opmd', 'gigpo', 'dapo'])
def test_a_group_of_one_is_doubted_once(spec):
  with pytest.warns(UserWarning, match='nothing to compare with') as caught:
    assert make_algorithm(spec, {'group_size': 1}).group_size == 1
  assert sum(issubclass(one.category, UserWarning) for one in caught) == 1


@pytest.mark.parametrize('spec', ['ppo', 'reinforce', 'reinforce_plus_plus', 'raft'])
def test_a_lone_attempt_is_fine_where_nothing_is_compared(spec):
  # A filter for the whole test would also fail for garbage that earlier tests left.
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    make_algorithm(spec, {'group_size': 1})


def test_settings_are_set_and_left():
  algorithm = make_algorithm(
    'dapo',
    {
      'sampler': 'fifo(a=1)',
      'filters': 'none',
      'shapers': 'a(x=1) + b',
      'data_format': 'text',
    },
  )
  assert (str(algorithm.sampler), algorithm.filters) == ('fifo(a=1)', ())
  assert (str(algorithm.shapers), algorithm.data_format) == ('(a(x=1), b)', 'text')
  options = registry.builder_options('sft')
  assert options['sampler'] == '' and 'critic_warmup' not in options
  assert make_algorithm('sft', options) == make_algorithm('sft')


def test_parts_say_what_they_carry_and_what_must_be_played():
  algorithm = Algorithm(
    policy_loss=losses.vanilla,
    advantage=functools.partial(advantages.normalise, mean='running'),
    kl_controller=kl_controllers.adaptive,
    init_state=lambda: 3,
  )
  state = requirements.init_state(algorithm)
  assert state.keys() == {'advantage', 'kl_controller', 'prepare'}
  assert state['kl_controller'] == {'scale': 1} and state['prepare'] == 3
  remax = Algorithm(policy_loss=losses.vanilla, advantage=advantages.remax)
  assert 'greedy_mask' in requirements.needs(remax)
  top = Algorithm(policy_loss=losses.distill)
  assert requirements.needs(top) == {'teacher_topk'}
  clip = Algorithm(policy_loss=losses.vanilla, advantage=advantages.clip_v)
  assert requirements.needs(clip) == {'entropy', 'nec'}


def test_a_length_left_open_is_the_runs():
  algorithm = make_algorithm('drgrpo')
  assert algorithm.aggregation.name == 'sequence_mean_token_sum_norm'
  filled = requirements.with_length(algorithm, 96)
  assert str(filled.aggregation) == 'sequence_mean_token_sum_norm(length=96)'
  custom = make_algorithm('drgrpo', {'length': 32.0})
  assert requirements.with_length(custom, 96).aggregation.options == {'length': 32.0}
  grpo = requirements.with_length(make_algorithm('grpo'), 96)
  assert str(grpo.aggregation) == 'token_mean'


def test_rows_of_a_group_count_the_greedy_one():
  assert requirements.rows_per_group(make_algorithm('rloo', {'group_size': 4})) == 4
  assert requirements.rows_per_group(make_algorithm('remax')) == 2
  swapped = make_algorithm('reinforce', {'advantage': 'remax'})
  assert requirements.rows_per_group(swapped) == 9


def test_a_column_that_nothing_gives(tmp_path):
  """Said when the algorithm is made, not after the model was compiled."""
  file = tmp_path / 'own.py'
  file.write_text('def loss(logprobs, advantage, mask):\n  return logprobs, {}\n')
  with pytest.raises(ConfigError, match=r"'advantage'.*mean 'advantages'"):
    make_algorithm('grpo', {'policy_loss': f'{file}:loss'})


def test_a_part_named_as_an_algorithm(tmp_path):
  file = tmp_path / 'own.py'
  file.write_text('def loss(logprobs, mask):\n  return logprobs, {}\n')
  with pytest.raises(ConfigError, match=r"cannot be built: missing .* 'logprobs'"):
    make_algorithm(f'{file}:loss')
