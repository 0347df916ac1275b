"""Algorithms by name: presets, swapped parts, needs, traced numbers, errors."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import signature
from jaxrl.algorithms import checks, compose, describe
from jaxrl.functional import advantages, controllers, corrections, kl, losses, marks
from jaxrl.signature import ConfigError
from jaxrl.types import Algorithm

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
  algorithm = compose.make('grpo', {'policy_loss': 'opmd(tau=.5)', 'kl_loss': 'none'})
  assert algorithm.policy_loss.func is losses.opmd
  assert algorithm.policy_loss.keywords == {'tau': 0.5}
  assert algorithm.kl_loss is None
  assert compose.needs(algorithm) == frozenset()
  same = compose.make('grpo', {'policy_loss': '', 'aggregation': ''})
  assert signature.unwrap(same.policy_loss) is losses.ppo_clip


def test_options_reach_their_parts():
  algorithm = compose.make('opmd', {'tau': 0.25, 'group_size': 4})
  assert algorithm.advantage.keywords['tau'] == 0.25
  assert algorithm.policy_loss.keywords['tau'] == 0.25
  assert algorithm.group_size == 4


@pytest.mark.parametrize(
  'spec, options, words',
  [
    ('grop', {}, "no algorithm 'grop'. Did you mean 'grpo'"),
    ('grpo', {'clp_low': 1.0}, "no option 'clp_low'. Did you mean 'clip_low'"),
    ('grpo', {'clip_low': 'x'}, 'float'),
    ('opmd', {'baseline': 'median'}, "'mean', 'logavgexp'"),
    ('grpo', {'policy_loss': 'ppo_clp'}, "Did you mean 'ppo_clip'"),
    ('grpo', {'policy_loss': 'opmd(ta=1)'}, r"no option 'ta'.*There are: tau"),
    ('grpo', {'advantage': 'grpo(std_over=3)'}, "'group', 'batch'"),
    ('grpo', {'aggregation': 'token_sum'}, "Did you mean 'token_mean'"),
    ('grpo', {'aggregation': 'sequence_mean_token_sum_norm(length=0)'}, 'length=1024'),
    ('grpo', {'behaviour': 'rolout'}, "Did you mean 'rollout'"),
  ],
)
def test_errors_name_the_place_and_what_exists(spec, options, words):
  with pytest.raises(ConfigError, match=words):
    compose.make(spec, options)


def test_a_users_own_file_and_part(tmp_path):
  file = tmp_path / 'lab.py'
  file.write_text(USERS)
  algorithm = compose.make(f'{file}:mine', {'slope': 3.0})
  assert algorithm.group_size == 3
  assert compose.needs(algorithm) == {'ref_logprobs'}
  assert compose.maker_options(f'{file}:mine')['slope'] == 2.0
  swapped = compose.make('grpo', {'policy_loss': f'{file}:my_loss(slope=1.5)'})
  assert swapped.policy_loss.keywords == {'slope': 1.5}
  with pytest.raises(ConfigError, match="Did you mean 'slope'"):
    compose.make(f'{file}:mine', {'slop': 1.0})


def test_maker_options_hold_the_defaults_and_empty_slots():
  options = compose.maker_options('grpo')
  assert options['clip_low'] == 0.2 and options['group_size'] == 8
  assert options['policy_loss'] == '' and options['aggregation'] == ''
  assert compose.make('grpo', options).group_size == 8


def test_needs_follow_from_the_parts():
  assert compose.needs(compose.make('grpo')) == {'ref_logprobs'}
  assert compose.needs(compose.make('grpo', {'kl_coef': 0.0})) == frozenset()
  assert compose.needs(compose.make('ppo')) == {'ref_logprobs', 'values'}
  assert compose.needs(compose.make('sft')) == frozenset()
  decoupled = compose.make('grpo', {'behaviour': 'decoupled', 'kl_coef': 0})
  assert compose.needs(decoupled) == {'old_logprobs'}
  bonus = compose.make('sft', {'entropy_loss': 'entropy_loss(coef=.01)'})
  assert compose.needs(bonus) == {'entropy'}


def test_columns_in_order_and_optional_ones():
  def part(logprobs, mask, teacher_logprobs=None, *, tau=1.0):
    return logprobs

  assert compose.columns(part) == ('logprobs', 'mask', 'teacher_logprobs')
  assert compose.columns(functools.partial(part, tau=2.0), required=True) == (
    'logprobs',
    'mask',
  )
  assert compose.call_part(part, {'logprobs': 1, 'mask': 2}) == 1
  with pytest.raises(ConfigError, match="part reads the column 'mask'"):
    compose.call_part(part, {'logprobs': 1, 'mask': None})


def test_numbers_are_traced_and_the_rest_is_hashable():
  """Two makings that differ in numbers alone share one compiled program."""
  traces = []

  @functools.partial(jax.jit, static_argnums=0)
  def run(algorithm, numbers, columns):
    traces.append(algorithm)
    loss, _ = compose.call_part(algorithm.policy_loss, columns, numbers['policy_loss'])
    return loss + compose.call_part(algorithm.kl_loss, columns, numbers['kl_loss'])

  one = jnp.ones((1, 1))
  columns = {
    'logprobs': -one,
    'old_logprobs': -2 * one,
    'ref_logprobs': 0 * one,
    'advantages': one,
    'mask': one > 0,
  }
  results = [
    run(*compose.split_numbers(compose.make('grpo', options)), columns)
    for options in ({}, {'clip_high': 0.5}, {'kl_coef': 1})
  ]
  np.testing.assert_allclose(np.ravel(results), [-1.1995, -1.4995, -0.7], rtol=1e-6)
  assert len(traces) == 1


def test_kl_terms_by_reference_to_the_preset():
  algorithm = compose.make('ppo')
  assert algorithm.kl_penalty.func is kl.k1
  assert algorithm.kl_penalty.keywords == {'coef': 1e-3}


def test_k1_as_a_loss_is_warned_of():
  with pytest.warns(UserWarning, match='zero in expectation'):
    compose.make('grpo', {'kl_loss': 'k1(coef=.01)'})


def test_every_swappable_part_answers_to_its_name():
  for slot, module in compose.PARTS.items():
    offered = compose.parts_of(module)
    assert offered and not compose.HELPERS & set(offered)
    for name in offered:
      assert compose.make_part(slot, name) is offered[name]


def test_prepare_keeps_its_own_options_and_hashes():
  def prepare(mask, *, level: float = 1.0):
    return {'mask': mask}

  first, second = (
    compose.split_numbers(
      dataclasses.replace(
        compose.make('grpo'), prepare=functools.partial(prepare, level=2.0)
      )
    )[0]
    for _ in range(2)
  )
  assert first == second and hash(first) == hash(second)
  assert compose.options_of(first.prepare) == {'level': 2.0}


@pytest.mark.parametrize('name', compose.names())
def test_describe_says_what_runs(name):
  text = describe.describe(name)
  assert describe.summary(name) in text
  for slot, part in compose.parts(compose.make(name)).items():
    assert f'{slot} = {compose.function_of(part).__name__}(' in text
  for option, value in signature.defaults(compose.maker(name)).items():
    assert re.search(rf'{option} += {re.escape(repr(value))}', text)


def test_a_correction_is_decoupled_and_scores_only_what_it_must():
  with_ratio = compose.make('grpo', {'correction': 'tis(cap=3.)', 'kl_coef': 0.0})
  assert with_ratio.behaviour == 'decoupled'
  assert compose.needs(with_ratio) == {'old_logprobs'}
  without = compose.make('reinforce', {'correction': 'icepop'})
  assert without.behaviour == 'decoupled' and compose.needs(without) == frozenset()
  for options in ({'behaviour': 'decoupled'}, {'correction': 'tis'}):
    penalised = compose.make('rloo', options)  # its k1 is of the old policy
    assert compose.needs(penalised) == {'old_logprobs', 'ref_logprobs'}
  same = {'correction': 'mis', 'behaviour': 'decoupled'}
  assert compose.make('grpo', same).correction is corrections.mis
  by_hand = Algorithm(policy_loss=losses.ppo_clip, correction=corrections.tis)
  assert compose.split_numbers(by_hand)[0].behaviour == 'decoupled'


@pytest.mark.parametrize(
  'spec, options, words',
  [
    ('grpo', {'correction': 'tis', 'behaviour': 'rollout'}, 'count it twice'),
    ('grpo', {'correction': 'tas'}, "Did you mean 'tis'"),
    ('grpo', {'policy_loss': 'dpo'}, "atom='row' may part them"),
    ('grpo', {'kl_controller': 'adaptive', 'kl_coef': 0.0}, 'there is neither'),
    ('sft', {'kl_penalty': 'k1'}, 'no advantage reads them'),
    ('sft', {'correction': 'tis'}, 'correction goes by what'),
    ('cpt', {'kl_loss': 'k2', 'kl_controller': 'adaptive'}, 'kl_controller goes by'),
    ('sft', {'advantage': 'reinforce', 'kl_penalty': 'k1'}, 'kl_penalty goes by'),
    ('grpo', {'critic_warmup': 3}, 'there is none'),
    ('grpo', {'critic_warmup': -1}, 'at least 0'),
    ('grpo', {'critic_warmup': '3'}, 'must be a int'),
    ('grpo', {'schema': 'roll'}, "Did you mean 'rollout'"),
    ('grpo', {'filters': 'a(x=1) + b(y)'}, 'options go by name'),
    ('grpo', {'sampler': 'mixed(0.1)'}, 'options go by name'),
  ],
)
def test_what_does_not_fit_together_is_refused(spec, options, words):
  with pytest.raises(ConfigError, match=words):
    compose.make(spec, options)


def test_pairs_have_one_mean_and_no_correction():
  pairs = Algorithm(policy_loss=losses.dpo, atom='pair', schema='preference')
  checks.refuse(pairs)
  with pytest.raises(ConfigError, match='a mean over pairs'):
    checks.refuse(pairs, asked=['aggregation'])
  corrected = dataclasses.replace(pairs, correction=corrections.tis)
  with pytest.raises(ConfigError, match='one number a pair'):
    checks.refuse(corrected)


def test_only_parts_that_hand_a_state_on_may_carry_one():
  @marks.stateful(dict)
  def loss(logprobs, mask, state):
    return -logprobs, {}

  with pytest.raises(ConfigError, match='loss is marked stateful'):
    checks.refuse(Algorithm(policy_loss=loss))


def test_a_controller_that_carries_nothing_is_refused():
  def still(kl, num_rows):
    return {'scale': jnp.ones(())}

  made = Algorithm(policy_loss=losses.vanilla, kl_loss=kl.k2, kl_controller=still)
  with pytest.raises(ConfigError, match='kl_controller=still is not marked: put @stat'):
    checks.refuse(made)


@pytest.mark.parametrize('spec', ['grpo', 'rloo', 'opmd', 'gigpo', 'dapo'])
def test_a_group_of_one_is_doubted_once(spec):
  with pytest.warns(UserWarning, match='nothing to compare with') as caught:
    assert compose.make(spec, {'group_size': 1}).group_size == 1
  assert len(caught) == 1


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('spec', ['ppo', 'reinforce', 'reinforce_plus_plus', 'raft'])
def test_a_lone_attempt_is_fine_where_nothing_is_compared(spec):
  compose.make(spec, {'group_size': 1})


def test_settings_are_set_and_left():
  made = compose.make(
    'dapo',
    {
      'sampler': 'fifo(a=1)',
      'filters': 'none',
      'shapers': 'a(x=1) + b',
      'schema': 'text',
    },
  )
  assert (made.sampler, made.filters) == ('fifo(a=1)', '')
  assert (made.shapers, made.schema) == ('a(x=1) + b', 'text')
  options = compose.maker_options('sft')
  assert options['critic_warmup'] == 0 and options['filters'] == ''
  assert compose.make('sft', options) == compose.make('sft')


def test_parts_say_what_they_carry_and_what_must_be_played():
  made = Algorithm(
    policy_loss=losses.vanilla,
    advantage=functools.partial(advantages.normalise, mean='running'),
    kl_controller=controllers.adaptive,
    init_state=lambda: 3,
  )
  state = compose.init_state(made)
  assert state.keys() == {'advantage', 'kl_controller', 'prepare'}
  assert state['kl_controller'] == {'scale': 1} and state['prepare'] == 3
  remax = Algorithm(policy_loss=losses.vanilla, advantage=advantages.remax)
  assert 'greedy_mask' in compose.needs(remax)
  top = Algorithm(policy_loss=losses.distill)
  assert compose.needs(top) == {'teacher_topk'}
  clip = Algorithm(policy_loss=losses.vanilla, advantage=advantages.clip_v)
  assert compose.needs(clip) == {'entropy', 'nec'}


def test_a_length_left_open_is_the_runs():
  made = compose.make('drgrpo')
  assert made.aggregation == 'sequence_mean_token_sum_norm'
  filled = compose.with_length(made, 96)
  assert filled.aggregation == 'sequence_mean_token_sum_norm(length=96)'
  own = compose.make('drgrpo', {'length': 32.0})
  assert compose.with_length(own, 96).aggregation.endswith('(length=32.0)')
  assert compose.with_length(compose.make('grpo'), 96).aggregation == 'token_mean'


def test_rows_of_a_group_count_the_greedy_one():
  assert compose.rows_per_group(compose.make('rloo', {'group_size': 4})) == 4
  assert compose.rows_per_group(compose.make('remax')) == 2
  swapped = compose.make('reinforce', {'advantage': 'remax'})
  assert compose.rows_per_group(swapped) == 9


def test_a_column_that_nothing_gives(tmp_path):
  """Said when the algorithm is made, not after the model was compiled."""
  file = tmp_path / 'own.py'
  file.write_text('def loss(logprobs, advantage, mask):\n  return logprobs, {}\n')
  with pytest.raises(ConfigError, match=r"'advantage'.*mean 'advantages'"):
    compose.make('grpo', {'policy_loss': f'{file}:loss'})


def test_a_part_named_as_an_algorithm(tmp_path):
  file = tmp_path / 'own.py'
  file.write_text('def loss(logprobs, mask):\n  return logprobs, {}\n')
  with pytest.raises(ConfigError, match=r"makes no algorithm: missing .* 'logprobs'"):
    compose.make(f'{file}:loss')
