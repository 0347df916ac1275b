"""Kuhn poker: its rules and exploitability, against OpenSpiel's where it is there."""

import importlib.util
import itertools
import random

import numpy as np
import pytest

from jaxrl.envs.games import kuhn_poker_env as kuhn
from jaxrl.envs.games.kuhn_poker_env import (
  INFO_SETS,
  InfoSet,
  KuhnPokerEnv,
  MoveChances,
)
from jaxrl.options import ConfigError
from tests.calls import env_factory

UNIFORM = {at: MoveChances(0.5) for at in INFO_SETS}


def random_strategy(seed):
  rng = np.random.default_rng(seed)
  return {at: MoveChances(float(rng.random())) for at in INFO_SETS}


def play(env, seed, moves):
  """Returns both players' cards and returns, and what each was shown."""
  text, info = env.reset(seed=seed)
  shown, returns, done = {0: [], 1: []}, [0.0, 0.0], False
  for move in moves:
    assert not done
    role = info['role']
    shown[role].append(text)
    text, reward, done, truncated, info = env.step(move)
    assert not truncated
    returns[role] += reward
    for other, amount in info.get('rewards', {}).items():
      returns[other] += amount
  assert done
  cards = [kuhn.CARDS.index(shown[i][0].split('card is ')[1][0]) for i in (0, 1)]
  return cards, returns, shown, info


@pytest.mark.parametrize(
  ('moves', 'stake', 'winner'),
  [
    ('pp', 1, None),
    ('bp', 1, 0),
    ('bb', 2, None),
    ('pbp', 1, 1),
    ('pbb', 2, None),
  ],
)
def test_who_wins_what(moves, stake, winner):
  env, deals = env_factory('kuhn_poker', {'show_rules': False})(), set()
  for seed in range(40):
    names = [kuhn.MOVES[move] for move in moves]
    cards, returns, shown, info = play(env, seed, names)
    won = winner if winner is not None else int(cards[1] > cards[0])
    expected = [float(stake), -float(stake)]
    assert returns == (expected if won == 0 else expected[::-1])
    assert info['columns'] == {'moves': moves}
    assert info['metrics'] == {'illegal': 0}
    deals.add(tuple(cards))
    other = kuhn.CARDS[cards[1]]
    assert not any(f'card is {other}' in text for text in shown[0])
  assert deals == set(itertools.permutations(range(3), 2))


def test_an_illegal_move_loses_the_most_that_can_be_lost():
  env = env_factory('kuhn_poker', {})()
  _, returns, _, info = play_two(env, 'raise')
  assert returns == [-2, 2]
  assert info['columns'] == {'moves': '?'}
  assert info['metrics'] == {'illegal': 1}
  _, returns, _, info = play_two(env, 'pass', 'pass or bet')
  assert returns == [2, -2]
  assert info['columns'] == {'moves': 'p?'}


def play_two(env, *moves):
  text, info = env.reset(seed=3)
  returns = [0.0, 0.0]
  for move in moves:
    role = info['role']
    text, reward, done, _, info = env.step(move)
    returns[role] += reward
    for other, amount in info.get('rewards', {}).items():
      returns[other] += amount
  assert done
  return text, returns, role, info


@pytest.mark.parametrize(
  'reply', ['bet', 'Bet.', 'I think.\n**BET**', '<answer>bet</answer> pass']
)
def test_a_move_is_the_answer_of_a_reply(reply):
  env = env_factory('kuhn_poker', {})()
  env.reset(seed=0)
  text, *_ = env.step(reply)
  assert 'The other player bets' in text


def test_rules_open_what_each_player_is_shown_first():
  env = env_factory('kuhn_poker', {})()
  _, _, shown, _ = play(env, 0, ['pass', 'bet', 'bet'])
  assert [text.startswith(kuhn.RULES) for text in shown[0]] == [True, False]
  assert shown[1][0].startswith(kuhn.RULES)


def test_numbers_of_the_literature():
  # OpenSpiel's: NashConv of the uniform policy is 11/12.
  assert kuhn.nash_conv(UNIFORM) == pytest.approx(11 / 12)
  for bluff in (0.0, 0.2, 1 / 3):
    best = kuhn.equilibrium(bluff)
    assert kuhn.nash_conv(best) == pytest.approx(0, abs=1e-12)
    assert kuhn.expected_return(best, best) == pytest.approx(kuhn.GAME_VALUE)
  with pytest.raises(ValueError, match='bluff must be from 0 to 1/3'):
    kuhn.equilibrium(0.5)


@pytest.mark.parametrize('role', [0, 1])
def test_a_best_response_is_what_it_says_and_no_strategy_does_better(role):
  strategy = random_strategy(1)
  value, answer = kuhn.best_response(strategy, role)
  sign = 1 - 2 * role

  def against(other):
    pair = (other, strategy) if role == 0 else (strategy, other)
    return sign * kuhn.expected_return(*pair)

  assert against(answer) == pytest.approx(value)
  for seed in range(200):
    assert against(random_strategy(seed)) <= value + 1e-12


def test_illegal_moves_are_counted_as_what_they_cost():
  always = {at: MoveChances(0.0, 1.0) for at in INFO_SETS}
  assert kuhn.expected_return(always, UNIFORM) == -2
  assert kuhn.nash_conv(always) == 4
  some = {at: MoveChances(0.4, 0.2) for at in INFO_SETS}
  assert kuhn.nash_conv(some) > kuhn.nash_conv(UNIFORM)


def test_returns_of_games_are_those_that_were_computed():
  first, second = random_strategy(5), random_strategy(6)
  env, rng, total, count = env_factory('kuhn_poker', {})(), random.Random(0), 0.0, 20000
  for seed in range(count):
    text, info = env.reset(seed=seed)
    done, history = False, ''
    while not done:
      role = info['role']
      card = kuhn.CARDS.index(text.split('card is ')[1][0])
      move = 'pb'[rng.random() < (first, second)[role][InfoSet(card, history)].bet]
      history += move
      text, reward, done, _, info = env.step(kuhn.MOVES[move])
    total += reward if role == 0 else -reward
  expected = kuhn.expected_return(first, second)
  assert total / count == pytest.approx(expected, abs=4 * 1.5 / count**0.5)


def test_a_probe_shows_every_information_set_as_it_is_in_play():
  env = env_factory('kuhn_poker', {'probe': True, 'show_rules': False})()
  played = env_factory('kuhn_poker', {'show_rules': False})()
  seen = {}
  for seed in range(60):
    for moves in (['pass', 'bet', 'bet'], ['bet', 'bet']):
      cards, _, shown, _ = play(played, seed, moves)
      seen[InfoSet(cards[0], '').name] = shown[0][0]
      path = moves[0][0]
      seen[InfoSet(cards[1], path).name] = shown[1][0]
      if len(moves) == 3:
        conversation = [
          {'role': 'user', 'content': shown[0][0]},
          {'role': 'assistant', 'content': 'pass'},
          {'role': 'user', 'content': shown[0][1]},
        ]
        seen[InfoSet(cards[0], 'pb').name] = conversation
  assert len(seen) == 12
  means = {}
  for seed in range(100, 112):  # any twelve in a row
    shown, info = env.reset(seed=seed)
    at = INFO_SETS[seed % 12]
    assert shown == seen[at.name]
    assert info == {'role': at.role}
    _, reward, done, _, info = env.step('bet' if at.card else 'what?')
    assert (reward, done) == (0, True)
    means |= info['metrics']
  assert means == {
    **{f'bet/{at.name}': float(at.card > 0) for at in INFO_SETS},
    **{f'illegal/{at.name}': float(at.card == 0) for at in INFO_SETS},
  }
  strategy = {
    at: MoveChances(float(at.card > 0), float(at.card == 0)) for at in INFO_SETS
  }
  assert KuhnPokerEnv.evaluation_metrics(means) == {
    'exploitability': kuhn.nash_conv(strategy) / 2,
    'nash_conv': kuhn.nash_conv(strategy),
    'first_return': kuhn.expected_return(strategy, strategy),
  }
  del means['bet/J']
  assert KuhnPokerEnv.evaluation_metrics(means) == {}


@pytest.mark.parametrize('bluff', [0.0, 0.25])
def test_the_equilibrium_player_reads_the_text(bluff):
  env, player = KuhnPokerEnv(), kuhn.EquilibriumPlayer(bluff=bluff)
  strategy, bets = kuhn.equilibrium(bluff), {at: [] for at in INFO_SETS}
  for seed in range(3000):
    text, info = env.reset(seed=seed)
    done, history = False, ''
    while not done:
      card = kuhn.CARDS.index(text.split('card is ')[1][0])
      message = [{'role': 'user', 'content': text}]
      move = player.reply(message, role=info['role'], seed=2 * seed + len(history))
      bets[InfoSet(card, history)].append(move == 'bet')
      history += move[0]
      text, _, done, _, info = env.step(move)
  for at, made in bets.items():
    if made:
      wanted = strategy[at].bet
      bound = 4 * (wanted * (1 - wanted) / len(made)) ** 0.5 + 1e-9
      assert abs(np.mean(made) - wanted) <= bound, at.name


def test_wrong_options_are_refused():
  with pytest.raises(ConfigError, match='cards'):
    env_factory('kuhn_poker', {'cards': 4})


@pytest.fixture(scope='module')
def spiel():
  """OpenSpiel's game."""
  if importlib.util.find_spec('pyspiel') is None:
    pytest.skip("needs pip install -e '.[envs]'")
  import pyspiel

  return pyspiel.load_game('kuhn_poker')


def spiel_policy(game, strategy):
  from open_spiel.python import policy

  table = policy.TabularPolicy(game)
  for name, row in table.state_lookup.items():
    at = InfoSet(int(name[0]), name[1:])
    table.action_probability_array[row] = [1 - strategy[at].bet, strategy[at].bet]
  return table


@pytest.mark.parametrize('seed', range(5))
def test_exploitability_is_openspiels(spiel, seed):
  from open_spiel.python.algorithms import expected_game_score, exploitability

  first, second = random_strategy(seed), random_strategy(seed + 100)
  ours, theirs = kuhn.nash_conv(first), spiel_policy(spiel, first)
  assert exploitability.nash_conv(spiel, theirs) == pytest.approx(ours, abs=1e-12)
  assert exploitability.exploitability(spiel, theirs) == pytest.approx(ours / 2)
  value = expected_game_score.policy_value(
    spiel.new_initial_state(), [theirs, spiel_policy(spiel, second)]
  )
  assert value[0] == pytest.approx(kuhn.expected_return(first, second), abs=1e-12)


def test_every_game_ends_as_openspiels(spiel):
  for deal in itertools.permutations(range(3), 2):
    for moves in kuhn.ENDS:
      state = spiel.new_initial_state()
      for card in deal:
        state.apply_action(card)
      for move in moves:
        assert not state.is_terminal()
        state.apply_action('pb'.index(move))
      assert state.is_terminal()
      assert state.returns()[0] == kuhn.payoff(deal, moves)
