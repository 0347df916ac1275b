"""Trains: `python -m launch.train --config=configs/X.py[:ALGORITHM] --workdir=DIR`.

A mistake in the command line or the config is answered by one line and exit status 2,
before any work. Exit status 130 or 143 after Ctrl-C or SIGTERM; the same command
resumes.
"""

import os
import signal
import sys

if __name__ == '__main__':  # until the run has its own handler: imports take seconds
  signal.signal(signal.SIGINT, lambda *_: (os.write(2, b'Stopped.\n'), os._exit(130)))

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.config import from_config
from launch.logging.console import Console
from launch.logging.metric_sinks import MultiSink
from launch.logging.workdir import ERROR_FILE, Workdir, default_path
from launch.report.open_sinks import open_sinks
from launch.runtime import process_env
from launch.runtime.signal_handler import SignalHandler, run_command
from launch.settings import command_line
from launch.settings.logging_settings import LoggingOptions

if TYPE_CHECKING:
  from launch.settings.run_settings import RunSettings
  from launch.trainer import Trainer

USAGE = """\
python -m launch.train --config=FILE.py[:ALGORITHM] [--config.KEY=VALUE] [--workdir=DIR]

  --config=configs/quickstart.py       a file with get_config(); see configs/
  --config=configs/gsm8k.py:opmd       … with another algorithm, built in
  --config=configs/gsm8k.py:my.mod:fn  … or your own: a module or file, and its function
  --config.algorithm.kl_coef=0         sets a key; --help[=WORD] lists them
  --workdir=runs/mine                  where the run lives; the same command resumes it
"""


def main(argv: Sequence[str]) -> int:
  """Runs one training from a command line; returns the exit status."""
  argv, help_word = command_line.split_help(argv)
  if help_word is not None and not argv:
    print(USAGE)
    return 0
  try:
    command = command_line.parse(argv, {'workdir': ''})
    config = command_line.load(command, dumps=True)
    if help_word is not None:
      from launch.settings.key_listing import list_keys  # a run needs none of it

      print(f'{USAGE}\n{list_keys(config, help_word)}')
      return 0
    command_line.check_algorithm(config)
    place = command.flags['workdir']
    place = place or default_path(command.config, command.algorithm)
    workdir = Workdir(place, config.to_dict())
  except command_line.ConfigError as error:
    from launch.logging.error_pages import print_error  # most runs need none of it

    print_error(error)
    return 2
  except BrokenPipeError:  # nobody reads the list of keys to its end
    raise
  except Exception:  # the user's algorithm, as it was imported
    traceback.print_exc()
    return 2
  try:
    return run(config, workdir, command)
  except KeyboardInterrupt:  # while the program itself was still being loaded
    print('Stopped before it began.', file=sys.stderr)
    return 130
  finally:
    workdir.close()


def run(config: Any, workdir: Workdir, command: command_line.Command) -> int:
  """Trains a config in a workdir, and tells the user about it.

  Args:
    config: The config, as the command line left it.
    workdir: The run's folder.
    command: The command line.

  Returns:
    The exit status.
  """
  console = Console()
  with console.listening():
    console.say(f'jaxrl: training in {workdir.path}', style='bold')
    console.fact('tuning', process_env.describe(os.environ))
    for line in workdir.changes:
      console.fact('changed', line)
    sink = None
    try:
      logging = from_config(LoggingOptions, config.logging, 'logging')
      console.set_level(logging.level)
      sink = open_sinks(workdir, console, logging)
      with SignalHandler(console.warn, console.restore) as stop:
        trainer, finished = train(config, workdir, console, sink, stop, logging)
      status = 'finished' if finished else 'stopped'
      sink.close(status)
      workdir.end(status)
    except Exception as error:
      console.restore()
      if sink:
        sink.close('failed')
      from launch.logging.error_pages import report_failure  # most runs end well

      return report_failure(error, console, workdir)
    if finished:
      (workdir.path / ERROR_FILE).unlink(missing_ok=True)  # of an earlier attempt
    from launch.logging.next_steps import next_steps, outputs  # only after training

    lines = {**outputs(workdir.path, logging.names), **trainer.closing}
    if config.trajectory_dump.path:
      lines['trajectories'] = config.trajectory_dump.path
    steps = next_steps(command, config, workdir.path) if finished else {}
    title = 'Finished.' if finished else 'Stopped; the same command resumes.'
    console.closing(title, {**lines, **steps})
    from launch.report.report_sink import tell_why_nothing_was_learned

    tell_why_nothing_was_learned(workdir.path, console)
    return 0 if finished else stop.status


def train(
  config: Any,
  workdir: Workdir,
  console: Console,
  sink: MultiSink,
  stop: SignalHandler,
  logging: LoggingOptions,
) -> tuple['Trainer', bool]:
  """Trains: options → build → train.

  The config becomes settings, which are checked; `build` assembles a trainer from them,
  and the trainer trains. If an actor is lost, a new trainer continues from the newest
  checkpoint.

  Args:
    config: The config.
    workdir: The run's folder.
    console: Takes what the user is told.
    sink: Takes metrics and trajectories.
    stop: Says whether the user asked to end.
    logging: Says which steps are traced.

  Returns:
    The trainer that came to its end, and whether training reached its end.
  """
  # Imported here because they import JAX, which takes seconds.
  from launch.build import build
  from launch.rollouts.preparation import check_run
  from launch.runtime.runtime_base import run_with_restarts
  from launch.settings.resolve import resolve_settings

  settings = resolve_settings(config, day=workdir.day)
  check_run(settings, trains=True)
  _dump_trajectories(settings, workdir, sink)

  def make_trainer() -> 'Trainer':
    trainer = build(
      settings,
      workdir=workdir.path,
      sink=sink,
      stop=stop,
      trace_steps=logging.traces,
    )
    for label, value in trainer.facts.items():
      console.fact(label, value)
    workdir.record(**trainer.facts)
    return trainer

  return run_with_restarts(make_trainer, console.warn)


def _dump_trajectories(
  settings: 'RunSettings', workdir: Workdir, sink: MultiSink
) -> None:
  """Adds the sink for trajectories to the others, where the run keeps them."""
  if settings.trajectory_dump is None or not settings.trajectory_dump.path:
    return
  from launch.logging.trajectory_dump import TrajectoryDump, has_begun

  fresh = not has_begun(workdir.path)
  sink.sinks.append(TrajectoryDump(settings, workdir.path, fresh=fresh))


if __name__ == '__main__':
  process_env.apply()
  run_command(main)
