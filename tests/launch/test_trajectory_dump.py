"""What a training run keeps of what was played."""

import json

import numpy as np
import pytest

from configs import base
from jaxrl.data import trajectory_codec
from jaxrl.options import ConfigError
from launch.logging.trajectory_dump import TrajectoryDump, has_begun
from launch.settings.resolve import resolve_settings
from tests.data.trajectory_writers.dumps import row


def config(path, columns=()):
  """The settings of a run that dumps to `path`."""
  config_dict = base.get_config()
  with config_dict.unlocked():
    config_dict.trajectory_dump = {'path': str(path), 'columns': columns}
    for tag in ('sums', 'lake'):
      config_dict.env[tag] = base.env_section('math')
  return resolve_settings(config_dict)


def attempt(tag='sums', **more):
  return row(20, tag=tag, **more)


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_a_part_for_each_tag_and_mode(tmp_path):
  sink = TrajectoryDump(config(tmp_path / 'out'), tmp_path, fresh=True)
  sums = [attempt(columns={'task_idx': 7, 'given': '3'}), attempt(sample_index=1)]
  sink.trajectories(2, [sums, [attempt('lake')]])
  sink.trajectories(2, [[attempt()]], kind='eval')
  names = sorted(path.name for path in (tmp_path / 'out').iterdir())
  assert names == [
    'train-lake-step000002.jsonl',
    'train-sums-step000002.jsonl',
    'val-sums-step000002.jsonl',
  ]
  first, second = read(tmp_path / 'out' / names[1])
  assert first['task_idx'] == 7 and first['given'] == '3'
  assert second['task_idx'] == 20 and second['given'] is None  # nobody said which row
  assert first['mode'] == 'train' and first['model_name'] == 'random'
  assert first['episode_score'] == 0.5
  back = trajectory_codec.from_json(json.loads(first['save_content']))
  assert back.tokens.tolist() == [3, 4]
  assert first['trajectory_id'] == f'train_2_{back.trajectory_id}'
  assert read(tmp_path / 'out' / names[2])[0]['mode'] == 'val'


def test_what_was_trained_on_has_its_advantages(tmp_path):
  groups = [[attempt(is_expert=True), attempt(extras={'seen': 1})], [attempt('lake')]]
  rows = np.arange(12, dtype=np.float32).reshape(4, 3)  # padded to a fourth row
  sink = TrajectoryDump(config(tmp_path / 'out'), tmp_path, fresh=True)
  sink.trajectories(0, groups, rows, logprobs=-rows)
  for tag, expected in (('sums', [3, 4]), ('lake', [6, 7])):
    (line,) = read(tmp_path / 'out' / f'train-{tag}-step000000.jsonl')
    back = trajectory_codec.from_json(json.loads(line['save_content']))
    assert back.extras['advantages'].tolist() == expected
    assert back.extras['advantages'].dtype == np.float32
    assert back.extras['old_logprobs'].tolist() == [-x for x in expected]
  assert 'advantages' not in groups[0][1].extras
  sink.trajectories(1, [[attempt()]], rows)
  (line,) = read(tmp_path / 'out' / 'train-sums-step000001.jsonl')
  assert 'advantages' in line['save_content']
  assert 'old_logprobs' not in line['save_content']
  sink.trajectories(1, [[attempt()]], kind='eval')
  (line,) = read(tmp_path / 'out' / 'val-sums-step000001.jsonl')
  assert 'advantages' not in line['save_content']


def test_a_step_done_again_replaces_its_part(tmp_path):
  TrajectoryDump(config(tmp_path / 'out'), tmp_path, fresh=True).trajectories(
    0, [[attempt()]]
  )
  again = TrajectoryDump(config(tmp_path / 'out'), tmp_path, fresh=False)
  again.trajectories(0, [[attempt(), attempt(sample_index=1)]])
  (part,) = (tmp_path / 'out').iterdir()
  assert len(read(part)) == 2
  with pytest.raises(ValueError, match='holds 1 parts of another run'):
    TrajectoryDump(config(tmp_path / 'out'), tmp_path, fresh=True)


def test_a_run_killed_after_its_first_evaluation_goes_on(tmp_path):
  """Its metrics tell of no step yet."""
  mine, other = tmp_path / 'mine', tmp_path / 'other'
  mine.mkdir()
  other.mkdir()

  def opened(folder):
    return TrajectoryDump(config(tmp_path / 'out'), folder, fresh=not has_begun(folder))

  opened(mine).trajectories(0, [[attempt()]], kind='eval')
  opened(mine).trajectories(0, [[attempt()]], kind='eval')
  with pytest.raises(ValueError, match='of another run'):
    opened(other)


def test_what_experts_wrote_is_not_played(tmp_path):
  sink = TrajectoryDump(config(tmp_path / 'out'), tmp_path, fresh=True)
  sink.trajectories(0, [[attempt(is_expert=True)]])
  assert not list((tmp_path / 'out').iterdir())
  sink.trajectories(1, [[attempt(), attempt(sample_index=1, is_expert=True)]])
  (part,) = (tmp_path / 'out').iterdir()
  assert len(read(part)) == 1


@pytest.mark.parametrize(
  'path, columns, words',
  [
    ('osss://x/y', (), "no scheme 'osss'"),
    ('experience+sqlite:///x.db', (), 'launch.rollout writes experience stores'),
    ('memory://x', (('task_idz', 'bigint'),), "no column 'task_idz'"),
    ('out.csv', (), "no format 'csv'"),
  ],
)
def test_mistakes_are_told_before_anything_is_played(tmp_path, path, columns, words):
  with pytest.raises(ConfigError, match=words):
    TrajectoryDump(config(path, columns), tmp_path, fresh=True)
