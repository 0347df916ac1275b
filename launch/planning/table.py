"""What `launch.plan` shows on a terminal."""

from typing import Any

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launch.planning import cost
from launch.planning.program import Program, Time
from launch.planning.report import Report, assumptions
from launch.planning.sweep import Sweep

BAR = 24
MOST_NAMED = 8  # meshes that were not compiled for one reason
PHASES = {
  'prepare': 'in scoring before updates',
  'train': 'in the update',
  'publish': 'in publishing',
}


def size(count: float) -> str:
  """Bytes, for people."""
  for unit, power in (('GB', 9), ('MB', 6), ('kB', 3)):
    if count >= 10**power:
      return f'{count / 10**power:,.2f} {unit}'
  return f'{count:,.0f} B'


def span(seconds: float) -> str:
  for unit, scale in (('s', 1.0), ('ms', 1e-3), ('µs', 1e-6)):
    if seconds >= scale:
      return f'{seconds / scale:,.3g} {unit}'
  return '0' if not seconds else f'{seconds * 1e6:,.2g} µs'


def number(count: float) -> str:
  for unit, power in (('P', 15), ('T', 12), ('G', 9), ('M', 6)):
    if count >= 10**power:
      return f'{count / 10**power:,.3g} {unit}'
  return f'{count:,.0f} '


def show(report: Report, console: Console) -> None:
  console.print(_head(report))
  console.print(_memory(report))
  console.print(_verdict(report))
  console.print(_programs(report))
  if any(one.collectives for one in _all(report).values()):
    console.print(_collectives(report))
  console.print(_step(report))
  console.print(_notes('assumed', assumptions(report)))


def _all(report: Report) -> dict[str, Program]:
  own = {'decode': report.decode} if report.decode else {}
  return report.cost.programs | own


def _table(title: str, *columns: str) -> Table:
  made = Table(
    title=title, title_justify='left', title_style='bold', box=box.SIMPLE_HEAD
  )
  for i, name in enumerate(columns):
    made.add_column(name, justify='right' if i else 'left', no_wrap=i > 0)
  return made


def _facts(*rows: tuple[str, str]) -> Table:
  made = Table.grid(padding=(0, 2))
  made.add_column(style='dim', no_wrap=True)
  made.add_column()
  for label, text in rows:
    made.add_row(label, Text(text))
  return made


def _head(report: Report) -> Any:
  run, found = report.run, report.cost
  shape = run.shape
  experts = f', {shape.num_experts} experts' if getattr(shape, 'num_experts', 0) else ''
  title = Text(f'{report.name} on {report.target.name}', style='bold')
  count = sum(one.compiled for one in _all(report).values())
  rows = [
    (
      'model',
      f'{run.source}: {shape.num_layers} layers of width {shape.hidden_size}'
      f'{experts}, vocabulary {shape.vocab_size:,}',
    ),
    (
      'devices',
      f'{report.target.size} × {report.target.chip.kind} '
      f'({cost.mesh_text(found.mesh)})',
    ),
    (
      'batch',
      f'{found.rows} rows of {found.length} tokens, {found.micro_rows} a micro-batch',
    ),
    ('programs', _counts(report) + f'; these were compiled in {count:.0f} s'),
  ]
  rows += [('kernels', text) for text in report.kernels]
  return Group(title, Padding(_facts(*rows), (0, 0, 1, 2)))


def _counts(report: Report) -> str:
  told = ', '.join(f'{count} of the {who}' for who, count in report.programs.items())
  return f'{sum(report.programs.values())} to compile before the first step ({told})'


def _memory(report: Report) -> Table:
  found = report.cost
  phase = PHASES.get(found.phase, 'while a teacher scores')
  made = _table(
    f'Memory of the fullest device, {phase}',
    *('part', 'bytes', 'share', ''),
  )
  for part, count in found.memory.items():
    if count:
      share = count / found.limit
      bar = '█' * min(BAR, round(share * BAR)) or '▏'
      made.add_row(part, size(count), f'{share:.1%}', Text(bar, style='cyan'))
  made.columns[3].justify = 'left'
  made.add_section()
  style = 'green' if found.fits else 'red'
  share = found.total / found.limit
  bar = Text('█' * min(BAR, round(share * BAR)), style=style)
  made.add_row('all', size(found.total), f'{share:.1%}', bar, style='bold')
  made.add_row('limit', size(found.limit), '', '')
  return made


def _verdict(report: Report) -> Any:
  found, change = report.cost, report.change
  left = found.limit - found.total
  if found.fits:
    return Padding(
      Text(f'fits, with {size(left)} to spare', style='bold green'), (0, 2, 1, 2)
    )
  told = Text('does not fit', style='bold red')
  if left < 0:
    told.append(f': {size(-left)} too much', style='red')
  if change is not None and change.overrides:
    told.append('\nnearest change that fits: ', style='bold')
    told.append(f'{change}', style='bold yellow')
    told.append(f' ({size(change.total)}; compiled, {change.tried} tried)')
  elif change is not None:
    told.append(f'\n{change.why} ({change.tried} changes compiled)')
  return Padding(told, (0, 2, 1, 2))


def _programs(report: Report) -> Table:
  made = _table(
    'Programs',
    'program',
    'runs',
    'FLOP',
    'bytes a device',
    'products',
    'memory',
    'links',
  )
  for name, one in _all(report).items():
    runs = report.step.runs.get(name, 1)
    time = report.step.times.get(name, report.step.rollout or Time(0, 0, 0)) * (
      1 / runs
    )
    moved, times = (
      size(one.moved),
      (span(time.compute), span(time.memory), span(time.links)),
    )
    if one.too_large:
      moved, times = '?', [times[0], '?', '?']
    made.add_row(name, str(runs), number(one.flops).strip(), moved, *times)
  return made


def _collectives(report: Report) -> Table:
  made = _table(
    'Collectives in one run', 'program', 'kind', 'count', 'bytes a device sends'
  )
  for name, one in _all(report).items():
    for kind, sent in sorted(one.collectives.items()):
      made.add_row(name, kind, f'{sent.count:,}', size(sent.bytes))
  made.columns[1].justify = 'left'
  return made


def _step(report: Report) -> Any:
  step, told = report.step, report.broadcast
  refused = any(one.too_large for one in report.cost.programs.values())
  (learn, slow), (least, most) = step.learn, step.step

  def between(a: float, b: float) -> str:
    return f'{span(a)} to {span(b)}' if span(a) != span(b) else span(a)

  rows = [('learner', 'unknown: not compiled' if refused else between(learn, slow))]
  if step.rollout is not None:
    rows.append(('rollout', between(step.rollout.least, step.rollout.most)))
  elif report.why:
    rows.append(('rollout', report.why))
  if not refused:
    beside = ', rollouts beside it' if step.together else ''
    rows.append(('step', between(least, most) + beside))
    rate = f'{step.tokens / most:,.0f} to {step.tokens / least:,.0f}'
    rows.append(('tokens', f'{step.tokens:,} a step, {rate} a second'))
  rows.append(
    ('broadcast', f'{size(told.bytes)} a version in {span(told.seconds)} ({told.way})')
  )
  return Group(Text(' A step', style='bold'), Padding(_facts(*rows), (0, 0, 1, 2)))


def _notes(label: str, lines: list[str]) -> Any:
  return Padding(
    _facts(*((label if not i else '', x) for i, x in enumerate(lines))), (0, 2)
  )


def show_sweep(found: Sweep, console: Console) -> None:
  made = _table(
    'Meshes, best first', 'mesh', 'fits', 'memory', 'rows', 'learner', 'links'
  )
  for one in found.entries:
    fits = Text('yes', style='green') if one.cost.fits else Text('no', style='red')
    least, most = one.learn
    sent = sum(
      c.bytes for p in one.cost.programs.values() for c in p.collectives.values()
    )
    refused = any(p.too_large for p in one.cost.programs.values())
    time = '?' if refused else f'{span(least)} to {span(most)}'
    made.add_row(
      cost.mesh_text(one.mesh),
      fits,
      size(one.cost.total),
      str(one.cost.rows),
      time,
      size(sent),
    )
  console.print(made)
  reasons: dict[str, list[str]] = {}
  for mesh, why in found.skipped.items():
    reasons.setdefault(why, []).append(mesh)
  lines = [f'{_first(meshes)}: {why}' for why, meshes in reasons.items()]
  console.print(_notes('not compiled', lines) if lines else '')


def _first(meshes: list[str]) -> str:
  told, more = '; '.join(meshes[:MOST_NAMED]), len(meshes) - MOST_NAMED
  return f'{told}; and {more} more' if more > 0 else told
