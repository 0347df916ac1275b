"""Compares evaluation scores before and after training, as data of a page."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.rollout.pass_at_k import wilson_interval

COUNT = 'tasks'


@dataclasses.dataclass(frozen=True)
class EvaluationScore:
  """Holds the value of an evaluation metric.

  Attributes:
    value: The value.
    step: The step at which it was measured.
    interval: The 95% interval of a share of tasks by Wilson, None if unknown.
  """

  value: float
  step: int
  interval: tuple[float, float] | None


def evaluation_scores(
  rows: Sequence[Mapping[str, Any]], name: str
) -> list[EvaluationScore]:
  """Returns the finite values of a metric in the last phase that has any.

  Args:
    rows: Rows of metrics.jsonl.
    name: Name of the metric, as in 'eval/TAG/mean'.
  """
  tag = f'eval/{name.split("/")[1]}'
  if name.startswith(f'{tag}/stop/'):  # a reason that ended nothing is not written
    rows = [{name: 0.0, **row} if f'{tag}/mean' in row else row for row in rows]
  measured = [row for row in rows if row.get(name) is not None]
  result = []
  for row in measured:
    if row['phase'] != measured[-1]['phase']:
      continue
    value, count = row[name], int(row.get(f'{tag}/{COUNT}') or 0)
    is_share = count and 0 <= value <= 1
    interval = wilson_interval(value, count) if is_share else None
    result.append(EvaluationScore(value, row['step'], interval))
  return result


def before_and_after(rows: Sequence[Mapping[str, Any]]) -> list[tuple]:
  """Returns (tag, first, last) of environments evaluated more than once."""
  result = []
  for name in dict.fromkeys(key for row in rows for key in row):
    if name.startswith('eval/') and name.endswith('/mean'):
      measured = evaluation_scores(rows, name)
      if len(measured) > 1:
        tag = name.removeprefix('eval/').removesuffix('/mean')
        result.append((tag, measured[0], measured[-1]))
  return result


def task_kind(rows: Sequence[Mapping[str, Any]], tag: str) -> str:
  """Returns what the tasks of a set are: held out, or rows that are trained on too."""
  name = f'eval/{tag}/training_rows'
  shares = [row[name] for row in rows if row.get(name) is not None]
  if not shares:
    return 'held out'
  return 'training rows' if shares[-1] == 1 else f'{shares[-1]:.0%} training rows'


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns all evaluation metrics of metrics.jsonl before and after training, as JSON.

  Returns:
    For each metric its name, its first score, its last one (None if it was measured
    once), and whether it is a score, of which more is better.
  """
  table = []
  names = {key for row in rows for key in row if key.startswith('eval/')}
  for name in sorted(names, key=lambda n: (not n.endswith('/mean'), n)):
    measured = evaluation_scores(rows, name)
    if not measured or name.endswith((f'/{COUNT}', '/training_rows')):
      continue
    first, last = measured[0], measured[-1]
    kind = name.rsplit('/', 1)[-1].partition('@')[0]
    table.append(
      {
        'name': name.removeprefix('eval/'),
        'first': dataclasses.asdict(first),
        'last': None if first.step == last.step else dataclasses.asdict(last),
        'is_score': kind in ('mean', 'pass', 'majority'),
      }
    )
  return table


def format_gain(gain: float) -> str:
  """Formats a difference of two scores with its sign."""
  return f'{gain:+.3g}' if gain else '0'
