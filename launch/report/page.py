"""Selects what the report of a run shows, as JSON data that static/report.js draws.

All names, values and tokens of the run are data of the page, which its script shows as
text. A content security policy in the page allows no script but its own.
"""

import base64
import collections
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from launch.logging.console import format_duration
from launch.logging.metric_sinks import is_trained
from launch.logging.workdir import flatten_keys
from launch.report import assets, evaluations

MAX_CHARTS = 36  # of a phase, beside the first ones
MAX_POINTS = 500  # a longer curve is thinned: neighbours are averaged
# The curves to look at first; all others are folded away below them.
FIRST = (
  'loss/total policy/entropy optimizer/grad_norm kl/reference policy/clip_fraction '
  'mismatch/kl staleness/mean tokens/action_per_row tokens/per_second time/step '
  'time/rollout time/train'
).split()
ORDER = (
  'reward eval loss policy value kl entropy optimizer advantage mismatch staleness '
  'rollout tokens time compile'
).split()
HIDDEN = ('time/wall',)

Row = dict[str, Any]
Point = tuple[float, float | None]  # (step, value); None where it was not finite


@dataclasses.dataclass(frozen=True)
class ReportData:
  """Holds what the page shows.

  Attributes:
    name: Name of the run.
    rows: Rows of metrics.jsonl.
    record: Content of config.json.
    snapshots: Sample trajectories, see `launch.report.samples`.
    status: 'running', 'finished', 'stopped' or 'failed'.
    warnings: Lines to show above the charts.
    num_trained: Training steps by phase, if `rows` are some of them.
    varying: (phase, name) of metrics that vary, also if they do not in `rows`.
  """

  name: str
  rows: Sequence[Row]
  record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  snapshots: Sequence[Mapping[str, Any]] = ()
  status: str = 'running'
  warnings: Sequence[str] = ()
  num_trained: Mapping[str, int] = dataclasses.field(default_factory=dict)
  varying: Collection[tuple[str, str]] = ()


def render_page(run: ReportData) -> str:
  """Returns the HTML of the whole page."""
  script = assets.inline_modules('report.js')
  mark = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  phases = list(dict.fromkeys(row['phase'] for row in run.rows))
  data = {
    **summarize_run(run),
    'phases': [_phase(run, name) for name in reversed(phases)],
    'snapshots': label_snapshots(run.snapshots),
  }
  values = {
    'policy': "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    f"script-src 'sha256-{mark}'",
    'title': escape(run.name),
    'style': assets.read_asset('style.css'),
    'data': _escape_json(data),
    'script': script,
  }
  return assets.fill_template('report.html', values)


def _escape_json(value: Any) -> str:
  """Returns JSON that no text can break out of: <, > and & are escaped."""
  text = json.dumps(value, allow_nan=False, separators=(',', ':'))
  for char in '<>&':
    text = text.replace(char, f'\\u{ord(char):04x}')
  return text


def label_snapshots(snapshots: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Adds a `series` to each snapshot: its kind, and its phase if there are several."""
  several = len({s['phase'] for s in snapshots}) > 1
  words = {'train': 'training', 'eval': 'evaluation'}
  labelled = []
  for snapshot in snapshots:
    kind = str(snapshot.get('kind', 'train'))
    series = words.get(kind, kind)
    if several:
      phase = snapshot['phase']
      series = phase if kind == 'train' else f'{phase}, {series}'
    labelled.append({**snapshot, 'series': series})
  return labelled


def summarize_run(run: ReportData) -> dict[str, Any]:
  """Returns what is said of a run beside its curves and samples, as JSON data."""
  config = run.record.get('config', {})
  launches = run.record.get('launches') or [{}]
  algorithm = config.get('algorithm', {}).get('name', '')
  facts = [('algorithm', str(algorithm))] if algorithm else []
  if 'seed' in config:
    facts.append(('seed', str(config['seed'])))
  if launches[0].get('time'):
    facts.append(('started', str(launches[0]['time'])))
  if len(launches) > 1:
    facts.append(('', f'launched {len(launches)} times'))
  launch = flatten_keys(launches[-1])
  return {
    'name': run.name,
    'status': run.status,
    'facts': facts,
    'command': str(launches[-1].get('command', '')),
    'tiles': _tiles(run),
    'warnings': list(run.warnings),
    'evaluations': evaluations.evaluation_table(run.rows),
    'launch': [
      (key.removeprefix('versions.'), str(value))
      for key, value in launch.items()
      if value is not None
    ],
    'config': [(key, str(value)) for key, value in flatten_keys(config).items()],
  }


def _tiles(run: ReportData) -> list[dict[str, Any]]:
  """Returns the figures in large type; a number is formatted by the page."""
  if not run.rows:
    return []
  tiles: list[dict[str, Any]] = []
  for tag, first, last in evaluations.before_and_after(run.rows)[:2]:
    gain = last.value - first.value
    tiles += [
      {
        'before': f'{first.value:.2f}',
        'value': f'{last.value:.2f}',
        'label': f'{tag}, {evaluations.task_kind(run.rows, tag)}: before and after',
      },
      {
        'value': evaluations.format_gain(gain),
        'tone': 'good' if gain > 0 else 'bad' if gain < 0 else '',
        'label': f'{tag}: gain',
      },
    ]
  phase = run.rows[-1]['phase']
  rows = [row for row in run.rows if row['phase'] == phase]
  rewarded = [row for row in rows if row.get('reward/mean') is not None]
  if rewarded and len(tiles) < 4:
    recent = rewarded[-max(1, len(rewarded) // 10) :]
    mean = sum(row['reward/mean'] for row in recent) / len(recent)
    steps = recent[-1]['step'] - recent[0]['step'] + 1
    label = f'mean of the last {steps} steps' if steps > 1 else 'at the last step'
    tiles.append({'value': mean, 'label': f'reward, {label}'})
  times = sorted(r['time/step'] for r in rows if r.get('time/step'))
  if times:
    median = f'{times[len(times) // 2]:.2f} s'
    tiles.append({'value': median, 'label': 'median step time'})
  seconds = run_seconds(run.rows)
  if seconds is not None:
    label = f'for {count_steps(run)}'
    tiles.append({'value': format_duration(seconds), 'label': label})
  return tiles


def count_steps(run: ReportData) -> str:
  """Returns how many steps a run has trained: '60 steps', '600 + 60 steps'.

  Args:
    run: The run. Its evaluations are rows too, but no steps.
  """
  trained = collections.Counter(row['phase'] for row in run.rows if is_trained(row))
  counts = [n for n in ({**trained, **run.num_trained}).values() if n]
  plural = '' if counts == [1] else 's'
  return f'{" + ".join(map(str, counts)) or 0} step{plural}'


def run_seconds(rows: Sequence[Row]) -> float | None:
  """Returns for how many seconds a run has written rows; None if it is not known."""
  walls = [row['time/wall'] for row in rows if row.get('time/wall')]
  if not walls:
    return None
  # A clock that is set back adds nothing.
  return sum(max(b - a, 0.0) for a, b in itertools.pairwise(walls))


def metric_rank(name: str) -> tuple[int, str]:
  """Returns the sort key that puts the metrics to look at first at the top."""
  head = name.split('/')[0].split('_')[0]
  return (ORDER.index(head) if head in ORDER else len(ORDER), name)


def _phase(run: ReportData, name: str) -> dict[str, Any]:
  """Returns the curves of a phase, in the groups in which the page shows them."""
  rows = [row for row in run.rows if row['phase'] == name]
  metrics = {key for row in rows for key in row} - {'phase', 'step', *HIDDEN}
  curves = {}
  for metric in sorted(metrics, key=metric_rank):
    points = thin_points([(r['step'], r[metric]) for r in rows if metric in r])
    points = [(step, short_number(value)) for step, value in points]
    curves[metric] = {'name': metric, 'points': points}
  means = [n for n in curves if n.startswith('eval/') and n.endswith('/mean')]
  trained = [row for row in rows if is_trained(row)]
  # Rewards in training and scores held out belong in one picture.
  hero = [curves.pop('reward/mean')] if 'reward/mean' in curves else []
  hero += [{**curves.pop(n), 'kind': 'dots'} for n in means[:3]]
  curves = {n: s for n, s in curves.items() if not n.startswith('eval/')}
  flat = {
    n: s['points'][-1][1]
    for n, s in curves.items()
    if _is_constant(s['points']) and (name, n) not in run.varying
  }
  curves = {n: s for n, s in curves.items() if n not in flat}
  first = [n for n in FIRST if n in curves][:9] or list(curves)[:9]
  rest = [n for n in curves if n not in first]
  return {
    'name': name,
    'steps': run.num_trained.get(name, len(trained)),
    'hero': hero,
    'first': [curves[n] for n in first],
    'rest': [curves[n] for n in rest[:MAX_CHARTS]],
    'more': max(0, len(rest) - MAX_CHARTS),
    'flat': list(flat.items()),
  }


def _is_constant(points: Sequence[Point]) -> bool:
  values = [value for _, value in points]
  return len(values) > 1 and values[0] is not None and len(set(values)) == 1


def thin_points(points: Sequence[Point]) -> list[Point]:
  """Averages neighbours so that at most MAX_POINTS remain; both ends are kept."""
  if len(points) <= MAX_POINTS:
    return list(points)
  first, *middle, last = points
  size = math.ceil(len(middle) / (MAX_POINTS - 2))
  result = [first]
  for i in range(0, len(middle), size):
    part = middle[i : i + size]
    values = [y for _, y in part if y is not None]
    result.append(
      (part[len(part) // 2][0], sum(values) / len(values) if values else None)
    )
  return [*result, last]


def short_number(value: float | None) -> float | None:
  """Rounds to six significant digits, which is more than a chart can show."""
  return None if value is None else float(f'{value:.6g}')
