"""`python -m tests.benchmarks`: how fast this is, beside what the machine could do.

--json=FILE writes the figures too. --only=toy,losses picks parts of toy, losses,
startup, weights, mismatch, gateway, rollouts, kernels, packing, view, tracing,
tenants, decoding. Each part is a process of its own, with the malloc settings that the
launcher applies by itself.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from typing import Any

from launch.runtime import process_env

SHARED = 2.0  # times faster, where prompts are shared, is aimed at
TREES = 3.0  # likewise than the fastest flat rows, where turns and branches are
PARTS = (
  *('toy', 'losses', 'startup', 'weights', 'mismatch', 'gateway', 'rollouts'),
  *('kernels', 'packing', 'view', 'tracing', 'tenants', 'decoding'),
)
FILTER_MS, PAGE_MS = 1000, 300  # are aimed at
TENANTS_RATIO = 1.3  # of one tenant's step with as many rows, at most
TRACING_SHARE = 0.01  # of a step that is not traced, at most


def _part(name: str, options: dict[str, Any]) -> Any:
  """Runs one part in a process of its own and returns what it measured."""
  env = process_env.tuned(os.environ)
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


def _toy(figures: dict[str, float]) -> None:
  f = figures
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


def _losses(figures: dict[str, dict[str, float]]) -> None:
  head = ('', 'ms', 'loss alone', 'floor', 'share', 'MiB', 'least', 'torch, ms*')
  body = [
    (
      label,
      f'{row["ms"]:.1f}',
      f'{row["loss_ms"]:.1f}',
      f'{row["floor_ms"]:.1f}',
      f'{row["share"]:.0%}',
      f'{row["mib"]:.0f}',
      f'{row["least_mib"]:.0f}',
      f'{row["torch_ms"]:g}' if 'torch_ms' in row else '–',
    )
    for label, row in figures.items()
  ]
  title = 'Advantages, weights, loss, metrics and gradient of [512, 4096], in one call'
  _rows(title, [head, *body])
  print('  floor: what must be moved (least), at the rate of a copy measured beside it')
  print(
    "  * Trinity-RFT's losses with gradient, without weights, metrics or advantages:"
  )
  print("    another machine's run, tuned; not measured here")


def _startup(figures: dict[str, dict[str, dict[str, float]]]) -> None:
  labels = ('nothing compiled before', 'again', 'once more')
  for name, runs in figures.items():
    _rows(
      f'From the command line to the first finished step (configs/{name}.py)',
      [
        ('', 'seconds', 'a later step', 'without one'),
        *(
          (label, f'{f["first"]:.1f}', f'{f["step"]:.1f}', f'{f["start"]:.1f}')
          for label, f in zip(labels, runs.values(), strict=True)
        ),
      ],
    )
  if 'smollm2' not in figures:
    print('  not measured: configs/smollm2.py, whose checkpoint make env-real fetches')


def _weights(figures: dict[str, float]) -> None:
  f = figures
  body = [
    (
      label,
      f'{f[f"{name}_mb"]:.1f}',
      f'{f[f"{name}_encode_s"]:.3f}',
      f'{f[f"{name}_put_s"]:.3f}',
      f'{f[f"{name}_load_s"]:.3f}',
    )
    for label, name in (
      ('shared memory, full', 'full'),
      (f'  … {f["moved"]:.0%} moved', 'delta'),
      ('object store, full', 'ray_full'),
      (f'  … {f["moved"]:.0%} moved', 'ray_delta'),
    )
  ]
  head = ('', 'MB', 'encode', 'hand over', 'fetch and check, s')
  _rows(f'Weights of {f["mb"]:.0f} MB in bf16', [head, *body])
  _rows(
    'Beside it',
    [
      ('memcpy, one thread', f'{f["memcpy_gb_s"]:.1f} GB/s, {f["memcpy_s"]:.3f} s'),
      (f'{f["real_steps"]:.0f} real steps at 1e-6', f'{f["real_share"]:.2%} of full'),
      ('  … the largest', f'{f["real_worst_share"]:.2%}'),
      ('  … weights that moved', f'{f["real_moved"]:.2%}'),
    ],
  )


def _mismatch(figures: dict[str, dict[str, float]]) -> None:
  lines = {'rescored': 'a rescoring', 'trained': "a gradient's forward"}
  tokens = figures['exact_rescored']['tokens']
  body = [
    (
      f'{mode}, {label}',
      f'{f["bytes"]:.0f}',
      f'{f["differ"]:.2%}',
      f'{f["mean"]:.2g}',
      f'{f["max"]:.2g}',
    )
    for mode in ('plain', 'exact')
    for name, label in lines.items()
    for f in [figures[f'{mode}_{name}']]
  ]
  head = ('', 'bytes that differ', 'of tokens', 'mean |Δ|', 'max |Δ|')
  _rows(f'Log-probs of {tokens:,.0f} sampled tokens: the engine against', [head, *body])
  plain, exact = figures['plain_cost'], figures['exact_cost']
  body = [
    (
      name,
      f'{plain[name]:.3f}',
      f'{exact[name]:.3f}',
      f'{exact[name] / plain[name]:.1f}',
    )
    for name in plain
  ]
  head = ('', 'plain, s', 'exact, s', 'times')
  _rows('The cost of exactness: one step of the toy', [head, *body])


def _gateway(figures: dict[str, float]) -> None:
  f = figures
  body = [
    (
      f'the last {f["last"]:.0f} of {turns} turns, {f[f"tokens_{turns}"]:,.0f} tokens',
      f'{f[f"direct_{turns}_ms"]:.2f}',
      f'{f[f"turn_{turns}_ms"]:.2f}',
      f'{f[f"added_{turns}_ms"]:.2f}',
    )
    for turns in (40, 200)
  ]
  head = ('', 'engine alone', 'by HTTP', 'added, ms')
  _rows(
    'A reply through the endpoint, from an engine that answers at once', [head, *body]
  )


def _rollouts(figures: dict[str, dict[str, Any]]) -> None:
  f, data = figures['scheduler'], figures['data']
  floor = f['hand_overs_s']
  body = [
    (f'{size} at once', *(f'{1e3 * s:.3f}' for s in both), f'{floor / both[0]:.0%}')
    for size in ('64', '512', '2000')
    for both in [(f[f'episode_{size}_s'], f[f'episode_{size}_cpu_s'])]
  ]
  body += [('  two calls of a thread', f'{1e3 * floor:.3f}', '', '100%')]
  head = ('', 'ms', 'of a processor', 'of which calls')
  _rows('The scheduler, an episode; engine and environment cost nothing', [head, *body])
  none = figures['environments']['none']['step_s']
  body = [
    (
      name,
      f'{1 / e["step_s"]:,.0f}',
      f'{1e6 * e["step_s"]:,.0f}',
      f'{1e6 * e["reset_s"]:,.0f}',
      f'{e["step_s"] / none:,.0f}',
    )
    for name, e in figures['environments'].items()
    if 'missing' not in e
  ]
  head = ('', 'steps /s', 'step, µs', 'reset, µs', 'times none')
  _rows('Environments, one thread', [head, *body])
  for e in figures['environments'].values():
    if 'missing' in e:
      print(f'  not played: {e["missing"]}')
  bare = data['empty_actor_per_s']
  _rows(
    'Tasks of 100,000 items drawn for 64 environments',
    [
      ('', '/s'),
      ('in this process', f'{data["local_per_s"]:,.0f}'),
      ('an actor', f'{data["actor_per_s"]:,.0f}'),
      ('  … of what an empty one answers', f'{data["actor_per_s"] / bare:.0%}'),
    ],
  )


def _kernels(figures: dict[str, Any]) -> None:
  body = [
    (
      option,
      f'{f["step_s"]:.3f}',
      f'{f["generate_s"]:.3f}',
      f'{f["train_s"]:.3f}',
      f'{f["scores_ms"]:.0f}',
      f'{f["scores_mib"]:.0f}',
    )
    for option in ('auto', 'reference')
    for f in [figures[option]]
  ]
  head = ('', 'step, s', 'generate', 'train', 'large vocabulary, ms', 'MiB')
  _rows('Kernels on and off: a step of the toy; log-probs, gradient', [head, *body])
  for line in figures['chosen'] or ['the reference is all there is here']:
    print(f'  {line}')
  data = figures['products_gb_per_s']
  forms = list(next(iter(data.values())))
  body = [(name, *(f'{f[form]:.1f}' for form in forms)) for name, f in data.items()]
  _rows('8 rows times matrices, GB/s of the matrices', [('', *forms), *body])


def _packing(figures: dict[str, dict[str, float]]) -> None:
  body = []
  for name, f in figures.items():
    base = figures[name.rpartition(': ')[0] + ': rectangle']
    body.append(
      (
        name,
        f'{f["seconds"]:.2f}',
        f'{f["median_s"]:.2f}',
        f'{base["seconds"] / f["seconds"]:.2f}',
        f'{f["padding_share"]:.1%}',
        f'{f["shared_share"]:.1%}',
      )
    )
  head = ('', 'seconds', 'median', 'times faster', 'empty', 'shared')
  _rows('A train step: 5 M parameters, float32', [head, *body])
  case = 'prompt:response 4:1, n 16'
  times = (
    figures[f'{case}: rectangle']['seconds'] / figures[f'{case}: shared']['seconds']
  )
  verdict = 'reached' if times >= SHARED else 'missed'
  print(f'  {case}: {times:.2f} times, aim {SHARED:g}: {verdict}')
  for case in ('games of 20 turns', 'branched sessions'):
    flat = min(figures[f'{case}: {way}']['seconds'] for way in ('rectangle', 'packed'))
    times = flat / figures[f'{case}: tree']['seconds']
    verdict = 'reached' if times >= TREES else 'missed'
    print(f'  {case}, trees: {times:.2f} times, aim {TREES:g}: {verdict}')


def _view(figures: dict[str, Any]) -> None:
  f = figures
  if 'missing' in f:
    print(f'\nThe view: not measured: {f["missing"]} is not installed')
    return
  body = [('', 'ms')]
  body += [(f'filter: {name}', f'{ms:.0f}') for name, ms in f['filters_ms'].items()]
  body += [
    ('another page', f'{f["page_ms"]:.0f}'),
    ('a trajectory', f'{f["trajectory_ms"]:.1f}'),
    ('a group', f'{f["group_ms"]:.1f}'),
  ]
  _rows(f'The view: {f["count"]:,} trajectories, slowest of several', body)
  _rows(
    'Beside it',
    [
      ('command to URL', f'{f["startup_s"]:.2f} s'),
      ('indexing', f'{f["index_s"]:.0f} s'),
      ('dump, index', f'{f["dump_mb"]:.0f} MB, {f["index_mb"]:.0f} MB'),
      ('scripts and styles', f'{f["pages_kb"]:.0f} kB'),
    ],
  )
  slowest = max(f['filters_ms'].values())
  verdict = 'reached' if slowest <= FILTER_MS and f['page_ms'] <= PAGE_MS else 'missed'
  print(f'  a filter in {FILTER_MS} ms and a page in {PAGE_MS} ms: {verdict}')


def _tracing(figures: dict[str, float]) -> None:
  f = figures
  _rows(
    'Steps that are not traced',
    [
      ('a step of configs/debug.py', f'{1e3 * f["step_s"]:.1f} ms'),
      ('with the key, of that without', f'{f["ratio"]:.3f}'),
      ('  lowest, highest', f'{f["lowest_ratio"]:.3f}, {f["highest_ratio"]:.3f}'),
      ('a span that is not kept', f'{f["span_ns"]:.0f} ns'),
      ('spans of a step', f'{f["spans_per_step"]:.0f}'),
      ('their share of the step', f'{f["share"]:.4%}'),
    ],
  )
  verdict = 'reached' if f['share'] <= TRACING_SHARE else 'missed'
  print(f'  at most {TRACING_SHARE:.0%}: {verdict}')


def _tenants(figures: dict[str, float]) -> None:
  f = figures
  rows = [('tenants', 'seconds', 'of one')]
  rows += [
    (f'{n}', f'{f[f"{n}_s"]:.3f}', f'{f.get(f"{n}_ratio", 1.0):.2f}')
    for n in (1, 4, 16)
  ]
  _rows(f'{f["rows"]:.0f} rows of {f["length"]:.0f} tokens, rank {f["rank"]:.0f}', rows)
  slowest = max(f['4_ratio'], f['16_ratio'])
  verdict = 'reached' if slowest <= TENANTS_RATIO else 'missed'
  print(f'  at most {TENANTS_RATIO} of one: {verdict}')


def _drafts(figures: dict[str, Any]) -> None:
  if 'missing' in figures:
    print(f'\nDrafted tokens: not measured: {figures["missing"]} is missing')
    return
  body = [
    (
      name,
      f'{f["ratio"]:.2f}',
      f'{f["lowest_ratio"]:.2f}, {f["highest_ratio"]:.2f}',
      f'{f["tokens"] / f["steps_without"]:.2f}',
      f'{f["tokens"] / f["steps"]:.2f}',
      f'{f["drafted"]:.0f}',
      f'{f["accepted"] / max(f["drafted"], 1):.0%}',
    )
    for name, f in figures.items()
  ]
  head = ('', 'time', 'lowest, highest', 'tokens a step', 'with', 'drafted', 'accepted')
  title = 'Drafted tokens, of the time without: SmolLM2-135M, 8 slots, float32'
  _rows(title, [head, *body])


def _blocks(figures: dict[str, dict[str, float]]) -> None:
  body = [
    (
      'whole prompts' if block == '0' else f'blocks of {block} tokens',
      f'{f["ratio"]:.2f}',
      f'{f["prefill_s"]:.2f}',
      f'{f["prefilled"]:,.0f}',
      f'{f["reused"]:,.0f}',
    )
    for block, f in figures.items()
  ]
  head = ('', 'time', 'prefill, s', 'computed', 'taken over')
  _rows('Prompts of 8 sessions of 8 turns, 9.6 M parameters, float32', [head, *body])


def _decoding(figures: dict[str, Any]) -> None:
  _drafts(figures['drafts'])
  _blocks(figures['blocks'])


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
  show = {
    'toy': _toy,
    'losses': _losses,
    'startup': _startup,
    'weights': _weights,
    'mismatch': _mismatch,
    'gateway': _gateway,
    'rollouts': _rollouts,
    'kernels': _kernels,
    'packing': _packing,
    'view': _view,
    'tracing': _tracing,
    'tenants': _tenants,
    'decoding': _decoding,
  }
  results: dict[str, Any] = {'load_before': os.getloadavg()[0]}
  env = process_env.tuned(os.environ)
  print(f'tuning: {process_env.describe(env)}')
  print(f'{os.cpu_count()} cores, load {results["load_before"]:.1f} before the run')
  for name in flags.only.split(','):
    results[name] = _part(name, {'steps': flags.steps} if name == 'toy' else {})
    show[name](results[name])
  if flags.json:
    with open(flags.json, 'w') as file:
      json.dump(results, file, indent=2)


if __name__ == '__main__':
  main()
