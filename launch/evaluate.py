"""Scores a model: `python -m launch.evaluate --checkpoint=FOLDER --config=FILE.py`.

`--benchmark=NAME --path=FILE` in place of the config asks and scores a benchmark as it
was published (`launch/benchmarks.py`).
Plays each tag's evaluation as training does (`eval.*`: which tasks, how many attempts,
at which temperature) and shows mean@k, pass@k and majority@k with intervals. The same
command yields the same scores.
"""

import asyncio
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.config import from_config
from launch.logging.console import Console
from launch.logging.error_pages import (
  describe_user_error,
  print_error,
  report_user_error,
)
from launch.logging.progress import RolloutProgress
from launch.runtime import process_env
from launch.runtime.signal_handler import run_command
from launch.settings import command_line
from launch.settings.command_line import ConfigError
from launch.settings.logging_settings import LoggingOptions

if TYPE_CHECKING:
  from launch.settings.run_settings import RunSettings

FLAGS = {
  'checkpoint': '',
  'k': '',
  'json': '',
  'benchmark': '',
  'path': '',
  'workdir': 'runs/evaluate',
}
USAGE = """\
python -m launch.evaluate --checkpoint=FOLDER --config=FILE.py [--config.KEY=VALUE]
python -m launch.evaluate --checkpoint=FOLDER --benchmark=NAME --path=FILE

  --checkpoint=runs/mine/export     a Hugging Face folder; sets model.checkpoint
  --k=1,4,16                        of pass@k and majority@k; else 1, 2, 4 …
  --json=scores.json                writes scores, intervals and every task's there
  --benchmark=gsm8k                 or math500, aime, ifeval, mmlu_pro, humaneval
  --path=test.jsonl                 the benchmark's file, in the published format
  --workdir=runs/evaluate           where NAME.json is written for a benchmark
  --config.eval.num_tasks=-1        how many tasks; -1: each item of the data set once
  --config.eval.group_size=16       attempts at each task, at least the largest k
  --config.eval.temperature=0.6     at which they are drawn; at 0 they are all alike
"""


class TagProgress:
  """Shows the progress of one environment tag after the other."""

  def __init__(self, console: Console):
    self._console, self._gauge, self._tag = console, None, ''

  def __call__(self, tag: str, rows: Any, total: int) -> None:
    """Counts the played group towards the tag's `total` samples."""
    if self._gauge is None or tag != self._tag:
      self.close()
      self._tag, self._gauge = tag, RolloutProgress(self._console, tag, total)
    self._gauge.group(rows)

  def close(self) -> None:
    """Ends the progress display of the current tag."""
    if self._gauge is not None:
      self._gauge.close()


def prepare_evaluation(config: Any, flags: dict[str, str]) -> list[int]:
  """Applies the flags to the config, in place.

  Returns:
    The values of k for pass@k and majority@k.

  Raises:
    ConfigError: For flags or a config that cannot be evaluated.
  """
  if flags['checkpoint']:
    command_line.override(config, 'model.checkpoint', flags['checkpoint'])
  if not config.model.checkpoint:
    raise ConfigError(
      'no model to evaluate: set --checkpoint=FOLDER, a Hugging Face folder'
    )
  if not config.env:
    raise ConfigError('config.env has no environment: there is nothing to play')
  if flags['benchmark'] and not flags['json']:
    workdir = pathlib.Path(flags['workdir'])
    workdir.mkdir(parents=True, exist_ok=True)
    flags['json'] = str(workdir / f'{flags["benchmark"]}.json')
  folder = pathlib.Path(flags['json']).parent
  if not folder.is_dir():
    raise ConfigError(f'--json={flags["json"]}: there is no folder {folder}')
  for section in (config.eval, *config.eval.sets.values()):
    if section.interval is not None:
      section.interval = max(section.interval, 1)  # which is what loads the tasks
  from launch.settings.resolve import evaluation_sets, read_options  # imports JAX

  ks = read_ks(flags['k'])
  for name, evaluation in evaluation_sets(read_options(config)).items():
    if ks and ks[-1] > evaluation.group_size:
      set_prefix = f'sets.{name}.' if name in config.eval.sets else ''
      raise ConfigError(
        f'--k={flags["k"]}: needs {ks[-1]} attempts at each task, but '
        f'eval.{set_prefix}group_size is {evaluation.group_size}: set '
        f'--config.eval.{set_prefix}group_size={ks[-1]}'
      )
  return ks


def read_ks(text: str) -> list[int]:
  """Parses '1,4,16' as [1, 4, 16], sorted and without duplicates."""
  try:
    ks = sorted({int(part) for part in text.split(',') if part.strip()})
  except ValueError:
    ks = [0]
  if ks and ks[0] < 1:
    raise ConfigError(
      f'--k={text}: must be whole numbers of at least 1, as in --k=1,4,16'
    )
  return ks


async def play_evaluation(
  job: Any, progress: TagProgress
) -> tuple[dict[str, float], list[Any]]:
  """Plays the evaluation on the job's parts, then closes them."""
  try:
    return await job.run(lambda: job.plays.evaluate(progress))
  finally:
    progress.close()


def build_evaluation(run_settings: 'RunSettings', console: Console) -> Any:
  """Creates the parts that play, and shows what will be played."""
  from launch.rollouts.env_datasets import describe_seen
  from launch.rollouts.inference_job import make_evaluator

  folder = run_settings.model.checkpoint
  job = make_evaluator(run_settings, pathlib.Path(folder))
  console.fact('model', folder)
  if job.description:
    console.fact('placement', job.description)
  sets = run_settings.active_evaluations
  attempts = {
    name: f'{s.group_size} a task, at temperature {s.temperature:g}'
    for name, s in sets.items()
  }
  if len(set(attempts.values())) > 1:
    attempts = {name: f'{name}: {text}' for name, text in attempts.items()}
  if seen := describe_seen(job.plays.seen_shares):
    console.fact('tasks', seen)
  console.fact('attempts', '; '.join(dict.fromkeys(attempts.values())))
  if any(s.group_size > 1 and not s.temperature for s in sets.values()):
    console.warn(
      'all attempts at a task are the same at temperature 0: set '
      '--config.eval.temperature'
    )
  return job


def evaluate(
  job: Any,
  settings: 'RunSettings',
  ks: Sequence[int],
  console: Console,
  benchmark: str = '',
) -> dict[str, Any]:
  """Plays and scores all tags and shows the scores.

  Returns:
    The scores as JSON data.
  """
  from launch.logging import evaluation_results

  metrics, groups = asyncio.run(play_evaluation(job, TagProgress(console)))
  tags = evaluation_results.summarize_tags(metrics, groups, ks, settings.seed)
  published = {}
  if benchmark:
    published = {
      'benchmark': score_benchmark(benchmark, tags[benchmark], groups, settings)
    }
  for text, style in evaluation_results.format_results(tags):
    console.say(text, style=style)
  eval_options = {
    key: value
    for key, value in settings.text('eval').items()
    if key != 'interval' and value != {}
  }
  return {
    **published,
    'checkpoint': settings.model.checkpoint,
    'seed': settings.seed,
    **eval_options,
    'level': evaluation_results.LEVEL,
    'tags': tags,
  }


def score_benchmark(
  name: str, tag: dict[str, Any], groups: Sequence[Any], settings: 'RunSettings'
) -> dict[str, Any]:
  """Adds a benchmark's further scores to those of its tag, in place.

  Returns:
    The published score, with what it stands for.
  """
  from jaxrl.data.row_sources import load_rows
  from launch import benchmarks
  from launch.logging.evaluation_results import with_intervals

  rows = load_rows(settings.tasks[name].path, 'test')
  parts = benchmarks.part_scores(name, groups, rows)
  votes = benchmarks.BENCHMARKS[name].votes
  kept = {k: v for k, v in tag['scores'].items() if votes or not k.startswith('maj')}
  tag['scores'] = kept | (with_intervals(parts, name, settings.seed) if parts else {})
  return benchmarks.published_score(name, tag)


def load_config(command: command_line.Command) -> Any:
  """Returns the config of a command line: a file's, or a benchmark's.

  Raises:
    ConfigError: For flags or keys that cannot be.
  """
  name, path = command.flags['benchmark'], command.flags['path']
  if not name:
    if path:
      raise ConfigError(
        f'--path={path}: is the file of a benchmark: set --benchmark=NAME'
      )
    return command_line.load(command)
  from launch.benchmarks import benchmark_config  # imports JAX: seconds

  return command_line.complete(benchmark_config(name, path), command)


def main(argv: Sequence[str]) -> int:
  """Evaluates from a command line; returns 1 if all attempts of a tag fail."""
  if not argv or '--help' in argv:
    print(USAGE)
    return 0
  console, status = Console(), 2  # after an error; 1 once it has begun to play
  with console.listening():
    try:
      command = command_line.parse(argv, FLAGS, without='benchmark')
      config = load_config(command)
      console.set_level(from_config(LoggingOptions, config.logging, 'logging').level)
      ks = prepare_evaluation(config, command.flags)
      command_line.check_algorithm(config)
      from launch.rollouts.env_datasets import check_limit  # imports JAX: seconds
      from launch.settings.resolve import resolve_settings

      settings = resolve_settings(config)
      check_limit(settings, dict(command.overrides))
      named = 'checkpoint' if command.flags['checkpoint'] else 'config.model.checkpoint'
      with command_line.naming_flag(named, 'model.checkpoint'):
        job = build_evaluation(settings, console)
      benchmark, status = command.flags['benchmark'], 1
      scores = evaluate(job, settings, ks, console, benchmark)
    except KeyboardInterrupt:
      console.say('Stopped: nothing was scored.')
      return 130
    except (ValueError, OSError) as error:
      if status == 2 or isinstance(error, ConfigError):
        print_error(error)
        return 2
      print_error(describe_user_error(error) or error)
      return 1
    except Exception as error:
      return report_user_error(error)
  if command.flags['json']:
    pathlib.Path(command.flags['json']).write_text(json.dumps(scores, indent=1) + '\n')
    if benchmark:
      console.fact('results', command.flags['json'])
  return int(any(tag['other']['failed'] == 1 for tag in scores['tags'].values()))


if __name__ == '__main__':
  process_env.apply()
  run_command(main)
