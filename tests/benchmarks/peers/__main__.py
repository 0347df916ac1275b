"""`python -m tests.benchmarks.peers`: this package beside its peers, on one model.

Each peer is a process with an environment of its own, made by `make bench-peers`, and
all take turns in one run, for other load on the machine changes every figure: only
ratios within a run mean anything. At a size that memory does not hold several times
over they run one after the other, this package first and once more at the end.
--size=toy|mid|smollm2 picks the model and the step, --ends lets samples end at
different lengths; --as-installed starts the peers as their users do, without what this
benchmark does to make them faster; --only=ours,narrow,trl,tunix,vllm picks peers
(narrow is this package with an engine that decodes in bfloat16); --json=FILE writes the
figures too; --python=trl=FILE names a peer's Python.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from launch.runtime import process_env
from tests.benchmarks.peers import shape

ROOT = pathlib.Path(__file__).parents[3]
PYTHON = {
  'ours': sys.executable,
  'narrow': sys.executable,
  'trl': '.venv-trl/bin/python',
  'tunix': '.venv-tunix/bin/python',
  'vllm': '.venv-vllm/bin/python',
}
LABELS = {
  'ours': 'jaxrl',
  'narrow': 'jaxrl, bf16 decode',
  'trl': 'TRL, Hugging Face',
  'tunix': 'Tunix',
  'vllm': 'vLLM',
}
TORCH = ('trl', 'vllm')
OWN = ('ours', 'narrow')
OTHERS = ('trl', 'tunix', 'vllm')
STEPS = (*OWN, 'trl', 'tunix')  # vLLM does not train
WARM = 3
# Ours over theirs, at most: what this package aims at.
AIMS = {'step': 0.45, 'decode': 0.45, 'memory': 0.6}


@dataclasses.dataclass(frozen=True)
class Setting:
  """How peers run.

  size: One of shape.SIZES.
  ends: Whether samples end at different lengths.
  as_installed: Whether others than this package are left as they are.
  """

  size: str = 'toy'
  ends: bool = False
  as_installed: bool = False


TOY = Setting()


def environment(name: str, folder: str, setting: Setting) -> dict[str, str]:
  """The environment of a peer, in which it runs fastest if it may be tuned.

  For all, large blocks of memory are kept. For torch, a thread a processor and, on
  AMD, MKL's fast path, by answering for it that the processor is Intel's.
  """
  env = dict(os.environ)
  env['PYTHONPATH'] = str(ROOT)
  env['PEER_SIZE'] = setting.size
  env['PEER_ENDS'] = str(int(setting.ends))
  if setting.as_installed and name in OTHERS:
    return env
  env = process_env.tuned(env)
  if name in TORCH:
    env['OMP_NUM_THREADS'] = str(os.cpu_count())
    libraries = fast_path(folder), env.get(process_env.PRELOAD, '')
    env[process_env.PRELOAD] = ':'.join(filter(None, libraries))
  return env


def fast_path(folder: str) -> str:
  """A library to load before MKL, or '' where it is not needed or cannot be made."""
  try:
    amd = 'AuthenticAMD' in pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    amd = False
  compiler = shutil.which('cc') or shutil.which('gcc')
  if not amd or not compiler:
    return ''
  library = os.path.join(folder, 'fast_path.so')
  source = 'int mkl_serv_intel_cpu_true(void) { return 1; }'
  command = [compiler, '-shared', '-fPIC', '-x', 'c', '-', '-o', library]
  subprocess.run(command, input=source.encode(), check=True)
  return library


class Peer:
  """One process, asked for one thing at a time. Raises RuntimeError when it dies."""

  def __init__(self, name: str, python: str, folder: str, setting: Setting = TOY):
    self.name, self.figures = name, {'step_s': [], 'generate_s': [], 'train_s': []}
    self.figures |= {'decode_s': [], 'mib': []}
    self.errors = open(os.path.join(folder, f'{name}.txt'), 'w+')  # noqa: SIM115
    command = [python, '-m', f'tests.benchmarks.peers.{name}']
    pipes: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
    self.process = subprocess.Popen(
      command,
      cwd=ROOT,
      env=environment(name, folder, setting),
      stderr=self.errors,
      text=True,
      **pipes,
    )

  def ask(self, word: str) -> dict[str, float]:
    try:
      print(word, file=self.process.stdin, flush=True)
      line = self.process.stdout.readline()  # pyright: ignore
    except BrokenPipeError:
      line = ''
    if not line:
      self.errors.seek(0)
      tail = ' | '.join(self.errors.read().splitlines()[-3:])
      raise RuntimeError(f'{self.name} ended at {word!r}: {tail}')
    return json.loads(line)

  def note(self, word: str) -> None:
    for name, value in self.ask(word).items():
      self.figures[name].append(value)

  def close(self) -> None:
    self.process.kill()
    self.process.wait()
    self.errors.close()


def warm(peer: Peer, steps: int) -> None:
  """Compiles and fills what there is to fill."""
  for _ in range(steps if peer.name in STEPS else 0):
    peer.ask('step')
  for _ in range(2):
    peer.ask('decode')


def measure(
  names: list[str],
  pythons: dict[str, str],
  steps: int,
  setting: Setting = TOY,
) -> dict[str, Any]:
  """name → lists of seconds, round by round; 'failed': name → why."""
  peers: dict[str, Peer] = {}
  failed: dict[str, str] = {}
  rates: list[dict[str, float]] = []
  figures: dict[str, dict[str, list[float]]] = {}
  is_alone = shape.SIZES[setting.size].alone

  def attempt(name: str, run: Any, *arguments: Any) -> None:
    try:
      run(*arguments)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
      failed[name] = str(error)
      if name in peers:
        peers.pop(name).close()

  def start(name: str, folder: str) -> None:
    if not pathlib.Path(ROOT / pythons[name]).exists():
      raise RuntimeError(f'{pythons[name]} is not there: make bench-peers makes it')
    peers[name] = Peer(name, str(ROOT / pythons[name]), folder, setting)
    warm(peers[name], 1 if is_alone else WARM)

  def take_turns(names: list[str], folder: str, steps: int) -> None:
    try:
      with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: attempt(name, start, name, folder), names))
      for word in ['step'] * steps + ['decode'] * steps:
        for name in list(peers):
          if name == 'ours':
            rates.append(machine.ask('peak'))
          if word == 'decode' or name in STEPS:
            attempt(name, peers[name].note, word)
    finally:
      for name, peer in peers.items():
        peer.close()
        known = figures.setdefault(name, {key: [] for key in peer.figures})
        for key, values in peer.figures.items():
          known[key] += values
      peers.clear()

  with (
    tempfile.TemporaryDirectory() as folder,
    contextlib.closing(Peer('rates', sys.executable, folder, setting)) as machine,
  ):
    if is_alone:
      again = ['ours'] if 'ours' in names and len(names) > 1 else []
      for name in [*names, *again]:
        take_turns(
          [name], folder, -(-steps // 2) if again and name == 'ours' else steps
        )
    else:
      take_turns(names, folder, steps)
  return {
    'peers': figures,
    'failed': failed,
    **dataclasses.asdict(setting),
    'flops': [one['flops'] for one in rates],
    'bytes_per_s': [one['rate'] for one in rates],
  }


def ratio(ours: list[float], theirs: list[float]) -> float:
  """The median of ours over theirs, each pair of one round; else of the medians."""
  if len(ours) != len(theirs):
    return statistics.median(ours) / statistics.median(theirs)
  return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(results: dict[str, Any]) -> list[list[str]]:
  """Rows of the table, the head first."""
  peak = statistics.median(results['flops']) if results['flops'] else 0.0
  size = shape.SIZES[results['size']]
  ours = results['peers'].get('ours')
  head = ['', 'step, s', 'generate', 'train', 'share', 'ours/its']
  rows = [[*head, 'decode, s', 'tokens/s', 'ours/its', 'MiB']]
  for name, figures in results['peers'].items():
    row = [LABELS[name]]
    if figures['step_s']:
      step, generate, train = (
        statistics.median(figures[key]) for key in ('step_s', 'generate_s', 'train_s')
      )
      share = f'{4 * size.forward_flops / step / peak:.0%}' if peak else '–'
      times = f'{ratio(ours["step_s"], figures["step_s"]):.2f}' if ours else '–'
      row += [f'{step:.3f}', f'{generate:.3f}', f'{train:.3f}', share, times]
    else:
      row += ['–'] * 5
    decode = statistics.median(figures['decode_s'])
    rate = size.prompts * size.samples * size.new / decode
    times = f'{ratio(ours["decode_s"], figures["decode_s"]):.2f}' if ours else '–'
    row += [f'{decode:.3f}', f'{rate:,.0f}', times, f'{max(figures["mib"]):,.0f}']
    rows.append(row)
  return rows


def judge(results: dict[str, Any]) -> list[str]:
  """A line an aim and way of decoding: reached or not."""
  peers, lines = results['peers'], []
  others = {
    n: statistics.median(p['decode_s']) for n, p in peers.items() if n not in OWN
  }
  for own in (name for name in OWN if name in peers):
    ours, who = peers[own], LABELS[own]
    for name in ('trl', 'tunix'):
      if name in peers:
        value = ratio(ours['step_s'], peers[name]['step_s'])
        lines.append(_line(f'{who}: step, of {LABELS[name]}', value, AIMS['step']))
        value = max(ours['mib']) / max(peers[name]['mib'])
        lines.append(_line(f'{who}: memory, of {LABELS[name]}', value, AIMS['memory']))
    if others:
      best = min(others, key=lambda n: others[n])
      value = ratio(ours['decode_s'], peers[best]['decode_s'])
      what = f'{who}: decode, of the best, {LABELS[best]}'
      lines.append(_line(what, value, AIMS['decode']))
  return lines


def _line(what: str, value: float, aim: float) -> str:
  return f'{what}: {value:.2f}, aim {aim:g}: {"reached" if value <= aim else "missed"}'


def show(results: dict[str, Any]) -> None:
  size = shape.SIZES[results['size']]
  rows, ends = size.prompts * size.samples, results['ends']
  print(
    f'\nOne step of {size.about}, {size.prompts} prompts × {size.samples}, '
    f'{size.prompt} + {"up to " if ends else ""}{size.new} tokens,\nfloat32) and '
    f'{rows} × {"as many" if ends else size.new} tokens decoded with log-probs: '
    f'medians; ratios {"of them" if size.alone else "by round"}'
    f'{"; peers as installed" if results["as_installed"] else ""}'
  )
  cells_of = table(results)
  widths = [max(len(row[i]) for row in cells_of) for i in range(len(cells_of[0]))]
  for first, *rest in cells_of:
    cells = [f'{cell:>{w}}' for cell, w in zip(rest, widths[1:], strict=True)]
    print('  ' + '  '.join([f'{first:<{widths[0]}}', *cells]))
  if results['flops']:
    rates = [rate / 1e9 for rate in results['flops']]
    spread = f'{min(rates):.0f}–{max(rates):.0f}'
    memory = statistics.median(results['bytes_per_s'])
    print(
      f'  peak: {statistics.median(rates):.0f} [{spread}] GFLOP/s and '
      f'{memory / 1e9:.1f} GB/s, measured between'
    )
    if (ours := results['peers'].get('ours')) and not ends:
      least = size.decode_bytes / memory
      print(
        f'  decoding reads weights and cache once a token: {least:.2f} s at that rate, '
        f'{least / statistics.median(ours["decode_s"]):.0%} of what ours takes'
      )
  for line in judge(results):
    print(f'  {line}')
  for name, why in results['failed'].items():
    print(f'  not measured: {LABELS[name]}: {why}')


def main() -> None:
  parser = argparse.ArgumentParser(prog='tests.benchmarks.peers', description=__doc__)
  parser.add_argument('--json', default='')
  parser.add_argument('--only', default=','.join(PYTHON))
  parser.add_argument('--steps', type=int, default=8)
  parser.add_argument('--size', choices=list(shape.SIZES), default='toy')
  parser.add_argument('--ends', action='store_true')
  parser.add_argument('--as-installed', action='store_true')
  parser.add_argument('--python', action='append', default=[], metavar='PEER=FILE')
  flags = parser.parse_args()
  pythons = PYTHON | dict(pair.split('=', 1) for pair in flags.python)
  print(f'{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the run')
  start = time.time()
  setting = Setting(flags.size, flags.ends, flags.as_installed)
  results = measure(flags.only.split(','), pythons, flags.steps, setting)
  results |= {'load_after': os.getloadavg(), 'seconds': time.time() - start}
  results |= {'python': platform.python_version(), 'cores': os.cpu_count()}
  show(results)
  print(
    f'  {results["seconds"]:.0f} s; load {results["load_after"][0]:.1f} after the run'
  )
  if flags.json:
    file = pathlib.Path(flags.json)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2))


if __name__ == '__main__':
  main()
