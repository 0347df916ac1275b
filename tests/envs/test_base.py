"""Environments by name, by dotted path, by file; their options checked by name."""

import pytest

from jaxrl.envs.base import factory, find
from jaxrl.envs.math import MathEnv
from jaxrl.signature import ConfigError

MINE = """
class Mine:
  def __init__(self, *, size: int = 3):
    self.size = size
"""


def test_known_names_and_dotted_paths():
  assert find('math') is MathEnv
  assert find('jaxrl.envs.math:MathEnv') is MathEnv


def test_a_file_outside_the_tree(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(MINE)
  assert factory(f'{file}:Mine', {'size': 5})().size == 5


def test_each_call_makes_another():
  make = factory('math')
  assert make() is not make()


def test_errors_before_anything_is_played(tmp_path):
  with pytest.raises(ConfigError, match=r"no environment 'maths'.*'math'"):
    factory('maths')
  with pytest.raises(ConfigError, match='reward'):
    factory('math', {'rewards': 1.0})
  with pytest.raises(ConfigError):
    factory('math', {'reward': 'one'})
  with pytest.raises(ConfigError, match=r"gymnasium: option 'id'"):
    factory('gymnasium')
