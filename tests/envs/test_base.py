"""Environments by name, by dotted path, by file; their options checked by name."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.envs.env_registry import (
  EnvResultError,
  check_reset_result,
  check_step_result,
  env_factory,
  find_env,
)
from jaxrl.envs.math_env import MathEnv
from jaxrl.options import ConfigError

MINE = """
class Mine:
  def __init__(self, *, size: int = 3):
    self.size = size
  def reset(self, *, seed, options=None):
    return 'go'
  step = lambda self, action: None
"""


def test_known_names_and_dotted_paths():
  assert find_env('math') is MathEnv
  assert find_env('jaxrl.envs.math_env:MathEnv') is MathEnv


def test_a_file_outside_the_tree(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(MINE)
  assert env_factory(f'{file}:Mine', {'size': 5})().size == 5


@pytest.mark.parametrize('value', ['5', "'text'", '{}', 'int', 'object()'])
def test_a_constant_is_no_environment(tmp_path, value):
  file = tmp_path / 'mine.py'
  file.write_text(f'CONSTANT = {value}')
  for prefix in ('', 'isolated:'):
    with pytest.raises(ConfigError, match=r'mine.py:CONSTANT.*reset and step'):
      find_env(f'{prefix}{file}:CONSTANT')


def test_each_call_makes_another():
  make = env_factory('math')
  assert make() is not make()


def test_errors_before_anything_is_played(tmp_path):
  with pytest.raises(ValueError, match=r"no environment 'maths'.*'math'"):
    env_factory('maths')
  with pytest.raises(ValueError, match='reward'):
    env_factory('math', {'rewards': 1.0})
  with pytest.raises(ValueError):
    env_factory('math', {'reward': 'one'})
  with pytest.raises(ValueError, match=r"option 'id'"):
    env_factory('gymnasium')


@pytest.mark.parametrize(
  'flag', [True, 1, np.True_, np.array(True), jnp.array(True)], ids=repr
)
def test_flags_of_numpy_and_jax_are_taken(flag):
  result = check_step_result(None, ('', 1, flag, np.False_, {}))
  assert result == ('', 1.0, True, False, {})


TEXT = [{'type': 'text', 'text': 'go'}]


@pytest.mark.parametrize('observation', ['', TEXT, [{'role': 'user', 'content': ''}]])
def test_observations_that_can_be_shown(observation):
  assert check_reset_result(None, (observation, {}))[0] is observation
  assert check_step_result(None, (observation, 0, False, False, {}))[0] is observation


@pytest.mark.parametrize(
  ('result', 'words'),
  [
    (('', 0, None, False, {}), 'terminated=None; it must be True or False'),
    (('', 0, False, 'no', {}), "truncated='no'; it must be True or False"),
    (('', 0, np.zeros(2), False, {}), 'terminated=array.*; it must be True or False'),
    (('', 0, 0.5, False, {}), 'terminated=0.5; it must be True or False'),
    ((5, 0, False, False, {}), 'an int as observation; it must be a text, a list'),
    (([*TEXT, 'go'], 0, False, False, {}), 'a list with a str as observation'),
    ((None, 0, False, False, {}), 'a NoneType as observation'),
    (('', float('inf'), True, False, {}), 'the reward inf; it must be a finite'),
    (('', np.eye(2), True, False, {}), r'the reward array.*\]\]\); it must be a n'),
    (('', 1.0, True, False, []), 'a list as info; it must be a dict'),
  ],
)
def test_wrong_results_are_named_with_the_place_of_the_method(tmp_path, result, words):
  file = tmp_path / 'mine.py'
  file.write_text(MINE)
  for name in (f'{file}:Mine', f'isolated:{file}:Mine'):  # no process is started
    env = env_factory(name)()
    with pytest.raises(EnvResultError, match=f'Mine.step returned {words}') as info:
      check_step_result(env, result)
    assert str(info.value).endswith(f' ({file}, line 7)')
    with pytest.raises(EnvResultError, match=r'Mine.reset.*mine.py, line 5\)'):
      check_reset_result(env, result)
