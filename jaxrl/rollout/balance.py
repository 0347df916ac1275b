"""Which of several engines a request goes to: loads, and homes of groups."""

import collections
import time

from jaxrl.rollout.calls import Call

GROUPS = 16_384  # that are remembered, with the engine each was served by


class Balance:
  """What each of `count` engines serves, and which of them are to be left alone.

  slack: requests above the least loaded that an engine may serve and still be given
  another one of a group that it holds the prefix of.
  """

  def __init__(self, count: int, slack: int):
    self.serving: list[set[Call]] = [set() for _ in range(count)]
    self._slack = slack
    self._homes: collections.OrderedDict[str, int] = collections.OrderedDict()
    self._resting: dict[int, float] = {}  # engine → until when

  @property
  def busy(self) -> list[int]:
    return [i for i, calls in enumerate(self.serving) if calls]

  def choose(self, call: Call) -> int | None:
    """The engine for `call`, which it then serves; None while all are resting."""
    now = time.monotonic()
    resting = {i for i, until in self._resting.items() if until > now}
    loads = {i: len(c) for i, c in enumerate(self.serving) if i not in resting}
    if not loads:
      return None
    best = min(loads, key=lambda i: (loads[i], i))
    home = self._homes.pop(call.group, None)
    if home in loads and loads[home] <= loads[best] + self._slack:
      best = home
    self._homes[call.group] = best  # as the one used last
    if len(self._homes) > GROUPS:
      self._homes.popitem(last=False)
    self.serving[best].add(call)
    call.engine, call.attempt = best, call.attempt + 1
    return best

  def leave(self, engine: int, seconds: float) -> None:
    """Gives `engine` nothing for some time."""
    self._resting[engine] = time.monotonic() + seconds

  def welcome(self, engine: int) -> None:
    """A new engine in that place: ready, and without any prefix."""
    self._resting.pop(engine, None)
    for group in [group for group, home in self._homes.items() if home == engine]:
      del self._homes[group]

  def wait(self) -> float:
    """Seconds until the first engine has rested."""
    return max(min(self._resting.values(), default=0.0) - time.monotonic(), 0.0)
