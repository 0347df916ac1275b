"""Environments by name, by dotted path, by file; their options checked by name."""

import pytest

from jaxrl.call_strings import ConfigError
from jaxrl.envs.env_registry import env_factory, find_env
from jaxrl.envs.math_env import MathEnv

MINE = """
class Mine:
  def __init__(self, *, size: int = 3):
    self.size = size
"""


def test_known_names_and_dotted_paths():
  assert find_env('math') is MathEnv
  assert find_env('jaxrl.envs.math_env:MathEnv') is MathEnv


def test_a_file_outside_the_tree(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(MINE)
  assert env_factory(f'{file}:Mine', {'size': 5})().size == 5


def test_each_call_makes_another():
  make = env_factory('math')
  assert make() is not make()


def test_errors_before_anything_is_played(tmp_path):
  with pytest.raises(ConfigError, match=r"no environment 'maths'.*'math'"):
    env_factory('maths')
  with pytest.raises(ConfigError, match='reward'):
    env_factory('math', {'rewards': 1.0})
  with pytest.raises(ConfigError):
    env_factory('math', {'reward': 'one'})
  with pytest.raises(ConfigError, match=r"gymnasium: option 'id'"):
    env_factory('gymnasium')
