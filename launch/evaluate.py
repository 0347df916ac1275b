"""Scores a model: `python -m launch.evaluate --checkpoint=FOLDER --config=FILE.py`.

Plays each tag's evaluation as training does (`eval.*`: which tasks, how many attempts,
at what temperature) and shows mean@k, pass@k and majority@k with intervals. The same
command finds the same scores.
"""

import asyncio
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from launch import config as configs
from launch import tune
from launch.config import ConfigError
from launch.console import Console
from launch.gauge import Gauge
from launch.sinks import open_sinks

FLAGS = {'checkpoint': '', 'k': '', 'json': ''}
USAGE = """\
python -m launch.evaluate --checkpoint=FOLDER --config=FILE.py [--config.KEY=VALUE]

  --checkpoint=runs/mine/export     a Hugging Face folder; sets model.checkpoint
  --k=1,4,16                        of pass@k and majority@k; else 1, 2, 4 …
  --json=scores.json                writes scores, intervals and every task's there
  --config.eval.num_tasks=-1        how many tasks; -1: each item of the data set once
  --config.eval.group_size=16       attempts at each task, at least the largest k
  --config.eval.temperature=0.6     at which they are drawn; at 0 they are all alike
"""


class Gauges:
  """Shows how far each tag is, one after the other."""

  def __init__(self, console: Console):
    self._console, self._gauge, self._tag = console, None, ''

  def __call__(self, tag: str, rows: Any, total: int) -> None:
    """One of the tag's `total` attempts came to be `rows`."""
    if self._gauge is None or tag != self._tag:
      self.close()
      self._tag, self._gauge = tag, Gauge(self._console, tag, total)
    self._gauge.group(rows)

  def close(self) -> None:
    if self._gauge is not None:
      self._gauge.close()


def prepare(config: Any, flags: dict[str, str]) -> list[int]:
  """Puts the flags into the config; returns the ks. Raises ConfigError."""
  if flags['checkpoint']:
    configs.override(config, 'model.checkpoint', flags['checkpoint'])
  if not config.model.checkpoint:
    raise ConfigError('which model? Name a Hugging Face folder: --checkpoint=FOLDER')
  if not config.env:
    raise ConfigError('config.env names no environment: there is nothing to play')
  folder = pathlib.Path(flags['json']).parent
  if not folder.is_dir():
    raise ConfigError(f'--json={flags["json"]}: there is no folder {folder}')
  config.eval.every = max(config.eval.every, 1)  # which is what loads the test set
  ks, size = read_ks(flags['k']), config.eval.group_size
  if ks and ks[-1] > size:
    raise ConfigError(
      f'--k={flags["k"]}: takes {ks[-1]} attempts at each task, not {size}: set '
      f'--config.eval.group_size={ks[-1]}'
    )
  return ks


def read_ks(text: str) -> list[int]:
  """'1,4,16' → [1, 4, 16], in order, each once."""
  try:
    ks = sorted({int(part) for part in text.split(',') if part.strip()})
  except ValueError:
    ks = [0]
  if ks and ks[0] < 1:
    raise ConfigError(f'--k={text}: wants whole numbers from 1, as in --k=1,4,16')
  return ks


async def play(job: Any, gauges: Gauges) -> tuple[dict[str, float], list[Any]]:
  """Plays the evaluation on `job`'s parts, then closes them."""
  try:
    return await job.run(lambda: job.plays.evaluate(gauges))
  finally:
    gauges.close()


def build(config: Any, console: Console) -> Any:
  """The parts that play; tells what will be played."""
  from launch import alone  # imports JAX: seconds

  folder, settings = config.model.checkpoint, config.eval
  job = alone.evaluator(config, pathlib.Path(folder))
  console.fact('model', folder)
  if job.told:
    console.fact('placement', job.told)
  attempts = f'{settings.group_size} a task, at temperature {settings.temperature:g}'
  console.fact('attempts', attempts)
  if settings.group_size > 1 and not settings.temperature:
    console.warn('at temperature 0 all attempts are alike: set eval.temperature')
  return job


def evaluate(
  job: Any, config: Any, ks: Sequence[int], console: Console
) -> dict[str, Any]:
  """Plays and scores all tags; shows the scores and returns what JSON is to hold."""
  from launch import results

  metrics, groups = asyncio.run(play(job, Gauges(console)))
  tags = results.results(metrics, groups, ks, config.seed)
  for text, style in results.lines(tags):
    console.say(text, style=style)
  played = {
    key: value for key, value in config.eval.to_dict().items() if key != 'every'
  }
  settings = {'checkpoint': config.model.checkpoint, 'seed': config.seed, **played}
  return {**settings, 'level': results.LEVEL, 'tags': tags}


def main(argv: Sequence[str]) -> int:
  """Evaluates from a command line; the exit status: 1 if all attempts of a tag fail."""
  if not argv or '--help' in argv:
    print(USAGE)
    return 0
  console = Console()
  with console.listening():
    try:
      command = configs.parse(argv, FLAGS)
      config = configs.load(command, {'logging': open_sinks})
      ks = prepare(config, command.flags)
      configs.check(config)
      job = build(config, console)
    except (ValueError, OSError) as error:
      print(f'error: {error}', file=sys.stderr)
      return 2
    try:
      found = evaluate(job, config, ks, console)
    except KeyboardInterrupt:
      return 130
    except (ValueError, OSError) as error:
      print(f'error: {error}', file=sys.stderr)
      return 2 if isinstance(error, ConfigError) else 1
  if command.flags['json']:
    pathlib.Path(command.flags['json']).write_text(json.dumps(found, indent=1) + '\n')
  return int(any(tag['other']['failed'] == 1 for tag in found['tags'].values()))


if __name__ == '__main__':
  tune.apply()
  sys.exit(main(sys.argv[1:]))
