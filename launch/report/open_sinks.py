"""Opens the metric sinks of a run."""

import importlib
import sys
from collections.abc import Callable

from jaxrl.component_table import ComponentTable
from jaxrl.options import ConfigError
from launch.logging.console import Console
from launch.logging.metric_sinks import (
  JsonLines,
  MetricSink,
  MultiSink,
  Prometheus,
  TensorBoard,
  Tracker,
)
from launch.logging.workdir import Workdir
from launch.report.report_sink import ReportSink
from launch.settings.logging_settings import LoggingOptions

SINKS: dict[str, Callable[..., MetricSink]] = {
  'report': ReportSink,
  'tensorboard': TensorBoard,
  'wandb': Tracker,
  'trackio': Tracker,
  'prometheus': Prometheus,
}


def open_sinks(
  workdir: Workdir, console: Console, settings: LoggingOptions
) -> MultiSink:
  """Opens metrics.jsonl, the console, and the sinks that the settings name.

  A user's own, a subclass of `MetricSink`, is made by
  `Name(folder, config, **options)` with the run's folder and its config as plain data.

  Raises:
    ConfigError: For a sink or an option that does not exist.
  """
  folder = workdir.path
  arguments = {
    'report': (folder,),
    'tensorboard': (folder / 'tensorboard',),
    'wandb': ('wandb', folder, workdir.config),
    'trackio': ('trackio', folder, workdir.config),
    'prometheus': (folder,),
  }
  known = ComponentTable[Callable[..., MetricSink]](
    'sink', 'logging.sinks', SINKS, base=MetricSink
  )
  sinks: list[MetricSink] = []
  key = '--config.logging.sinks'
  for call in settings.sinks:
    name, sink_class, options = known.find(call, f'{key}: {call.name}')
    if name == 'tensorboard':
      _import_without_torch('tensorboardX')
    if not isinstance(sink_class, type):
      raise ConfigError(
        f'{key}: {call.name}: it is a function; derive a class from '
        'launch.logging.metric_sinks.MetricSink'
      )
    own_args = arguments.get(name, (folder, workdir.config))
    sinks.append(sink_class(*own_args, **options))
  return MultiSink(
    [JsonLines(folder / 'metrics.jsonl'), console, *sinks], warn=console.warn
  )


def _import_without_torch(name: str) -> None:
  """Imports a package that can do without torch as if torch were not installed.

  Importing torch takes a second.
  """
  if 'torch' in sys.modules:
    importlib.import_module(name)
    return
  sys.modules['torch'] = None  # pyright: ignore[reportArgumentType]
  try:
    importlib.import_module(name)
  finally:
    del sys.modules['torch']
