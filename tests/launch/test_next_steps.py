"""What a finished run prints: commands that work when they are pasted."""

import importlib.util
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest

from launch.logging import next_steps
from launch.settings import command_line
from launch.settings.component_options import build_algorithm
from tests.launch import runs
from tests.marks import slow_except

WORKDIR = pathlib.Path('runs/mine')


@pytest.fixture
def path(monkeypatch):
  def put(*folders):
    monkeypatch.setenv('PATH', os.pathsep.join(map(str, folders)))

  return put


def steps_of(algorithm, *overrides):
  argv = [f'--config={runs.DEBUG}:{algorithm}', *overrides]
  command = command_line.parse(argv, {'workdir': ''})
  config = command_line.load(command, dumps=True)
  return next_steps.next_steps(command, config, WORKDIR)


def load(line):
  """The config of a printed command, as the command itself would read it."""
  _, _, module, *argv = shlex.split(line)
  assert module in ('launch.train', 'launch.play')
  command = command_line.parse(argv, {'workdir': ''})
  return command_line.load(command, dumps=module == 'launch.train')


def test_another_algorithm_does_not_get_the_keys_of_this_one():
  grpo_option = '--config.algorithm.std_threshold=0.1'  # opmd has no such option
  steps = steps_of('grpo', grpo_option, '--config.batch.num_groups=3')
  other = load(steps['try opmd'])
  assert other.algorithm.name == 'opmd' and other.batch.num_groups == 3
  options = other.algorithm.to_dict()
  assert build_algorithm(options.pop('name'), options).group_size == 2  # its own
  assert load(steps['train on']).algorithm.std_threshold == 0.1


def test_adapters_are_merged_in_what_is_played():
  steps = steps_of('grpo', '--config.model.lora=lora(rank=2)')
  played = load(steps['watch it play'])
  assert played.model.lora == '' and played.model.checkpoint == 'runs/mine/export'
  assert load(steps['train on']).model.lora == 'lora(rank=2)'


def test_a_dump_is_of_one_run_and_not_of_what_is_shown():
  steps = steps_of('grpo', '--config.trajectory_dump.path=runs/kept')
  assert load(steps['train on']).trajectory_dump.path == 'runs/kept'
  assert load(steps['try opmd']).trajectory_dump.path == ''
  assert 'trajectory_dump' not in steps['watch it play']
  load(steps['watch it play'])


@pytest.mark.parametrize(
  'algorithm, options',
  [
    ('mix', ['dataset.expert_path=rows.jsonl']),
    ('ppo', ['rollout.staleness_policy=recompute', 'rollout.async_ratio=1']),
    ('grpo', ["dataset.experience_store=store(url='sqlite:////a.db')"]),
  ],
)
def test_what_another_algorithm_would_refuse_is_not_printed(algorithm, options):
  steps = steps_of(algorithm, *(f'--config.{option}' for option in options))
  assert list(steps) == ['watch it play', 'train on']


def test_python_is_named_so_that_it_is_found(path, tmp_path, monkeypatch):
  folder = pathlib.Path(sys.executable).parent
  path(folder, tmp_path)
  assert next_steps.python_command() == 'python'
  path(tmp_path)  # the environment is not active
  monkeypatch.chdir(folder.parent)
  assert next_steps.python_command() == f'bin/{pathlib.Path(sys.executable).name}'
  monkeypatch.chdir(tmp_path)
  assert next_steps.python_command() == shlex.quote(sys.executable)


@pytest.mark.parametrize(
  'there, install',
  [
    ({'tensorboard', 'pip'}, ''),
    ({'pip'}, '{python} -m pip install tensorboard && '),
    (set(), 'uv pip install --python {python} tensorboard && '),
  ],
)
def test_curves_are_shown_by_a_program_that_is_there_or_installed(
  there, install, monkeypatch
):
  monkeypatch.setattr(
    importlib.util, 'find_spec', lambda name: object() if name in there else None
  )
  line = next_steps.outputs(WORKDIR, ('tensorboard',))['curves']
  python = next_steps.python_command()
  show = f'{python} -m tensorboard.main --logdir runs/mine/tensorboard'
  assert line == install.format(python=python) + show


@pytest.mark.parametrize(
  'words',
  [
    ('-m', 'launch.train', '--help'),
    ('-m', 'launch.algorithms', '--help'),
    ('-m', 'launch.plan', '--help'),
    ('examples/grpo_minimal.py',),
  ],
)
def test_a_python_without_the_packages_is_answered_in_one_line(words):
  # -S leaves site-packages out, as in a Python where nothing is installed.
  done = subprocess.run(
    [sys.executable, '-S', *words],
    cwd=runs.ROOT,
    env={'PATH': os.environ['PATH']},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1 and done.stdout == ''
  assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1
  assert 'source .venv/bin/activate' in done.stderr


@pytest.mark.parametrize(
  'words',
  slow_except(
    ('.algorithms',),
    ('', '.algorithms', '.view --help', '.plan --help', '.train --config=X --help'),
  ),
)
def test_a_reader_that_leaves_early_ends_a_command_quietly(words):
  module, *options = f'launch{words}'.replace('X', str(runs.DEBUG)).split()
  reader, writer = os.pipe()
  os.close(reader)  # as `| true` does
  done = subprocess.run(
    [sys.executable, '-m', module, *options],
    cwd=runs.ROOT,
    stdout=writer,
    stderr=subprocess.PIPE,
    text=True,
  )
  os.close(writer)
  assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, '')
