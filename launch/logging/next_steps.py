"""What is printed at the end of a run: where to look, and commands worth trying next.

Each command works when it is pasted into the shell that started the run.
"""

import importlib.util
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Collection
from typing import Any

from launch.settings.command_line import Command


def python_command() -> str:
  """Returns how to call this Python: 'python' where its environment is active."""
  found = shutil.which('python')
  if found and os.path.abspath(found) == os.path.abspath(sys.executable):
    return 'python'
  here = os.path.relpath(sys.executable)
  return shlex.quote(sys.executable if here.startswith(os.pardir) else here)


def outputs(workdir: pathlib.Path, sinks: Collection[str]) -> dict[str, str]:
  """Returns where to look, by what was written.

  Args:
    workdir: folder of the run.
    sinks: names of the sinks that metrics went to.
  """
  paths = {'metrics': str(workdir / 'metrics.jsonl')}
  if 'report' in sinks:
    paths = {'report': str(workdir / 'report.html'), **paths}
  if 'tensorboard' in sinks:
    show = f'tensorboard --logdir {shlex.quote(str(workdir / "tensorboard"))}'
    if importlib.util.find_spec('tensorboard') is None:  # the run writes without it
      show = f'{python_command()} -m pip install tensorboard && {show}'
    paths['curves'] = show
  return paths


def next_steps(command: Command, config: Any, workdir: pathlib.Path) -> dict[str, str]:
  """Returns commands worth trying after a finished run, by label.

  Args:
    command: command line of the run.
    config: its config.
    workdir: its folder.
  """
  lasts = 'num_epochs' if config.get('num_epochs') else 'num_steps'
  own = {key: text for key, text in command.overrides if key != lasts}

  def line(module: str, algorithm: str | None, *more: str, without: str = '') -> str:
    options = [
      f'--config.{key}' + ('' if text is None else f'={text}')
      for key, text in own.items()
      if not (without and key.startswith(without))
    ]
    spec = command.config + (f':{algorithm}' if algorithm else '')
    arguments = shlex.join(['-m', module, f'--config={spec}', *options, *more])
    return f'{python_command()} {arguments}'

  used = command.algorithm
  other = 'grpo' if used == 'opmd' else 'opmd'
  if any(config.get('teacher', {}).values()):  # which only some algorithms ask
    other = 'on_policy_distill' if used == 'jsd' else 'jsd'
  longer = f'--config.{lasts}={2 * max(config[lasts], 1)}'
  steps = {'train on': line('launch.train', used, longer, f'--workdir={workdir}')}
  if not config.get('env', True):  # nothing to play
    return steps
  # The keys of one algorithm are not another's.
  elsewhere = f'--workdir={workdir}-{other}'
  steps[f'try {other}'] = line('launch.train', other, elsewhere, without='algorithm.')
  if config.get('checkpoint', {}).get('export'):
    model = [f'--config.model.checkpoint={workdir / "export"}']
    if config.get('model', {}).get('lora'):  # merged in what was exported
      model.append('--config.model.lora=')
    watch = line('launch.play', used, *model, without='model.lora')
    steps = {'watch it play': watch, **steps}
  return steps
