"""Row formats turn a played episode into training rows.

Each format is a function `(cache, tag, max_tokens) -> rows`; `ROW_FORMATS` names them.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl.rollout.engine.resumable_generation import pad_or_trim_experts
from jaxrl.rollout.episodes.rollout_cache import RolloutCache, Turn
from jaxrl.training.batching.batch_builder import (
  ROUTED_EXPERTS_KEY,
  SEGMENT_LENGTHS_KEY,
  STEP_ENDS_KEY,
)
from jaxrl.types import Trajectory


def trajectory_rows(
  cache: RolloutCache, tag: str = '', max_tokens: int = 0
) -> list[Trajectory]:
  """Makes one row of the episode, with each turn's reward on its last token.

  Args:
    cache: The played episode.
    tag: The environment's tag.
    max_tokens: Unused.

  Returns:
    One row.
  """
  return [_make_row(cache, tag, cache.own_turns, len(cache.tokens), 0)]


def turn_rows(
  cache: RolloutCache, tag: str = '', max_tokens: int = 0
) -> list[Trajectory]:
  """Makes one row per turn: the history is its prompt, the response its only action.

  `extras['state_hash']` identifies what the model was shown.

  Args:
    cache: The played episode.
    tag: The environment's tag.
    max_tokens: Unused.

  Returns:
    One row per turn. An episode without a turn gives one row without actions.
  """
  rows = []
  for i, turn in enumerate(cache.turns):
    if turn.replayed:
      continue
    row = _make_row(cache, tag, [turn], turn.stop, i)
    row.extras['state_hash'] = turn.state_hash
    rows.append(row)
  return rows or trajectory_rows(cache, tag)


def packed_turn_rows(
  cache: RolloutCache, tag: str = '', max_tokens: int = 0
) -> list[Trajectory]:
  """Lays the rows of `turn_rows` end to end, as many in a row as fit.

  `extras['segments']` holds the number of tokens of each segment, if there are several.
  No token sees another segment and positions start anew, so a packed row teaches what
  separate rows teach. Whatever looks at whole rows sees the turns of a row as one, as
  in `trajectory_rows`. A row's turn index is that of its first turn.

  Args:
    cache: The played episode.
    tag: The environment's tag.
    max_tokens: Tokens that a row may have; 0 for no limit.

  Returns:
    The packed rows.
  """
  packed: list[list[Trajectory]] = []
  for row in turn_rows(cache, tag):
    num_tokens = sum(len(segment.tokens) for segment in packed[-1]) if packed else 0
    fits = not max_tokens or num_tokens + len(row.tokens) <= max_tokens
    if packed and fits:
      packed[-1].append(row)
    else:
      packed.append([row])
  return [_concat_rows(segments) for segments in packed]


def _concat_rows(segments: list[Trajectory]) -> Trajectory:
  names = ('tokens', 'action_mask', 'rollout_logprobs', 'rewards', 'weights_version')
  arrays = {
    name: np.concatenate([getattr(segment, name) for segment in segments])
    for name in names
  }
  extras = {k: v for k, v in segments[0].extras.items() if k != 'state_hash'}
  if len(segments) > 1:
    extras[SEGMENT_LENGTHS_KEY] = [len(segment.tokens) for segment in segments]
  starts = np.cumsum([0, *(len(segment.tokens) for segment in segments)]).tolist()
  ends = [
    start + end
    for start, segment in zip(starts, segments, strict=False)
    for end in segment.extras.get(STEP_ENDS_KEY, ())
  ]
  if ends:
    extras[STEP_ENDS_KEY] = ends
  if ROUTED_EXPERTS_KEY in extras:
    extras[ROUTED_EXPERTS_KEY] = np.concatenate(
      [segment.extras[ROUTED_EXPERTS_KEY] for segment in segments]
    )
  images = [image for segment in segments for image in segment.images]
  return dataclasses.replace(segments[0], **arrays, extras=extras, images=images)


ROW_FORMATS: dict[str, Callable[..., list[Trajectory]]] = {
  'trajectory': trajectory_rows,
  'step': turn_rows,
  'concatenated': packed_turn_rows,
}


def _make_row(
  cache: RolloutCache, tag: str, turns: list[Turn], length: int, turn_index: int
) -> Trajectory:
  """Makes a row of the first `length` tokens, in which `turns` are the actions."""
  mask = np.zeros(length, bool)
  rewards = np.zeros(length, np.float32)
  for turn in turns:
    mask[turn.start : turn.stop] = True
    rewards[turn.stop - 1] += turn.reward
    for place, reward in turn.step_rewards.items():
      rewards[place] += reward
  lease, extras = cache.lease, dict(cache.extras)
  if ends := [place for turn in turns for place in turn.step_rewards]:
    extras[STEP_ENDS_KEY] = sorted(ends)
  if ROUTED_EXPERTS_KEY in extras:
    extras[ROUTED_EXPERTS_KEY] = pad_or_trim_experts(extras[ROUTED_EXPERTS_KEY], length)
  return Trajectory(
    tokens=np.array(cache.tokens[:length], np.int32),
    action_mask=mask,
    rollout_logprobs=np.where(mask, np.array(cache.logprobs[:length], np.float32), 0),
    rewards=rewards,
    weights_version=np.where(mask, np.array(cache.versions[:length], np.int32), -1),
    env_group=lease.env_group,
    episode_id=lease.episode_id,
    sample_index=lease.sample_index,
    turn=turn_index,
    tag=tag,
    episode_seed=cache.seed,
    stop_reason=cache.stop_reason,
    is_greedy=lease.greedy,
    messages=list(cache.messages),
    metrics=dict(cache.metrics),
    columns={**_task_columns(cache), **cache.columns},
    extras=extras,
    images=[image for end, image in cache.images if end <= length],
  )


def _task_columns(cache: RolloutCache) -> dict[str, int]:
  """Returns the index of the data set's row, for dumps; nothing for a bare seed."""
  index = cache.task.index if cache.task else None
  return {} if index is None else {'task_idx': index}
