"""A folder of one's own parts and algorithms: named as the built-in ones are."""

import pytest

from jaxrl.algorithms import registry
from jaxrl.functional import advantages
from jaxrl.options import ConfigError, unwrap
from launch.settings import plugins
from tests.calls import make_algorithm

LOSSES = """
import jax.numpy as jnp
from jaxrl.functional.losses import vanilla


def steep(logprobs, advantages, mask, *, slope: float = 2.0):
  return jnp.where(mask, -slope * advantages * logprobs, 0), {}


def _hidden(logprobs):
  return logprobs
"""
WHOLE = '''
"""All that an algorithm has, in one file."""

from functools import partial

import jax.numpy as jnp
from jaxrl.functional import reductions
from jaxrl.types import Advantages, Algorithm


def halved(rewards, mask, episode_ids, *, share: float = 0.5):
  """A = share·R."""
  returns = share * reductions.episode_returns(rewards, episode_ids)
  return Advantages(reductions.episode_to_tokens(returns, episode_ids, mask))


def straight(logprobs, advantages, mask):
  return jnp.where(mask, -advantages * logprobs, 0), {}


def cubic(logprobs, ref_logprobs, *, coef: float = 1.0):
  return coef * jnp.abs(logprobs - ref_logprobs) ** 3


def whole(*, share: float = 0.5, kl_coef: float = 0.1, group_size: int = 3):
  return Algorithm(
    advantage=partial(halved, share=share),
    policy_loss=straight,
    kl_loss=partial(cubic, coef=kl_coef),
    group_size=group_size,
  )


def other(*, group_size: int = 2) -> Algorithm:
  return whole(group_size=group_size)
'''


@pytest.fixture
def folder(tmp_path):
  place = tmp_path / 'plugins'
  place.mkdir()
  (place / 'my_losses.py').write_text(LOSSES)
  (place / 'whole.py').write_text(WHOLE)
  (place / '_notes.py').write_text('raise SystemExit')
  return place


def test_what_a_folder_offers(folder):
  loaded = plugins.read(str(folder))
  assert loaded.of('algorithm') == {
    'whole': f'{folder}/whole.py:whole',
    'other': f'{folder}/whole.py:other',
  }
  for slot in registry.COMPONENT_MODULES:
    assert set(loaded.of(slot)) == {'steep', 'halved', 'straight', 'cubic'}
  assert loaded.names.keys() == {'algorithm', *registry.COMPONENT_MODULES}


def test_bare_names_stand_for_their_files(folder):
  loaded = plugins.read(str(folder))
  assert loaded.algorithm('grpo') == 'grpo'
  options = {
    'policy_loss': 'steep(slope=3.0)',
    'advantage': 'opmd(tau=.5)',
    'kl_loss': 'none',
    'aggregation': '',
  }
  loaded.name_components({'algorithm': options})
  assert options['policy_loss'] == f'{folder}/my_losses.py:steep(slope=3.0)'
  assert options['advantage'] == 'opmd(tau=.5)' and options['kl_loss'] == 'none'
  algorithm = make_algorithm(loaded.algorithm('whole'), {**options, 'share': 0.25})
  assert algorithm.policy_loss.keywords == {'slope': 3.0}
  assert unwrap(algorithm.advantage) is advantages.opmd
  assert algorithm.group_size == 3


def test_an_unknown_name_is_answered_with_the_nearest_of_both(folder):
  loaded = plugins.read(str(folder))
  with pytest.raises(ConfigError, match=r"Did you mean 'steep'.*ppo_clip"):
    loaded.name_components({'algorithm': {'policy_loss': 'stepe'}})
  with pytest.raises(ConfigError, match=r"Did you mean 'whole'.*grpo"):
    loaded.algorithm('whoel')


@pytest.mark.parametrize(
  'text, words',
  [
    (
      'def cispo(logprobs, mask):\n  pass',
      r"'cispo' is already .* built-in policy_loss \(jaxrl/functional/.*\.py:\d+\)",
    ),
    (
      'from jaxrl.types import Algorithm\ndef opmd(*, a=1) -> Algorithm:\n  pass',
      r"'opmd' is already the name of a built-in algorithm \(.*/presets/opmd.py:\d+\)",
    ),
    (
      'def steep(mask):\n  pass',
      r"taken.py: 'steep' is already the name of .*my_losses.py:steep",
    ),
  ],
)
def test_a_name_that_is_taken_is_an_error(folder, text, words):
  (folder / 'taken.py').write_text(text)
  with pytest.raises(ConfigError, match=words):
    plugins.read(str(folder))


def test_a_folder_that_is_not_there(tmp_path):
  with pytest.raises(ConfigError, match='no such folder'):
    plugins.read(str(tmp_path / 'plugin'))


def test_an_error_in_a_plugin_is_its_own(folder):
  (folder / 'broken.py').write_text('x = 1\ny = x / 0\n')
  with pytest.raises(ZeroDivisionError) as caught:
    plugins.read(str(folder))
  assert str(caught.traceback[-1].path) == str(folder / 'broken.py')


@pytest.mark.parametrize(
  'slot, name, option',
  [
    ('advantage', 'halved', 'share'),
    ('policy_loss', 'steep', 'slope'),
    ('kl_loss', 'cubic', 'coef'),
    ('kl_penalty', 'cubic', 'coef'),
  ],
)
def test_a_part_by_dotted_path_and_its_options(folder, slot, name, option):
  file = folder / ('my_losses.py' if name == 'steep' else 'whole.py')
  algorithm = make_algorithm('grpo', {slot: f'{file}:{name}({option}=1.5)'})
  assert getattr(algorithm, slot).keywords == {option: 1.5}
  with pytest.raises(ConfigError, match=f"no option 'size'.*There are: {option}"):
    make_algorithm('grpo', {slot: f'{file}:{name}(size=1)'})
  with pytest.raises(ConfigError, match='must be a number'):
    make_algorithm('grpo', {slot: f"{file}:{name}({option}='x')"})


def test_a_folder_that_no_call_string_can_name(tmp_path):
  folder = tmp_path / 'my parts'
  folder.mkdir()
  with pytest.raises(
    ConfigError, match=r'may only contain letters, .* rename the folder'
  ):
    plugins.read(str(folder))
