"""Compares evaluation scores before and after training, as numbers and a table."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from launch.report.charts import format_number

COUNT = 'tasks'


@dataclasses.dataclass(frozen=True)
class EvaluationScore:
  """Holds the value of an evaluation metric.

  Attributes:
    value: the value.
    phase: the training phase that it belongs to.
    step: the step at which it was measured.
    count: number of tasks it averages, 0 if unknown.
  """

  value: float
  phase: str
  step: int
  count: int = 0

  @property
  def error(self) -> float | None:
    """Half width of the 95% interval of a share of `count` tasks, None if unknown."""
    if not self.count or not 0 < self.value < 1:
      return None
    return 1.96 * math.sqrt(self.value * (1 - self.value) / self.count)


def evaluation_scores(
  rows: Sequence[Mapping[str, Any]], name: str
) -> list[EvaluationScore]:
  """Returns the finite values of a metric in the last phase that has any.

  Args:
    rows: rows of metrics.jsonl.
    name: name of the metric, as in 'eval/TAG/mean'.
  """
  tag = f'eval/{name.split("/")[1]}'
  if name.startswith(f'{tag}/stop/'):  # a reason that ended nothing is not written
    rows = [{name: 0.0, **row} if f'{tag}/mean' in row else row for row in rows]
  measured = [row for row in rows if row.get(name) is not None]
  count_name = f'{tag}/{COUNT}'
  result = []
  for row in measured:
    if row['phase'] != measured[-1]['phase']:
      continue
    count = int(row.get(count_name) or 0)
    result.append(EvaluationScore(row[name], row['phase'], row['step'], count))
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


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns an HTML table of all evaluation metrics, '' if there are none."""
  lines = []
  names = {key for row in rows for key in row if key.startswith('eval/')}
  for name in sorted(names, key=lambda n: (not n.endswith('/mean'), n)):
    measured = evaluation_scores(rows, name)
    if not measured or name.endswith(f'/{COUNT}'):
      continue
    lines.append(_table_row(name.removeprefix('eval/'), measured[0], measured[-1]))
  if not lines:
    return ''
  head = (
    '<tr><th>metric</th><th class="num">before</th><th class="num">after</th>'
    '<th class="num">change</th><th class="bar"></th></tr>'
  )
  return (
    '<h2>Evaluation<small>with ± the half width of a 95% interval where the number of '
    'tasks is known</small></h2>'
    f'<div class="card scroll"><table>{head}{"".join(lines)}</table></div>'
  )


def _table_row(name: str, first: EvaluationScore, last: EvaluationScore) -> str:
  gain = last.value - first.value
  kind = name.rsplit('/', 1)[-1].partition('@')[0]
  score = kind in ('mean', 'pass', 'majority')  # of others, more may be worse
  tone = 'good' if gain > 0 else 'bad' if gain < 0 else ''
  tone = tone if score else ''
  only = first.step == last.step
  after = '<td class="num">–</td><td class="num">–</td>'
  if not only:
    after = f'{_cell(last)}<td class="num {tone}">{format_gain(gain)}</td>'
  return (
    f'<tr><td>{escape(name)}</td>{_cell(first)}{after}'
    f'<td class="bar {tone}">{_bar(first, last) if score else ""}</td></tr>'
  )


def format_gain(gain: float) -> str:
  """Formats a difference of two scores with its sign."""
  return f'{gain:+.3g}' if gain else '0'


def _cell(score: EvaluationScore) -> str:
  error = f' ± {score.error:.3f}' if score.error is not None else ''
  return (
    f'<td class="num">{format_number(score.value)}'
    f'<small>{error} at {score.step}</small></td>'
  )


def _bar(first: EvaluationScore, last: EvaluationScore) -> str:
  """Draws both values on a scale from 0 to 1, and nothing for other values."""
  if not all(0 <= score.value <= 1 for score in (first, last)):
    return ''
  a, b = (6 + 148 * score.value for score in (first, last))
  return (
    '<svg viewBox="0 0 160 14" aria-hidden="true">'
    '<line class="track" x1="6" x2="154" y1="7" y2="7"/>'
    f'<line class="gain" x1="{a:.1f}" x2="{b:.1f}" y1="7" y2="7"/>'
    f'<circle class="from" cx="{a:.1f}" cy="7" r="4"/>'
    f'<circle class="to" cx="{b:.1f}" cy="7" r="5"/></svg>'
  )
