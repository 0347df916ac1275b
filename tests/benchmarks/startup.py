"""From the command line to the first finished step, with and without the cache."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from launch.runtime import process_env
from tests.benchmarks.decoding import FOLDER

TOY = (
  '--config=configs/debug.py',
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
)
REAL = (
  '--config=configs/smollm2.py',
  f'--config.model.checkpoint={FOLDER}',
  '--config.eval.interval=0',
)
RUNS = ('cold_s', 'second_s', 'third_s')
LIMIT = 300.0


def measure() -> dict[str, dict[str, dict[str, float]]]:
  """config → run → seconds: an empty cache of programs, then a filled one.

  first: To the first step in metrics.jsonl. start: That without a step as the second
  one took it. Of the config with a checkpoint, if `make env-real` has fetched it.
  """
  figures = {'debug': _starts(TOY)}
  if FOLDER.exists():
    figures['smollm2'] = _starts(REAL)
  return figures


def _starts(flags: tuple[str, ...]) -> dict[str, dict[str, float]]:
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    env = {**os.environ, process_env.CACHE_DIR: str(root / 'cache')}
    return {name: _start(root / name, flags, env) for name in RUNS}


def _start(
  workdir: pathlib.Path, flags: tuple[str, ...], env: dict[str, str]
) -> dict[str, float]:
  command = [sys.executable, '-m', 'launch.train', *flags, f'--workdir={workdir}']
  start = time.perf_counter()
  log = workdir.with_suffix('.log')
  with log.open('w') as out:
    child = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
  ends: list[float] = []  # when each step had ended
  try:
    while len(ends) < 2:
      now = time.perf_counter() - start
      steps = _steps(workdir / 'metrics.jsonl')
      ends += [now] * (len(steps) - len(ends))
      if child.poll() is not None or now > LIMIT:
        raise RuntimeError(f'two steps were not finished:\n{log.read_text()[-2000:]}')
      time.sleep(0.02)
    return {'first': ends[0], 'step': steps[1], 'start': ends[0] - steps[1]}
  finally:
    child.send_signal(signal.SIGKILL)
    child.wait()


def _steps(path: pathlib.Path) -> list[float]:
  """The seconds of the steps that have ended."""
  if not path.exists():
    return []
  rows = [json.loads(line) for line in path.read_text().split('\n')[:-1]]
  return [row['time/step'] for row in rows if 'time/step' in row]
