"""The sinks of a run, as `config.logging` asks for them."""

import functools
from collections.abc import Callable

from jaxrl.signature import call, split
from launch.console import Console
from launch.report.sink import Report
from launch.workdir import Workdir
from launch.writers import JsonLines, Sink, TensorBoard, Tracker, Writers


def open_sinks(
  workdir: Workdir, console: Console, *, sinks: str = 'report + tensorboard'
) -> Writers:
  """The writers of a run in `workdir`; the keyword options are `config.logging`.

  sinks: call strings joined by +, beside metrics.jsonl and the console: `report`,
  `tensorboard`, `wandb(project='mine')`, `trackio(project='mine')`; '' for none.
  Raises ConfigError.
  """
  folder = workdir.path
  known: dict[str, Callable[..., Sink]] = {
    'report': functools.partial(Report, folder),
    'tensorboard': functools.partial(TensorBoard, folder / 'tensorboard'),
  }
  for service in ('wandb', 'trackio'):
    known[service] = functools.partial(Tracker, service, folder, workdir.config)
  own = [call(term, known, 'sink', 'logging.sinks') for term in split(sinks)]
  return Writers(
    [JsonLines(folder / 'metrics.jsonl'), console, *own], warn=console.warn
  )
