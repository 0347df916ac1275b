"""From a played episode to training rows.

Each formulation takes the rollout cache, its tag, and `room`, the tokens that a row may
have, 0 for any number.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl.data.collate import ROUTED, SEGMENTS
from jaxrl.rollout import routing
from jaxrl.rollout.episode import RolloutCache, Turn
from jaxrl.types import Trajectory


def trajectory(cache: RolloutCache, tag: str = '', room: int = 0) -> list[Trajectory]:
  """One row for the episode; each turn's reward on its last action token."""
  return [_row(cache, tag, cache.turns, len(cache.tokens), 0)]


def steps(cache: RolloutCache, tag: str = '', room: int = 0) -> list[Trajectory]:
  """One row per turn: its history as prompt, its reply as the only actions.

  extras['state_hash'] names what the model was shown. An episode without a turn is
  one row without actions.
  """
  rows = []
  for i, turn in enumerate(cache.turns):
    row = _row(cache, tag, [turn], turn.stop, i)
    row.extras['state_hash'] = turn.state_hash
    rows.append(row)
  return rows or trajectory(cache, tag)


def concatenated(cache: RolloutCache, tag: str = '', room: int = 0) -> list[Trajectory]:
  """The rows of `steps` laid end to end, as many in a row as there is room for.

  extras['segments'] holds the number of tokens of each, if several: no token sees
  another segment's, and positions begin anew, so what is learned is what separate rows
  teach. To whatever looks at whole rows the turns of a row are one, as in `trajectory`.
  A row's `step` is its first turn's.
  """
  rows: list[list[Trajectory]] = []
  for row in steps(cache, tag):
    taken = sum(len(one.tokens) for one in rows[-1]) if rows else 0
    if rows and (not room or taken + len(row.tokens) <= room):
      rows[-1].append(row)
    else:
      rows.append([row])
  return [_joined(parts) for parts in rows]


def _joined(parts: list[Trajectory]) -> Trajectory:
  whole = {
    name: np.concatenate([getattr(part, name) for part in parts])
    for name in ('tokens', 'action_mask', 'rollout_logprobs', 'rewards')
  }
  versions = np.concatenate([part.weights_version for part in parts])
  extras = {k: v for k, v in parts[0].extras.items() if k != 'state_hash'}
  if len(parts) > 1:
    extras[SEGMENTS] = [len(part.tokens) for part in parts]
  if ROUTED in extras:
    extras[ROUTED] = np.concatenate([part.extras[ROUTED] for part in parts])
  return dataclasses.replace(parts[0], **whole, weights_version=versions, extras=extras)


FORMULATIONS: dict[str, Callable[..., list[Trajectory]]] = {
  'trajectory': trajectory,
  'step': steps,
  'concatenated': concatenated,
}


def _row(
  cache: RolloutCache, tag: str, turns: list[Turn], length: int, step: int
) -> Trajectory:
  mask = np.zeros(length, bool)
  rewards = np.zeros(length, np.float32)
  for turn in turns:
    mask[turn.start : turn.stop] = True
    rewards[turn.stop - 1] += turn.reward
  lease, extras = cache.lease, dict(cache.extras)
  if ROUTED in extras:
    extras[ROUTED] = routing.fitted(extras[ROUTED], length)
  return Trajectory(
    tokens=np.array(cache.tokens[:length], np.int32),
    action_mask=mask,
    rollout_logprobs=np.where(mask, np.array(cache.logprobs[:length], np.float32), 0),
    rewards=rewards,
    weights_version=np.where(mask, np.array(cache.versions[:length], np.int32), -1),
    group_id=lease.group_id,
    episode_id=lease.episode_id,
    member=lease.member,
    step=step,
    tag=tag,
    episode_seed=cache.seed,
    stop_reason=cache.stop_reason,
    is_greedy=lease.greedy,
    messages=list(cache.messages),
    metrics=dict(cache.metrics),
    columns={**_task(cache), **cache.columns},
    extras=extras,
  )


def _task(cache: RolloutCache) -> dict[str, int]:
  """The row of the data set that was played, for dumps; none for a bare seed."""
  index = cache.task.index if cache.task else None
  return {} if index is None else {'task_idx': index}
