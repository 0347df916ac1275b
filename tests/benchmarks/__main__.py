"""`python -m tests.benchmarks`: how fast this is, beside what the machine could do.

--json=FILE writes the figures too. --only=toy,losses,startup picks parts. Each part is
a process of its own, with the malloc settings that the launcher applies by itself.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from typing import Any

from launch import tune

PARTS = ('toy', 'losses', 'startup')


def _part(name: str, options: dict[str, Any]) -> Any:
  """Runs one part in a process of its own and returns what it measured."""
  env = {**os.environ, **tune.settings(os.environ), tune.MARK: '1'}
  command = [sys.executable, '-m', 'tests.benchmarks', '--child', name]
  done = subprocess.run(
    [*command, json.dumps(options)], env=env, stdout=subprocess.PIPE, check=True
  )
  return json.loads(done.stdout.splitlines()[-1])


def _rows(title: str, rows: list[tuple[str, ...]]) -> None:
  print(f'\n{title}')
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  for row in rows:
    first, *rest = (cell for cell in row)
    cells = [f'{cell:>{w}}' for cell, w in zip(rest, widths[1:], strict=True)]
    print('  ' + '  '.join([f'{first:<{widths[0]}}', *cells]).rstrip())


def _toy(found: dict[str, float]) -> None:
  f = found
  _rows(
    'One step: 3.28 M parameters, 8 prompts × 8 samples, 32 + 64 tokens, float32',
    [
      ('', 'seconds', 'floor', 'share of peak'),
      _phase('step', f['step_s'], f['floor_s'], f['share']),
      _phase(
        'generate',
        f['generate_s'],
        f['generate_s'] * f['generate_share'],
        f['generate_share'],
      ),
      _phase('train', f['train_s'], f['train_s'] * f['train_share'], f['train_share']),
    ],
  )
  _rows(
    'Beside it',
    [
      ('matrix product, 2048³, float32', f'{f["peak_gflops"]:.0f} GFLOP/s'),
      ('fastest step', f'{f["fastest_step_s"]:.3f} s'),
      ('tokens generated, 8 prompts × 8', f'{f["tokens_per_s"]:,.0f} /s'),
      ('tokens generated, 64 prompts', f'{f["decode_tokens_per_s"]:,.0f} /s'),
      (
        '  … at 320 GFLOP/s',
        f'{f["decode_tokens_per_s"] * 320e9 / (1e9 * f["peak_gflops"]):,.0f} /s',
      ),
      ('programs compiled', f'{f["programs"]:.0f}'),
      ('  … after three steps', f'{f["programs_after_warmup"]:.0f}'),
      ('peak memory', f'{f["peak_mib"]:,.0f} MiB'),
    ],
  )


def _phase(name: str, seconds: float, floor: float, share: float) -> tuple[str, ...]:
  return name, f'{seconds:.3f}', f'{floor:.3f}', f'{share:.0%}'


def _losses(found: dict[str, dict[str, float]]) -> None:
  head = ('', 'ms', 'bytes allow', 'MiB', 'least', 'with advantage', 'PyTorch*')
  body = [
    (
      label,
      f'{row["ms"]:.1f}',
      f'{row["floor_ms"]:.1f}',
      f'{row["mib"]:.0f}',
      f'{row["least_mib"]:.0f}',
      f'{row["with_advantage_ms"]:.1f}',
      f'{row["torch_ms"]:g}',
    )
    for label, row in found.items()
  ]
  _rows('Loss, weights and gradient of [512, 4096]', [head, *body])
  print('  * tuned, one run on a similar machine; not measured here')


def _startup(found: dict[str, float]) -> None:
  _rows(
    'From the command line to the first finished step (configs/debug.py, no SFT)',
    [
      ('', 'seconds'),
      ('nothing compiled before', f'{found["cold_s"]:.1f}'),
      ('again', f'{found["second_s"]:.1f}'),
      ('once more', f'{found["third_s"]:.1f}'),
    ],
  )


def main() -> None:
  parser = argparse.ArgumentParser(prog='tests.benchmarks', description=__doc__)
  parser.add_argument('--json', default='')
  parser.add_argument('--only', default=','.join(PARTS))
  parser.add_argument('--steps', type=int, default=8)
  parser.add_argument('--child', nargs=2, help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.child:
    name, options = flags.child
    part = importlib.import_module(f'tests.benchmarks.{name}')
    print(json.dumps(part.measure(**json.loads(options))))
    return
  show = {'toy': _toy, 'losses': _losses, 'startup': _startup}
  found: dict[str, Any] = {'load_before': os.getloadavg()[0]}
  print(f'tuning: {tune.describe({**os.environ, **tune.settings(os.environ)})}')
  print(f'{os.cpu_count()} cores, load {found["load_before"]:.1f} before the run')
  for name in flags.only.split(','):
    found[name] = _part(name, {'steps': flags.steps} if name == 'toy' else {})
    show[name](found[name])
  if flags.json:
    with open(flags.json, 'w') as file:
      json.dump(found, file, indent=2)


if __name__ == '__main__':
  main()
