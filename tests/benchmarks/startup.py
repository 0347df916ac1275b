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

COMMAND = (
  '--config=configs/debug.py',
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
)
LIMIT = 120.0


def measure() -> dict[str, float]:
  """Seconds to the first step in metrics.jsonl: an empty cache, and a filled one."""
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    env = {**os.environ, process_env.CACHE_DIR: str(root / 'cache')}
    return {
      name: _first_step(root / name, env) for name in ('cold_s', 'second_s', 'third_s')
    }


def _first_step(workdir: pathlib.Path, env: dict[str, str]) -> float:
  command = [sys.executable, '-m', 'launch.train', *COMMAND, f'--workdir={workdir}']
  start = time.perf_counter()
  log = workdir.with_suffix('.log')
  with log.open('w') as out:
    child = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
  try:
    while not _finished_a_step(workdir / 'metrics.jsonl'):
      if child.poll() is not None or time.perf_counter() - start > LIMIT:
        raise RuntimeError(f'no step was finished:\n{log.read_text()[-2000:]}')
      time.sleep(0.02)
    return time.perf_counter() - start
  finally:
    child.send_signal(signal.SIGKILL)
    child.wait()


def _finished_a_step(path: pathlib.Path) -> bool:
  if not path.exists():
    return False
  lines = path.read_text().split('\n')[:-1]
  return any('time/step' in json.loads(line) for line in lines)
