"""Parse the section `logging`: where metrics go, and which steps are traced."""

import dataclasses
import re

from jaxrl.call_strings import ComponentCall, ConfigError, unknown_name_error
from launch.settings.call_syntax import parse_calls, parse_setting


@dataclasses.dataclass(frozen=True)
class LoggingSettings:
  """Where metrics go, beside metrics.jsonl and the console, and which steps are traced.

  Attributes:
    sinks: a call of each sink.
    trace_steps: the first and the last step of each trace, in ascending order.
    level: the least level of the messages that the console shows.
  """

  sinks: tuple[ComponentCall, ...]
  trace_steps: tuple[tuple[int, int], ...]
  level: str = 'info'

  @property
  def names(self) -> set[str]:
    """The names of the sinks."""
    return {call.name for call in self.sinks}


LEVELS = ('debug', 'info', 'warning', 'error')


def read_logging(
  *,
  sinks: str = 'report + tensorboard',
  trace_steps: str = '',
  level: str = 'info',
) -> LoggingSettings:
  """Reads the section `logging`, whose keys are the options of this function.

  Args:
    sinks: call strings joined by +, beside metrics.jsonl and the console: `report`,
      `tensorboard`, `wandb(project='mine')`, `trackio(project='mine')`,
      `prometheus(port=9100)`, or your own, `path/file.py:Name(option=1)`; '' for
      none.
    trace_steps: training steps to trace with `jax.profiler`, '10-12, 50' for a file of
      steps 10 to 12 and one of step 50; '' for none.
    level: log level of the console, which shows messages from 'debug', 'info',
      'warning' or 'error' on.

  Raises:
    ConfigError: if the call strings, the steps or the level cannot be read.
  """
  if level not in LEVELS:
    raise unknown_name_error(level, LEVELS, 'level', '--config.logging.level')
  return LoggingSettings(
    parse_setting('logging.sinks', sinks, parse_calls),
    parse_setting('logging.trace_steps', str(trace_steps), parse_steps),
    level,
  )


def parse_steps(text: str) -> tuple[tuple[int, int], ...]:
  """Reads '10-12, 50': ranges of steps in ascending order, none of them twice.

  Args:
    text: the text; '' has no ranges.

  Returns:
    The first and the last step of each range.

  Raises:
    ConfigError: if it cannot be read.
  """
  ranges: list[tuple[int, int]] = []
  for term in filter(None, (term.strip() for term in text.split(','))):
    match = re.fullmatch(r'(\d+)(?:\s*-\s*(\d+))?', term)
    if match is None:
      raise ConfigError(f"{term!r} is no step and no range of steps; write '10-12, 50'")
    first = int(match[1])
    last = int(match[2] or first)
    if last < first or (ranges and first <= ranges[-1][1]):
      raise ConfigError(f"{term!r}: write steps in ascending order, as in '10-12, 50'")
    ranges.append((first, last))
  return tuple(ranges)
