"""`env.<tag>.manager`: episodes are played by a class of the user's own.

The classes are those that docs/extending.md shows.
"""

import numpy as np
import pytest

from launch import play, rollout
from tests.launch import runs
from tests.launch.runtime.test_ray_runtime import same
from tests.launch.test_extensions import FILES
from tests.marks import slow

OPTIONS = (
  '--config.sft.num_steps=0',
  '--config.num_steps=1',
  '--config.eval.num_tasks=2',
  '--config.checkpoint.export=false',
  runs.ONE_LAYER,
)
KEY = '--config.env.arithmetic.manager'
SCALED = 'last_turn_manager.py:LastTurnManager(scale=3.0)'
PLAIN = 'single_turn_manager.py:SingleTurnManager'
BROKEN = """
import dataclasses

from jaxrl.rollout.agent_env_manager import AgentEnvManager
from jaxrl.rollout.env_manager import EnvManager


def function(context, group_id, env_id, **options):
  return None


class NoLoop:
  def __init__(self, context, group_id, env_id, **options):
    pass


class PlainLoop(NoLoop):
  def run_rollout_loop(self, data):
    return 0


class FewOptions(EnvManager):
  def __init__(self, context, group_id=0, env_id=0, *, tag=''):
    super().__init__(context, group_id, env_id, tag=tag)


class ForAgents(AgentEnvManager):
  pass


class Forgetful(EnvManager):
  def formulate_rollouts(self, cache):
    super().formulate_rollouts(cache)


class Empty(EnvManager):
  def formulate_rollouts(self, cache):
    return []


class OtherSample(EnvManager):
  def formulate_rollouts(self, cache):
    return [
      dataclasses.replace(row, sample_index=9)
      for row in super().formulate_rollouts(cache)
    ]


class Short(EnvManager):
  def formulate_rollouts(self, cache):
    rows = super().formulate_rollouts(cache)
    for row in rows:
      row.rewards = row.rewards[1:]
    return rows


class Lazy(EnvManager):
  async def run_rollout_loop(self, data):
    return 0


class Silent:
  def __init__(self, context, group_id, env_id, **options):
    pass

  async def run_rollout_loop(self, data):
    return 0


class Twice(EnvManager):
  async def run_rollout_loop(self, data):
    queue = self.context.queue
    while True:
      await queue.get_episode_id(self.group_id, self.env_id)
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  place = tmp_path_factory.mktemp('managers')
  for name in ('last_turn_manager.py', 'single_turn_manager.py'):
    (place / name).write_text(FILES[name])
  (place / 'broken.py').write_text(BROKEN)
  return place


@pytest.fixture(scope='module')
def ours(tmp_path_factory):
  return runs.record(tmp_path_factory.mktemp('ours'), *OPTIONS)


def rows_of(recorder):
  return [row for *_, groups, _ in recorder.played for group in groups for row in group]


@pytest.mark.slow
def test_a_subclass_changes_what_the_trainer_receives(folder, ours, tmp_path):
  scaled = runs.record(tmp_path, *OPTIONS, f'{KEY}={folder}/{SCALED}')
  kinds = {kind for _, kind, *_ in scaled.played}
  assert kinds == {'train', 'eval'} and len(rows_of(scaled)) == len(rows_of(ours))
  for row, row_ in zip(rows_of(scaled), rows_of(ours), strict=True):
    np.testing.assert_array_equal(row.tokens, row_.tokens)
    np.testing.assert_array_equal(row.rewards, 3 * row_.rewards)
  assert any(row.score for row in rows_of(ours))
  (mine,), (usual,) = (
    [row['reward/mean'] for _, row in recorder.metrics if 'reward/mean' in row]
    for recorder in (scaled, ours)
  )
  assert mine == pytest.approx(3 * usual) and usual > 0


@pytest.mark.slow
def test_a_manager_from_scratch_plays_the_same_episodes(folder, ours, tmp_path):
  """In training and in evaluations; seeds and samples are those of our manager."""
  same(ours, runs.record(tmp_path, *OPTIONS, f'{KEY}={folder}/{PLAIN}'))


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    ('missing.py:Manager', 'there is no file'),
    ('broken.py:Manager', "no attribute 'Manager'"),
    ('broken.py:function', 'is not a class'),
    ('broken.py:NoLoop', 'has no coroutine run_rollout_loop'),
    ('broken.py:PlainLoop', 'has no coroutine run_rollout_loop'),
    ('broken.py:FewOptions', "unexpected keyword argument 'temperature'"),
    ('broken.py:ForAgents', 'is not played by an agent: derive'),
    ('last_turn_manager.py:LastTurnManager(colour=1)', "no option 'colour'"),
    ('last_turn_manager.py:LastTurnManager(scale="x")', 'must be a number'),
    ('last_turn_manager.py:LastTurnManager(max_steps=2)', "'max_steps' is an option"),
  ],
)
def test_a_wrong_class_is_refused_before_anything_is_loaded(
  folder, tmp_path, capsys, monkeypatch, call, message
):
  monkeypatch.setattr('launch.build.load_policy', None)
  option = f'{KEY}={folder}/{call}'
  assert runs.main(tmp_path / 'run', option, config=runs.VARIED) == 2
  (line,) = [x for x in capsys.readouterr().err.splitlines() if 'error' in x]
  assert message in line and 'env.arithmetic.manager' in line


def test_a_name_without_a_file_is_refused(tmp_path, capsys):
  assert runs.main(tmp_path / 'run', f'{KEY}=Mine', config=runs.VARIED) == 2
  error = capsys.readouterr().err
  assert f"{KEY}=Mine: 'Mine' is not a location" in error and error.count('\n') == 1


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    slow('Forgetful', 'formulate_rollouts returned a NoneType'),
    ('Empty', 'put an empty list'),
    slow('OtherSample', 'put a row with sample_index=9'),
    slow('Short', 'values of rewards'),
    ('Lazy', 'returned from run_rollout_loop before'),
    slow('Twice', 'asked for the next episode before it had put the last one'),
  ],
)
def test_a_manager_that_breaks_the_protocol_stops_the_run(
  folder, tmp_path, name, message
):
  options = (*OPTIONS, '--config.eval.interval=0', f'{KEY}={folder}/broken.py:{name}')
  with pytest.raises(ValueError, match=message) as caught:
    runs.record(tmp_path, *options)
  assert f'broken.py:{name}' in str(caught.value) or name == 'Forgetful'


def test_a_broken_manager_ends_an_evaluation_with_one_line(folder, tmp_path, capsys):
  option = f'{KEY}={folder}/broken.py:Silent'
  argv = runs.argv(tmp_path, '--mode=val', option, runs.ONE_LAYER, config=runs.VARIED)
  assert rollout.main(argv) != 0
  (line,) = [x for x in capsys.readouterr().err.splitlines() if 'error' in x]
  assert 'returned from run_rollout_loop before' in line


def test_play_refuses_a_manager_without_turns(folder, capsys):
  argv = (f'--config={runs.DEBUG}', f'{KEY}={folder}/{PLAIN}', runs.ONE_LAYER)
  assert play.main(argv) == 2
  error = capsys.readouterr().err
  assert 'env.arithmetic.manager' in error and 'not derived from' in error
