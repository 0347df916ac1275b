"""What a group's attempts came to; greedy ones are baselines and count in nothing."""

import numpy as np

from jaxrl.types import Group, Trajectory

Rows = list[Trajectory]  # one attempt: one row, or one per turn
UNSHAPED = 'unshaped_score'  # in a row's metrics: its attempt's, before shapers
CUT_OFF = 'cut_off'  # in a row's extras: its last reply ran into the limit of tokens


def members(group: Group) -> dict[int, Rows]:
  """Each attempt's rows, in the order of the group."""
  found: dict[int, Rows] = {}
  for row in group:
    found.setdefault(row.member, []).append(row)
  return found


def sampled(group: Group) -> Group:
  """The rows that the policy sampled: all but the greedy ones."""
  return [row for row in group if not row.is_greedy]


def score(rows: Rows) -> float:
  """An attempt's return, over all of its rows."""
  return sum(row.score for row in rows)


def scores(group: Group) -> np.ndarray:
  """`[members]` float64: each sampled attempt's return."""
  return np.array([score(rows) for rows in members(sampled(group)).values()])


def accuracies(group: Group) -> np.ndarray:
  """`[members]` float64: what the environment reports as accuracy, else the return.

  Of rewards as the environment gave them, before any shaping.
  """
  return np.array([_accuracy(rows) for rows in members(sampled(group)).values()])


def _accuracy(rows: Rows) -> float:
  metrics = rows[-1].metrics
  unshaped = metrics.get(UNSHAPED, score(rows))
  return float(metrics.get('accuracy', unshaped))


def lengths(group: Group) -> np.ndarray:
  """`[members]` int64: tokens that each sampled attempt wrote."""
  return np.array([length(rows) for rows in members(sampled(group)).values()])


def length(rows: Rows) -> int:
  """Tokens that an attempt wrote, over all of its rows."""
  return sum(int(row.action_mask.sum()) for row in rows)


def truncated(rows: Rows) -> bool:
  """Whether an attempt was cut short: by its length, its turns, or within a reply."""
  last = rows[-1]
  return last.stop_reason in ('max_length', 'max_steps') or bool(
    last.extras.get(CUT_OFF)
  )
