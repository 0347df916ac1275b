"""Playing alone: what is played is kept, once, whatever ends the process."""

import collections
import json
import subprocess
import sys
import time

import pytest

from jaxrl.data import trajectory_codec
from jaxrl.options import ConfigError
from jaxrl.types import FAILURES
from launch import rollout
from launch.rollouts import dataset_rollout
from launch.settings import command_line
from tests.data.trajectory_writers.dumps import row
from tests.launch import runs


def argv(workdir, *options, limit=12, config=runs.VARIED):
  limit = f'--config.dataset.limit={limit}'
  return [f'--config={config}', f'--workdir={workdir}', limit, *options]


def dumped(folder):
  files = sorted(folder.glob('trajectories/*.jsonl'))
  return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_data_set_to_its_end_and_again(tmp_path, capsys):
  options = argv(tmp_path, '--group_size=2', '--part_size=8')
  assert rollout.main(options) == 0
  output = capsys.readouterr().out
  assert 'rollout 24/24  score 0.' in output and 'Finished.' in output
  files = sorted(path.name for path in (tmp_path / 'trajectories').iterdir())
  assert files == [f'train-arithmetic-0000{i}.jsonl' for i in (0, 1)]
  rows = dumped(tmp_path)
  assert [r['task_idx'] for r in rows] == [i for i in range(12) for _ in range(2)]
  assert len({r['trajectory_id'] for r in rows}) == 24
  for r in rows:
    content = trajectory_codec.from_json(json.loads(r['save_content']))
    assert content.score == r['episode_score']
    assert content.trajectory_id == r['trajectory_id'] and content.action_mask.any()
    assert (r['mode'], r['model_name'], r['turn']) == ('train', 'random', 0)
  assert len({r['save_content'] for r in rows}) == 24
  assert rollout.main(options) == 0
  output = capsys.readouterr().out
  assert '24 of them played before' in output and '0 of them just now' in output
  assert dumped(tmp_path) == rows
  assert rollout.main([*options[:-2], '--group_size=3']) == 2
  assert 'holds a run with another config' in capsys.readouterr().err


@pytest.mark.parametrize(
  'options, message',
  [
    (
      ['--config.trajectory_dump.columns=[["task_id","bigint"]]'],
      "Did you mean 'task_idx'",
    ),
    (
      ['--config.trajectory_dump.columns=[["task_idx","bigit"]]'],
      "Did you mean 'bigint'",
    ),
    (['--config.trajectory_dump.path=memry://x'], "Did you mean 'memory'"),
    (['--config.trajectory_dump.pth=x'], 'did you mean --config.trajectory_dump.path'),
    (['--mode=test'], 'must be one of train, val'),
    (
      ['--config.dataset.system_prompt=Hi', '--config.sft.num_steps=0'],
      'system_prompt=Hi: has no effect here',
    ),
    (['--num_tasks=0'], 'must be positive'),
    (['--num_tasks=few'], '--num_tasks=few: must be a whole number'),
    (['--num_task=1'], 'did you mean --num_tasks'),
    (['--group_size=0'], 'at least 1'),
    (['--config.cluster.num_engines=2'], 'needs --config.cluster.ray=true'),
    (['--config.rollout.engine=vllm'], 'set --config.cluster.ray=true'),
    (
      ['--config.cluster.ray', '--config.weight_sync.transport=inprocess'],
      'object_store',
    ),
  ],
)
def test_what_is_wrong_is_told_before_any_episode(options, message, tmp_path, capsys):
  assert rollout.main(argv(tmp_path, *options)) == 2
  assert message in capsys.readouterr().err
  assert not (tmp_path / 'model').exists()


def test_games_need_a_number(tmp_path, capsys):
  lake = f'{runs.ROOT}/configs/frozen_lake.py'
  assert rollout.main([f'--config={lake}', f'--workdir={tmp_path}']) == 2
  assert 'set --num_tasks' in capsys.readouterr().err


def prepared(tmp_path, *options, **more):
  command = command_line.parse(argv(tmp_path, *options, limit=100), {'workdir': ''})
  config = command_line.load(command)
  rollout.prepare_rollout(config, **{'num_tasks': -1, 'group_size': 1, **more})
  return config


def test_each_mode_has_its_own_rows_and_temperature(tmp_path):
  options = '--config.eval.path=tests.jsonl', '--config.rollout.temperature=0.7'
  config = prepared(tmp_path, *options, mode='train', num_tasks=30)
  (train,) = config.eval.sets.values()
  assert train.path.startswith('generate:') and train.split == 'train'
  assert (train.temperature, train.num_tasks) == (0.7, 30)
  config = prepared(tmp_path, *options, mode='val', group_size=4)
  (tests,) = config.eval.sets.values()
  assert tests.path == 'tests.jsonl' and tests.num_tasks == 8
  assert config.rollout.temperature == tests.temperature == 0
  assert tests.group_size == 4 and config.synthesis.mode == 'val'
  with pytest.raises(ConfigError, match='train, val'):
    prepared(tmp_path, mode='tests')


def test_a_limit_of_the_data_set_does_not_limit_games(tmp_path):
  command = command_line.parse([f'--config={runs.ROOT}/configs/frozen_lake.py'])
  config = command_line.load(command)
  config.dataset.limit = 10
  options = {'mode': 'train', 'group_size': 1}
  rollout.prepare_rollout(config, num_tasks=25, **options)
  assert config.eval.sets.lake.num_tasks == 25


@pytest.mark.slow
def test_tokens_may_be_left_out_where_nothing_trains_on_them(tmp_path, capsys):
  options = argv(
    tmp_path / 'dump', '--config.rollout.top_p=0.5', '--config.rollout.top_k=3'
  )
  assert rollout.main(options) == 0
  store = f'--config.trajectory_dump.path=experience+sqlite:///{tmp_path}/a.db'
  argument = [*options, f'--workdir={tmp_path / "store"}', store]
  assert rollout.main(argument) != 0
  assert 'rollout.top_p=0.5' in capsys.readouterr().err


def test_each_evaluation_set_is_played(tmp_path):
  """Sets of one tag, with their own numbers of tasks and temperatures."""
  file = tmp_path / 'config.py'
  file.write_text(
    'from configs import base, debug\ndef get_config():\n  c = debug.get_config()\n'
    "  c.eval.sets.few = base.eval_set(tag='arithmetic', num_tasks=2)\n"
    "  c.eval.sets.warm = base.eval_set(tag='arithmetic', temperature=1.0)\n"
    '  return c\n'
  )
  dump = tmp_path / 'dump'
  command = [
    f'--config={file}',
    f'--workdir={tmp_path / "run"}',
    f'--config.trajectory_dump.path={dump}',
    '--mode=val',
  ]
  assert rollout.main(command) == 0
  files = {path.name: path.read_text().splitlines() for path in dump.iterdir()}
  assert {name: len(lines) for name, lines in files.items()} == {
    'val-few-00000.jsonl': 2,
    'val-warm-00000.jsonl': 8,
  }


@pytest.mark.parametrize('total', [0, 5, 40])
@pytest.mark.parametrize('played', [set(), {0, 1, 2}, {1, 4, 9}, set(range(8, 16))])
async def test_a_queue_goes_on_with_what_is_left(played, total):
  from jaxrl.rollout.queue.group_queue import GroupQueue

  size = total or 20
  queue = GroupQueue(num_groups=-1, num_env_groups=3, total=total, in_order=False)
  queue.load_state_dict(dataset_rollout.remaining_tasks_state(played, 3, total))
  leased = []
  for group_id in range(3):
    while lease := await queue.get_episode_id(group_id, 0):
      number = group_id + lease.episode_id
      rows = [row(number)] if number < size else None
      leased += [number] if rows else []
      await queue.put(group_id, lease.episode_id, 0, rows, 0)
  assert sorted(leased) == [i for i in range(size) if i not in played]
  taken = []
  while groups := await queue.get_batch(1):
    taken += [group[0].env_group for group in groups]
  assert sorted(taken) == sorted(leased)


def test_attempts_that_failed_score_nothing_and_all_have_a_name():
  reason = sorted(FAILURES)[0]
  lost = row(7, sample_index=1, rewards=(0, 3), stop_reason=reason)
  lost.tag, lost.episode_seed = '', 0
  group = [row(7), lost]
  assert dataset_rollout.complete_group(group, 't', 100) == 7
  assert [r.trajectory_id for r in group] == ['t_7_0_107_0_0', 't_7_0_107_1_0']
  assert [r.score for r in group] == [0.5, 0.0]


@pytest.mark.slow
@pytest.mark.extended
def test_killed_at_any_moment_every_item_is_there_once(tmp_path):
  """Three real kills: in a part, after parts, and on the way; then it ends."""
  size, env = 60, runs.environment()
  options = argv(
    tmp_path, '--part_size=4', '--config.rollout.max_num_seqs=4', limit=size
  )
  command = [sys.executable, '-u', '-m', 'launch.rollout', *options]

  def start():
    out = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    return subprocess.Popen(command, cwd=runs.ROOT, env=env, **out)

  def kept():
    """Lines that the ledger holds, and parts that are done."""
    lines = 0
    for path in (tmp_path / 'ledger').glob('*.jsonl'):
      try:
        lines += path.read_bytes().count(b'\n')
      except FileNotFoundError:  # sealed meanwhile
        continue
    done = tmp_path / 'ledger' / 'done.txt'
    return lines, done.read_bytes().count(b'\n') if done.exists() else 0

  for enough in (lambda: kept()[0], lambda: kept()[1] > 4, lambda: kept()[1] > 8):
    process = start()
    while process.poll() is None and not enough():
      time.sleep(0.002)
    assert process.poll() is None, process.communicate()[0]
    process.kill()
    process.communicate()
    assert kept()[1] < size / 4
  process = start()
  output, _ = process.communicate(timeout=240)
  assert process.returncode == 0, output
  assert 'of them played before' in output
  counts = collections.Counter(r['task_idx'] for r in dumped(tmp_path))
  assert counts == dict.fromkeys(range(size), 1)
  assert len({r['trajectory_id'] for r in dumped(tmp_path)}) == size


OWN = """
from configs import base, debug
from jaxrl.data.dataset import GlobalDataset

ROWS = [{'question': f'row {i}.', 'answer': '1'} for i in range(24)]
DATA = GlobalDataset(ROWS, mode='traversal')

class Own:
  uses_dataset = False
  columns = {'row': 'string'}

  def reset(self, *, seed, options=None):
    item = DATA.get_data_item(seed)
    if item is None:
      return None, None
    self.row = item['question']
    return item['question'], {}

  def step(self, action):
    return '', 0.0, True, False, {'columns': {'row': self.row}}

def get_config():
  config = debug.get_config()
  del config.env.arithmetic
  config.env.own = base.env_section(f'PREFIX{__file__}:Own', max_tokens_per_step=2)
  config.rollout.max_num_seqs = 4
  return config
"""


@pytest.mark.slow
@pytest.mark.parametrize('prefix', ['', 'isolated:'])
def test_an_environment_that_opens_its_own_data_plays_every_row(tmp_path, prefix):
  file = tmp_path / 'own.py'
  file.write_text(OWN.replace('PREFIX', prefix))
  options = (f'--config={file}', f'--workdir={tmp_path}', '--num_tasks=100')
  assert rollout.main(options) == 0
  assert sorted(r['row'] for r in dumped(tmp_path)) == sorted(
    f'row {i}.' for i in range(24)
  )
