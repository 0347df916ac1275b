"""Knows before launch: `python -m launch.plan --config=FILE.py --topology=v5p:8x8x8`.

Compiles the programs of a run for a machine that need not be here, and tells what of
its memory they take, how long a step will last, and what to change if it does not fit.
No parameter is ever allocated.
"""

import json
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from launch import config as configs
from launch import targets

USAGE = """\
python -m launch.plan --config=FILE.py[:ALGORITHM] [--config.KEY=VALUE] [--topology=…]

  --topology=v5p:8x8x8    a TPU slice: v5e:4x4, v5p:2x2x2, v6e:4x4; or GPUs: h200:8,
                          h100:16; or cpu:1. By default the config's own TOPOLOGY
  --sweep=mesh            ranks meshes; --compiles=6 of them are compiled at most
  --json=PATH             all of it as JSON too

A checkpoint's config.json is enough; Qwen3's published shapes are known by name.
"""
FLAGS = {'topology': '', 'sweep': '', 'compiles': '6', 'json': ''}


def main(argv: Sequence[str]) -> int:
  """Plans from a command line; returns the exit status, 1 where it does not fit."""
  if not argv or '--help' in argv or '-h' in argv:
    print(USAGE)
    return 0
  try:
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # no accelerator is taken to plan
    command = configs.parse(argv, FLAGS)
    target = targets.parse(command.flags['topology'] or _own(command.config))
    if command.flags['sweep'] not in ('', 'mesh'):
      raise configs.ConfigError(f'--sweep={command.flags["sweep"]}: sweeps mesh alone')
    if not command.flags['compiles'].isdigit() or command.flags['compiles'] == '0':
      raise configs.ConfigError('--compiles: wants a whole number, at least 1')
    _check_json(command.flags['json'])
    targets.prepare(target)
    return _plan(command, target)
  except configs.ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2


def _own(path: str) -> str:
  """The TOPOLOGY that a config file names. Raises ConfigError where it names none."""
  found = getattr(configs.module(path), 'TOPOLOGY', '')
  if not found:
    raise configs.ConfigError(
      f'which machine? {path} has no TOPOLOGY: name one, --topology=h200:8'
    )
  return str(found)


def _plan(command: configs.Command, target: targets.Target) -> int:
  from jaxrl.data.sinks.dump import open_dump
  from launch.sinks import open_sinks

  config = configs.load(command, {'logging': open_sinks, 'dump': open_dump})
  devices = targets.topology(target.name)  # imports JAX: seconds
  from rich.console import Console

  from launch.planning import abstract, report, sweep, table

  console, run = Console(highlight=False), abstract.read(config)
  name = pathlib.Path(command.config).name
  with console.status(f'compiling {name} for {target.name} …'):
    if command.flags['sweep']:
      from launch.planning import decode

      engine, most = decode.engine_of(run), int(command.flags['compiles'])
      ranked = sweep.sweep(run, target, devices, engine=engine, most=most)
    else:
      found = report.make(name, run, target, devices)
  if command.flags['sweep']:
    table.show_sweep(ranked, console)
    _write(command.flags['json'], ranked.data())
    return 0 if any(one.cost.fits for one in ranked.entries) else 1
  table.show(found, console)
  _write(command.flags['json'], found.data())
  return 0 if found.cost.fits else 1


def _check_json(path: str) -> None:
  """Raises ConfigError, before any work, for a file that cannot be written."""
  if path and not pathlib.Path(path).absolute().parent.is_dir():
    raise configs.ConfigError(f'--json={path}: there is no such folder')


def _write(path: str, data: dict[str, Any]) -> None:
  if path:
    text = json.dumps(_known(data), indent=2, default=str, allow_nan=False)
    pathlib.Path(path).write_text(text + '\n')


def _known(data: Any) -> Any:
  """data, with null for what no compiler told: JSON has no infinity."""
  if isinstance(data, dict):
    return {key: _known(value) for key, value in data.items()}
  if isinstance(data, (list, tuple)):
    return [_known(value) for value in data]
  return None if isinstance(data, float) and not math.isfinite(data) else data


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
