"""What the learner reports of a batch and of its own work."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.rollout.members import UNSHAPED, members, score
from jaxrl.types import Batch, Group

Metrics = dict[str, float]


def of_groups(groups: Sequence[Group]) -> Metrics:
  """Rewards of what was played: per episode, and their spread within groups.

  reward/mean and its like are of what the environment gave; reward/shaped_… of what
  shapers made of it, where there are any; reward/greedy_mean of greedy attempts, which
  count in nothing else. What environments report as reward/… and grader/… (the parts
  of a reward, and graders that failed) is averaged over the attempts that have it.
  """
  shaped: list[list[float]] = []
  scores: list[list[float]] = []
  greedy: list[float] = []
  graded: dict[str, list[float]] = {}
  for group in groups:
    played = [row for row in group if not row.is_expert]
    attempts = members(played).items()
    greedy += [_unshaped(rows) for _, rows in attempts if rows[0].is_greedy]
    sampled = [rows for _, rows in attempts if not rows[0].is_greedy]
    for rows in sampled:
      for name, value in rows[-1].metrics.items():
        if name.startswith(('reward/', 'grader/')):
          graded.setdefault(name, []).append(value)
    if sampled:
      scores.append([_unshaped(rows) for rows in sampled])
      shaped.append([score(rows) for rows in sampled])
  if not scores:
    return {}
  flat = np.concatenate([np.asarray(group) for group in scores])
  metrics = {name: float(np.mean(values)) for name, values in graded.items()}
  metrics |= {
    'reward/mean': float(flat.mean()),
    'reward/std': float(flat.std()),
    'reward/max': float(flat.max()),
    'reward/min': float(flat.min()),
    'reward/group_std': _group_std(scores),
    'reward/groups_without_spread': float(
      np.mean([max(group) == min(group) for group in scores])
    ),
  }
  if any(UNSHAPED in row.metrics for group in groups for row in group):
    metrics['reward/shaped_mean'] = float(np.mean(np.concatenate(shaped)))
    metrics['reward/shaped_group_std'] = _group_std(shaped)
  if greedy:
    metrics['reward/greedy_mean'] = float(np.mean(greedy))
  return metrics


def _unshaped(rows: Group) -> float:
  """An attempt's return as the environment gave it."""
  return rows[-1].metrics.get(UNSHAPED, score(rows))


def _group_std(scores: Sequence[Sequence[float]]) -> float:
  return float(np.mean([np.std(group) for group in scores]))


def of_batch(batch: Batch, step: int) -> Metrics:
  """Counts of tokens, and how old the weights were that wrote them.

  staleness: step − the version of a row's oldest action token; rows from files have
  none. share: of rows older than this step's weights.
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
    oldest = np.where(written, batch.weights_version, step).min(axis=1)
    oldest = oldest[written.any(axis=1)]
    metrics['staleness/mean'] = float((step - oldest).mean())
    metrics['staleness/max'] = float((step - oldest).max())
    metrics['staleness/share'] = float((oldest < step).mean())
  return metrics


def average(updates: Sequence[Mapping[str, np.ndarray]]) -> Metrics:
  """Means over the updates of a batch; the mismatch is the first's, still unmoved."""
  out = {}
  for name in updates[0]:
    values = [float(update[name]) for update in updates]
    first = name.startswith('mismatch/')
    out[name] = values[0] if first else float(np.mean(values))
  return out
