"""Gymnasium's environments in text: its own, and small ones of text spaces."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from jaxrl.envs.adapters.gymnasium_env import (
  GymnasiumEnv,
  describe_colors,
  observation_text,
)
from jaxrl.envs.env_registry import env_factory

LAKE = {'id': 'FrozenLake-v1', 'arguments': {'is_slippery': False}}
MOVES = ['left', 'down', 'right', 'up']


class Echo(gymnasium.Env):
  """Says what was said, twice; wants lower case."""

  observation_space = spaces.Text(100)
  action_space = spaces.Text(5, charset='abcdef')

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    return f'seed{seed}', {}

  def step(self, action):
    return action * 2, len(action), action == 'fade', False, {}


class Dial(gymnasium.Env):
  """Actions from 5 to 7; ends by truncation."""

  observation_space = spaces.Box(-1, 1, (2,))
  action_space = spaces.Discrete(3, start=5)

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

  def step(self, action):
    return np.array([0.5, -0.25], np.float32), float(action), False, True, {}


@pytest.fixture(autouse=True)
def registered():
  gymnasium.register('Echo-v0', Echo)
  gymnasium.register('Dial-v0', Dial)
  yield
  gymnasium.registry.pop('Echo-v0')
  gymnasium.registry.pop('Dial-v0')


def test_a_lake_is_played_by_names_and_shown_by_its_rendering():
  env = GymnasiumEnv(**LAKE, actions=MOVES, rules='Reach G.')
  shown, info = env.reset(seed=0)
  assert shown == 'Reach G.\n[red S]FFF\nFHFH\nFFFH\nHFFG'
  assert info == {'suffix': 'Answer with one of: left, down, right, up.'}
  for reply in ('down', 'I go Down!', '<answer>right</answer>', 'right, no, down'):
    shown, reward, terminated, *_ = env.step(reply)
    assert (reward, terminated) == (0, False)
  assert shown == '  (Down)\nSFFF\nFHFH\nFFFH\nH[red F]FG'
  assert env.step('right')[1:3] == (0, False)
  shown, reward, terminated, truncated, info = env.step('right')
  assert (reward, terminated, truncated) == (1, True, False)
  assert info['metrics'] == {'invalid_actions': 0}


def test_an_invalid_action_moves_nothing_and_says_what_is_valid():
  env = GymnasiumEnv(**LAKE, actions=MOVES, invalid_reward=-0.5, max_chars=20)
  first = env.reset(seed=0)[0]
  for reply in ('upwards', '', '7', 'down' + ' ' * 30 + '.'):
    shown, reward, terminated, truncated, info = env.step(reply)
    assert shown == f'Answer with one of: left, down, right, up.\n{first}'
    assert (reward, terminated, truncated) == (-0.5, False, False)
  assert info['metrics']['invalid_actions'] == 4


def test_text_spaces():
  env = env_factory('gymnasium', {'id': 'Echo-v0'})()
  shown, info = env.reset(seed=7)
  assert (shown, info['suffix']) == ('seed7', 'Answer with 1 to 5 characters.')
  assert env.step('<answer>cab</answer>')[:3] == ('cabcab', 3, False)
  assert env.step('ABC')[:2] == ('Answer with 1 to 5 characters.\ncabcab', 0)
  assert env.step('abcdef')[1] == 0
  assert env.step('fade')[:3] == ('fadefade', 4, True)


def test_numbers_of_a_space_that_starts_elsewhere():
  env = GymnasiumEnv(id='Dial-v0')
  assert env.reset(seed=1)[0] == GymnasiumEnv(id='Dial-v0').reset(seed=1)[0]
  assert env.reset(seed=1)[0] != env.reset(seed=2)[0]
  assert env.help == 'Answer with one of: 5, 6, 7.'
  assert env.step('16')[1] == env.step('-6')[1] == 0
  assert env.step('not 5 but 6')[:4] == ('[ 0.5 , -0.25]', 6, False, True)


def test_longer_names_win_over_those_that_end_them():
  env = GymnasiumEnv(id='Dial-v0', actions=['left', 'turn left', 'stay'])
  env.reset(seed=0)
  assert env.step('turn left')[1] == 6
  assert env.step('LEFT')[1] == 5


def test_observations_may_be_shown_instead():
  env = GymnasiumEnv(**LAKE, show='observation')
  assert env.reset(seed=0)[0] == '0'
  assert env.step('1')[0] == '4'


def test_colours_in_words():
  shown = describe_colors('a\x1b[34;1mY\x1b[0m b\x1b[43m \x1b[0m')
  assert shown == 'a[blue Y] b[yellow  ]'


def test_as_text():
  assert (
    observation_text({'a': np.array([1, 2]), 'b': (1, 0.12345)})
    == 'a: [1, 2]\nb: 1, 0.123'
  )
  assert observation_text(np.float32(2.5)) == '2.5'
  assert observation_text(np.int64(3)) == observation_text(np.array(3)) == '3'


@pytest.mark.parametrize(
  'options, why',
  [
    ({'id': 'FrozenLoke-v1'}, 'FrozenLoke'),
    ({'id': 'no_such_module:Env-v0'}, 'no_such_module'),
    ({'id': 'Pendulum-v1'}, 'only text and discrete'),
    ({'id': 'Echo-v0', 'actions': ['a']}, 'only discrete ones can be named'),
    ({**LAKE, 'actions': ['left', 'right']}, '4 actions'),
    ({**LAKE, 'actions': ['up', 'Up', 'down', 'left']}, 'a unique name'),
    ({'id': 'Dial-v0', 'show': 'render'}, 'no text rendering'),
  ],
)
def test_config_errors(options, why):
  with pytest.raises(ValueError, match=why):
    GymnasiumEnv(**options)


def test_errors():
  with pytest.raises(ValueError, match='show'):
    GymnasiumEnv(**LAKE, show='image')
  with pytest.raises(RuntimeError, match='reset'):
    GymnasiumEnv(**LAKE).step('1')
