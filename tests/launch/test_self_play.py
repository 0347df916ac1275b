"""Whole runs in which the policy plays several players, or one against an opponent."""

import json
import signal

import numpy as np
import pytest

from jaxrl.data import trajectory_codec
from jaxrl.envs.games.kuhn_poker_env import KuhnPokerEnv
from jaxrl.options import ConfigError
from launch import play
from launch.report.trajectory_index import TrajectoryIndex, TrajectoryQuery
from launch.report.trajectory_view import show_group, show_trajectory
from launch.rollouts import opponent_models
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from tests.launch import runs
from tests.launch.runtime.test_ray_runtime import same
from tests.launch.test_bad_input import refused
from tests.launch.test_resume import has, when

CONFIG = str(runs.ROOT / 'tests' / 'launch' / 'poker.py')


def record(folder, *options, algorithm='rae'):
  return runs.record(folder, *options, config=f'{CONFIG}:{algorithm}')


def train_rows(recorder):
  played = [groups for _, kind, groups, _ in recorder.played if kind == 'train']
  return [row for groups in played for group in groups for row in group]


@pytest.fixture(scope='module')
def local(tmp_path_factory):
  folder = tmp_path_factory.mktemp('poker')
  return folder, record(folder)


@pytest.mark.slow
def test_both_sides_are_trained_on(local):
  _, recorder = local
  rows = train_rows(recorder)
  games = {}
  for row in rows:
    games.setdefault((row.group_name, row.sample_index), []).append(row)
  assert len(games) == 2 * 2 * 8  # steps, groups, samples
  for of_game in games.values():
    roles = [row.extras['role'] for row in of_game]
    assert roles == [0, 1]
    first = of_game[0]
    total = first.metrics['reward/role_0'] + first.metrics['reward/role_1']
    assert (first.score, total) == (first.metrics['reward/role_0'], 0)
  assert {row.extras['role'] for row in rows} == {0, 1}
  metrics = [row for _, row in recorder.metrics if 'loss/total' in row]
  assert all(row['optimizer/grad_norm'] > 0 for row in metrics)
  assert all(row['reward/role_0'] == -row['reward/role_1'] for row in metrics)


@pytest.mark.slow
def test_no_step_compiles_for_the_rows_of_both_sides(local):
  _, recorder = local
  metrics = [row for _, row in recorder.metrics if 'loss/total' in row]
  assert [row['compile/recompiles'] for row in metrics] == [0, 0]


@pytest.mark.slow
def test_the_exploitability_follows_from_the_probes(local):
  _, recorder = local
  (values, *_) = [m for _, m in recorder.metrics if 'eval/probe/bet/J' in m]
  named = {k.removeprefix('eval/probe/'): v for k, v in values.items()}
  expected = KuhnPokerEnv.evaluation_metrics(named)
  assert 0 < expected['exploitability'] <= 2
  assert {name: named[name] for name in expected} == expected


@pytest.mark.slow
def test_dumps_have_each_players_conversation_and_can_be_viewed(tmp_path):
  options = ('--config.num_steps=1', '--config.eval.interval=0')
  dump = f'--config.trajectory_dump.path={tmp_path}/dump'
  assert runs.main(tmp_path / 'run', *options, dump, config=CONFIG) == 0
  (part,) = (tmp_path / 'dump').glob('train-kuhn-*.jsonl')
  lines = [json.loads(line) for line in part.read_text().splitlines()]
  rows = [trajectory_codec.from_json(json.loads(x['save_content'])) for x in lines]
  assert [row.extras['role'] for row in rows] == [0, 1] * 16
  for line, row in zip(lines, rows, strict=True):
    shown = ' '.join(m['content'] for m in row.messages if m['role'] == 'user')
    cards = {part[0] for part in shown.split('Your card is ')[1:]}
    assert len(cards) == 1 and len(line['moves']) in (2, 3)
  index = TrajectoryIndex(tmp_path, [f'{tmp_path}/dump/*.jsonl'])
  index.refresh()
  assert index.select(TrajectoryQuery(), 0, 1)['total'] == len(rows)
  entry = index.find(f'train_0_{rows[0].trajectory_id}')
  assert entry is not None
  game = [m for m in show_group(index, entry[0]['grp']) if m['sample'] == 0]
  assert [member['turn'] for member in game] == [0, 1]
  assert game[0]['messages'] != game[1]['messages']
  assert show_trajectory(index, game[0]['id'], None)['num_tokens'] == len(
    rows[0].tokens
  )
  index.close()


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', ['grpo', 'gigpo', 'hierarchical_grpo', 'ppo'])
def test_other_algorithms_train_on_both_sides(tmp_path, algorithm):
  options = ('--config.num_steps=1', '--config.eval.interval=0')
  recorder = record(tmp_path, *options, algorithm=algorithm)
  ((_, _, groups, advantages),) = [x for x in recorder.played if x[1] == 'train']
  rows = [row for group in groups for row in group]
  if algorithm == 'grpo':
    for group, start in zip(groups, np.cumsum([0, *map(len, groups)]), strict=False):
      scores = np.array([row.score for row in group])
      expected = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
      for i, row in enumerate(group):
        actual = advantages[start + i][: len(row.tokens)][row.action_mask]
        np.testing.assert_allclose(actual, expected[i], rtol=1e-4)
  if algorithm == 'hierarchical_grpo':
    for group, start in zip(groups, np.cumsum([0, *map(len, groups)]), strict=False):
      first = [row.score for row in group if row.extras['role'] == 0]
      for i, row in enumerate(group):
        # The second player has no peer in its episode: it is a group of its own.
        less = np.mean(first) if row.extras['role'] == 0 else 0.0
        actual = advantages[start + i][: len(row.tokens)][row.action_mask]
        np.testing.assert_allclose(actual, row.score - less, atol=1e-5)
  assert {row.extras['role'] for row in rows} == {0, 1}


@pytest.mark.slow
def test_a_killed_run_ends_at_the_same_bits(tmp_path):
  options = ('--config.num_steps=3', '--config.eval.interval=0')
  runs.run(tmp_path / 'whole', *options, config=CONFIG)
  process = runs.spawn(tmp_path / 'run', *options, config=CONFIG)
  assert when(process, lambda: has(tmp_path / 'run', 'train', 1))
  process.send_signal(signal.SIGKILL)
  process.communicate(timeout=60)
  runs.run(tmp_path / 'run', *options, config=CONFIG)
  assert runs.numbers(tmp_path / 'run') == runs.numbers(tmp_path / 'whole')
  assert runs.weights(tmp_path / 'run') == runs.weights(tmp_path / 'whole')


@pytest.mark.slow
def test_a_frozen_model_plays_the_other_side(local, tmp_path):
  """The opponent is the model that training begins with; its weights do not move."""
  folder, _ = local
  call = f'model(checkpoint="{folder}/model", max_tokens=2, max_length=256)'
  opponent = f'--config.env.kuhn.opponent={call}'
  recorder = record(tmp_path, opponent, '--config.eval.interval=0')
  rows = train_rows(recorder)
  roles = {}
  for row in rows:
    roles.setdefault(row.group_name, set()).add(row.extras['role'])
  assert all(len(of_group) == 1 for of_group in roles.values())
  assert len({(row.group_name, row.sample_index) for row in rows}) == len(rows)


@pytest.mark.slow
def test_a_program_plays_the_other_side(tmp_path):
  call = 'jaxrl.envs.games.kuhn_poker_env:EquilibriumPlayer(bluff=0.0)'
  options = (f'--config.env.kuhn.opponent={call}', '--config.env.kuhn.policy_role=1')
  rows = train_rows(record(tmp_path, *options, '--config.eval.interval=0'))
  assert {row.extras['role'] for row in rows} == {1}
  assert {row.columns['moves'][0] for row in rows} <= {'p', 'b'}


@pytest.mark.slow
def test_environments_in_processes_of_their_own_play_the_same(local, tmp_path):
  _, recorder = local
  option = '--config.env.kuhn.env_type=isolated:tests.launch.poker:LenientPoker'
  same(recorder, record(tmp_path, option))


@pytest.mark.slow
def test_play_shows_both_conversations(capsys):
  assert play.main([f'--config={CONFIG}', '--episode=1']) == 0
  output = capsys.readouterr().out
  assert output.index('player of role 0') < output.index('Ended by')
  assert 'You begin' in output.replace('|', '')


REFUSED = {
  '--config.env.kuhn.opponent=rnadom': "no opponent 'rnadom'",
  '--config.env.kuhn.opponent=random': "replies='…' must list",
  '--config.env.kuhn.opponent=random(reply="a")': "no option 'reply'",
  '--config.env.kuhn.opponent=model(url="http://127.0.0.1:1/v1")': "needs model='…'",
  '--config.env.kuhn.opponent=model(checkpoint="/none")': 'checkpoint=',
  '--config.env.kuhn.num_seeds=3': 'has several players',
  '--config.env.kuhn.policy_role=1': 'the policy plays every role',
  '--config.env.kuhn.policy_role=-1': 'must be at least 0',
}


@pytest.mark.parametrize('option', REFUSED)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, capsys, option):
  assert REFUSED[option] in refused(tmp_path, capsys, option, config=CONFIG)


def rows_per_sample(tmp_path, *options, config=CONFIG):
  argv = runs.argv(tmp_path, *options, config=config)
  command = command_line.parse(argv, {'workdir': ''})
  return resolve_settings(command_line.load(command)).rows_per_sample


def test_samples_are_planned_with_a_row_for_each_player_of_the_policy(tmp_path):
  opponent = '--config.env.kuhn.opponent=random(replies="a")'
  assert rows_per_sample(tmp_path) == 2
  assert rows_per_sample(tmp_path, opponent) == 1
  assert rows_per_sample(tmp_path, config=f'{CONFIG}:gigpo') == 1  # of turns
  assert rows_per_sample(tmp_path, config=runs.DEBUG) == 1


def test_an_opponent_of_a_single_player_is_refused(tmp_path, capsys):
  option = '--config.env.arithmetic.opponent=random(replies="a")'
  error = refused(tmp_path, capsys, option)
  assert 'math has one player' in error and 'env.arithmetic' in error


def test_a_manager_of_one_player_is_refused(tmp_path, capsys):
  call = 'jaxrl.rollout.env_manager:EnvManager'
  option = f'--config.env.kuhn.manager={call}'
  error = refused(tmp_path, capsys, option, config=CONFIG)
  assert 'the environment has several players: derive' in error
  call = 'jaxrl.rollout.multi_player_env_manager:MultiPlayerEnvManager'
  option = f'--config.env.arithmetic.manager={call}'
  error = refused(tmp_path, capsys, option)
  assert 'the environment has one player: derive' in error


def test_a_model_of_an_opponent_is_not_loaded_to_be_checked(tmp_path):
  argv = runs.argv(tmp_path, config=CONFIG)
  command = command_line.parse(argv, {'workdir': ''})
  config = command_line.load(command)
  settings = resolve_settings(config)
  opponent_models.validate_opponents(settings)
  config.env.kuhn.policy_role = 5
  config.env.kuhn.opponent = 'random(replies="a")'
  with pytest.raises(ConfigError, match=r'env\.kuhn: policy_role=5: .* has 2'):
    opponent_models.validate_opponents(resolve_settings(config))
