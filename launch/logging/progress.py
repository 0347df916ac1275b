"""Shows the progress of rollouts: episodes, rate, score and time left."""

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from rich.progress import Progress

from launch.logging.console import Console, format_duration

if TYPE_CHECKING:
  from jaxrl.types import Group

EVERY = 10.0  # seconds between lines where there is no terminal
WINDOW = 256  # groups that the rate is taken over


class RolloutProgress:
  """Shows on the console how many episodes are played, and how well."""

  def __init__(
    self, console: Console, name: str, total: int, start: int = 0, every: float = EVERY
  ):
    """Begins to show progress.

    Args:
      console: The console.
      name: What is shown before the numbers.
      total: Episodes in all.
      start: Episodes that were played before; the score is of the others.
      every: Seconds between lines where there is no terminal.
    """
    self._console = console
    self._name = name
    self._every = every
    self._total = total
    self._start = start
    self._done = start
    self._score = 0.0
    self._reasons = Counter[str]()
    self._times = deque([(time.monotonic(), start)], maxlen=WINDOW)
    self._printed = time.monotonic()
    again = f', {start} of them played before' if start else ''
    console.say(f'{name}: {total} episodes{again}')
    self._bar: Progress | None = None
    if console.live:
      self._bar, self._task = console.start_bar(name, total, start)

  def group(self, group: 'Group') -> None:
    """Notes that a group of episodes was played."""
    last = {row.sample_index: row for row in group}
    self._done += len(last)
    self._score += sum(row.score for row in group)
    self._reasons.update(row.stop_reason for row in last.values() if row.failed)
    now = time.monotonic()
    self._times.append((now, self._done))
    if self._bar:
      self._bar.update(self._task, completed=self._done, status=self._status())
    elif now - self._printed >= self._every or self._done == self._total:
      self._printed = now
      width = len(str(self._total))
      of = f'{self._done:>{width}}/{self._total}'
      self._console.say(f'{self._name} {of}  {self._status()}')

  def _status(self) -> str:
    (then, first), (now, last) = self._times[0], self._times[-1]
    parts = [f'score {self.score:.3f}'] if self._done > self._start else []
    if failed := self._reasons.total():
      parts.append(f'failed {failed}')
    if last > first and now > then:
      rate = (last - first) / (now - then)
      each = f'{rate:.1f} episodes/s' if rate >= 1 else f'{1 / rate:.1f} s/episode'
      parts += [each, f'{format_duration((self._total - self._done) / rate)} left']
    return '  '.join(parts)

  @property
  def score(self) -> float:
    """The mean score of the episodes played since the start; 0 before any."""
    return self._score / max(self._done - self._start, 1)

  def summary(self) -> dict[str, str]:
    """Returns the last lines for the user, by label."""
    played = self._done - self._start
    lines = {'episodes': f'{self._done} of {self._total}, {played} of them just now'}
    if played:
      lines['score'] = f'{self.score:.4f}, of those just played'
    if self._reasons:
      counts = (f'{count} × {reason}' for reason, count in self._reasons.items())
      lines['failed'] = ', '.join(counts)
    return lines

  def close(self) -> None:
    """Removes the bar."""
    if self._bar:
      self._bar.stop()
      self._bar = None
