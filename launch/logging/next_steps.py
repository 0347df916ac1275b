"""What is printed at the end of a run: where to look, and commands worth trying next.

Each command works when it is pasted into the shell that started the run: what another
algorithm or command would refuse is left out.
"""

import importlib.util
import os
import pathlib
import shlex
import shutil
import sys
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from launch.settings import command_line
from launch.settings.command_line import Command


def python_command() -> str:
  """Returns how to call this Python: 'python' where its environment is active."""
  python_path = shutil.which('python')
  if python_path and os.path.abspath(python_path) == os.path.abspath(sys.executable):
    return 'python'
  here = os.path.relpath(sys.executable)
  return shlex.quote(sys.executable if here.startswith(os.pardir) else here)


def outputs(workdir: pathlib.Path, sinks: Collection[str]) -> dict[str, str]:
  """Returns where to look, by what was written.

  Args:
    workdir: Folder of the run.
    sinks: Names of the sinks that metrics went to.
  """
  paths = {'metrics': str(workdir / 'metrics.jsonl')}
  if 'report' in sinks:
    paths = {'report': str(workdir / 'report.html'), **paths}
  if 'tensorboard' in sinks:
    # As a module: its program is on the PATH only where the environment is active.
    show = f'{python_command()} -m tensorboard.main --logdir '
    show += shlex.quote(str(workdir / 'tensorboard'))
    if importlib.util.find_spec('tensorboard') is None:  # the run writes without it
      install = f'{python_command()} -m pip install tensorboard'
      if importlib.util.find_spec('pip') is None:  # as in an environment made by uv
        install = f'uv pip install --python {python_command()} tensorboard'
      show = f'{install} && {show}'
    paths['curves'] = show
  return paths


def next_steps(command: Command, config: Any, workdir: pathlib.Path) -> dict[str, str]:
  """Returns commands worth trying after a finished run, by label.

  Args:
    command: Command line of the run.
    config: Its config.
    workdir: Its folder.
  """
  lasts = 'num_epochs' if config.get('num_epochs') else 'num_steps'
  overrides = {key: text for key, text in command.overrides if key != lasts}

  def arguments(
    algorithm: str | None, *more: str, without: tuple[str, ...] = ()
  ) -> list[str]:
    options = [
      f'--config.{key}' + ('' if text is None else f'={text}')
      for key, text in overrides.items()
      if not key.startswith(without)
    ]
    spec = command.config + (f':{algorithm}' if algorithm else '')
    return [f'--config={spec}', *options, *more]

  used = command.algorithm
  other = 'grpo' if used == 'opmd' else 'opmd'
  if any(config.get('teacher', {}).values()):  # which only some algorithms ask
    other = 'on_policy_distill' if used == 'jsd' else 'jsd'
  longer = f'--config.{lasts}={2 * max(config[lasts], 1)}'
  resumed = arguments(used, longer, f'--workdir={workdir}')
  steps = {'train on': _line('launch.train', resumed)}
  if not config.get('env', True):  # nothing to play
    return steps
  # One algorithm has not another's keys; a dump or a store's reader is one run's.
  elsewhere = [f'--workdir={workdir}-{other}']
  if config.get('trajectory_dump', {}).get('path'):
    elsewhere.append('--config.trajectory_dump.path=')
  attempt = arguments(other, *elsewhere, without=('algorithm.', 'trajectory_dump.'))
  store = config.get('dataset', {}).get('experience_store')
  if not store and _is_accepted(attempt, trains=True):
    steps[f'try {other}'] = _line('launch.train', attempt)
  if config.get('checkpoint', {}).get('export'):
    model = [f'--config.model.checkpoint={workdir / "export"}']
    if config.get('model', {}).get('lora'):  # merged in what was exported
      model.append('--config.model.lora=')
    watch = arguments(used, without=('model.lora', 'trajectory_dump.'))
    if _is_accepted(watch, trains=False):
      steps = {'watch it play': _line('launch.play', [*watch, *model]), **steps}
  return steps


def _line(module: str, arguments: Sequence[str]) -> str:
  return f'{python_command()} {shlex.join(["-m", module, *arguments])}'


def _is_accepted(arguments: Sequence[str], *, trains: bool) -> bool:
  """Returns whether a command would accept its command line."""
  from launch.settings.resolve import resolve_settings
  from launch.settings.validation import validate, validate_training

  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # the command itself tells what is doubtful
      command = command_line.parse(arguments, {'workdir': ''})
      config = command_line.load(command, dumps=trains)
      settings = resolve_settings(config, warn=False)
      validate(settings)
      if trains:
        validate_training(settings)
  except Exception:  # a config file of the user's may raise anything
    return False
  return True
