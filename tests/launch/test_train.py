"""The command itself: its errors, its signals, its exit status, its last lines."""

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from jaxrl.rollout.queue.group_pipeline import GroupPipeline
from jaxrl.user_code import import_object
from launch import train
from launch.logging import error_pages
from launch.logging.console import Console
from launch.logging.workdir import Workdir
from launch.runtime.signal_handler import SignalHandler
from tests.launch import runs
from tests.marks import slow

CONFIG = """
from ml_collections import ConfigDict
def get_config(algorithm='grpo'):
  return ConfigDict(dict(seed=0, num_steps=3))
"""
# Stands in for launch.build: steps of a tenth of a second that do nothing.
JOB = """
import asyncio
class Job:
  facts = {'model': 'toy', 'devices': '1 x cpu'}
  closing = {'next': 'nothing'}
  def __init__(self, config, workdir, sink, stop, trace_steps=()):
    self.config, self.sink, self.stop = config, sink, stop
    if config.seed == 13:
      raise OSError(28, 'No space left on device', 'checkpoints')
    if config.seed == 14:
      raise ValueError('a bug')
  async def train(self):
    self.sink.phase('rl', self.config.num_steps)
    for step in range(self.config.num_steps):
      await asyncio.sleep(0.1)
      self.sink.write(step, {'reward/mean': 0.5})
      if self.stop():
        return False
    return True
build = Job
resolve_settings = lambda config, day: config
check_run = lambda settings, trains: None
"""


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'toy.py').write_text(CONFIG)
  return tmp_path


@pytest.fixture
def built(monkeypatch):
  fake = types.ModuleType('launch.build')
  exec(JOB, fake.__dict__)
  monkeypatch.setitem(sys.modules, 'launch.build', fake)
  monkeypatch.setitem(sys.modules, 'launch.settings.resolve', fake)
  monkeypatch.setitem(sys.modules, 'launch.rollouts.preparation', fake)
  monkeypatch.setattr('launch.build', fake, raising=False)


def main(folder, *argv):
  return train.main([f'--config={folder}/toy.py', f'--workdir={folder}/run', *argv])


def test_a_run_leaves_its_files_and_says_where(folder, built, capsys):
  assert main(folder) == 0
  output = capsys.readouterr().out
  for words in (
    'toy',
    '1 x cpu',
    'tuning',
    'rl 3/3',
    'Finished.',
    'report.html',
    'next',
  ):
    assert words in output
  run = folder / 'run'
  lines = (run / 'metrics.jsonl').read_text().splitlines()
  assert [json.loads(line)['step'] for line in lines] == [0, 1, 2]
  assert json.loads((run / 'config.json').read_text())['launches'][0]['model'] == 'toy'
  assert (run / 'report.html').exists() and list((run / 'tensorboard').rglob('events*'))


def test_sinks_can_be_left_out(folder, built):
  assert main(folder, '--config.logging.sinks=') == 0
  assert {p.name for p in (folder / 'run').iterdir()} == {
    '.lock', 'config.json', 'metrics.jsonl',
  }  # fmt: skip


@pytest.mark.parametrize(
  'argv, words',
  [
    (['--config.sed=1'], 'did you mean --config.seed'),
    (['--config.num_steps=x'], 'must be a whole number'),
    (['--config.logging.sinks=mlflow'], "no sink 'mlflow'"),
    (['--worksdir=x'], 'did you mean --workdir'),
  ],
)
def test_the_users_mistakes_end_with_2_and_one_line(folder, built, capsys, argv, words):
  assert main(folder, *argv) == 2
  err = capsys.readouterr().err
  assert err.startswith('error: ') and err.count('\n') == 1 and words in err


def test_a_full_disk_is_one_line_and_a_bug_a_traceback(folder, built, capsys):
  assert main(folder, '--config.seed=13') == 1
  err = capsys.readouterr().err
  assert err.count('\n') == 1 and 'No space left on device' in err
  assert 'Traceback' in (folder / 'run' / 'error.txt').read_text()
  assert main(folder, '--config.seed=14') == 1
  assert 'Traceback' in capsys.readouterr().err
  assert not (folder / 'run' / 'report.html').exists()  # there is nothing to show
  assert main(folder) == 0
  assert not (folder / 'run' / 'error.txt').exists()  # what it told of is over


def test_help_lists_the_keys(folder, capsys):
  assert train.main(['--help']) == 0
  assert train.main(['--help', f'--config={folder}/toy.py']) == 0
  output = capsys.readouterr().out
  assert '--config.num_steps=3' in output and '--config.logging.sinks=report' in output


def test_a_mistake_is_told_before_jax_is_imported(folder):
  code = (
    'import sys; from launch import train\n'
    f'status = train.main(["--config={folder}/toy.py", "--config.sed=1"])\n'
    'assert "jax" not in sys.modules, "jax is imported"; sys.exit(status)'
  )
  ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
  assert ran.returncode == 2, ran.stderr


def start(folder, *argv):
  code = (
    'import sys, types; m = types.ModuleType("launch.build")\n'
    f'exec({JOB!r}, m.__dict__)\n'
    'for name in ("build", "settings.resolve", "rollouts.preparation"):\n'
    '  sys.modules[f"launch.{name}"] = m\n'
    'import launch; launch.build = m\n'
    'from launch import train; sys.exit(train.main(sys.argv[1:]))'
  )
  command = [sys.executable, '-u', '-c', code, f'--config={folder}/toy.py']
  command += [f'--workdir={folder}/run', '--config.num_steps=600', *argv]
  env = {**os.environ, 'PYTHONPATH': os.getcwd()}
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
  for line in process.stdout:
    if line.startswith('rl   1/600'):
      return process
  raise AssertionError('it never began')


@pytest.mark.parametrize(
  'number, status',
  [
    slow(signal.SIGINT, 130),
    (signal.SIGTERM, 143),
  ],
)
def test_a_signal_stops_after_the_step(folder, number, status):
  process = start(folder)
  process.send_signal(number)
  output, _ = process.communicate(timeout=30)
  assert process.returncode == status
  assert (
    'stopping after this step' in output
    and 'Stopped; the same command resumes.' in output
  )
  assert 'stopped' in (folder / 'run' / 'report.html').read_text()


def test_a_second_signal_ends_it_at_once(folder):
  (folder / 'toy.py').write_text(CONFIG)
  process = start(folder)
  os.kill(process.pid, signal.SIGSTOP)  # so that both arrive within one step
  process.send_signal(signal.SIGINT)
  process.send_signal(signal.SIGTERM)
  process.send_signal(signal.SIGCONT)
  output, _ = process.communicate(timeout=30)
  assert process.returncode in (130, 143)
  assert 'Stopped' not in output


def test_a_signal_that_interrupts_a_line_is_told_after_it():
  messages = queue.Queue()

  def tell(text):
    if threading.current_thread() is threading.main_thread():
      raise RuntimeError('reentrant call inside <_io.BufferedWriter>')
    messages.put(text)

  with SignalHandler(tell, lambda: None) as stop:
    signal.raise_signal(signal.SIGTERM)
  assert stop() and stop.status == 143
  assert messages.get(timeout=10).startswith('SIGTERM: stopping after this step')


FILTERS = """
def drop(group_id, episode_id, group):
  return group.size > 3

def divide(group_id, episode_id, group):
  return 1 // 0

def shape(group):
  return group['reward']
"""


@pytest.mark.parametrize('elsewhere', [False, True])
@pytest.mark.parametrize(
  'name, line, message',
  [
    ('drop', 3, "AttributeError: 'list' object has no attribute 'size'; raised by a "),
    ('divide', 6, 'ZeroDivisionError: integer division or modulo by zero; raised by '),
    ('shape', 9, 'TypeError: list indices must be integers or slices, not str; rais'),
  ],
)
def test_what_a_users_filter_raises_is_a_line_with_its_place(
  tmp_path, capsys, name, line, message, elsewhere
):
  (tmp_path / 'mine.py').write_text(FILTERS)
  function = import_object(f'{tmp_path}/mine.py:{name}')
  parts = (None, function) if name == 'shape' else (function, None)
  pipeline = GroupPipeline(*parts, min_samples=1, needs_greedy=False)
  with pytest.raises(Exception) as raised:
    pipeline.process(0, 0, [])
  error = raised.value
  if elsewhere:  # in an actor: its traceback does not arrive
    error = error.with_traceback(None)
  workdir = Workdir(tmp_path / 'run', {})
  assert error_pages.report_failure(error, Console(), workdir) == 1
  workdir.close()
  err = capsys.readouterr().err
  assert err.startswith(f'error: {message}') and err.count('\n') == 1
  assert err.endswith(f' ({tmp_path}/mine.py, line {line})\n')
  text = (tmp_path / 'run' / 'error.txt').read_text()
  assert f'mine.py, line {line})' in text
  assert ('Traceback' in text) is not elsewhere


def test_ctrl_c_during_the_imports_is_one_line(folder):
  command = [sys.executable, '-X', 'importtime', '-m', 'launch.train']
  process = subprocess.Popen(
    [*command, f'--config={folder}/toy.py', f'--workdir={folder}/run'],
    stderr=subprocess.PIPE,
    text=True,
    env={**os.environ, 'JAXRL_TUNE': '0'},
  )
  for line in process.stderr:
    if 'jaxrl.data.trajectory_writers' in line:  # the first of many
      break
  process.send_signal(signal.SIGINT)
  _, output = process.communicate(timeout=30)
  lines = [line for line in output.splitlines() if not line.startswith('import time:')]
  assert process.returncode == 130 and lines == ['Stopped.'], lines


@pytest.mark.slow
def test_a_run_goes_on_while_the_clock_is_set_back(tmp_path, monkeypatch):
  clock = itertools.count(2e9, -3600.0)
  monkeypatch.setattr(time, 'time', lambda: next(clock))
  options = ('--config.num_steps=3', '--config.checkpoint.save_interval=1')
  assert runs.main(tmp_path, '--config.sft.num_steps=0', *options) == 0
  rows = runs.rows(tmp_path)
  assert [row['step'] for row in rows] == list(range(4))  # the last is an evaluation
  walls = [row.pop('time/wall') for row in rows]
  assert walls == sorted(walls, reverse=True)
  times = {k: v for row in rows for k, v in row.items() if k.startswith('time/')}
  assert times['time/step'] > 0 and min(times.values()) >= 0
