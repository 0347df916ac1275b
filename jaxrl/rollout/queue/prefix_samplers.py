"""Prefix samplers choose the turns of earlier episodes that a task's groups go on from.

A prefix sampler is told how each group of a known task fared, and is asked where the
next group of that task begins. All samples of a group continue the same prefix.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from jaxrl.component_table import ComponentTable
from jaxrl.options import AT_LEAST_ONE, NOT_NEGATIVE, SHARE, Range, option_ranges
from jaxrl.types import StateDict


class PlayedTurns(NamedTuple):
  """What the model did in an episode.

  Attributes:
    seed: What the environment was reset with.
    replies: The token ids of each reply, those that were replayed first.
    states: A hash of what the model was shown before each reply.
  """

  seed: int
  replies: list[list[int]]
  states: list[int]


class Prefix(NamedTuple):
  """The first turns of an episode, for others to go on from.

  Attributes:
    key: The number of the task.
    kind: 'head_start' if the episode passed, 'handicap' if it failed.
    seed: What the environment is reset with.
    replies: The token ids of the replies to replay.
    states: A hash of what was shown before each of them, and after the last.
    num_turns: The turns of the whole episode.
  """

  key: int
  kind: str
  seed: int
  replies: list[list[int]]
  states: list[int]
  num_turns: int


class GroupOutcome(NamedTuple):
  """How a group fared.

  Attributes:
    key: The number of the task.
    prefix: What its samples continued; None if they played from the start.
    num_samples: The samples that count; 0 if the group could not be played.
    num_passed: How many of them passed.
    success: A sample that passed, if any.
    failure: A sample that failed, if any.
  """

  key: int
  prefix: Prefix | None
  num_samples: int
  num_passed: int
  success: PlayedTurns | None = None
  failure: PlayedTurns | None = None


class PrefixSampler:
  """What a prefix sampler is: derive your own from it, or write a class like it.

  What it decides may depend on what it was told and on nothing else, so that a run is
  the same however long each episode takes.

  Attributes:
    pass_score: A sample passes from this accuracy on: the environment's metric, or the
      return where the environment reports none.
  """

  pass_score: float = 1.0

  def observe(self, outcome: GroupOutcome) -> None:
    """Learns how a group fared; called in the order of groups, between steps.

    Args:
      outcome: How it fared.
    """
    raise NotImplementedError

  def choose(self, key: int) -> Prefix | None:
    """Returns where the next group of a task begins; None is the task's start.

    Args:
      key: The number of the task.
    """
    raise NotImplementedError

  def state_dict(self) -> StateDict:
    """Returns what a checkpoint keeps, as JSON."""
    raise NotImplementedError

  def load_state_dict(self, state: StateDict) -> None:
    """Restores what `state_dict` returned, perhaps by way of JSON.

    Args:
      state: The state.
    """
    raise NotImplementedError


@dataclasses.dataclass
class TaskRecord:
  """What is known of a task.

  Attributes:
    kind: What its next group is given: '', 'head_start' or 'handicap'.
    turns_left: How many turns of the source the next group does not replay.
    success: The newest episode that passed, if any.
    failure: The newest one that failed, if any.
  """

  kind: str = ''
  turns_left: float = 0.0
  success: PlayedTurns | None = None
  failure: PlayedTurns | None = None

  @property
  def source(self) -> PlayedTurns | None:
    """Returns the episode whose turns are replayed, if any are."""
    return {'head_start': self.success, 'handicap': self.failure}.get(self.kind)


@option_ranges(
  ascending=('low', 'aim', 'high'),
  aim=Range(0.05, 0.95),
  low=SHARE,
  high=SHARE,
  max_tasks=AT_LEAST_ONE,
)
class PrefixSampling(PrefixSampler):
  """Replays the policy's own turns so that about half of a group pass.

  Prefix Sampling (arXiv 2605.05112): where most samples of a task fail, its next group
  goes on from the first turns of one that passed, a head start; where most pass, from
  those of one that failed, a handicap. Pass rates near a half have the most of a binary
  reward's information.

  How many turns are replayed is ours; `PrefixRatios` has the authors' rule. A group
  that has r turns of an episode of its kind before it ends as that episode did at a
  rate q; if each turn kept it on that way equally often, r' = r · log t / log q turns
  would make the rate t, the aim. q is (k + ½) / (n + 1) for k of n samples. The number
  is corrected after each group whose pass rate is outside [low, high], and the task is
  played from its start again once r' reaches the length of the episode.
  """

  def __init__(
    self,
    *,
    aim: float = 0.5,
    low: float = 0.25,
    high: float = 0.75,
    handicaps: bool = True,
    pass_score: float = 1.0,
    max_tasks: int = 4096,
  ):
    """Initializes the sampler.

    Args:
      aim: Pass rate that prefixes aim at.
      low: A task with a lower pass rate gets a head start.
      high: A task with a higher pass rate gets a handicap.
      handicaps: Whether there are handicaps at all.
      pass_score: A sample passes from this accuracy on.
      max_tasks: Tasks that are remembered; the one not met for longest is forgotten.
    """
    self.pass_score = pass_score
    self._aim = aim
    self._low = low
    self._high = high
    self._handicaps = handicaps
    self._max_tasks = max_tasks
    self._records: dict[int, TaskRecord] = {}  # the task met last comes last

  def observe(self, outcome: GroupOutcome) -> None:
    """Updates the record of the group's task; forgets one that cannot be replayed.

    Args:
      outcome: How the group fared.
    """
    record = self._records.pop(outcome.key, None) or TaskRecord()
    if not outcome.num_samples:
      return
    self._records[outcome.key] = record
    if len(self._records) > self._max_tasks:
      del self._records[next(iter(self._records))]
    record.success = outcome.success or record.success
    record.failure = outcome.failure or record.failure
    kind, length = self._needed(outcome, record)
    if kind:
      left = length * self._correction(kind, outcome)
      record.kind, record.turns_left = kind, left
    source = record.source
    if source is None or round(record.turns_left) >= len(source.replies):
      record.kind = ''

  def _needed(self, outcome: GroupOutcome, record: TaskRecord) -> tuple[str, float]:
    """Returns what the group shows to be needed: a kind of prefix, and whose turns.

    Returns:
      The kind, and the turns after the prefix that the group had: '' if nothing has to
      change.
    """
    rate = outcome.num_passed / outcome.num_samples
    prefix = outcome.prefix
    if self._low <= rate <= self._high:
      if prefix is None:
        record.kind = ''
      return '', 0
    if prefix is not None:  # make it longer or shorter
      return prefix.kind, prefix.num_turns - len(prefix.replies)
    record.kind = ''
    if rate < self._low and record.success is not None:
      return 'head_start', len(record.success.replies)
    if rate > self._high and self._handicaps and record.failure is not None:
      return 'handicap', len(record.failure.replies)
    return '', 0

  def _correction(self, kind: str, outcome: GroupOutcome) -> float:
    """Returns the factor of the turns after the prefix that leads to the aim."""
    count, aim = outcome.num_passed, self._aim
    if kind == 'handicap':
      count, aim = outcome.num_samples - count, 1 - aim
    return math.log(aim) / math.log((count + 0.5) / (outcome.num_samples + 1))

  def choose(self, key: int) -> Prefix | None:
    """Returns the prefix of the next group of a task, None for its start.

    Args:
      key: The number of the task.
    """
    record = self._records.get(key)
    source = None if record is None else record.source
    if record is None or source is None:
      return None
    length = len(source.replies)
    count = length - max(1, round(record.turns_left))
    if count < 1:
      return None
    replies, states = source.replies[:count], source.states[: count + 1]
    return Prefix(key, record.kind, source.seed, replies, states, length)

  def state_dict(self) -> StateDict:
    """Returns the records as JSON."""
    records = [
      [key, r.kind, r.turns_left, r.success, r.failure]
      for key, r in self._records.items()
    ]
    return {'records': records}

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the records.

    Args:
      state: A value that `state_dict` returned, perhaps by way of JSON.
    """
    self._records = {
      key: TaskRecord(kind, left, _turns(success), _turns(failure))
      for key, kind, left, success, failure in state['records']
    }


def _turns(values: Any) -> PlayedTurns | None:
  return None if values is None else PlayedTurns(*values)


@option_ranges(
  ascending=('low', 'high'),
  low=SHARE,
  high=SHARE,
  remaining_ratio=Range(0.05, 0.95),
  prefix_ratio=Range(0.05, 0.95),
  remaining_cap=NOT_NEGATIVE,
  prefix_cap=NOT_NEGATIVE,
  max_tasks=AT_LEAST_ONE,
)
class PrefixRatios(PrefixSampler):
  """Replays a share of a group's turns once, as the authors of Prefix Sampling do.

  Where few samples of a group pass, but some do, the task's next group goes on from the
  first turns of one that passed, and plays `remaining_ratio` of its turns itself. Where
  nearly all pass, it goes on from the first `prefix_ratio` of the turns of one that
  failed. The group after that plays from the start. Groups that fail or pass as a whole
  change nothing.

  For each of both kinds, a moving average of the pass rates after prefixes is kept,
  with a weight of 0.05 for each group. Above 0.53 its ratio grows by 0.05, and below
  0.47 it shrinks by as much; then it rests for five groups. The authors, whose text of
  March 2026 has the rule, count the steps of training instead of groups.
  """

  TARGET, DEADZONE, RATE, MOVE, REST = 0.5, 0.03, 0.05, 0.05, 5

  def __init__(
    self,
    *,
    low: float = 0.3,
    high: float = 0.7,
    remaining_ratio: float = 0.25,
    prefix_ratio: float = 0.25,
    remaining_cap: int = 0,
    prefix_cap: int = 0,
    adaptive: bool = True,
    pass_score: float = 1.0,
    max_tasks: int = 4096,
  ):
    """Initializes the sampler.

    Args:
      low: A task with a lower pass rate gets a head start.
      high: A task with a higher pass rate gets a handicap.
      remaining_ratio: Share of the turns that a head start leaves to play.
      prefix_ratio: Share of the turns that a handicap replays.
      remaining_cap: The most turns that a head start leaves; 0 for no bound.
      prefix_cap: The most turns that a handicap replays; 0 for no bound.
      adaptive: Whether the ratios follow the pass rates after prefixes.
      pass_score: A sample passes from this accuracy on.
      max_tasks: Prefixes that are kept; the oldest one is forgotten.
    """
    self.pass_score = pass_score
    self._low, self._high = low, high
    self._caps = {'head_start': remaining_cap, 'handicap': prefix_cap}
    self._adaptive, self._max_tasks = adaptive, max_tasks
    self._ratios = {'head_start': remaining_ratio, 'handicap': prefix_ratio}
    self._rates = dict.fromkeys(self._ratios, self.TARGET)
    self._rests = dict.fromkeys(self._ratios, 0)
    self._next: dict[int, Prefix] = {}  # the newest one comes last

  def observe(self, outcome: GroupOutcome) -> None:
    """Cuts the next prefix of the group's task, or adapts the ratio of its own.

    Args:
      outcome: How the group fared.
    """
    self._next.pop(outcome.key, None)
    if not outcome.num_samples:
      return
    rate = outcome.num_passed / outcome.num_samples
    if outcome.prefix is not None:
      self._adapt(outcome.prefix.kind, rate)
      return
    prefix = None
    if 0 < rate < self._low and outcome.success is not None:
      prefix = self._cut(outcome.key, 'head_start', outcome.success)
    elif self._high < rate < 1 and outcome.failure is not None:
      prefix = self._cut(outcome.key, 'handicap', outcome.failure)
    if prefix is not None:
      self._next[outcome.key] = prefix
    if len(self._next) > self._max_tasks:
      del self._next[next(iter(self._next))]

  def _cut(self, key: int, kind: str, source: PlayedTurns) -> Prefix | None:
    """Returns the first turns of an episode; None if these are none."""
    length, cap = len(source.replies), self._caps[kind]
    count = int(length * self._ratios[kind])
    count = min(count, cap) if cap else count
    if kind == 'head_start':
      count = length - max(1, count)
    if count < 1:
      return None
    replies, states = source.replies[:count], source.states[: count + 1]
    return Prefix(key, kind, source.seed, replies, states, length)

  def _adapt(self, kind: str, rate: float) -> None:
    self._rates[kind] += self.RATE * (rate - self._rates[kind])
    if self._rests[kind]:
      self._rests[kind] -= 1
    elif self._adaptive and abs(self._rates[kind] - self.TARGET) > self.DEADZONE:
      # More turns to play are harder, and so are more turns of one that failed.
      move = math.copysign(self.MOVE, self._rates[kind] - self.TARGET)
      ratio = round(self._ratios[kind] + move, 2)
      self._ratios[kind] = min(max(ratio, 0.05), 0.95)
      self._rests[kind] = self.REST

  def choose(self, key: int) -> Prefix | None:
    """Returns the prefix of the next group of a task, None for its start.

    Args:
      key: The number of the task.
    """
    return self._next.get(key)

  def state_dict(self) -> StateDict:
    """Returns prefixes, ratios, rates and rests as JSON."""
    control = {
      kind: [self._ratios[kind], self._rates[kind], self._rests[kind]]
      for kind in self._ratios
    }
    return {'control': control, 'next': list(self._next.values())}

  def load_state_dict(self, state: StateDict) -> None:
    """Restores them.

    Args:
      state: A value that `state_dict` returned, perhaps by way of JSON.
    """
    for kind, (ratio, rate, rest) in state['control'].items():
      self._ratios[kind], self._rates[kind], self._rests[kind] = ratio, rate, rest
    prefixes = [Prefix(*values) for values in state['next']]
    self._next = {prefix.key: prefix for prefix in prefixes}


PREFIX_SAMPLERS: ComponentTable[type] = ComponentTable(
  'prefix sampler',
  'env.TAG.prefixes',
  {'prefix_ratios': PrefixRatios, 'prefix_sampling': PrefixSampling},
  base=PrefixSampler,
)
