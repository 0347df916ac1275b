"""PrefixGroupQueue lets the groups of a task go on from turns of earlier episodes.

It tells a prefix sampler how groups fared, once the trainer has collected a step and in
the order of their numbers, and asks it where the groups of the next step begin. So what
is replayed depends on no more than what the groups themselves depend on.
"""

import math
from typing import Any

from jaxrl.component_table import Component
from jaxrl.group_stats import rows_by_sample, sample_accuracies, without_greedy
from jaxrl.rollout.queue.group_queue import GroupQueue
from jaxrl.rollout.queue.group_state import GroupResults, GroupState
from jaxrl.rollout.queue.prefix_samplers import (
  PREFIX_SAMPLERS,
  GroupOutcome,
  PlayedTurns,
  Prefix,
  PrefixSampler,
)
from jaxrl.rollout.replay_env_manager import PLAYED_KEY
from jaxrl.types import Group, StateDict

SHARE = 'prefix/share'  # a row's metric: whether its episode continued a prefix


class PrefixGroupQueue(GroupQueue):
  """A queue whose groups may begin with turns of an earlier episode of their task."""

  def __init__(self, *args: Any, prefixes: Component, **options: Any):
    """Creates an empty queue.

    Args:
      *args: As for `GroupQueue`.
      prefixes: The prefix sampler, one of `PREFIX_SAMPLERS` or a user's own.
      **options: As for `GroupQueue`.

    Raises:
      ValueError: If an option is out of range, or the prefix sampler cannot be made.
    """
    super().__init__(*args, **options)
    self._sampler: PrefixSampler = PREFIX_SAMPLERS.build(prefixes)
    # Of groups in play, or not taken yet, by number: what the sampler has chosen.
    self._chosen: dict[int, Prefix | None] = {}
    self._outcomes: dict[int, GroupOutcome] = {}  # that the sampler does not know yet
    self._results = _StartResults()

  # ---- called by environment workers

  def get_prefix(self, group_id: int, episode_id: int, key: int) -> Prefix | None:
    """Returns what a group continues; the same for all of its samples.

    Args:
      group_id: The env group.
      episode_id: The episode that was leased.
      key: The number of the task: a row's index or a seed.

    Returns:
      The prefix, or None if the group plays from the start.
    """
    number = group_id + episode_id
    if number not in self._chosen:
      self._chosen[number] = self._sampler.choose(key)
    return self._chosen[number]

  # ---- called by the trainer

  async def advance_step(self, step: int) -> None:
    """Tells the sampler how the last groups fared, then begins a step.

    Args:
      step: The step that the trainer now collects.
    """
    for number in sorted(self._outcomes):
      self._sampler.observe(self._outcomes[number])
    self._outcomes.clear()
    await super().advance_step(step)
    self._chosen = {n: p for n, p in self._chosen.items() if self._is_pending(n)}

  def _is_pending(self, number: int) -> bool:
    return number in self._active or number in self._ready

  def state_dict(self) -> StateDict:
    """Returns the state as JSON, with all that decides which prefixes come next."""
    return {
      **super().state_dict(),
      'prefixes': {
        'sampler': self._sampler.state_dict(),
        'chosen': [
          [n, p] for n, p in sorted(self._chosen.items()) if self._is_pending(n)
        ],
        # Groups that were not taken are played again.
        'outcomes': [
          [n, o] for n, o in sorted(self._outcomes.items()) if not self._is_pending(n)
        ],
      },
    }

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the state; a checkpoint of a run without prefixes has none of theirs.

    Args:
      state: A value that `state_dict` returned, perhaps by way of JSON.

    Raises:
      ValueError: As for `GroupQueue`.
    """
    super().load_state_dict(state)
    self._chosen, self._outcomes = {}, {}
    known = state.get('prefixes')
    if known is None:
      return
    self._sampler.load_state_dict(known['sampler'])
    self._chosen = {number: _prefix(values) for number, values in known['chosen']}
    self._outcomes = {number: _outcome(values) for number, values in known['outcomes']}

  # ---- the life of a group

  def _finalize_if_done(self, group: GroupState) -> None:
    super()._finalize_if_done(group)
    prefix = self._chosen.get(group.number)
    if prefix is None or self._is_pending(group.number):
      return
    # Dropped for failures: perhaps because its prefix cannot be replayed any more.
    unplayed = GroupOutcome(prefix.key, prefix, 0, 0)
    self._outcomes.setdefault(group.number, unplayed)

  def _process_group(self, group: GroupState, rows: Group) -> None:
    self._observe(group.number, rows)
    super()._process_group(group, rows)

  def _observe(self, number: int, rows: Group) -> None:
    """Notes how a whole group fared, and gives its rows the metrics of prefixes."""
    prefix = self._chosen.get(number)
    samples = rows_by_sample(without_greedy(rows)).values()
    played = [group[-1].extras.get(PLAYED_KEY) for group in samples]
    for row in rows:
      row.extras.pop(PLAYED_KEY, None)
    passed = [bool(a >= self._sampler.pass_score) for a in sample_accuracies(rows)]
    for sample, has_passed in zip(samples, passed, strict=True):
      sample[-1].metrics.update(_metrics(prefix, has_passed))
    episodes: dict[bool, PlayedTurns] = {}
    for values, has_passed in zip(played, passed, strict=True):
      if values is not None and values['replies'] and has_passed not in episodes:
        turns = values['seed'], values['replies'], values['states']
        episodes[has_passed] = PlayedTurns(*turns)
    key = next((values['key'] for values in played if values is not None), None)
    if key is not None:
      self._outcomes[number] = GroupOutcome(
        key,
        prefix,
        len(passed),
        sum(passed),
        episodes.get(True),
        episodes.get(False),
      )


class _StartResults(GroupResults):
  """Collects the accuracies of groups that played from the start.

  A prefix makes a task easier or harder than it is for a curriculum.
  """

  def record(self, group: Group) -> None:
    """Adds the result of a group, unless it continued a prefix."""
    if not any(row.metrics.get(SHARE) for row in group):
      super().record(group)


def _metrics(prefix: Prefix | None, has_passed: bool) -> dict[str, float]:
  """Returns the metrics of a sample, which the learner averages where they are."""
  if prefix is None:
    return {SHARE: 0.0, 'prefix/start_pass_rate': float(has_passed)}
  return {
    SHARE: 1.0,
    'prefix/pass_rate': float(has_passed),
    'prefix/turns': float(len(prefix.replies)),
    'prefix/tokens': float(math.fsum(len(reply) for reply in prefix.replies)),
    'prefix/head_starts': float(prefix.kind == 'head_start'),
  }


def _prefix(values: Any) -> Prefix | None:
  return None if values is None else Prefix(*values)


def _outcome(values: Any) -> GroupOutcome:
  key, prefix, num_samples, num_passed, *episodes = values
  turns = [None if x is None else PlayedTurns(*x) for x in episodes]
  return GroupOutcome(key, _prefix(prefix), num_samples, num_passed, *turns)
