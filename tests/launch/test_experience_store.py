"""Exploring and training apart, over a store."""

import collections
import re
import sqlite3
import subprocess
import sys
import time

import pytest

from jaxrl.data.store.experience_writer import ExperienceWriter, GroupSerializer
from jaxrl.data.store.store_database import StoreDatabase
from jaxrl.options import ConfigError
from launch import build, rollout
from launch.rollouts import experience_store
from launch.rollouts.rollout_scheduler import RolloutScheduler
from tests.launch import runs

ALONE = ('--config.eval.interval=0', '--config.sft.num_steps=0')
FOUR = '--config.algorithm.group_size=4'
FAIR = '--config.algorithm.correction=none'  # by default a store's groups have one


def url(folder):
  return f'sqlite:///{folder}/store.db'


def source(folder, **options):
  arguments = ''.join(f', {name}={value!r}' for name, value in options.items())
  return f"--config.dataset.experience_store=store(url='{url(folder)}'{arguments})"


def explore(folder, name, *options, limit=6):
  """The command line of an explorer that plays `limit` groups of four."""
  place = f'--config.trajectory_dump.path=experience+{url(folder)}'
  size = f'--config.dataset.limit={limit}', '--group_size=4'
  return runs.argv(folder / name, place, *size, *options, config=runs.VARIED)


def uses(folder):
  """How often each group has been used in steps below the newest checkpoint's."""
  with sqlite3.connect(folder / 'store.db') as raw:
    ((saved,),) = raw.execute('select saved from jaxrl_readers')
    groups = [group for (group,) in raw.execute('select id from jaxrl_groups')]
    used = raw.execute(
      "select group_id from jaxrl_uses where lost = '' and step < ?", (saved,)
    )
    counts = collections.Counter(group for (group,) in used)
  return {group: counts[group] for group in groups}


def learned(sink):
  """What a run tells of learning: neither of time nor of playing."""
  parts = ('loss/', 'optimizer/', 'policy/', 'advantage/', 'reward/', 'mismatch/')
  return [
    (step, {k: v for k, v in row.items() if k.startswith(parts)})
    for step, row in sink.metrics
  ]


def tokens(sink):
  return [
    [row.tokens.tobytes() for row in group]
    for _, _, groups, _ in sink.played
    for group in groups
  ]


@pytest.mark.slow
def test_stored_groups_teach_what_played_ones_do(tmp_path, monkeypatch):
  database = StoreDatabase(url(tmp_path))
  take, facts = RolloutScheduler.take, []

  async def taken(self, *args, **options):
    groups = await take(self, *args, **options)
    if not facts:
      facts.append(
        experience_store.compatibility_facts(self._settings, self._policy.tokenizer)
      )
    explorer = ExperienceWriter(database, 'direct', facts[0])
    for group in groups:
      number = group[0].env_group + group[0].episode_id
      explorer.add(group[0].tag, number, GroupSerializer().rows(group, number))
    explorer.flush()
    return groups

  options = (*ALONE, FAIR, FOUR)
  monkeypatch.setattr(RolloutScheduler, 'take', taken)
  direct = runs.record(tmp_path / 'direct', *options)
  # Neither engines nor managers are made.
  monkeypatch.setattr(build, 'RolloutScheduler', None)
  again = runs.record(tmp_path / 'again', *options, source(tmp_path, wait=1.0))
  assert len(direct.metrics) == 3 and learned(again) == learned(direct)
  assert {'loss/total', 'optimizer/grad_norm'} <= learned(again)[0][1].keys()
  assert tokens(again) == tokens(direct) and len(tokens(again)) == 6
  monkeypatch.undo()
  with pytest.raises(ConfigError, match='trains from a store'):
    runs.record(tmp_path / 'again', *options, '--config.num_steps=4')
  with pytest.raises(ConfigError, match='has played its own episodes'):
    place = source(tmp_path, reader='b')
    runs.record(tmp_path / 'direct', *options, '--config.num_steps=4', place)


@pytest.mark.slow
def test_explorers_then_trainers_until_nothing_is_left(tmp_path, capsys):
  assert rollout.main(explore(tmp_path, 'a', limit=3)) == 0
  options = (*ALONE, FOUR, source(tmp_path, uses=2, wait=0.0))
  train = [*options, '--config.num_steps=9', '--config.checkpoint.save_interval=2']
  assert runs.main(tmp_path / 't', *train, config=runs.VARIED) == 1
  captured = capsys.readouterr()
  assert 'of any age, from the store, corrected by tis' in captured.out
  assert (
    'step 3: no new group in' in captured.err and 'Start an explorer' in captured.err
  )
  assert uses(tmp_path) == {1: 2, 2: 2, 3: 2}
  assert rollout.main(explore(tmp_path, 'a', limit=3)) == 0  # as it was: nothing new
  assert 'dump          sqlite:///' in capsys.readouterr().out
  assert rollout.main(explore(tmp_path, 'b', limit=1)) == 0
  assert runs.main(tmp_path / 't', *train, config=runs.VARIED) == 1
  captured = capsys.readouterr()
  assert (
    'resumes at step 3 of 9' in captured.out and 'step 5: no new group' in captured.err
  )
  assert uses(tmp_path) == {1: 2, 2: 2, 3: 2, 4: 2}
  assert runs.main(tmp_path / 'other', *train, config=runs.VARIED) == 2
  error = capsys.readouterr().err
  assert 'up to the checkpoint of step 5 in another workdir' in error
  hot = (*ALONE, source(tmp_path, reader='hot'), '--config.rollout.temperature=0.5')
  assert runs.main(tmp_path / 'hot', *hot, config=runs.VARIED) == 2
  assert 'set --config.rollout.temperature to the same value' in capsys.readouterr().err


@pytest.mark.parametrize(
  'options, message',
  [
    (['--config.rollout.async_ratio=1'], 'rollout.async_ratio=1.0: has no effect'),
    (
      ['--config.weight_sync.policy=trainer'],
      'weight_sync.policy=trainer: has no effect',
    ),
    (['--config.algorithm.sampler=replay'], 'already decides how often'),
    (
      ['--config.dataset.experience_store=store(url="x", use=1)'],
      "Did you mean 'uses'",
    ),
    (['--config.dataset.experience_store=experience'], "no source 'experience'"),
    (['--config.dataset.curriculum=random'], 'curriculum=random: has no effect'),
  ],
)
def test_what_has_no_effect_is_refused(options, message, tmp_path, capsys):
  options = [*ALONE, source(tmp_path, uses=2), *options]
  assert runs.main(tmp_path / 't', *options) == 2
  assert message in capsys.readouterr().err
  assert not (tmp_path / 'store.db').exists()


@pytest.mark.parametrize(
  'options, message',
  [
    (
      ['--config.trajectory_dump.columns=[["task_idx","bigint"]]'],
      'keeps whole groups',
    ),
    (
      ['--config.trajectory_dump.save_arrays=false'],
      'trajectory_dump.save_arrays: has no effect here',
    ),
    (['--config.dataset.experience_store=sqlite:////x.db'], 'does not read a store'),
    (['--config.trajectory_dump.path=store(url="sqlite://")'], 'names no file'),
  ],
)
def test_what_explorers_refuse(options, message, tmp_path, capsys):
  assert rollout.main(explore(tmp_path, 'a', *options)) == 2
  assert message in capsys.readouterr().err


def _spawn(module, argv):
  env = runs.environment()
  command = [sys.executable, '-u', '-m', module, *argv]
  out = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
  return subprocess.Popen(command, text=True, cwd=runs.ROOT, env=env, **out)


def _read_until(process, mark):
  lines = []
  for line in process.stdout:
    lines.append(line)
    if mark in line:
      return lines
  raise AssertionError(''.join(lines))


@pytest.mark.slow
@pytest.mark.extended
def test_every_group_is_used_as_often_as_asked_whatever_is_killed(tmp_path):
  """A trainer that waits for an explorer; both killed, both started again."""
  options = (*ALONE, FOUR, source(tmp_path, uses=2, wait=60.0))
  train = runs.argv(
    tmp_path / 't',
    *options,
    '--config.num_steps=40',
    '--config.checkpoint.save_interval=4',
    config=runs.VARIED,
  )
  trainer = _spawn('launch.train', train)
  _read_until(trainer, 'waits for groups')  # it was there first
  explorer = _spawn('launch.rollout', explore(tmp_path, 'a', limit=20))
  count = 0
  while count < 3 and explorer.poll() is None:
    time.sleep(0.02)
    with sqlite3.connect(tmp_path / 'store.db') as raw:
      ((count,),) = raw.execute('select count(*) from jaxrl_groups')
  explorer.kill()
  explorer.communicate()
  trainer.kill()
  trainer.communicate()
  others = [_spawn('launch.rollout', explore(tmp_path, n, limit=20)) for n in 'ab']
  trainer = _spawn('launch.train', train)
  _read_until(trainer, 'train 11/40')
  trainer.kill()
  trainer.communicate()
  for process in others:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
  trainer = _spawn('launch.train', train)
  output, _ = trainer.communicate(timeout=300)
  assert re.search(r'resumes at step [1-9]', output), output
  assert trainer.returncode == 0, output
  assert uses(tmp_path) == dict.fromkeys(range(1, 41), 2)
  with sqlite3.connect(tmp_path / 'store.db') as raw:
    group_keys = raw.execute('select run, number from jaxrl_groups')
    counts = collections.Counter(run for run, _ in set(group_keys))
  assert sorted(counts.values()) == [20, 20]
