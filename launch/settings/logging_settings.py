"""Parse `logging.sinks`: where the metrics of a run go."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.call_strings import parse_calls


@dataclasses.dataclass(frozen=True)
class LoggingSettings:
  """Where metrics go, beside metrics.jsonl and the console.

  Attributes:
    sinks: name and options of each sink.
  """

  sinks: tuple[tuple[str, Mapping[str, Any]], ...]

  @property
  def names(self) -> set[str]:
    """The names of the sinks."""
    return {name for name, _ in self.sinks}


def read_logging(*, sinks: str = 'report + tensorboard') -> LoggingSettings:
  """Reads the section `logging`, whose keys are the options of this function.

  Args:
    sinks: call strings joined by +, beside metrics.jsonl and the console: `report`,
      `tensorboard`, `wandb(project='mine')`, `trackio(project='mine')`; '' for none.

  Raises:
    ConfigError: if the call strings cannot be read.
  """
  return LoggingSettings(tuple(parse_calls(sinks)))
