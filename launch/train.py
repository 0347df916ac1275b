"""Trains: `python -m launch.train --config=configs/X.py[:ALGORITHM] --workdir=DIR`.

A mistake in the command line or the config is answered by one line and exit status 2,
before any work. Exit status 130 or 143 after Ctrl-C or SIGTERM; the same command
resumes.
"""

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from jaxrl.data.sinks.dump import open_dump
from jaxrl.rollout.lost import CannotFill
from jaxrl.signature import parse_calls
from launch import config as configs
from launch import tune
from launch.console import Console
from launch.sinks import open_sinks
from launch.stop import Stop
from launch.workdir import Workdir, default_path

USAGE = """\
python -m launch.train --config=FILE.py[:ALGORITHM] [--config.KEY=VALUE] [--workdir=DIR]

  --config=configs/quickstart.py       a file with get_config(); see configs/
  --config=configs/gsm8k.py:opmd       … with another algorithm, built in
  --config=configs/gsm8k.py:my.mod:fn  … or your own: a module or file, and its function
  --config.algorithm.kl_coef=0         sets a key; --help after --config lists them
  --workdir=runs/mine                  where the run lives; the same command resumes it
"""


def main(argv: Sequence[str]) -> int:
  """Runs one training from a command line; returns the exit status."""
  help_wanted = '--help' in argv or '-h' in argv
  argv = [item for item in argv if item not in ('--help', '-h')]
  if help_wanted and not argv:
    print(USAGE)
    return 0
  try:
    command = configs.parse(argv, {'workdir': ''})
    config = configs.load(command, {'logging': open_sinks, 'dump': open_dump})
    if help_wanted:
      print(f'{USAGE}\n{configs.listing(config)}')
      return 0
    configs.check(config)
    place = command.flags['workdir']
    place = place or default_path(command.config, command.algorithm)
    workdir = Workdir(place, config)
  except configs.ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
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


def run(config: Any, workdir: Workdir, command: configs.Command) -> int:
  """Builds what `config` says, trains it in `workdir`, and says where to look."""
  console = Console()
  with console.listening():
    return _run(config, workdir, command, console)


def _run(
  config: Any, workdir: Workdir, command: configs.Command, console: Console
) -> int:
  console.say(f'jaxrl: training in {workdir.path}', style='bold')
  console.fact('tuning', tune.describe(os.environ))
  for line in workdir.changes:
    console.fact('changed', line)
  writers = None
  try:
    from launch import build, resume  # import JAX: seconds

    writers = open_sinks(workdir, console, **config.logging)
    if config.dump.path:
      from launch.dump import Dump, begun

      fresh = not begun(workdir.path)
      writers.sinks.append(Dump(config, workdir.path, fresh=fresh))
    with Stop(console.warn, console.restore) as stop:

      def make() -> Any:
        job = build.build(config, workdir=workdir.path, writers=writers, stop=stop)
        for label, value in job.facts.items():
          console.fact(label, value)
        workdir.record(**job.facts)
        return job

      job, finished = resume.train(make, console.warn)
    writers.close('finished' if finished else 'stopped')
    title = 'Finished.' if finished else 'Stopped; the same command resumes.'
    looks = {**places(workdir, config.logging.sinks), **job.closing}
    if config.dump.path:
      looks['trajectories'] = config.dump.path
    steps = next_steps(command, config, workdir) if finished else {}
    console.closing(title, {**looks, **steps})
    return 0 if finished else stop.status
  except Exception as error:
    console.restore()
    if writers:
      writers.close('failed')
    return failed(error, console, workdir)


def places(workdir: Workdir, sinks: str) -> dict[str, str]:
  """Where to look, by what was written."""
  written = {name for name, _ in parse_calls(sinks)}
  found = {'metrics': str(workdir.path / 'metrics.jsonl')}
  if 'report' in written:
    found = {'report': str(workdir.path / 'report.html'), **found}
  if 'tensorboard' in written:
    folder = shlex.quote(str(workdir.path / 'tensorboard'))
    found['curves'] = f'tensorboard --logdir {folder}'
  return found


def next_steps(
  command: configs.Command, config: Any, workdir: Workdir
) -> dict[str, str]:
  """Commands worth trying after a finished run."""
  lasts = 'num_epochs' if config.get('num_epochs') else 'num_steps'
  own = {key: text for key, text in command.overrides if key != lasts}
  options = [
    f'--config.{key}' + ('' if own[key] is None else f'={own[key]}') for key in own
  ]

  def line(module: str, algorithm: str | None, *more: str) -> str:
    spec = command.config + (f':{algorithm}' if algorithm else '')
    return shlex.join(['python', '-m', module, f'--config={spec}', *options, *more])

  used, place = command.algorithm, workdir.path
  other = 'grpo' if used == 'opmd' else 'opmd'
  if any(config.get('teacher', {}).values()):  # which only some algorithms ask
    other = 'on_policy_distill' if used == 'jsd' else 'jsd'
  longer = f'--config.{lasts}={2 * max(config[lasts], 1)}'
  steps = {'train on': line('launch.train', used, longer, f'--workdir={place}')}
  if not config.get('env', True):  # nothing to play
    return steps
  steps[f'try {other}'] = line('launch.train', other, f'--workdir={place}-{other}')
  if config.get('checkpoint', {}).get('export'):
    model = [f'--config.model.checkpoint={place / "export"}']
    if config.get('model', {}).get('lora'):  # merged in what was exported
      options = [text for text in options if not text.startswith('--config.model.lora')]
      model.append('--config.model.lora=')
    steps = {'watch it play': line('launch.play', used, *model), **steps}
  return steps


def failed(error: Exception, console: Console, workdir: Workdir) -> int:
  """Tells of an error: a line when it is the user's to mend, else the traceback."""
  text = ''.join(traceback.format_exception(error))
  log = workdir.path / 'error.txt'
  try:
    log.write_text(text)
  except OSError:
    log = None
  known = isinstance(
    error, configs.ConfigError | CannotFill | OSError | ArithmeticError
  )
  print(f'error: {error}' if known else text, file=sys.stderr)
  if log and known:
    console.say(f'(traceback in {log})', style='dim')
  return 2 if isinstance(error, configs.ConfigError) else 1


if __name__ == '__main__':
  tune.apply()
  sys.exit(main(sys.argv[1:]))
