"""Prints the report of `launch.plan` on a terminal."""

from typing import Any

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launch.learner.learner_factory import mesh_text
from launch.planning.compiled_program import TimeEstimate
from launch.planning.plan_report import PlanReport, list_assumptions
from launch.planning.sweep import MeshSweep

BAR_WIDTH = 24
MAX_NAMED_MESHES = 8  # meshes that were not compiled for one reason
PHASES = {
  'prepare': 'in scoring before updates',
  'train': 'in the update',
  'publish': 'in publishing',
}


def format_bytes(count: float) -> str:
  """Formats a number of bytes, as in '1.50 GB'."""
  for unit, power in (('GB', 9), ('MB', 6), ('kB', 3)):
    if count >= 10**power:
      return f'{count / 10**power:,.2f} {unit}'
  return f'{count:,.0f} B'


def format_seconds(seconds: float) -> str:
  """Formats a duration in seconds, as in '3.2 ms'."""
  for unit, scale in (('s', 1.0), ('ms', 1e-3), ('µs', 1e-6)):
    if seconds >= scale:
      return f'{seconds / scale:,.3g} {unit}'
  return '0' if not seconds else f'{seconds * 1e6:,.2g} µs'


def format_count(count: float) -> str:
  """Formats a large number with a decimal prefix, as in '1.5 T'."""
  for unit, power in (('P', 15), ('T', 12), ('G', 9), ('M', 6)):
    if count >= 10**power:
      return f'{count / 10**power:,.3g} {unit}'
  return f'{count:,.0f} '


def print_report(report: PlanReport, console: Console) -> None:
  """Prints memory, programs, step time and assumptions of a plan."""
  console.print(_header(report))
  console.print(_memory_table(report))
  console.print(_verdict(report))
  console.print(_program_table(report))
  if any(one.collectives for one in report.all_programs.values()):
    console.print(_collective_table(report))
  console.print(_step_facts(report))
  console.print(_notes('assumed', list_assumptions(report)))


def _new_table(title: str, *columns: str) -> Table:
  table = Table(
    title=title, title_justify='left', title_style='bold', box=box.SIMPLE_HEAD
  )
  for i, name in enumerate(columns):
    table.add_column(name, justify='right' if i else 'left', no_wrap=i > 0)
  return table


def _fact_table(*rows: tuple[str, str]) -> Table:
  table = Table.grid(padding=(0, 2))
  table.add_column(style='dim', no_wrap=True)
  table.add_column()
  for label, text in rows:
    table.add_row(label, Text(text))
  return table


def _header(report: PlanReport) -> Any:
  run, run_cost = report.run, report.cost
  shape = run.shape
  experts = f', {shape.num_experts} experts' if getattr(shape, 'num_experts', 0) else ''
  title = Text(f'{report.name} on {report.target.name}', style='bold')
  count = sum(one.compile_seconds for one in report.all_programs.values())
  rows = [
    (
      'model',
      f'{run.source}: {shape.num_layers} layers of width {shape.hidden_size}'
      f'{experts}, vocabulary {shape.vocab_size:,}',
    ),
    (
      'devices',
      f'{report.target.size} × {report.target.chip.kind} ({mesh_text(run_cost.mesh)})',
    ),
    (
      'batch',
      f'{run_cost.rows} rows of {run_cost.length} tokens, '
      f'{run_cost.micro_rows} a micro-batch',
    ),
    ('programs', _program_counts(report) + f'; these were compiled in {count:.0f} s'),
  ]
  rows += [('kernels', text) for text in report.kernels]
  return Group(title, Padding(_fact_table(*rows), (0, 0, 1, 2)))


def _program_counts(report: PlanReport) -> str:
  parts = ', '.join(f'{count} of the {who}' for who, count in report.programs.items())
  text = f'{sum(report.programs.values())} to compile before the first step ({parts})'
  if not report.cost.num_shapes:
    text += (
      f', and {report.cost.programs_per_shape} of the learner in the steps, for each '
      'new shape of a batch and its images'
    )
  return text


def _memory_table(report: PlanReport) -> Table:
  run_cost = report.cost
  phase = PHASES.get(run_cost.phase, 'while a teacher scores')
  table = _new_table(
    f'Memory of the fullest device, {phase}',
    *('part', 'bytes', 'share', ''),
  )
  for part, count in run_cost.memory.items():
    if count:
      share = count / run_cost.limit
      bar = '█' * min(BAR_WIDTH, round(share * BAR_WIDTH)) or '▏'
      table.add_row(part, format_bytes(count), f'{share:.1%}', Text(bar, style='cyan'))
  table.columns[3].justify = 'left'
  table.add_section()
  style = 'green' if run_cost.fits else 'red'
  share = run_cost.total / run_cost.limit
  bar = Text('█' * min(BAR_WIDTH, round(share * BAR_WIDTH)), style=style)
  table.add_row('all', format_bytes(run_cost.total), f'{share:.1%}', bar, style='bold')
  table.add_row('limit', format_bytes(run_cost.limit), '', '')
  return table


def _verdict(report: PlanReport) -> Any:
  run_cost, suggestion = report.cost, report.suggestion
  spare_bytes = run_cost.limit - run_cost.total
  if run_cost.fits:
    return Padding(
      Text(f'fits, with {format_bytes(spare_bytes)} to spare', style='bold green'),
      (0, 2, 1, 2),
    )
  text = Text('does not fit', style='bold red')
  if spare_bytes < 0:
    text.append(f': {format_bytes(-spare_bytes)} too much', style='red')
  if suggestion is not None and suggestion.overrides:
    text.append('\nnearest change that fits: ', style='bold')
    text.append(f'{suggestion}', style='bold yellow')
    text.append(
      f' ({format_bytes(suggestion.total)}; compiled, {suggestion.num_tried} tried)'
    )
  elif suggestion is not None:
    text.append(f'\n{suggestion.reason} ({suggestion.num_tried} changes compiled)')
  return Padding(text, (0, 2, 1, 2))


def _program_table(report: PlanReport) -> Table:
  columns = 'program', 'runs', 'FLOP', 'bytes a device', 'products', 'memory', 'links'
  table = _new_table('Programs', *columns)
  for name, program in report.all_programs.items():
    runs, all_runs = report.step.runs.get(name, 1), report.step.times.get(name)
    time = (all_runs or report.step.rollout or TimeEstimate(0, 0, 0)) * (1 / runs)
    traffic = '?', format_seconds(time.compute), '?', '?'
    if not program.too_large:
      times = map(format_seconds, (time.compute, time.memory, time.links))
      traffic = format_bytes(program.bytes_accessed), *times
    table.add_row(name, str(runs), format_count(program.flops).strip(), *traffic)
  return table


def _collective_table(report: PlanReport) -> Table:
  table = _new_table(
    'Collectives in one run', 'program', 'kind', 'count', 'bytes a device sends'
  )
  for name, program in report.all_programs.items():
    for kind, collective in sorted(program.collectives.items()):
      table.add_row(name, kind, f'{collective.count:,}', format_bytes(collective.bytes))
  table.columns[1].justify = 'left'
  return table


def _step_facts(report: PlanReport) -> Any:
  step, publish = report.step, report.publish
  refused = any(one.too_large for one in report.cost.programs.values())
  (learn, slow), (least, most) = step.learn, step.step

  def format_range(a: float, b: float) -> str:
    return ' to '.join(dict.fromkeys(map(format_seconds, (a, b))))

  rows = [
    ('learner', 'unknown: not compiled' if refused else format_range(learn, slow))
  ]
  if step.rollout is not None:
    rows.append(('rollout', format_range(step.rollout.least, step.rollout.most)))
  elif report.decode_error:
    rows.append(('rollout', report.decode_error))
  if not refused:
    beside = ', rollouts beside it' if step.overlapped else ''
    rows.append(('step', format_range(least, most) + beside))
    rate = f'{step.tokens / most:,.0f} to {step.tokens / least:,.0f}'
    rows.append(('tokens', f'{step.tokens:,} a step, {rate} a second'))
  rows.append(
    (
      'broadcast',
      f'{format_bytes(publish.bytes)} a version in {format_seconds(publish.seconds)} '
      f'({publish.description})',
    )
  )
  return Group(Text(' A step', style='bold'), Padding(_fact_table(*rows), (0, 0, 1, 2)))


def _notes(label: str, lines: list[str]) -> Any:
  return Padding(
    _fact_table(*((label if not i else '', x) for i, x in enumerate(lines))), (0, 2)
  )


def print_sweep(mesh_sweep: MeshSweep, console: Console) -> None:
  """Prints the ranked meshes of a sweep and why others were not compiled."""
  table = _new_table(
    'Meshes, best first', 'mesh', 'fits', 'memory', 'rows', 'learner', 'links'
  )
  for entry in mesh_sweep.entries:
    fits = Text('yes', style='green') if entry.cost.fits else Text('no', style='red')
    least, most = entry.learn_seconds
    bytes_sent = sum(
      c.bytes for p in entry.cost.programs.values() for c in p.collectives.values()
    )
    refused = any(p.too_large for p in entry.cost.programs.values())
    time = '?' if refused else f'{format_seconds(least)} to {format_seconds(most)}'
    table.add_row(
      mesh_text(entry.mesh),
      fits,
      format_bytes(entry.cost.total),
      str(entry.cost.rows),
      time,
      format_bytes(bytes_sent),
    )
  console.print(table)
  reasons: dict[str, list[str]] = {}
  for mesh, why in mesh_sweep.skipped.items():
    reasons.setdefault(why, []).append(mesh)
  lines = [f'{_first_meshes(meshes)}: {why}' for why, meshes in reasons.items()]
  console.print(_notes('not compiled', lines) if lines else '')


def _first_meshes(meshes: list[str]) -> str:
  named, more = '; '.join(meshes[:MAX_NAMED_MESHES]), len(meshes) - MAX_NAMED_MESHES
  return f'{named}; and {more} more' if more > 0 else named
