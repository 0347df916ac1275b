"""Logging options say where metrics go, and which steps are traced."""

import dataclasses
import functools
import re

from jaxrl.component_calls import ComponentCall, parse_calls
from jaxrl.options import ConfigError, OptionError, Options, option

LEVELS = ('debug', 'info', 'warning', 'error')


@dataclasses.dataclass(frozen=True)
class LoggingOptions(Options):
  """Where metrics go beside metrics.jsonl and the console; which steps are traced."""

  sinks: tuple[ComponentCall, ...] = option(
    parse_calls('report + tensorboard'),
    'Sinks joined by +, beside metrics.jsonl and the console: `report`, '
    '`tensorboard`, '
    "`wandb(project='mine')`, `trackio(project='mine')`, `prometheus(port=9100)`, or "
    "your own, `path/file.py:Name(option=1)`; '' for none.",
  )
  trace_steps: str = option(
    '',
    "Training steps to trace with `jax.profiler`, '10-12, 50' for a file of steps 10 "
    "to 12 and one of step 50; '' for none.",
  )
  level: str = option(
    'info',
    "Log level of the console, which shows messages from 'debug', 'info', 'warning' or "
    "'error' on.",
    choices=LEVELS,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    _ = self.traces  # for its errors

  @functools.cached_property
  def traces(self) -> tuple[tuple[int, int], ...]:
    """The first and the last step of each trace, in ascending order."""
    try:
      return _parse_steps(self.trace_steps)
    except ValueError as error:
      raise OptionError('trace_steps', self.trace_steps, str(error)) from error

  @property
  def names(self) -> set[str]:
    """The names of the sinks."""
    return {call.name for call in self.sinks}


def _parse_steps(text: str) -> tuple[tuple[int, int], ...]:
  """Reads '10-12, 50': the first and the last step of each range, in order."""
  ranges: list[tuple[int, int]] = []
  for term in filter(None, (term.strip() for term in text.split(','))):
    match = re.fullmatch(r'(\d+)(?:\s*-\s*(\d+))?', term)
    if match is None:
      raise ConfigError(f"{term!r} is not a step or a range; write '10-12, 50'")
    first = int(match[1])
    last = int(match[2] or first)
    if last < first or (ranges and first <= ranges[-1][1]):
      raise ConfigError(f"{term!r}: write steps in ascending order, as in '10-12, 50'")
    ranges.append((first, last))
  return tuple(ranges)
