"""Plans a run before launch: `python -m launch.plan --config=FILE.py --topology=…`.

Compiles the programs of a run for a machine that need not be here, and reports how much
of its memory they take, how long a step will last, and what to change if it does not
fit. No parameter is ever allocated.
"""

import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from launch.logging.error_pages import is_refusal, print_error
from launch.planning import targets
from launch.runtime.signal_handler import run_command
from launch.settings import command_line

USAGE = """\
python -m launch.plan --config=FILE.py[:ALGORITHM] [--config.KEY=VALUE] [--topology=…]

  --topology=v5p:8x8x8    a TPU slice: v5e:4x4, v5p:2x2x2, v6e:4x4; or GPUs: h200:8,
                          h100:16; or cpu:1. By default the config's own TOPOLOGY
  --sweep=mesh            ranks meshes; --compiles=6 of them are compiled at most
  --json=PATH             all of it as JSON too

TPUs and GPUs need their compilers, the extra targets: pip install -e '.[targets]'.
A checkpoint's config.json is enough; Qwen3's published shapes are known by name.
"""
FLAGS = {'topology': '', 'sweep': '', 'compiles': '6', 'json': ''}


def main(argv: Sequence[str]) -> int:
  """Plans from a command line; returns the exit status, 1 if the run does not fit."""
  if not argv or '--help' in argv or '-h' in argv:
    print(USAGE)
    return 0
  try:
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # no accelerator is taken to plan
    command = command_line.parse(argv, FLAGS)
    target = targets.parse_target(
      command.flags['topology'] or _default_topology(command.config)
    )
    if command.flags['sweep'] not in ('', 'mesh'):
      raise command_line.ConfigError(
        f"--sweep={command.flags['sweep']}: must be 'mesh', which is all that "
        'can be swept'
      )
    if not command.flags['compiles'].isdigit() or command.flags['compiles'] == '0':
      raise command_line.ConfigError(
        f'--compiles={command.flags["compiles"]}: must be a whole number of at least 1'
      )
    _check_json(command.flags['json'])
    targets.set_compiler_env(target)
    return _plan(command, target)
  except ValueError as error:
    if not is_refusal(error):
      raise
    print_error(error)
    return 2


def _default_topology(path: str) -> str:
  """Returns the TOPOLOGY of a config file; raises ConfigError if it has none."""
  topology = getattr(command_line.module(path), 'TOPOLOGY', '')
  if not topology:
    raise command_line.ConfigError(
      f'no machine to plan for: {path} has no TOPOLOGY, so name one, as in '
      '--topology=h200:8'
    )
  return str(topology)


def _plan(command: command_line.Command, target: targets.Target) -> int:
  config = command_line.load(command, dumps=True)
  devices = targets.target_devices(target.name)  # imports JAX: seconds
  from rich.console import Console

  from launch.planning import plan_report, plan_table, planned_run, sweep
  from launch.settings.resolve import resolve_settings

  console = Console(highlight=False)
  run = planned_run.read_run(resolve_settings(config))
  name = pathlib.Path(command.config).name
  with console.status(f'compiling {name} for {target.name} …'):
    if command.flags['sweep']:
      max_compiles = int(command.flags['compiles'])
      ranked = sweep.sweep_meshes(run, target, devices, max_compiles=max_compiles)
    else:
      report = plan_report.make_report(name, run, target, devices)
  if command.flags['sweep']:
    plan_table.print_sweep(ranked, console)
    _write_json(command.flags['json'], ranked.to_json())
    return 0 if any(one.cost.fits for one in ranked.entries) else 1
  plan_table.print_report(report, console)
  _write_json(command.flags['json'], report.to_json())
  return 0 if report.cost.fits else 1


def _check_json(path: str) -> None:
  """Raises ConfigError, before any work, if the file cannot be written."""
  if path and not pathlib.Path(path).absolute().parent.is_dir():
    raise command_line.ConfigError(
      f'--json={path}: there is no folder {pathlib.Path(path).parent}'
    )


def _write_json(path: str, data: dict[str, Any]) -> None:
  if path:
    text = json.dumps(_finite(data), indent=2, default=str, allow_nan=False)
    pathlib.Path(path).write_text(text + '\n')


def _finite(data: Any) -> Any:
  """Replaces numbers that are not finite by None, since JSON has no infinity."""
  if isinstance(data, dict):
    return {key: _finite(value) for key, value in data.items()}
  if isinstance(data, (list, tuple)):
    return [_finite(value) for value in data]
  return None if isinstance(data, float) and not math.isfinite(data) else data


if __name__ == '__main__':
  run_command(main)
