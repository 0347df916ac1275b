"""Tests that a component in the place of another kind is refused, also a user's own."""

import types

import pytest

from jaxrl.algorithms import registry
from jaxrl.functional import losses
from jaxrl.options import ConfigError
from jaxrl.types import Advantages

PAIRS = ('dpo', 'hinge', 'ipo')


def _own(function):
  """Returns a copy of a component, as a user's own file would define it."""
  copy = types.FunctionType(
    function.__code__, function.__globals__, function.__name__, function.__defaults__
  )
  vars(copy).update(vars(function), __module__='lab')
  copy.__kwdefaults__ = function.__kwdefaults__
  return copy


def _options(field, function):
  return {field: function} | ({'kl_loss': 'k2'} if field == 'kl_controller' else {})


@pytest.mark.parametrize('field', registry.COMPONENT_MODULES)
def test_a_component_of_another_kind_is_refused(field):
  base, tried = 'ppo' if field == 'value_loss' else 'grpo', 0
  for module in dict.fromkeys(registry.COMPONENT_MODULES.values()):
    if module is registry.COMPONENT_MODULES[field]:
      continue
    for name, function in registry.components_in(module).items():
      # A user's own divergence from a teacher may serve as a KL term.
      is_divergence = field.startswith('kl_') and name == 'distill'
      for part in (function,) if is_divergence else (function, _own(function)):
        tried += 1
        with pytest.raises(ConfigError, match=f'{field}={function.__name__} '):
          registry.make(base, _options(field, part))
  assert tried > 20


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('field', registry.COMPONENT_MODULES)
def test_a_users_own_component_of_the_right_kind_is_taken(field):
  base = 'ppo' if field == 'value_loss' else 'grpo'
  for name, function in registry.components_in(
    registry.COMPONENT_MODULES[field]
  ).items():
    if field == 'value_loss' and name != 'value_loss':
      continue
    if field == 'policy_loss' and name in (*PAIRS, 'value_loss'):
      continue
    part = _own(function)
    assert getattr(registry.make(base, _options(field, part)), field) is part


def test_policy_and_value_losses_are_told_apart():
  with pytest.raises(ConfigError, match='value_loss=ppo_clip does not read values'):
    registry.make('ppo', {'value_loss': losses.ppo_clip})
  with pytest.raises(
    ConfigError, match='policy_loss=value_loss does not read logprobs'
  ):
    registry.make('grpo', {'policy_loss': 'value_loss'})


def _array(rewards, mask):
  return rewards * mask


def _reduced(rewards, mask):
  return Advantages((rewards * mask).sum())


def _named(logprobs, advantages):
  return {'loss': logprobs * advantages}


def _triple(logprobs, ref_logprobs):
  return logprobs, ref_logprobs, {}


def _nothing(logprobs, advantages):
  del logprobs, advantages


def _unscored(old_logprobs, rollout_logprobs):
  return old_logprobs - rollout_logprobs


@pytest.mark.parametrize(
  ('field', 'part', 'returned'),
  [
    ('advantage', _array, 'an array of shape'),
    ('advantage', _reduced, 'Advantages'),
    ('policy_loss', _named, 'a dict'),
    ('policy_loss', _nothing, 'None'),
    ('kl_loss', _triple, 'a tuple of 3'),
    ('kl_penalty', _triple, 'a tuple of 3'),
    ('correction', _unscored, 'an array of shape'),
  ],
)
def test_what_a_component_returns_is_checked_before_the_run(field, part, returned):
  with pytest.raises(ConfigError, match=f'returns {returned}.*; an? .* returns'):
    registry.make('grpo', {field: part})


@pytest.mark.parametrize('name', ['CONST', 'Loss'])
@pytest.mark.parametrize('field', registry.COMPONENT_MODULES)
def test_what_is_no_function_is_refused(field, name, tmp_path):
  file = tmp_path / 'lab.py'
  file.write_text('CONST = 3\nclass Loss: pass\n')
  with pytest.raises(ConfigError, match='a component is a function of arrays'):
    registry.make('ppo', {field: f'{file}:{name}'})
