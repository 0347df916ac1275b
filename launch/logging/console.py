"""Shows a run on the terminal: a progress bar, and one line per step.

On a terminal a progress bar with rate and time left stays below the lines. Elsewhere
(a pipe, a log file) the same lines come plain, without control characters.
"""

import contextlib
import functools
import logging
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from launch.logging.metric_sinks import Metrics, MetricSink, is_trained

# What a line shows, in this order, of what a step has: metric → (label, format).
COLUMNS = {
  'reward/mean': ('reward', '{:.3f}'),
  'loss/total': ('loss', '{:.4f}'),
  'policy/entropy': ('entropy', '{:.3f}'),
  'kl/reference': ('kl', '{:.4f}'),
  'optimizer/grad_norm': ('grad', '{:.2f}'),
  'mismatch/kl': ('mismatch', '{:.1e}'),
  'staleness/mean': ('stale', '{:.1f}'),
  'tokens/action_per_row': ('tokens', '{:.0f}'),
  'tokens/per_second': ('tokens/s', '{:,.0f}'),
  'time/rollout': ('rollout', '{:.2f}s'),
  'time/train': ('train', '{:.2f}s'),
  'time/step': ('step', '{:.2f}s'),
}
FAST = 0.5  # seconds; in a long phase, lines nearer than this are left out

# What the shell takes as one word: runs of plain characters and of quoted text.
QUOTED_WORDS = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+""")
OWN = ('jaxrl', 'kernels', 'launch')  # the packages whose log is shown
break_words = functools.partial(
  textwrap.wrap, break_long_words=False, break_on_hyphens=False
)


def _own_stream(stream: TextIO) -> TextIO:
  """Returns a stream to the same place, which environment code does not know.

  So it can neither close nor replace it.

  Args:
    stream: The stream; one without a descriptor is returned itself.
  """
  try:
    stream.flush()
    descriptor = os.dup(stream.fileno())
  except (OSError, ValueError, AttributeError):  # such as a StringIO
    return stream
  return open(
    descriptor, 'w', encoding=stream.encoding, errors=stream.errors, buffering=1
  )


class Console(MetricSink):
  """Prints a run's progress.

  Attributes:
    terminal: The `rich` console.
    live: Whether it is a terminal rather than a pipe or a file.
  """

  def __init__(self, stream: TextIO | None = None, width: int | None = None):
    stream = stream or _own_stream(sys.stdout)
    self.terminal = Terminal(file=stream, highlight=False, width=width, soft_wrap=True)
    self.live = self.terminal.is_terminal
    self._progress: Progress | None = None
    self._clock = Clock()
    self._name, self._total = '', None
    self._printed = 0.0

  def say(self, text: str = '', style: str = '') -> None:
    """Prints one line as it is."""
    self.terminal.print(Text(self._wrap(text), style=style))

  def _wrap(self, text: str) -> str:
    """Breaks a line that is too long for the terminal, between words."""
    if not self.live or len(text) <= self.terminal.width:
      return text
    lines = (
      break_words(line, self.terminal.width, subsequent_indent='  ')
      for line in text.split('\n')
    )
    return '\n'.join('\n'.join(parts) for parts in lines)

  def fact(self, label: str, value: str) -> None:
    """Prints a fact of the run: `label`, then `value`, in two columns."""
    line = Text().append(f'  {label:<13} ', style='dim').append(value)
    if not self.live or line.cell_len <= self.terminal.width:
      self.terminal.print(line)
      return
    # A long command or path stands on a line of its own, so that it can be copied as it
    # is; what else is long is broken between words.
    is_command = ' -m ' in value
    if is_command or ' ' not in value:
      value = break_command(value, self.terminal.width - 4) if is_command else value
      self.terminal.print(Text(f'  {label}', style='dim'))
      self.terminal.print(Text(f'    {value}'))
      return
    lines = break_words(value, max(20, self.terminal.width - 16))
    line = Text().append(f'  {label:<13} ', style='dim')
    self.terminal.print(line.append(f'\n{" " * 16}'.join(lines)))

  def warn(self, text: str) -> None:
    """Prints a warning."""
    self.terminal.print(Text(self._wrap(f'warning: {text}'), style='yellow'))

  @contextlib.contextmanager
  def listening(self) -> Iterator[None]:
    """Shows what the project's own packages log, while entered."""
    loggers = [logging.getLogger(name) for name in OWN]
    before = [(log.handlers, log.level, log.propagate) for log in loggers]
    for log in loggers:
      log.handlers, log.propagate = [_Handler(self)], False
      log.setLevel(logging.INFO)
    try:
      yield
    finally:
      for log, (handlers, level, propagate) in zip(loggers, before, strict=True):
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)

  def set_level(self, level: str) -> None:
    """Shows only messages of a level or above, until `listening` is left.

    Args:
      level: 'debug', 'info', 'warning' or 'error'.
    """
    for name in OWN:
      logging.getLogger(name).setLevel(level.upper())

  def start_bar(self, name: str, total: int | None, done: int) -> tuple[Progress, Any]:
    """Starts a progress bar; returns it and its task, with a field `status`."""
    progress = Progress(
      TextColumn('[bold]{task.description}'),
      BarColumn(bar_width=40, complete_style='cyan', finished_style='green'),
      MofNCompleteColumn(),
      TextColumn('[dim]{task.fields[status]}'),
      console=self.terminal,
      transient=True,
      refresh_per_second=4,
    )
    task = progress.add_task(name, total=total, completed=done, status='')
    progress.start()
    return progress, task

  def phase(self, name: str, total: int | None, start: int = 0) -> None:
    """Announces a phase and starts its progress bar."""
    self.restore()
    self._name, self._total = name, total
    self._clock, self._printed = Clock(start), 0.0
    if start and total:
      self.say(f'{name}: resumes at step {start} of {total}')
    elif total:
      self.say(f'{name}: {total} steps')
    else:
      self.say(name)
    if self.live:
      self._progress, self._task = self.start_bar(name, total, start)

  def write(self, step: int, metrics: Metrics) -> None:
    """Prints the metrics of a step and moves the progress bar."""
    evals = {k: v for k, v in metrics.items() if k.startswith('eval/')}
    trained = step < (self._total or step + 1) and is_trained(metrics)
    if trained:
      self._clock.tick(step + 1)
    pace = self._clock.pace(self._total)
    if self._progress:
      self._progress.update(self._task, completed=self._clock.done, status=pace)
    if trained and not self._skip(step):
      left = '' if self.live else self._clock.left(self._total)
      self.terminal.print(self._line(step, metrics, left))
    for name, value in evals.items():
      if name.endswith('/mean'):
        tag = name.removeprefix('eval/').removesuffix('/mean')
        shown = 'not a number' if value is None else f'{value:.3f}'
        mark = f'  evaluation after {step} steps of {self._name}  {tag}  '
        text = Text(mark, style='cyan').append(shown, style='bold')
        self.terminal.print(text)

  def _skip(self, step: int) -> bool:
    """Returns whether a step is not printed, as in a long phase of quick steps."""
    now = time.monotonic()
    total = self._total or 0
    if total > 100 and now - self._printed < FAST and step not in (0, total - 1):
      return True
    self._printed = now
    return False

  def _line(self, step: int, metrics: Metrics, pace: str) -> Text:
    width = len(str(self._total or 0))
    of = f'/{self._total}' if self._total else ''
    line = Text().append(f'{self._name} {step + 1:>{width}}{of}', style='bold')
    room = self.terminal.width if self.live else 10**6
    for name, (label, form) in COLUMNS.items():
      if name not in metrics:
        continue
      number = metrics[name]
      value = 'nan' if number is None else form.format(number)
      if line.cell_len + len(f'  {label} {value}') > room:
        break
      line.append(f'  {label} ', style='dim')
      line.append(value, style='red' if number is None else '')
    if pace:
      line.append(f'  {pace}', style='dim')
    return line

  def closing(self, title: str, lines: Mapping[str, Any]) -> None:
    """Prints the last lines: a title and where to look."""
    self.restore()
    self.say()
    self.say(title, style='bold')
    for label, value in lines.items():
      self.fact(label, str(value))

  def restore(self) -> None:
    """Removes the bar, and restores the terminal's cursor."""
    if self._progress:
      self._progress.stop()
      self._progress = None

  def close(self, status: str) -> None:
    """Removes the progress bar."""
    self.restore()


class _Handler(logging.Handler):
  def __init__(self, console: Console):
    super().__init__()
    self._console = console

  def emit(self, record: logging.LogRecord) -> None:
    if record.levelno >= logging.WARNING:
      self._console.warn(record.getMessage())
    else:
      self._console.say(record.getMessage(), style='dim')


class Clock:
  """Estimates the rate and the time left from the times of the last steps."""

  def __init__(self, start: int = 0, window: int = 20):
    self.done = start
    self._times = [(time.monotonic(), start)]
    self._window = window

  def tick(self, done: int) -> None:
    """Notes that so many steps are over."""
    self.done = max(done, self.done)
    self._times = [*self._times[-self._window :], (time.monotonic(), self.done)]

  def pace(self, total: int | None) -> str:
    """Returns '0.82 s/step, 0:41 left', or '' before anything is known."""
    each = self._each()
    if each is None:
      return ''
    rate = f'{each:.2f} s/step' if each >= 0.1 else f'{1 / each:.0f} steps/s'
    return ', '.join(filter(None, [rate, self.left(total)]))

  def left(self, total: int | None) -> str:
    """Returns '0:41 left', or '' before anything is known."""
    each = self._each()
    if each is None or not total:
      return ''
    return f'{format_duration(each * (total - self.done))} left'

  def _each(self) -> float | None:
    """Returns the seconds of a step; None before anything is known."""
    # The first steps compile: once there are others, they are left out.
    times = self._times[2:] if len(self._times) > 4 else self._times[1:]
    if len(times) < 2:
      return None
    (then, first), (now, last) = times[0], times[-1]
    return (now - then) / (last - first) if last > first and now > then else None


def break_command(command: str, width: int) -> str:
  """Breaks a command of the shell into lines that can be pasted together.

  Args:
    command: The command, on one line.
    width: Cells of a line. An argument that is longer stays whole.
  """
  # Only at spaces that the shell takes as such: not inside quotes.
  words = [word for word in QUOTED_WORDS.findall(command) if word]
  lines = [words[0]]
  for word in words[1:]:
    if len(lines[-1]) + len(word) + 9 > width:
      lines.append(word)
    else:
      lines[-1] += f' {word}'
  return ' \\\n      '.join(lines)


def format_duration(seconds: float) -> str:
  """Formats seconds: 75 → '1:15'; 4000 → '1:06:40'."""
  whole = max(0, round(seconds))
  hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
  return f'{hours}:{minutes:02}:{rest:02}' if hours else f'{minutes}:{rest:02}'
