"""From a played episode to training rows."""

from collections.abc import Callable

import numpy as np

from jaxrl.rollout.episode import RolloutCache, Turn
from jaxrl.types import Trajectory


def trajectory(cache: RolloutCache, tag: str = '') -> list[Trajectory]:
  """One row for the episode; each turn's reward on its last action token."""
  return [_row(cache, tag, cache.turns, len(cache.tokens), 0)]


def steps(cache: RolloutCache, tag: str = '') -> list[Trajectory]:
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


FORMULATIONS: dict[str, Callable[..., list[Trajectory]]] = {
  'trajectory': trajectory,
  'step': steps,
}


def _row(
  cache: RolloutCache, tag: str, turns: list[Turn], length: int, step: int
) -> Trajectory:
  mask = np.zeros(length, bool)
  rewards = np.zeros(length, np.float32)
  for turn in turns:
    mask[turn.start : turn.stop] = True
    rewards[turn.stop - 1] += turn.reward
  lease = cache.lease
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
    messages=list(cache.messages),
    metrics=dict(cache.metrics),
    columns=dict(cache.columns),
    extras=dict(cache.extras),
  )
