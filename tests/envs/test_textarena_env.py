"""TextArena's games, in a process of their own."""

import importlib.util
import random
import types

import pytest

from jaxrl.envs.adapters.textarena_env import TextArenaGame
from jaxrl.envs.env_registry import env_factory
from jaxrl.options import ConfigError

OPTIONS = {'arguments': {}, 'invalid_reward': 0.0, 'max_chars': 10}


@pytest.fixture(scope='module')
def guess():
  """One environment for all tests here: its process takes seconds to start."""
  if importlib.util.find_spec('textarena') is None:  # its import takes seconds
    pytest.skip("needs pip install -e '.[envs]'")
  options = {'id': 'GuessTheNumber-v0', 'invalid_reward': -0.5, 'max_chars': 100}
  env = env_factory('textarena', options)()
  yield env
  env.close()


def search(env, seed):
  """Halves the numbers until the game is over; its last answer and the guesses."""
  shown, _ = env.reset(seed=seed)
  assert 'between 1 and 20' in shown
  low, high, guesses = 1, 20, []
  while True:
    guesses.append((low + high) // 2)
    answer = env.step(f'I think it is this.\n<answer>[{guesses[-1]}]</answer>')
    if answer[2]:
      return answer, guesses
    assert answer[1] == 0
    if 'higher' in answer[0]:
      low = guesses[-1] + 1
    else:
      high = guesses[-1] - 1


def test_a_game_is_won(guess):
  (shown, reward, _, truncated, info), guesses = search(guess, 0)
  assert 'correct number' in shown
  assert (reward, truncated, len(guesses) <= 5) == (1, False, True)
  assert info['metrics'] == {
    'score': 1,
    'success': 1,
    'accuracy': 1,
    'invalid_actions': 0,
  }


def test_games_follow_from_the_seed_and_leave_this_process_alone(guess):
  before = random.getstate()
  games = [search(guess, seed)[1] for seed in range(8)]
  assert games == [search(guess, seed)[1] for seed in range(8)]
  assert len({tuple(game) for game in games}) > 3
  assert random.getstate() == before


def test_the_game_says_what_is_invalid_and_ends_at_the_second_time(guess):
  guess.reset(seed=0)
  shown, reward, terminated, _, info = guess.step('twelve')
  assert 'invalid move' in shown
  assert 'twelve' not in shown
  assert (reward, terminated, info['metrics']['invalid_actions']) == (0, False, 1)
  shown, _, terminated, _, info = guess.step('[99]')
  assert 'outside the range' in shown
  assert (terminated, info['metrics']['invalid_actions']) == (True, 2)
  assert info['metrics']['success'] == 0


def test_an_answer_that_is_too_long_is_not_played(guess):
  guess.reset(seed=0)
  shown, reward, terminated, _, info = guess.step('[5]' + ' ' * 100 + '.')
  assert (shown, reward) == ('An answer has at most 100 characters.', -0.5)
  assert (terminated, info['metrics']['invalid_actions']) == (False, 1)


class Two:
  """Stands in for a game of two players, which refuses one as TextArena's do."""

  def reset(self, num_players, seed=None):
    assert num_players == 2, 'The number of players has to be 2'


@pytest.fixture
def package(monkeypatch):
  """Stands in for the package, which takes seconds to import."""
  registration = types.SimpleNamespace(ENV_REGISTRY={'Duel-v0': Two})
  fake = types.SimpleNamespace(
    envs=types.SimpleNamespace(registration=registration),
    State=lambda num_players, seed: None,
    make=lambda id: Two(),
  )
  monkeypatch.setattr('importlib.import_module', lambda name: fake)


def test_an_unknown_game(package):
  with pytest.raises(ValueError, match=r"no game 'Duel'.*'Duel-v0'"):
    TextArenaGame(id='Duel', **OPTIONS)


def test_a_game_of_two_players(package):
  game = TextArenaGame(id='Duel-v0', **OPTIONS)
  with pytest.raises(ValueError, match='cannot be played by one player'):
    game.reset(seed=0)
  with pytest.raises(RuntimeError, match='reset'):
    TextArenaGame(id='Duel-v0', **OPTIONS).step('1')


def test_no_game_or_no_package(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: True)
  with pytest.raises(ConfigError, match="'id' must name a game"):
    env_factory('textarena')
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ConfigError, match='envs'):
    env_factory('textarena', {'id': 'Duel-v0'})
