"""Group statistics reduce a group's rows to one number per sample.

Greedy samples are baselines: the statistics of a group leave them out.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl.types import PLAYER_KEY, Group, Trajectory

GroupResult = tuple[int, float, int]  # a group's seed, mean accuracy, number of samples
SampleRows = list[Trajectory]  # one sample: a single row, or one row per turn
# Key in a row's metrics: the sample's return before reward shaping.
RAW_SCORE = 'unshaped_score'
# Key in a row's extras: whether the last response ran into its token limit.
RESPONSE_TRUNCATED = 'cut_off'


def rows_by_sample(group: Group) -> dict[int, SampleRows]:
  """Splits a group into its samples.

  Args:
    group: Rows of all samples of one task.

  Returns:
    The rows of each sample by sample index, in the order of the group.
  """
  samples: dict[int, SampleRows] = {}
  for row in group:
    samples.setdefault(row.sample_index, []).append(row)
  return samples


def number_episodes(groups: Sequence[Group], *, whole: bool = False) -> list[int]:
  """Numbers the episodes of a batch densely.

  Args:
    groups: Rows by group.
    whole: Whether the rows of several players of a sample share a number; else what
      each player did is an episode by itself.

  Returns:
    The number of each row's episode, in the order of the groups.
  """
  numbers: dict[tuple[int, int, int], int] = {}
  return [
    numbers.setdefault(
      (i, row.sample_index, 0 if whole else row.extras.get(PLAYER_KEY, 0)),
      len(numbers),
    )
    for i, group in enumerate(groups)
    for row in group
  ]


def without_greedy(group: Group) -> Group:
  """Returns the rows that the policy sampled, which are all but the greedy ones."""
  return [row for row in group if not row.is_greedy]


def sample_score(rows: SampleRows) -> float:
  """Returns the return of one sample, summed over all of its rows."""
  return sum(row.score for row in rows)


def raw_score(rows: SampleRows) -> float:
  """Returns the return of one sample as the environment gave it, before any shaping."""
  metrics = rows[-1].metrics
  return metrics[RAW_SCORE] if RAW_SCORE in metrics else sample_score(rows)


def sample_scores(group: Group) -> np.ndarray:
  """Computes the return of every sample that is not greedy.

  Args:
    group: Rows of all samples of one task.

  Returns:
    `[samples]` float64 returns.
  """
  samples = rows_by_sample(without_greedy(group)).values()
  return np.array([sample_score(rows) for rows in samples])


def sample_accuracies(group: Group) -> np.ndarray:
  """Computes the accuracy of every sample that is not greedy.

  The accuracy is the environment's metric `accuracy`, or the return before any reward
  shaping where the environment reports none.

  Args:
    group: Rows of all samples of one task.

  Returns:
    `[samples]` float64 accuracies.
  """
  samples = rows_by_sample(without_greedy(group)).values()
  return np.array([_accuracy(rows) for rows in samples])


def _accuracy(rows: SampleRows) -> float:
  metrics = rows[-1].metrics
  return float(metrics['accuracy'] if 'accuracy' in metrics else raw_score(rows))


def response_length(rows: SampleRows) -> int:
  """Returns the number of tokens that one sample wrote, over all of its rows."""
  return sum(int(row.action_mask.sum()) for row in rows)


def is_truncated(rows: SampleRows) -> bool:
  """Returns whether a sample was cut short.

  Args:
    rows: The rows of one sample.

  Returns:
    True if the episode reached its limit on tokens or turns, or if the last response
    ran into its own token limit.
  """
  last = rows[-1]
  return last.stop_reason in ('max_length', 'max_steps') or bool(
    last.extras.get(RESPONSE_TRUNCATED)
  )


def oldest_weights_version(group: Group) -> int | None:
  """Returns the oldest weights version that wrote an action of `group`.

  Args:
    group: The trajectories of a group.

  Returns:
    The version, or None for rows from files.
  """
  written = [row.weights_version[row.action_mask] for row in group]
  versions = np.concatenate([np.zeros(0, np.int32), *written])
  versions = versions[versions >= 0]
  return int(versions.min()) if versions.size else None
