"""Open the metric loggers of a run."""

import functools
from collections.abc import Callable

from jaxrl.call_strings import check_options, unknown_name_error
from launch.logging.console import Console
from launch.logging.metric_loggers import (
  JsonLines,
  MetricLogger,
  MultiLogger,
  TensorBoard,
  Tracker,
)
from launch.logging.workdir import Workdir
from launch.report.report_logger import ReportLogger
from launch.settings.logging_settings import LoggingSettings


def open_loggers(
  workdir: Workdir, console: Console, settings: LoggingSettings
) -> MultiLogger:
  """Opens metrics.jsonl, the console, and the loggers that the settings name.

  Args:
    workdir: the run's folder.
    console: the terminal.
    settings: which other loggers there are.

  Raises:
    ConfigError: for a logger or an option that does not exist.
  """
  folder = workdir.path
  known: dict[str, Callable[..., MetricLogger]] = {
    'report': functools.partial(ReportLogger, folder),
    'tensorboard': functools.partial(TensorBoard, folder / 'tensorboard'),
  }
  for service in ('wandb', 'trackio'):
    known[service] = functools.partial(Tracker, service, folder, workdir.config)
  loggers: list[MetricLogger] = []
  for name, options in settings.sinks:
    if name not in known:
      raise unknown_name_error(name, known, 'sink', '--config.logging.sinks')
    check_options(known[name], options, f'--config.logging.sinks: {name}')
    loggers.append(known[name](**options))
  return MultiLogger(
    [JsonLines(folder / 'metrics.jsonl'), console, *loggers], warn=console.warn
  )
