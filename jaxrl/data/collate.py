"""From ragged trajectories to one rectangle."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.types import Batch, Group, Trajectory

ROUTED = 'routed_experts'  # in a row's extras: `[T, L, k]`, −1 where no one knows
SEGMENTS = 'segments'  # in a row's extras: tokens of each of the parts it is joined of


def pick_bucket(length: int, buckets: Sequence[int]) -> int:
  """The smallest bucket that holds `length`; raises ValueError if none does."""
  fitting = [bucket for bucket in buckets if bucket >= length]
  if not fitting:
    raise ValueError(
      f'a trajectory of {length} tokens is longer than the largest length bucket, '
      f'{max(buckets)}; add a larger bucket or lower the maximal length'
    )
  return min(fitting)


def collate(
  groups: Sequence[Group],
  buckets: Sequence[int],
  num_rows: int | None = None,
  *,
  multiple: int = 1,
  pad_id: int = 0,
) -> Batch:
  """Joins groups into a numpy `Batch` of B rows by T tokens, in the order given.

  T is the smallest of `buckets` that holds the longest row. B is `num_rows`, or the
  number of rows rounded up to `multiple`. task_ids count groups, run_ids episodes;
  padding rows have ids −1, no action and segment 0. Segments count a row's parts,
  from 1. `weights_version` is −1 where not an action. state_hash and routed_experts are
  there when any row has them in its extras; expert_mask, greedy_mask and loss_weights
  when any row is other than rows mostly are.
  Raises ValueError for no rows, too many, and one longer than every bucket or of
  segments that are not all of it.
  """
  rows = [row for group in groups for row in group]
  if not rows:
    raise ValueError('there is nothing to collate: no group holds a trajectory')
  count = -(-len(rows) // multiple) * multiple if num_rows is None else num_rows
  if len(rows) > count:
    raise ValueError(f'{len(rows)} rows do not fit a batch of {count}')
  lengths = np.array([len(row.tokens) for row in rows])
  width = pick_bucket(int(lengths.max()), buckets)
  inside = np.pad(np.arange(width) < lengths[:, None], ((0, count - len(rows)), (0, 0)))

  def column(name: str, dtype: type, fill: int = 0) -> np.ndarray:
    out = np.full((count, width), fill, dtype)
    out[inside] = np.concatenate([getattr(row, name) for row in rows])
    return out

  def ids(values: Sequence[int]) -> np.ndarray:
    out = np.full(count, -1, np.int32)
    out[: len(rows)] = values
    return out

  def unusual(name: str, usual: Any) -> np.ndarray | None:
    out = np.full(count, usual)
    out[: len(rows)] = [getattr(row, name) for row in rows]
    return out if (out != usual).any() else None

  return Batch(
    tokens=column('tokens', np.int32, pad_id),
    segment_ids=_segment_ids(rows, inside),
    action_mask=column('action_mask', bool),
    rollout_logprobs=column('rollout_logprobs', np.float32),
    rewards=column('rewards', np.float32),
    task_ids=ids([i for i, group in enumerate(groups) for _ in group]),
    run_ids=ids(_run_ids(groups)),
    step_ids=ids([row.step for row in rows]),
    weights_version=column('weights_version', np.int32, -1),
    expert_mask=unusual('is_expert', False),
    greedy_mask=unusual('is_greedy', False),
    loss_weights=unusual('weight', np.float32(1)),
    state_hash=_state_hash(rows, ids),
    routed_experts=_routed(rows, inside),
  )


def _segment_ids(rows: Sequence[Trajectory], inside: np.ndarray) -> np.ndarray:
  ids = inside.astype(np.int32)
  for i, row in enumerate(rows):
    sizes = row.extras.get(SEGMENTS)
    if sizes is None:
      continue
    if sum(sizes) != len(row.tokens) or min(sizes) < 1:
      raise ValueError(
        f'row {row.trajectory_id} of {len(row.tokens)} tokens has segments of {sizes}'
      )
    ids[i, : len(row.tokens)] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
  return ids


def _routed(rows: Sequence[Trajectory], inside: np.ndarray) -> np.ndarray | None:
  found = [np.asarray(row.extras[ROUTED]) for row in rows if ROUTED in row.extras]
  if not found:
    return None
  out = np.full((*inside.shape, *found[0].shape[1:]), -1, np.int16)
  for i, row in enumerate(rows):
    if ROUTED not in row.extras:
      continue
    value, wanted = np.asarray(row.extras[ROUTED]), (len(row.tokens), *out.shape[2:])
    if value.shape != wanted:
      raise ValueError(
        f'row {row.trajectory_id}: {ROUTED} in its extras has shape {value.shape}, but '
        f'its tokens and the first row ask for {wanted}'
      )
    out[i, : len(value)] = value
  return out


def _run_ids(groups: Sequence[Group]) -> list[int]:
  """Dense ids of episodes: rows of one member of one group share theirs."""
  seen: dict[tuple[int, int], int] = {}
  return [
    seen.setdefault((i, row.member), len(seen))
    for i, group in enumerate(groups)
    for row in group
  ]


def _state_hash(rows: Sequence[Trajectory], ids) -> np.ndarray | None:
  if not any('state_hash' in row.extras for row in rows):
    return None
  return ids([row.extras.get('state_hash', -1) for row in rows])
