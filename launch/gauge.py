"""How far playing has come: episodes, rate, score and time left."""

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from rich.progress import Progress

from launch.console import Console, span

if TYPE_CHECKING:
  from jaxrl.types import Group

EVERY = 10.0  # seconds between lines where there is no terminal
WINDOW = 256  # groups that the rate is taken over


class Gauge:
  """Shows on `console` how many of `total` episodes are played, and how well.

  start: those that were played before; the score is of the others.
  """

  def __init__(
    self, console: Console, name: str, total: int, start: int = 0, every: float = EVERY
  ):
    self._console, self._name, self._every = console, name, every
    self._total, self._start, self._done = total, start, start
    self._score, self._reasons = 0.0, Counter[str]()
    self._times = deque([(time.monotonic(), start)], maxlen=WINDOW)
    self._printed = time.monotonic()
    again = f', {start} of them played before' if start else ''
    console.say(f'{name}: {total} episodes{again}')
    self._bar: Progress | None = None
    if console.live:
      self._bar = console.bar('said')
      self._task = self._bar.add_task(name, total=total, completed=start, said='')
      self._bar.start()

  def group(self, group: 'Group') -> None:
    """A group of episodes was played."""
    last = {row.member: row for row in group}
    self._done += len(last)
    self._score += sum(row.score for row in group)
    self._reasons.update(row.stop_reason for row in last.values() if row.failed)
    now = time.monotonic()
    self._times.append((now, self._done))
    if self._bar:
      self._bar.update(self._task, completed=self._done, said=self._said())
    elif now - self._printed >= self._every or self._done == self._total:
      self._printed = now
      width = len(str(self._total))
      of = f'{self._done:>{width}}/{self._total}'
      self._console.say(f'{self._name} {of}  {self._said()}')

  def _said(self) -> str:
    (then, first), (now, last) = self._times[0], self._times[-1]
    parts = [f'score {self.score:.3f}'] if self._done > self._start else []
    if failed := self._reasons.total():
      parts.append(f'failed {failed}')
    if last > first and now > then:
      rate = (last - first) / (now - then)
      each = f'{rate:.1f} episodes/s' if rate >= 1 else f'{1 / rate:.1f} s/episode'
      parts += [each, f'{span((self._total - self._done) / rate)} left']
    return '  '.join(parts)

  @property
  def score(self) -> float:
    """The mean score of the episodes played since the start; 0 before any."""
    return self._score / max(self._done - self._start, 1)

  def summary(self) -> dict[str, str]:
    """Last lines for the user."""
    played = self._done - self._start
    lines = {'episodes': f'{self._done} of {self._total}, {played} of them just now'}
    if played:
      lines['score'] = f'{self.score:.4f}, of those just played'
    if self._reasons:
      counts = (f'{count} × {reason}' for reason, count in self._reasons.items())
      lines['failed'] = ', '.join(counts)
    return lines

  def close(self) -> None:
    """Takes the bar down."""
    if self._bar:
      self._bar.stop()
      self._bar = None
