"""What a finished run prints: commands that work when they are pasted."""

import importlib.util
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from launch.logging import next_steps
from launch.settings import command_line
from launch.settings.algorithm_options import build_algorithm
from tests.launch import runs

WORKDIR = pathlib.Path('runs/mine')


@pytest.fixture
def path(monkeypatch):
  def put(*folders):
    monkeypatch.setenv('PATH', os.pathsep.join(map(str, folders)))

  return put


def steps_of(algorithm, *overrides):
  argv = [f'--config={runs.DEBUG}:{algorithm}', *overrides]
  command = command_line.parse(argv, {'workdir': ''})
  config = command_line.load(command)
  return next_steps.next_steps(command, config, WORKDIR)


def load(line):
  """The config of a printed command, as the command itself would read it."""
  _, _, module, *argv = shlex.split(line)
  assert module in ('launch.train', 'launch.play')
  return command_line.load(command_line.parse(argv, {'workdir': ''}))


def test_another_algorithm_does_not_get_the_keys_of_this_one():
  own = '--config.algorithm.std_threshold=0.1'  # opmd has no such option
  steps = steps_of('grpo', own, '--config.batch.num_groups=3')
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


def test_python_is_named_so_that_it_is_found(path, tmp_path, monkeypatch):
  folder = pathlib.Path(sys.executable).parent
  path(folder, tmp_path)
  assert next_steps.python_command() == 'python'
  path(tmp_path)  # the environment is not active
  monkeypatch.chdir(folder.parent)
  assert next_steps.python_command() == f'bin/{pathlib.Path(sys.executable).name}'
  monkeypatch.chdir(tmp_path)
  assert next_steps.python_command() == shlex.quote(sys.executable)


@pytest.mark.parametrize('there', [True, False])
def test_curves_are_shown_by_a_program_that_is_there_or_installed(there, monkeypatch):
  found = object() if there else None
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: found)
  line = next_steps.outputs(WORKDIR, ('tensorboard',))['curves']
  assert line.endswith('tensorboard --logdir runs/mine/tensorboard')
  assert ('pip install tensorboard && ' in line) is not there


@pytest.mark.parametrize('module', ['launch.train', 'launch.algorithms', 'launch.plan'])
def test_a_python_without_the_packages_is_answered_in_one_line(module, tmp_path):
  # -S leaves site-packages out, as in a Python where nothing is installed.
  done = subprocess.run(
    [sys.executable, '-S', '-m', module, '--help'],
    cwd=runs.ROOT,
    env={'PATH': os.environ['PATH']},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1 and done.stdout == ''
  assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1
  assert 'source .venv/bin/activate' in done.stderr
