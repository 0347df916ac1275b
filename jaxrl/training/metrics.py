"""What the learner reports of a batch and of its own work."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.types import Batch, Group

Metrics = dict[str, float]


def of_groups(groups: Sequence[Group]) -> Metrics:
  """Rewards of what was played: per episode, and their spread within groups."""
  scores: list[list[float]] = []
  for group in groups:
    members: dict[int, float] = {}
    for row in group:
      if not row.is_expert:
        members[row.member] = members.get(row.member, 0.0) + row.score
    if members:
      scores.append(list(members.values()))
  if not scores:
    return {}
  flat = np.concatenate([np.asarray(group) for group in scores])
  return {
    'reward/mean': float(flat.mean()),
    'reward/std': float(flat.std()),
    'reward/max': float(flat.max()),
    'reward/min': float(flat.min()),
    'reward/group_std': float(np.mean([np.std(group) for group in scores])),
    'reward/groups_without_spread': float(
      np.mean([max(group) == min(group) for group in scores])
    ),
  }


def of_batch(batch: Batch, step: int) -> Metrics:
  """Counts of tokens, and how old the weights were that wrote them.

  staleness: step − the version of a row's oldest action token, 0 for files.
  """
  rows = batch.task_ids >= 0
  tokens = int((batch.segment_ids > 0).sum())
  actions = batch.action_mask.sum(axis=1)[rows]
  metrics = {
    'tokens/total': float(tokens),
    'tokens/action': float(actions.sum()),
    'tokens/action_per_row': float(actions.mean()),
    'tokens/rows': float(rows.sum()),
    'tokens/length': float(batch.tokens.shape[1]),
    'tokens/padding_share': 1.0 - tokens / batch.tokens.size,
  }
  written = batch.action_mask & (batch.weights_version >= 0)
  if written.any():
    oldest = np.where(written, batch.weights_version, step).min(axis=1)[rows]
    metrics['staleness/mean'] = float((step - oldest).mean())
    metrics['staleness/max'] = float((step - oldest).max())
  return metrics


def average(updates: Sequence[Mapping[str, np.ndarray]]) -> Metrics:
  """Means over the updates of a batch; the mismatch is the first's, still unmoved."""
  out = {}
  for name in updates[0]:
    values = [float(update[name]) for update in updates]
    first = name.startswith('mismatch/')
    out[name] = values[0] if first else float(np.mean(values))
  return out
