"""Algorithms by name: presets, swapped parts, needs, traced numbers, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import signature
from jaxrl.algorithms import compose, describe
from jaxrl.functional import kl, losses
from jaxrl.signature import ConfigError

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
    ('grpo', {'aggregation': 'sequence_mean_token_sum_norm'}, 'length=1024'),
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
    assert f'{option} = {value!r}' in text
