"""Several players in one episode: each has its own conversation, rows and rewards."""

import dataclasses

import numpy as np
import pytest

from jaxrl.component_calls import parse_call
from jaxrl.data.trajectory_codec import from_json, to_json
from jaxrl.envs.games.kuhn_poker_env import KuhnPokerEnv
from jaxrl.options import ConfigError
from jaxrl.rollout import opponents
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.env_worker import make_env_manager
from jaxrl.rollout.multi_player_env_manager import MultiPlayerEnvManager
from jaxrl.rollout.opponents import PlayerOptions
from jaxrl.rollout.rewards.reward_pipeline import (
  RewardOutput,
  RewardPipeline,
  RewardTerm,
)
from jaxrl.rollout.thread_pool import Timeouts
from jaxrl.training.batching.batch_builder import collate
from tests.rollout.fakes import END, FakeEngine, lease, world


class Auction:
  """Three players bid in turn, each knowing its secret; who bids most is paid."""

  num_players = 3
  uses_dataset = False

  def __init__(self, *, rounds=2, fault=''):
    self.rounds, self.fault = rounds, fault

  def reset(self, *, seed, options=None):
    self.bids = []
    return 'secret 0', {'role': 0}

  def step(self, action):
    self.bids.append(len(action))
    role = (len(self.bids) - 1) % 3
    done = len(self.bids) == 3 * self.rounds
    info = {'columns': {'bids': str(self.bids)}, 'metrics': {'bids': len(self.bids)}}
    if done:
      winner = int(np.argmax([sum(self.bids[i::3]) for i in range(3)]))
      info['rewards'] = {i: 10.0 * (i == winner) for i in range(3) if i != role}
    if self.fault == 'role':
      info['role'] = 3
    elif self.fault == 'own reward':
      info['rewards'] = {role: 1.0}
    elif self.fault == 'endless reward':
      info['rewards'] = {(role + 1) % 3: float('inf')}
    elif not done:
      info['role'] = (role + 1) % 3
    return f'secret {(role + 1) % 3}, said {self.bids}', 1.0, done, False, info


def players(make_env=Auction, engine=None, *, opponent=None, role=None, **fields):
  context = world(make_env, engine)
  count = make_env().num_players
  setup = PlayerOptions(count, opponent, role)
  return dataclasses.replace(context, players=setup, **fields)


async def play(context, *, base_seed=7, episode=0, member=0, **options):
  manager = make_env_manager(context, **{'max_steps': 9, 'tag': 'game', **options})
  assert type(manager) is MultiPlayerEnvManager
  return await manager.play_episode(
    lease(episode_id=episode, member=member), base_seed=base_seed
  )


def text(tokens):
  return ''.join('|' if t == END else chr(t) for t in tokens)


def bids(engine_text='ab'):
  return FakeEngine(lambda prompt, sampling: engine_text)


async def test_each_player_has_its_own_tokens_rewards_and_role():
  rows = await play(
    players(engine=bids()),
    system_template='hi',
    turn_template='{observation} {turn_idx}/{actions_left}',
  )
  assert [row.extras['role'] for row in rows] == [0, 1, 2]
  assert [text(row.tokens) for row in rows] == [
    'shi|usecret 0 0/9|>ab|usecret 0, said [2, 2, 2] 1/6|>ab|',
    'shi|usecret 1, said [2] 0/8|>ab|usecret 1, said [2, 2, 2, 2] 1/5|>ab|',
    'shi|usecret 2, said [2, 2] 0/7|>ab|usecret 2, said [2, 2, 2, 2, 2] 1/4|>ab|',
  ]
  # The first of the largest bids wins; each bid is paid 1, the winner 10 beside it.
  assert [row.rewards[row.rewards != 0].tolist() for row in rows] == [
    [1, 11],
    [1, 1],
    [1, 1],
  ]
  assert all(row.rewards.nonzero()[0][-1] == len(row.tokens) - 1 for row in rows)
  for row in rows:
    assert row.action_mask.sum() == 6
    assert [m['role'] for m in row.messages] == [
      'system', 'user', 'assistant', 'user', 'assistant',
    ]  # fmt: skip
    assert row.columns == {'bids': str([2] * 6)}
    assert row.metrics == {
      'bids': 6,
      'turns': 6,
      'response_length': 18,
      'reward/role_0': 12,
      'reward/role_1': 2,
      'reward/role_2': 2,
    }
    assert (row.sample_index, row.episode_seed, row.stop_reason) == (0, 7, 'finish')
  assert [row.turn for row in rows] == [0, 1, 2]
  assert len({row.trajectory_id for row in rows}) == 3


async def test_one_row_per_turn_in_the_order_of_play():
  rows = await play(players(engine=bids()), row_format='step')
  assert [row.turn for row in rows] == [0, 1, 2, 3, 4, 5]
  assert [row.extras['role'] for row in rows] == [0, 1, 2, 0, 1, 2]
  assert [row.score for row in rows] == [1, 1, 1, 11, 1, 1]
  assert [row.action_mask.sum() for row in rows] == [3] * 6
  packed = await play(players(engine=bids()), row_format='concatenated')
  assert [(row.turn, row.extras['role']) for row in packed] == [(0, 0), (1, 1), (2, 2)]
  assert [len(row.extras['segments']) for row in packed] == [2, 2, 2]


async def test_every_turn_draws_from_a_seed_of_its_own():
  engine = FakeEngine()
  await play(players(engine=engine))
  seeds = [sampling.seed for _, _, sampling in engine.requests]
  names = [name for name, _, _ in engine.requests]
  assert len(seeds) == len(set(seeds)) == len(set(names)) == 6
  again = FakeEngine()
  await play(players(engine=again))
  assert [(n, p, s.seed) for n, p, s in again.requests] == [
    (n, p, s.seed) for n, p, s in engine.requests
  ]


async def test_prompts_never_hold_what_another_was_shown():
  engine = bids('pass')
  for episode in range(12):
    await play(players(KuhnPokerEnv, engine), episode=episode)
  for _, prompt, _ in engine.requests:
    assert len({part[0] for part in text(prompt).split('Your card is ')[1:]}) == 1


class Always:
  def __init__(self, reply='ab', error=None):
    self.answer, self.error, self.seen = reply, error, []

  def reply(self, messages, *, role, seed):
    self.seen.append((messages, role, seed))
    if self.error is not None:
      raise self.error
    return self.answer


class AlwaysLater(Always):
  async def reply(self, messages, *, role, seed):
    return super().reply(messages, role=role, seed=seed)


@pytest.mark.parametrize('kind', [Always, AlwaysLater])
async def test_an_opponent_plays_all_other_roles(kind):
  opponent, engine = kind('xyz'), bids()
  (row,) = await play(players(engine=engine, opponent=opponent, role=1))
  assert row.extras['role'] == 1
  assert text(row.tokens) == (
    'usecret 1, said [3]|>ab|usecret 1, said [3, 2, 3, 3]|>ab|'
  )
  assert (row.turn, row.score) == (1, 2)
  assert row.metrics['reward/role_0'] == 12
  assert row.metrics['turns'] == 6
  assert len(engine.requests) == 2
  assert [role for _, role, _ in opponent.seen] == [0, 2, 0, 2]
  assert len({seed for *_, seed in opponent.seen}) == 4
  assert opponent.seen[2][0] == [
    {'role': 'user', 'content': 'secret 0'},
    {'role': 'assistant', 'content': 'xyz'},
    {'role': 'user', 'content': 'secret 0, said [3, 2, 3]'},
  ]


async def test_the_policy_changes_its_role_from_group_to_group():
  roles = {}
  for episode in range(6):
    for member in range(2):
      context = players(engine=bids(), opponent=Always())
      (row,) = await play(context, episode=episode, member=member)
      roles.setdefault(episode, set()).add(row.extras['role'])
  assert [roles[i] for i in range(6)] == [{(7 + i) % 3} for i in range(6)]


@pytest.mark.parametrize(
  ('opponent', 'error'),
  [
    (Always(error=KeyError('broken')), 'broken'),
    (Always(3), 'an opponent replied int, not a text'),
  ],
)
async def test_an_opponent_that_fails_costs_the_episode(opponent, error):
  rows = await play(players(engine=bids(), opponent=opponent, role=1))
  assert [row.stop_reason for row in rows] == ['env_error']
  assert error in rows[0].extras['error']


async def test_an_opponent_that_hangs_is_given_up():
  class Hangs(Always):
    def reply(self, messages, *, role, seed):
      import time

      time.sleep(5)

  context = players(engine=bids(), opponent=Hangs(), role=2)
  rows = await play(context, timeouts=Timeouts(step=0.1))
  assert [row.stop_reason for row in rows] == ['env_timeout']


@pytest.mark.parametrize(
  ('fault', 'error'),
  [
    ('role', "info['role'] is 3, but there are 3 players"),
    ('own reward', "info['rewards'] has 0; it must have roles below 3"),
    ('endless reward', "info['rewards'] has inf; it must be finite numbers"),
  ],
)
async def test_what_an_environment_returns_is_checked(fault, error):
  rows = await play(players(lambda: Auction(fault=fault), bids()))
  assert {row.stop_reason for row in rows} == {'env_error'}
  assert error in rows[0].extras['error']


async def test_a_first_role_that_there_is_not_fails_the_reset():
  class Wrong(Auction):
    def reset(self, *, seed, options=None):
      return 'hi', {'role': 4}

  (row,) = await play(players(Wrong, bids()))
  assert row.stop_reason == 'env_reset_failed'
  assert "info['role'] is 4" in row.extras['error']


async def test_what_is_earned_before_a_players_first_turn_is_paid_with_it():
  class Gift(Auction):
    def step(self, action):
      *rest, info = super().step(action)
      if len(self.bids) == 1:
        info['rewards'] = {2: 5.0}
      return *rest, info

  rows = await play(players(lambda: Gift(rounds=1), bids()))
  assert [row.score for row in rows] == [11, 1, 6]


@pytest.mark.parametrize('max_steps', [1, 2, 4])
async def test_turns_of_all_players_count(max_steps):
  rows = await play(players(engine=bids()), max_steps=max_steps)
  assert [row.extras['role'] for row in rows] == list(range(min(3, max_steps)))
  assert {row.stop_reason for row in rows} == {'max_steps'}
  assert rows[0].metrics['turns'] == max_steps


async def test_a_full_window_ends_the_game():
  rows = await play(players(engine=bids()), max_length=30)
  assert {row.stop_reason for row in rows} == {'max_length'}
  assert all(len(row.tokens) <= 30 for row in rows)
  assert [row.extras['role'] for row in rows] == [0, 1, 2]


@pytest.mark.parametrize('failing', [0, 3])
async def test_a_failed_generation_fails_every_row(failing):
  replies = iter(['ab'] * failing + [RuntimeError('no device')])
  rows = await play(players(engine=FakeEngine(lambda prompt, sampling: next(replies))))
  assert {row.stop_reason for row in rows} == {'generate_failed'}
  assert all('no device' in row.extras['error'] for row in rows)
  assert len(rows) == max(1, failing)


async def test_rewards_are_added_to_each_players_conversation():
  async def longest(episode):
    return RewardOutput(float(len(episode.messages[0]['content'])))

  pipeline = RewardPipeline({'size': RewardTerm(longest)}, env_weight=0.5)
  rows = await play(players(lambda: Auction(rounds=1), bids(), rewards=pipeline))
  assert [row.metrics['reward/size'] for row in rows] == [8, 18, 21]
  assert [row.score for row in rows] == [5.5 + 8, 0.5 + 18, 0.5 + 21]


async def test_a_missing_reward_fails_the_game():
  async def fails(episode):
    raise OSError('no judge')

  pipeline = RewardPipeline({'bad': RewardTerm(fails)})
  rows = await play(players(engine=bids(), rewards=pipeline))
  assert {row.stop_reason for row in rows} == {'reward_failed'}
  assert len(rows) == 3


async def games(count, **options):
  """Groups of two games of Kuhn poker each."""
  return [
    [
      row
      for member in range(2)
      for row in await play(
        players(KuhnPokerEnv, FakeEngine(lambda p, s: ('pass', 'bet')[s.seed % 2])),
        episode=episode,
        member=member,
        **options,
      )
    ]
    for episode in range(count)
  ]


async def test_players_are_episodes_of_their_own_unless_they_are_compared():
  groups = await games(3)
  batch = collate(groups, [512])
  assert batch.role_ids.tolist() == [0, 1] * 6
  assert batch.episode_ids.tolist() == list(range(12))
  assert batch.group_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 4
  returns = batch.rewards.sum(axis=1)
  assert (returns[::2] == -returns[1::2]).all()
  assert returns.any()
  whole = collate(groups, [512], whole_episodes=True)
  assert whole.episode_ids.tolist() == [i // 2 for i in range(12)]
  turns = collate(await games(3, row_format='step'), [512])
  for episode in set(turns.episode_ids):
    assert len(set(turns.role_ids[turns.episode_ids == episode])) == 1


async def test_rows_survive_being_written():
  (rows, *_) = await games(1)
  for row in rows:
    again = from_json(to_json(row))
    assert again.extras == row.extras
    assert again.messages == row.messages
    assert np.array_equal(again.tokens, row.tokens)


async def test_one_player_is_played_as_ever():
  assert type(make_env_manager(world())) is EnvManager


def test_random_opponents_draw_each_reply():
  opponent = opponents.make_opponent(parse_call("random(replies='a, b,c')"), 'here')
  drawn = [opponent.reply([], role=0, seed=seed) for seed in range(300)]
  assert {text: drawn.count(text) > 70 for text in set(drawn)} == dict.fromkeys(
    'abc', True
  )
  assert drawn == [opponent.reply([], role=0, seed=seed) for seed in range(300)]


@pytest.mark.parametrize(
  ('opponent', 'error'),
  [
    ('random', "here: replies='…' must list what may be said"),
    ('rnadom', "no opponent 'rnadom'. Did you mean 'random'"),
    ('tests.rollout.fakes:FakeChat', 'here: FakeChat has no method reply'),
  ],
)
def test_wrong_opponents_are_refused(opponent, error):
  with pytest.raises(ConfigError, match=error):
    opponents.make_opponent(parse_call(opponent), 'here')


@pytest.mark.parametrize(
  ('arguments', 'error'),
  [
    ((0,), 'its num_players is 0; it must be 1 to 8'),
    (('two',), "its num_players is 'two'"),
    ((1, 'random'), 'opponent=random: has no effect here: game has one player'),
    ((1, None, 0), 'policy_role=0: has no effect here: the policy plays every role'),
    ((2, None, 0), 'policy_role=0: has no effect here'),
    ((2, 'random', 2), 'policy_role=2: game has 2 players, from 0: set at most 1'),
  ],
)
def test_players_that_do_not_go_together_are_refused(arguments, error):
  with pytest.raises(ValueError, match=error):
    opponents.check_players('game', *arguments)
  opponents.check_players('game', 1)
  opponents.check_players('game', 2, 'random', 1)


class FakeClient:
  def __init__(self):
    self.asked = []

  async def ask(self, name, messages, **sampling):
    self.asked.append((name, messages, sampling))
    return 'pass'


async def test_a_model_opponent_asks_its_client():
  client = FakeClient()
  opponent = opponents.ModelOpponent(client, temperature=0.5, max_tokens=4)
  rows = await play(players(KuhnPokerEnv, bids('bet'), opponent=opponent, role=0))
  assert [row.columns['moves'] for row in rows] == ['bp']
  ((_, messages, sampling),) = client.asked
  assert [m['role'] for m in messages] == ['user']
  assert sampling.keys() == {'seed', 'temperature', 'max_tokens'}
  assert (sampling['temperature'], sampling['max_tokens']) == (0.5, 4)
  with pytest.raises(ValueError, match='temperature must be at least 0, not -1'):
    opponents.ModelOpponent(client, temperature=-1)
