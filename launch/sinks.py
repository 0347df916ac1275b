"""The sinks of a run, as `config.logging` asks for them."""

from launch.console import Console
from launch.report.sink import Report
from launch.workdir import Workdir
from launch.writers import JsonLines, Sink, TensorBoard, Tracker, Writers


def open_sinks(
  workdir: Workdir,
  console: Console,
  *,
  report: bool = True,
  tensorboard: bool = True,
  tracker: str = '',
  project: str = 'jaxrl',
) -> Writers:
  """The writers of a run in `workdir`; the keyword options are `config.logging`.

  tracker: '', 'wandb' or 'trackio'. project: the tracker's project.
  """
  folder = workdir.path
  sinks: list[Sink] = [JsonLines(folder / 'metrics.jsonl'), console]
  if report:
    sinks.append(Report(folder))
  if tensorboard:
    sinks.append(TensorBoard(folder / 'tensorboard'))
  if tracker:
    sinks.append(Tracker(tracker, folder, workdir.config, project))
  return Writers(sinks, warn=console.warn)
