"""Kills of runs and of parts of runs; afterwards the same command must finish them."""

import signal
import subprocess
import time

import psutil

from tests.chaos.trials import Trials
from tests.launch import runs

OPTIONS = (
  '--config.sft.num_steps=0',
  '--config.eval.num_tasks=4',
  '--config.num_steps=6',
  '--config.checkpoint.save_interval=1',
  '--config.rollout.engine=jax(decode_steps=4)',
)
RAY = ('--config.cluster.ray=true', '--config.cluster.num_workers=2')
PARTS = ('ray::RolloutWorker', 'ray::GroupQueue', 'ray::', 'raylet', 'gcs_server')
TRIES = 6  # times that the same command is run again


def finish(folder, *options) -> str:
  """Runs the same command until it ends well."""
  for _ in range(TRIES):
    process = runs.spawn(folder, *options)
    try:
      output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
      process.kill()
      process.communicate()
      return 'the same command hung'
    if process.returncode == 0:
      return ''
  return f'the same command failed {TRIES} times: {output[-200:]!r}'


def compare(whole, folder) -> str:
  """Returns '' if both runs ended at the same bits."""
  if runs.weights(whole) != runs.weights(folder):
    return 'other weights than an undisturbed run'
  if runs.numbers(whole) != runs.numbers(folder):
    return 'other metrics than an undisturbed run'
  return ''


def single_process(rng, folder) -> Trials:
  """Kills a run one to three times, at any moment of its life."""
  whole = folder / 'whole'
  runs.run(whole, *OPTIONS)
  for number in range(1000):
    place = folder / f'run{number}'
    moments = rng.uniform(0.5, 9.0, size=rng.integers(1, 4)).round(2).tolist()

    def attempt(place=place, moments=moments) -> str:
      for seconds in moments:
        process = runs.spawn(place, *OPTIONS)
        time.sleep(seconds)
        process.kill()
        process.communicate()
      return finish(place, *OPTIONS) or compare(whole, place)

    yield f'kill -9 after {", ".join(map(str, moments))} s', attempt


def ray_parts(rng, folder) -> Trials:
  """Kills one process of a run under Ray, or the whole, or stops it by a signal."""
  whole = folder / 'whole'
  runs.run(whole, *OPTIONS)
  options = (*OPTIONS, *RAY)
  for number in range(1000):
    place = folder / f'run{number}'
    part = PARTS[number % len(PARTS)]
    step, draw = int(rng.integers(1, 4)), int(rng.integers(1 << 30))

    def attempt(place=place, part=part, step=step, draw=draw) -> str:
      process = runs.spawn(place, *options)
      for line in process.stdout or ():
        if line.startswith(f'train {step}/'):
          break
      family = psutil.Process(process.pid).children(recursive=True)
      matches = [p for p in family if part in ' '.join(_command(p))]
      if matches:
        matches[draw % len(matches)].send_signal(signal.SIGKILL)
      try:
        process.communicate(timeout=300)
      except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f'hung after the loss of {part}'
      return finish(place, *options) or compare(whole, place)

    yield f'kill -9 of {part} after step {step}', attempt


def _command(process) -> list[str]:
  try:
    return process.cmdline()
  except psutil.Error:
    return []
