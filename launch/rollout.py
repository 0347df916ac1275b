"""Plays and keeps: `python -m launch.rollout --config=FILE.py --workdir=DIR`.

Plays a data set to its end, or so many tasks, with the weights of
`--config.model.checkpoint`; trains nothing. Trajectories go to `--config.dump.path`, in
the columns of `--config.dump.columns`. Killed at any moment, the same command goes on:
every task is there once.
"""

import asyncio
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from launch import config as configs
from launch import tune
from launch.console import Console
from launch.gauge import Gauge
from launch.sinks import open_sinks
from launch.stop import Stop
from launch.train import failed
from launch.workdir import Workdir, default_path

FLAGS = {
  'workdir': '',
  'mode': 'train',
  'num_tasks': '-1',
  'group_size': '1',
  'part_size': '256',
}
USAGE = """\
python -m launch.rollout --config=FILE.py [--config.KEY=VALUE] [--workdir=DIR]

  --config.model.checkpoint=DIR   whose weights play
  --config.dump.path=PATH         a folder or URL (s3://, gs://, memory://) for JSON
                                  lines; NAME.jsonl; NAME.parquet;
                                  odps://PROJECT/tables/TABLE/ds=NAME; or a store to
                                  train from, experience+sqlite:////ABS/PATH.db
  --config.dump.columns=PAIRS     [['task_idx','bigint'],['save_content','string']]; all
  --mode=train                    the rows of dataset.path, as training samples; val: as
                                  evaluations do
  --num_tasks=-1                  so many tasks; -1 all
  --group_size=1                  attempts at each task
  --part_size=256                 tasks of a file
  --workdir=runs/mine             where the run lives; the same command resumes it
"""


def main(argv: Sequence[str]) -> int:
  """Plays from a command line; returns the exit status."""
  if not argv or '--help' in argv:
    print(USAGE)
    return 0
  try:
    command = configs.parse(argv, FLAGS)
    from jaxrl.data.sinks.dump import open_dump

    config = configs.load(command, {'logging': open_sinks, 'dump': open_dump})
    configs.check(config)
    from launch import synthesis  # imports JAX: seconds

    numbers = {
      name: configs.read(command.flags[name], int, 0, False)
      for name in ('num_tasks', 'group_size', 'part_size')
    }
    part_size, mode = numbers.pop('part_size'), command.flags['mode']
    synthesis.prepare(config, mode=mode, **numbers)
    place = command.flags['workdir'] or default_path(command.config, f'rollout-{mode}')
    workdir = Workdir(place, config)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except Exception:  # the user's algorithm, as it was imported
    traceback.print_exc()
    return 2
  console = Console()
  try:
    with console.listening():
      return _run(config, workdir, console, max(part_size, 1))
  except Exception as error:
    return failed(error, console, workdir)
  finally:
    workdir.close()


def _run(config: Any, workdir: Workdir, console: Console, part_size: int) -> int:
  console.say(f'jaxrl: playing in {workdir.path}', style='bold')
  console.fact('tuning', tune.describe(os.environ))
  job = _Job(config, workdir.path, part_size)
  for label, value in job.facts.items():
    console.fact(label, value)
  workdir.record(**job.facts)
  how = 'now; what is in play is played again'
  with Stop(console.warn, console.restore, how=how) as stop:
    finished = asyncio.run(job.play(console, stop))
  title = 'Finished.' if finished else 'Stopped; the same command resumes.'
  console.closing(title, job.closing)
  return 0 if finished else stop.status


class _Job:
  """What plays, and what keeps it. Raises ConfigError before any episode."""

  def __init__(self, config: Any, folder: pathlib.Path, part_size: int):
    from jaxrl.data.sinks.dump import open_dump
    from jaxrl.data.sinks.ledger import Ledger
    from jaxrl.data.store.options import names_store
    from launch import build, checks, stored
    from launch.algorithm import make_algorithm
    from launch.alone import Alone
    from launch.datasets import load_datasets
    from launch.dump import env_columns
    from launch.synthesis import Synthesis

    self._columns: Any
    self._ledger: Any
    mode = config.synthesis.mode
    own = env_columns(config)
    whole = names_store(config.dump.path)  # groups, for training
    if not whole:
      self._columns, sink = open_dump(mode, folder.absolute(), own, **config.dump)
    algorithm = make_algorithm(config)
    checks.settings(config, algorithm)

    def make(host: Any, dispatcher: Any) -> tuple[Any, Synthesis]:
      _, tests = load_datasets(config, host)
      policy = build.make_policy(config, folder, critic=False)
      own = config, policy, host, dispatcher, tests
      plays = Synthesis(*own, algorithm=algorithm)
      asyncio.run(plays.check_prompts())
      if whole:
        kept = stored.explorer(config, algorithm, folder, policy.tokenizer)
        self._columns, self._ledger, self._where = kept
      else:
        self._ledger = Ledger(folder / 'ledger', sink, part_size=part_size)
      return policy, plays

    self._where = config.dump.path or str(folder / 'trajectories')
    self._alone = Alone(config, make)
    self._rollouts = self._alone.plays
    self._group_size = config.eval.group_size
    self._model = config.model.checkpoint or 'random'
    self.facts = {
      'model': self._model,
      'data': f'{config.eval.path or config.dataset.path or "seeds"}, mode {mode}',
      'dump': self._where,
      'columns': ', '.join(f'{n} {kind}' for n, kind in self._columns.types.items()),
    }
    if self._alone.told:
      self.facts['placement'] = self._alone.told
    self.closing = {'trajectories': self._where}

  async def play(self, console: Console, stop: Any) -> bool:
    """False if it was asked to stop before the end. Closes everything."""
    return await self._alone.run(lambda: self._play(console, stop))

  async def _play(self, console: Console, stop: Any) -> bool:
    sizes = await self._rollouts.sizes()
    kept = sum(
      sum(item < size for item in self._ledger.played(tag))
      for tag, size in sizes.items()
    )
    total = sum(sizes.values()) * self._group_size
    gauge = Gauge(console, 'rollout', total, kept * self._group_size)
    try:
      options = {'model_name': self._model, 'told': gauge.group, 'stop': stop}
      done = await self._rollouts.play(self._ledger, self._columns, **options)
      await self._rollouts.close()
    finally:
      gauge.close()
    self.closing |= gauge.summary()
    return done


if __name__ == '__main__':
  tune.apply()
  sys.exit(main(sys.argv[1:]))
