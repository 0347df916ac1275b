"""`python -m tests.benchmarks.gpu`: kernels, train step and decode on one GPU.

Needs jax, flax and optax. --only=logprobs,experts picks parts of train, decode,
logprobs, attention, agreement, experts; each is a process of its own, killed after
--limit seconds, which are fewer than eight minutes by default. The cases that aims are
about come first. What it had measured by then stays, and the failure of one does not
stop the others. --json=FILE writes the figures. --tiny runs the same code at toy sizes,
on whatever there is: its figures mean nothing.
"""

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from tests.benchmarks.gpu import aims

VERSIONS = ('jax', 'flax', 'optax')
PARTS = ('train', 'decode', 'logprobs', 'attention', 'agreement', 'experts')
TITLES = {
  'agreement': 'Errors of kernels in values and gradients, against float32 arithmetic',
  'logprobs': 'Log-probs of given tokens, bfloat16: hidden states and table in',
  'attention': 'Causal attention, bfloat16, 16 heads on 8 of keys, 128 wide',
  'experts': 'A layer of experts, bfloat16; share: of the work that is chosen',
  'train': 'Train step: GRPO, AdamW, bfloat16 activations, float32 state',
  'decode': "Decode, bfloat16, the engine's own program, 512 tokens behind each slot",
}


def _child(name: str, tiny: bool) -> None:
  """Measures one part here; the last line of the output is its result, so far."""
  import logging

  logging.basicConfig(level=logging.INFO, stream=sys.stderr, format='  %(message)s')
  for noisy in ('jax', 'absl', 'jaxrl'):
    logging.getLogger(noisy).setLevel(logging.WARNING)
  from tests.benchmarks.gpu import device

  figures = {'device': device.describe()}
  part = importlib.import_module(f'tests.benchmarks.gpu.{name}')
  for measured in part.measure(tiny=tiny):
    print(json.dumps(figures | measured), flush=True)


def _part(name: str, tiny: bool, limit: float) -> dict[str, Any]:
  """What a part measured, or {'failed': why}."""
  command = [sys.executable, '-m', 'tests.benchmarks.gpu', '--child', name]
  command += ['--tiny'] if tiny else []
  try:
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit, check=True)
    return _last(done.stdout)
  except subprocess.TimeoutExpired as error:
    printed, why = error.stdout, f'took more than {limit:.0f} s'
  except subprocess.CalledProcessError as error:
    printed, why = error.stdout, f'{error}; its own words are above'
  figures = _last(printed or b'')
  return {'failed': why} if 'failed' in figures else figures | {'stopped': why}


def _last(printed: bytes) -> dict[str, Any]:
  """The last whole line that a part printed: what it had measured by then."""
  lines = [line for line in printed.splitlines(keepends=True) if line.endswith(b'\n')]
  try:
    return json.loads(lines[-1])
  except (IndexError, ValueError):
    return {'failed': 'it printed no result; its own words are above'}


def _cells(cost: dict[str, Any]) -> list[str]:
  if 'failed' in cost:
    return ['–', '–', '–']
  share = f'{cost["share"]:.0%}' if 'share' in cost else '–'
  return [f'{cost["ms"]:.2f}', f'{cost["mib"]:,.0f}', share]


def kernel_rows(figures: dict[str, Any]) -> tuple[list[list[str]], list[str]]:
  """Rows of a table of kernels, the head first, and what could not be measured."""
  rows = [['', 'forward, ms', 'MiB', 'share', 'with gradient, ms', 'MiB', 'share']]
  failures = []
  for shape, table in figures['shapes'].items():
    for name, costs in table.items():
      parts = [costs] if 'failed' in costs else [costs['forward'], costs['both']]
      failures += [f'{shape}, {name}: {c["failed"]}' for c in parts if 'failed' in c]
      if 'failed' not in costs:
        rows.append([f'{shape}, {name}', *_cells(parts[0]), *_cells(parts[1])])
  return rows, failures


def case_rows(figures: dict[str, Any]) -> tuple[list[list[str]], list[str]]:
  """Rows of a table of cases, the head first, and what could not be measured."""
  names: dict[str, None] = {}
  for case in figures['cases'].values():
    names |= dict.fromkeys(name for name in case if name != 'failed')
  rows = [['', *(name.replace('_', ' ') for name in names)]]
  failures = []
  for label, case in figures['cases'].items():
    if 'failed' in case:
      failures.append(f'{label}: {case["failed"]}')
      continue
    shares = ('mfu', 'share')
    rows.append(
      [label, *(f'{case[n]:.0%}' if n in shares else f'{case[n]:,.4g}' for n in names)]
    )
  return rows, failures


def show(name: str, figures: dict[str, Any]) -> None:
  print(f'\n{TITLES[name]}')
  if 'failed' in figures:
    print(f'  not measured: {figures["failed"]}', flush=True)
    return
  rows, failures = (kernel_rows if 'shapes' in figures else case_rows)(figures)
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  for first, *rest in rows:
    cells = [f'{cell:>{w}}' for cell, w in zip(rest, widths[1:], strict=True)]
    print('  ' + '  '.join([f'{first:<{widths[0]}}', *cells]))
  if 'stopped' in figures:
    failures.append(f'the rest: {figures["stopped"]}')
  for line in dict.fromkeys(failures):
    print(f'  not measured: {line}')
  card = figures['device']
  print(
    f'  {card["card"]}: {figures["flops"] / 1e12:.4g} TFLOP/s of bfloat16 products, '
    f'{figures["bytes"] / 1e9:.4g} GB/s, measured beside it',
    flush=True,
  )


def close(results: dict[str, Any]) -> None:
  """Prints whether aims were reached, and what the figures are of."""
  lines = aims.verdicts(results)
  if lines:
    print('\nAims on one H200')
    print('\n'.join(f'  {line}' for line in lines))
  parts = [results[name] for name in PARTS if name in results]
  cards = [part['device'] for part in parts if 'device' in part]
  if cards:
    versions = ', '.join(f'{name} {cards[0][name]}' for name in VERSIONS)
    print(f'\n{results["date"]}, {cards[0]["card"]}, {versions}', flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(prog='tests.benchmarks.gpu', description=__doc__)
  parser.add_argument('--json', default='')
  parser.add_argument('--only', default=','.join(PARTS))
  parser.add_argument('--limit', type=float, default=460.0, help='seconds a part')
  parser.add_argument('--tiny', action='store_true')
  parser.add_argument('--child', help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.child:
    _child(flags.child, flags.tiny)
    return
  names = flags.only.split(',')
  if unknown := [name for name in names if name not in PARTS]:
    parser.error(f'no part {", ".join(unknown)}; there are {", ".join(PARTS)}')
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.92')
  results: dict[str, Any] = {'date': time.strftime('%Y-%m-%d'), 'tiny': flags.tiny}
  for name in names:
    results[name] = _part(name, flags.tiny, flags.limit)
    show(name, results[name])
  close(results)
  if flags.json:
    file = pathlib.Path(flags.json)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2))
  if all('failed' in results[name] for name in names):
    sys.exit(1)


if __name__ == '__main__':
  main()
