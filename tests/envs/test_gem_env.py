"""GEM's games, in a process of their own."""

import importlib.util
import random

import pytest

from jaxrl.envs.adapters.gem_env import GemGame
from jaxrl.envs.env_registry import env_factory
from jaxrl.options import ConfigError


@pytest.fixture(scope='module')
def guess():
  """One environment for all tests here: its process takes seconds to start."""
  if importlib.util.find_spec('gem') is None:  # its import takes seconds
    pytest.skip("needs pip install -e '.[envs]'")
  arguments = {'min_number': 1, 'max_number': 20, 'max_turns': 6}
  options = {'id': 'game:GuessTheNumber-v0-easy', 'arguments': arguments}
  env = env_factory('gem', options)()
  yield env
  env.close()


def search(env, seed):
  """Halves the numbers until the game is over; its last answer and the guesses."""
  shown, info = env.reset(seed=seed)
  assert 'between 1 and 20' in shown and info['suffix'] == 'Enter your next guess.'
  low, high, guesses = 1, 20, []
  while True:
    guesses.append((low + high) // 2)
    answer = env.step(f'I think it is \\boxed{{{guesses[-1]}}}.')
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
  assert info['metrics'] == {'score': 1, 'success': 1, 'accuracy': 1}


def test_games_follow_from_the_seed_and_leave_this_process_alone(guess):
  before = random.getstate()
  seeds = [*range(8), 2**40]  # numpy takes no seed as large as the last
  games = [search(guess, seed)[1] for seed in seeds]
  assert games == [search(guess, seed)[1] for seed in seeds]
  assert len({tuple(game) for game in games}) > 3
  assert random.getstate() == before


def test_a_reply_without_a_guess_costs_what_the_game_says(guess):
  guess.reset(seed=0)
  _, reward, terminated, _, info = guess.step('twelve')
  assert (reward, terminated, info['metrics']['success']) == (-0.1, True, 0)
  guess.reset(seed=0)
  _, reward, *_ = guess.step(' ' * 20_000 + '\\boxed{10}')  # too far back to be seen
  assert reward == -0.1


def test_an_unknown_game():
  if importlib.util.find_spec('gem') is None:
    pytest.skip("needs pip install -e '.[envs]'")
  with pytest.raises(ValueError, match=r"no environment 'game:Wordle'.*'game:Wordle-"):
    GemGame(id='game:Wordle', arguments={}, max_chars=10)


def test_what_is_refused(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: True)
  with pytest.raises(ConfigError, match="'id' must name"):
    env_factory('gem')
  with pytest.raises(ConfigError, match='unsafe=True'):
    env_factory('gem', {'id': 'code:Taco8k'})
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ConfigError, match='envs'):
    env_factory('gem', {'id': 'game:Wordle-v0-easy'})
