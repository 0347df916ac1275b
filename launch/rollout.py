"""Generates trajectories: `python -m launch.rollout --config=FILE.py --workdir=DIR`.

Plays a data set to its end, or a number of tasks, and trains nothing. If the command is
killed, running it again resumes the work, and every task is written once.
"""

import asyncio
import collections
import dataclasses
import json
import os
import pathlib
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.config import from_config
from launch.logging.console import Console
from launch.logging.error_pages import print_error, report_failure
from launch.logging.progress import RolloutProgress
from launch.logging.workdir import Workdir, default_path
from launch.runtime import process_env
from launch.runtime.signal_handler import SignalHandler, run_command
from launch.settings import command_line
from launch.settings.command_line import ConfigError
from launch.settings.logging_settings import LoggingOptions

if TYPE_CHECKING:
  from jaxrl.run_options import RunOptions
  from launch.settings.run_settings import RunSettings

FLAGS = {
  'workdir': '',
  'mode': 'train',
  'num_tasks': '-1',
  'group_size': '1',
  'part_size': '256',
  'check': 'false',
}
USAGE = """\
python -m launch.rollout --config=FILE.py [--config.KEY=VALUE] [--workdir=DIR]

  --config.model.checkpoint=DIR   whose weights play
  --config.trajectory_dump.path=PATH
                                  a folder or URL (s3://, gs://, memory://) for JSON
                                  lines; NAME.jsonl; NAME.parquet;
                                  odps://PROJECT/tables/TABLE/ds=NAME; or a store to
                                  train from, experience+sqlite:////ABS/PATH.db
  --config.trajectory_dump.columns=PAIRS
                                  [['task_idx','bigint'],['save_content','string']]; all
  --mode=train                    the rows that training plays; val: each evaluation
                                  set, at its temperature
  --num_tasks=-1                  so many tasks; -1 all
  --group_size=1                  attempts at each task
  --part_size=256                 tasks of a file
  --check                         checks the tasks, without a model: the reference
                                  solution must pass and an empty one fail; status 1 if
                                  a task is broken
  --workdir=runs/mine             where the run lives; the same command resumes it
"""


MODES = ('train', 'val')


def prepare_rollout(config: Any, *, mode: str, num_tasks: int, group_size: int) -> None:
  """Turns a training config into one for generating trajectories.

  The request is recorded as `config.synthesis`.

  Args:
    config: The config, changed in place.
    mode: 'train' plays the rows that training plays, as training samples; 'val' plays
      every evaluation set, at its temperature.
    num_tasks: Tasks to play; −1 plays all of them.
    group_size: Samples of each task.

  Raises:
    ConfigError: For invalid flags, or a config without anything to play.
  """
  from ml_collections import ConfigDict

  from jaxrl.data.store import store_options
  from jaxrl.envs.env_registry import options_for_split, uses_dataset
  from launch.settings.resolve import read_options

  if mode not in MODES:
    raise ConfigError(f'--mode={mode}: must be one of {", ".join(MODES)}')
  if num_tasks == 0 or num_tasks < -1:
    raise ConfigError(f'--num_tasks={num_tasks}: must be positive, or -1 for all')
  if group_size < 1:
    raise ConfigError(f'--group_size={group_size}: must be at least 1')
  if config.dataset.experience_store:
    raise ConfigError(
      '--config.dataset.experience_store: launch.rollout does not read a '
      'store. To write one, set --config.trajectory_dump.path'
    )
  if not config.get('env', {}):
    raise ConfigError('config.env has no environment: there is nothing to play')
  sets = _sets_to_play(read_options(config), mode)
  if not sets:
    raise ConfigError(
      'config.env: every tag has weight 0, so training plays nothing: give one a '
      'weight above 0, or set --mode=val'
    )
  envs = {name: config.env[section['tag']].to_dict() for name, section in sets.items()}
  for name, section in sets.items():
    env = envs[name]
    if mode == 'val':
      split = section['split']
      env['env_config'] = options_for_split(env['env_type'], env['env_config'], split)
    limits = [n for n in (section['num_tasks'], num_tasks) if n > 0]
    section |= {'tag': name, 'interval': 1, 'group_size': group_size}
    section['num_tasks'] = min(limits, default=-1)
    if section['num_tasks'] < 0 and not uses_dataset(
      env['env_type'], env['env_config']
    ):
      raise ConfigError(
        f'env.{name} makes its tasks from seeds, without end: set --num_tasks=…'
      )
    env['weight'] = env['weight'] or 1.0  # a tag that is only evaluated is played too
  temperatures = {section['temperature'] for section in sets.values()}
  if len(temperatures) > 1 and store_options.is_store_path(config.trajectory_dump.path):
    raise ConfigError(
      f'--config.trajectory_dump.path={config.trajectory_dump.path}: an experience '
      'store has samples of one temperature, and the sets of eval.sets have several'
    )
  with config.unlocked():
    config.rollout.update(temperature=max(temperatures), extra_samples=0)
    config.eval.sets, config.env = ConfigDict(sets), ConfigDict(envs)
    config.synthesis = {'mode': mode, 'sets': sets}


def _sets_to_play(options: 'RunOptions', mode: str) -> dict[str, dict[str, Any]]:
  """Returns what is to be played, each part as an evaluation set with all its keys."""
  from jaxrl.config import to_config
  from jaxrl.envs.env_registry import uses_dataset
  from jaxrl.run_options import EvalSetOptions
  from launch.settings.resolve import evaluation_sets, tag_tasks

  if mode == 'val':
    sets: Any = evaluation_sets(options)
  else:
    sets = {}
    for tag, env in options.env.items():
      tasks = tag_tasks(options, tag)
      limit = tasks.limit if uses_dataset(env.env_type, env.env_config) else None
      if env.weight:
        sets[tag] = EvalSetOptions(
          tag=tag,
          path=tasks.path,
          split=tasks.split,
          columns=tasks.columns,
          num_tasks=limit or -1,
          temperature=options.rollout.temperature,
        )
  return {name: to_config(played).to_dict() for name, played in sets.items()}


def main(argv: Sequence[str]) -> int:
  """Generates trajectories from a command line; returns the exit status."""
  if not argv or '--help' in argv:
    print(USAGE)
    return 0
  try:
    command = command_line.parse(argv, FLAGS)
    config: Any = command_line.load(command, dumps=True)
    command_line.check_algorithm(config)

    numbers = {name: command.flag(name, int) for name in ('num_tasks', 'group_size')}
    part_size, mode = command.flag('part_size', int), command.flags['mode']
    checks = command.flag('check', bool)
    if checks:
      _refuse_flags_of_episodes(command.flags)
    prepare_rollout(config, mode=mode, **numbers)
    name = 'check' if checks else f'rollout-{mode}'
    folder = command.flags['workdir'] or default_path(command.config, name)
    workdir = Workdir(folder, config.to_dict())
  except ValueError as error:
    print_error(error)
    return 2
  except Exception:  # the user's algorithm, as it was imported
    traceback.print_exc()
    return 2
  console = Console()
  try:
    with console.listening():
      console.set_level(from_config(LoggingOptions, config.logging, 'logging').level)
      from launch.rollouts.env_datasets import check_limit
      from launch.settings.resolve import resolve_settings

      if checks:
        settings = resolve_settings(config, warn=False, check_machine=False)
        return _check_tasks(settings, workdir, console, mode)
      settings = resolve_settings(config, day=workdir.day)
      if mode == 'val':
        check_limit(settings, dict(command.overrides))
      return _run(settings, workdir, console, mode, max(part_size, 1))
  except KeyboardInterrupt:  # a check; a rollout stops by itself
    return 130
  except Exception as error:
    return report_failure(error, console, workdir)
  finally:
    workdir.close()


def _refuse_flags_of_episodes(flags: Mapping[str, str]) -> None:
  for name in ('group_size', 'part_size'):
    if flags[name] != FLAGS[name]:
      raise ConfigError(
        f'--{name}={flags[name]}: has no effect with --check, which plays each task '
        'once with its reference solution and once with an empty one'
      )


def _check_tasks(
  settings: 'RunSettings', workdir: Workdir, console: Console, mode: str
) -> int:
  """Checks all tasks, prints a line for each; returns 1 if any is broken."""
  from launch.rollouts.task_check import BROKEN, NO_SOLUTION, TaskChecker

  checker = TaskChecker(settings, mode=mode)
  total, file = sum(checker.num_tasks.values()), workdir.path / 'check.jsonl'
  console.say(f'jaxrl: checking {total} tasks', style='bold')
  counts = collections.Counter[str]()

  async def check_all() -> None:
    with file.open('w') as results:
      async for task in checker.check():
        counts[task.verdict] += 1
        console.say(str(task), style='red' if task.is_broken else '')
        results.write(json.dumps(dataclasses.asdict(task)) + '\n')

  asyncio.run(check_all())
  broken = {text: counts[verdict] for verdict, text in BROKEN.items()}
  reasons = ', '.join(f'{text}: {count}' for text, count in broken.items())
  num_broken = sum(broken.values())
  lines = {
    'ok': counts['ok'],
    'broken': f'{num_broken} ({reasons})',
    'unverified': f'{counts[NO_SOLUTION]} (no reference solution)',
    'results': file,
  }
  console.closing(f'{num_broken} of {total} tasks broken.', lines)
  return 1 if num_broken else 0


def _run(
  settings: 'RunSettings',
  workdir: Workdir,
  console: Console,
  mode: str,
  part_size: int,
) -> int:
  console.say(f'jaxrl: playing in {workdir.path}', style='bold')
  console.fact('tuning', process_env.describe(os.environ))
  job = DatasetRolloutJob(settings, workdir.path, mode, part_size)
  for label, value in job.facts.items():
    console.fact(label, value)
  workdir.record(**job.facts)
  how = 'now; what is in play is played again'
  with SignalHandler(console.warn, console.restore, how=how) as stop:
    finished = asyncio.run(job.run(lambda: job.play(console, stop)))
  workdir.end('finished' if finished else 'stopped')
  title = 'Finished.' if finished else 'Stopped; the same command resumes.'
  console.closing(title, job.closing)
  return 0 if finished else stop.status


class DatasetRolloutJob:
  """Plays a data set and writes its trajectories.

  Attributes:
    run: Awaits work and closes everything, see `InferenceJob.run`.
    facts: Facts to show before the run, by label.
    closing: Facts to show after the run, by label.
  """

  def __init__(
    self, settings: 'RunSettings', folder: pathlib.Path, mode: str, part_size: int
  ):
    """Creates the parts.

    Raises:
      ConfigError: For invalid settings, before any episode is played.
    """
    from jaxrl.data.row_sources import describe_sources
    from jaxrl.data.trajectory_writers.dump_journal import DumpJournal
    from jaxrl.data.trajectory_writers.writer import open_dump
    from launch.logging.trajectory_dump import env_columns
    from launch.rollouts.dataset_rollout import DatasetRollout
    from launch.rollouts.env_datasets import load_datasets
    from launch.rollouts.experience_store import open_store_target
    from launch.rollouts.inference_job import InferenceJob
    from launch.rollouts.preparation import check_run, load_policy, name_formats
    from launch.settings.validation import validate_sampling

    dump = settings.trajectory_dump
    assert dump is not None
    self._columns: Any
    self._ledger: Any
    if dump.store is None:
      columns = env_columns(settings)
      self._columns, writer = open_dump(mode, folder.absolute(), dump, columns)
    check_run(settings, trains=False)
    if dump.store is not None:  # which is trained on
      validate_sampling(settings)
    self._where = dump.path or str(folder / 'trajectories')

    def make_parts(runtime: Any, device_thread: Any) -> tuple[Any, DatasetRollout]:
      tests = load_datasets(settings, runtime).tests
      policy = load_policy(settings, folder, critic=False)
      plays = DatasetRollout(settings, policy, runtime, device_thread, tests, mode=mode)
      asyncio.run(plays.check_prompts())
      if dump.store is None:
        self._columns.formats = name_formats(settings.chat, policy)
        self._ledger = DumpJournal(folder / 'ledger', writer, part_size=part_size)
      else:
        self._columns, self._ledger, self._where = open_store_target(
          settings, folder, policy.tokenizer
        )
      return policy, plays

    job = InferenceJob(settings, make_parts)
    self.run, self._rollouts = job.run, job.plays
    sets = settings.evaluations.values()
    self._group_size = next(evaluation.group_size for evaluation in sets)
    self._model = settings.model.name
    paths = [e.path or settings.tasks[e.tag].path for e in sets]
    data = '; '.join(dict.fromkeys(describe_sources(path) for path in paths)) or 'seeds'
    self.facts = {
      'model': self._model,
      'data': f'{data}, mode {mode}',
      'dump': self._where,
      'columns': ', '.join(f'{n} {kind}' for n, kind in self._columns.types.items()),
    }
    if job.description:
      self.facts['placement'] = job.description
    self.closing = {'trajectories': self._where}

  async def play(self, console: Console, stop: Any) -> bool:
    """Plays the data set; returns False if it was stopped before the end.

    `run` of the job closes everything after it.
    """
    sizes = await self._rollouts.sizes()
    kept = sum(
      sum(item < size for item in self._ledger.played_items(tag))
      for tag, size in sizes.items()
    )
    total = sum(sizes.values()) * self._group_size
    gauge = RolloutProgress(console, 'rollout', total, kept * self._group_size)
    try:
      done = await self._rollouts.play(
        self._ledger,
        self._columns,
        model_name=self._model,
        on_group=gauge.group,
        stop=stop,
      )
      await self._rollouts.close()
    finally:
      gauge.close()
    self.closing |= gauge.summary()
    return done


if __name__ == '__main__':
  process_env.apply()
  run_command(main)
