"""Scores before and after training, as numbers and as a table."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from launch.report.charts import number_text

COUNT = 'tasks'


@dataclasses.dataclass(frozen=True)
class Score:
  """A value, the phase and step it belongs to, and how many tasks it averages."""

  value: float
  phase: str
  step: int
  count: int = 0

  @property
  def error(self) -> float | None:
    """Half the 95% interval of a share of `count` tasks."""
    if not self.count or not 0 < self.value < 1:
      return None
    return 1.96 * math.sqrt(self.value * (1 - self.value) / self.count)


def scores(rows: Sequence[Mapping[str, Any]], name: str) -> list[Score]:
  """The finite values of `name`, in the last phase that has any."""
  tag = f'eval/{name.split("/")[1]}'
  if name.startswith(f'{tag}/stop/'):  # a reason that ended nothing is not written
    rows = [{name: 0.0, **row} if f'{tag}/mean' in row else row for row in rows]
  found = [row for row in rows if row.get(name) is not None]
  count_name = f'{tag}/{COUNT}'
  result = []
  for row in found:
    if row['phase'] != found[-1]['phase']:
      continue
    count = int(row.get(count_name) or 0)
    result.append(Score(row[name], row['phase'], row['step'], count))
  return result


def before_and_after(rows: Sequence[Mapping[str, Any]]) -> list[tuple]:
  """(tag, first, last) of each environment evaluated more than once."""
  result = []
  for name in dict.fromkeys(key for row in rows for key in row):
    if name.startswith('eval/') and name.endswith('/mean'):
      found = scores(rows, name)
      if len(found) > 1:
        tag = name.removeprefix('eval/').removesuffix('/mean')
        result.append((tag, found[0], found[-1]))
  return result


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """An HTML table of all evaluation metrics; '' when there are none."""
  lines = []
  names = {key for row in rows for key in row if key.startswith('eval/')}
  for name in sorted(names, key=lambda n: (not n.endswith('/mean'), n)):
    found = scores(rows, name)
    if not found or name.endswith(f'/{COUNT}'):
      continue
    lines.append(_line(name.removeprefix('eval/'), found[0], found[-1]))
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


def _line(name: str, first: Score, last: Score) -> str:
  gain = last.value - first.value
  kind = name.rsplit('/', 1)[-1].partition('@')[0]
  score = kind in ('mean', 'pass', 'majority')  # of others, more may be worse
  tone = 'good' if gain > 0 else 'bad' if gain < 0 else ''
  tone = tone if score else ''
  only = first.step == last.step
  after = '<td class="num">–</td><td class="num">–</td>'
  if not only:
    after = f'{_cell(last)}<td class="num {tone}">{gain_text(gain)}</td>'
  return (
    f'<tr><td>{escape(name)}</td>{_cell(first)}{after}'
    f'<td class="bar {tone}">{_bar(first, last) if score else ""}</td></tr>'
  )


def gain_text(gain: float) -> str:
  return f'{gain:+.3g}' if gain else '0'


def _cell(score: Score) -> str:
  error = f' ± {score.error:.3f}' if score.error is not None else ''
  return (
    f'<td class="num">{number_text(score.value)}'
    f'<small>{error} at {score.step}</small></td>'
  )


def _bar(first: Score, last: Score) -> str:
  """Both values on a scale from 0 to 1; nothing for other values."""
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
