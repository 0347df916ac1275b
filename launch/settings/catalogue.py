"""Catalogue: lists every kind of component, and describes each one in a page."""

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.algorithms import registry, requirements
from jaxrl.component_table import join_calls
from jaxrl.config import describe_options
from jaxrl.functional import components
from jaxrl.functional.reductions import MAX_EXPONENT
from jaxrl.options import declared_ranges, defaults, unknown_name_error, unwrap
from jaxrl.types import Algorithm
from jaxrl.user_code import import_object
from launch.settings.component_kinds import (
  KINDS,
  PARTS,
  ComponentKind,
  component_docstring,
  defined_at,
  find_kind,
  load_component,
)
from launch.settings.plugins import Plugins

WIDTH = 88
RULE = f'\n\n{"─" * WIDTH}\n'
SOURCE = re.compile(r'\s*\(([^()]*(?:arXiv \d{4}\.\d{5}|, (?:19|20)\d\d)[^()]*)\)\.?')
SYMBOLS = f"""\
p, o, q: log-probs by the policy, the one that sampled, the reference. r = e^(p−o).
A: advantage. R: a run's return. μ, s: mean and sample standard deviation of its group.
sg: no gradient. Exponents are clipped to ±{MAX_EXPONENT:g}."""
PROVENANCE = {
  'paper': 'the values of the paper',
  'trinity': 'the components and values of Trinity-RFT, except for the group size',
  'verl': 'the components and values of verl, except for the group size',
  'trl': 'the components and values of TRL',
  'prime-rl': 'the components and values of prime-rl, except for the group size',
  'ours': 'values of our own choice: the paper gives others, or none',
}
NEEDS = {
  'old_logprobs': "the learner's own log-probs of what was sampled",
  'ref_logprobs': 'a reference model, the initial weights',
  'teacher_logprobs': 'a teacher, teacher.checkpoint',
  'teacher_topk': "a teacher's likeliest tokens, teacher.checkpoint",
  'values': 'a critic: a value head on the model',
  'entropy': "the policy's entropy",
  'nec': "the mean of the policy's entropy indicator",
  'sum_pi_squared': "the sum of the policy's squared probabilities",
  'greedy_mask': 'one greedy attempt more per task, as a baseline',
}
FAMILIES = {
  'attempts at a task, compared': 'Reinforcement: whole attempts at a task',
  'turns': 'Reinforcement: turns and episodes of their own worth',
  'expert': "Reinforcement beside an expert's rows",
  'teacher': 'A teacher at hand',
  'self': 'The policy as its own teacher, which is shown more',
  'files': 'From files of answers',
  'pairs': 'From files of preferences',
}
_SKIPPED_SECTIONS = re.compile(
  r'\n(?:Args|Attributes|Returns|Raises|Keyword Args):\n.*', re.DOTALL
)
_SHOWN_SETTINGS = (
  *('data_format', 'group_size', 'aggregation', 'old_logprobs_source', 'sampler'),
  'batch_unit',
)


def summary(spec: str) -> str:
  """Returns the first line of an algorithm's file, its paper included.

  Args:
    spec: The algorithm's name or location.
  """
  function = registry.builder(spec)
  text = unwrap(function).__globals__.get('__doc__')
  return (text or inspect.getdoc(function) or '').split('\n')[0]


def source(text: str) -> str:
  """Returns the paper that a text cites.

  Args:
    text: A docstring.

  Returns:
    The text in its brackets; '' if it cites none.
  """
  match = SOURCE.search(text)
  return match.group(1) if match else ''


def family(algorithm: Algorithm) -> str:
  """Returns which of FAMILIES an algorithm belongs to, by what it learns from.

  Args:
    algorithm: The algorithm.
  """
  reads = requirements.fields_read(algorithm)
  if algorithm.data_format == 'preference':
    return 'pairs'
  if algorithm.self_teacher is not None:
    return 'self'
  if {'teacher_logprobs', 'teacher_topk'} & requirements.needs(algorithm):
    return 'teacher'
  if algorithm.data_format != 'rollout':
    return 'files'
  if 'expert_mask' in reads:
    return 'expert'
  turn_level = components.component_info(algorithm.advantage).turn_level
  if turn_level or 'turn_ids' in reads:
    return 'turns'
  return 'attempts at a task, compared'


def index(plugins: Plugins) -> str:
  """Lists the algorithms, then the kinds, each with how many components it has.

  Args:
    plugins: The user's own components.

  Returns:
    The text.
  """
  kinds = []
  for kind in KINDS:
    num_plugins = len(plugins.of(kind.name))
    more = f' + {num_plugins} of your own' if num_plugins else ''
    kinds.append((kind.plural, f'{len(kind.built_in())}{more}', kind.what))
  widths = [max(len(row[i]) for row in kinds) for i in range(2)]
  rows = [
    _columns(f'  {name:{widths[0]}} {count:>{widths[1]}}  ', what)
    for name, count, what in kinds
  ]
  return '\n'.join([_algorithms(plugins), '', 'Kinds of components', *rows])


def _algorithms(plugins: Plugins) -> str:
  """Lists every algorithm in a line of its own, by family."""
  families: dict[str, list[str]] = {title: [] for title in FAMILIES.values()}
  for name in registry.names():
    families[FAMILIES[family(registry.make(name))]].append(name)
  families['Your own'] = list(plugins.of('algorithm').values())
  width = max(len(n.split(':')[-1]) for names in families.values() for n in names)
  lines = [f'{"arXiv       defaults":>{WIDTH - 1}}']
  for title, names in families.items():
    lines += [title] if names else []
    for spec in names:
      head, colon, rest = summary(spec).partition(': ')
      text, name = rest if colon else head, spec.split(':')[-1]
      lines.append(_row(name, text, width, f'{registry.make(spec).provenance:8}'))
    lines += [''] if names else []
  return '\n'.join(lines).rstrip()


def _row(name: str, text: str, width: int, last: str = '') -> str:
  """Formats a name, a text and the paper that it cites in columns."""
  where = source(text)
  number = re.search(r'\d{4}\.\d{5}', where)
  where = number.group() if number else where
  where += f'  {last}' if last else ''
  words = SOURCE.sub('', text).removesuffix('.').removeprefix('Computes ')
  words = re.sub(r' ((All |Both )?(are )?)?`\[B, T\]`$', '', words)
  room = WIDTH - width - 4 - len(where)
  first, *rest = textwrap.wrap(words, room) or ['']
  line = f'  {name:{width}} {first:{room}} {where}'.rstrip()
  return '\n'.join([line, *(' ' * (width + 3) + more for more in rest)])


def parts(plugins: Plugins) -> str:
  """Lists every part that an algorithm may take, by the field that takes it.

  Args:
    plugins: The user's own components.

  Returns:
    The text.
  """
  head = textwrap.wrap(SYMBOLS.replace('\n', ' '), WIDTH)
  head.append("Swap one: algorithm.policy_loss='cispo(clip_high=.3)'")
  pages = [kind_page(kind, Plugins()) for kind in KINDS if kind.name in PARTS]
  own = plugins.of('policy_loss')  # a function of a file may be any part
  rows = [_row(name, _first_line(part), 20) for name, part in own.items()]
  pages += ['\n'.join(['Your own', *rows])] if rows else []
  return '\n\n'.join(['\n'.join(head), *pages])


def kind_page(kind: ComponentKind, plugins: Plugins) -> str:
  """Lists the components of a kind, a line each.

  Args:
    kind: The kind.
    plugins: The user's own components.

  Returns:
    The text.
  """
  if kind.name == 'algorithm':
    return _algorithms(plugins)
  lines = textwrap.wrap(f'{kind.plural}: {kind.what}', WIDTH)
  lines += _fold('named by', ', '.join(f'--config.{key}' for key in kind.keys))
  if not kind.accepts:
    lines += ['', '  all are built in: a file of your own cannot add one']
  groups = {'': kind.built_in(), 'Your own': plugins.of(kind.name)}
  width = max((len(name) for group in groups.values() for name in group), default=0)
  for title, group in groups.items():
    if group:
      lines += ['', title] if title else ['']
      lines += [_row(name, _first_line(part), width) for name, part in group.items()]
  if not any(groups.values()):
    lines += ['', '  none has a name: yours is named by where it is, file.py:Name']
  return '\n'.join(lines)


def component_pages(name: str, plugins: Plugins) -> list[str]:
  """Describes every component of this name.

  Args:
    name: The name, or the location of a component of the user's own.
    plugins: The user's own components.

  Returns:
    A page for each component, or for the kind if `name` is that of a kind.

  Raises:
    ConfigError: If nothing has this name.
  """
  names: set[str] = set()
  kinds: dict[Any, list[str]] = {}  # a component of several kinds has one page
  if ':' in name:
    value = import_object(name)
    own = [kind.name for kind in KINDS if kind.accepts and kind.accepts(value)]
    kinds[name] = own or ['algorithm']
  for kind in KINDS:
    known = {**kind.built_in(), **plugins.of(kind.name)}
    names |= {*known, kind.name, kind.plural}
    if name in known:
      kinds.setdefault(known[name], []).append(kind.name)
  pages = [_page(name.split(':')[-1], component, of) for component, of in kinds.items()]
  if (kind := find_kind(name)) is not None:
    pages.append(kind_page(kind, plugins))
  if not pages:
    what = 'algorithm, component or kind'
    raise unknown_name_error(name, names, what, 'launch.algorithms')
  return pages


def _page(name: str, component: Any, kinds: list[str]) -> str:
  """Describes a component, which may be of several kinds."""
  title = f'{name}: {" or ".join(kinds)}'
  try:
    value = load_component(component)
  except ImportError as error:
    place = defined_at(component)
    return f'{title}\n\nneeds a package that is missing: {error}\n\ndefined in  {place}'
  if kinds == ['algorithm']:
    is_preset = name in registry.names() and '.presets.' in component
    lines = list(_algorithm_lines(name if is_preset else component))
  else:
    is_part = not PARTS.keys().isdisjoint(kinds)
    if is_part and str(component).rpartition(':')[0].endswith('.py'):
      title = f'{name}: a part of your own'
    lines = [title, '', *_component_lines(component, value, is_part)]
  return '\n'.join([*lines, '', f'defined in  {defined_at(component)}'])


def _component_lines(component: Any, value: Any, is_part: bool) -> Iterator[str]:
  """Yields a component's docstring and its options; of a part, its fields too."""
  text = _docstring(component, value)
  options = defaults(value) if callable(value) else {}
  notes = {} if is_part else describe_options(value)  # the text has those of a part
  ranges = _ranges(value, value.__name__) if is_part else declared_ranges(value)
  if is_part:
    yield from text.splitlines()
    yield ''
    yield from _fold('reads', ', '.join(components.fields_of(value)))
  else:
    yield from _SKIPPED_SECTIONS.sub('', text).strip().splitlines()
    yield ''
  yield from _option_lines(options, notes, ranges)


def _algorithm_lines(spec: str) -> Iterator[str]:
  """Yields an algorithm's options and defaults, settings, needs and components."""
  function, made = registry.builder(spec), registry.make(spec)
  name = spec.split(':')[-1]
  yield from (f'{name}: an algorithm', '', summary(spec))
  yield from (*(inspect.getdoc(function) or '').splitlines(), '')
  yield from _option_lines(defaults(function), {}, _ranges(function, spec))
  if made.provenance:
    yield from ('', f'defaults  {PROVENANCE[made.provenance]}')
  shown = [f'{setting} {getattr(made, setting)}' for setting in _SHOWN_SETTINGS]
  extra = {
    'filters': join_calls(made.filters),
    'shapers': join_calls(made.shapers),
    'critic_warmup': made.critic_warmup,
  }
  shown += [f'{setting} {value}' for setting, value in extra.items() if value]
  needs = [NEEDS.get(need, need) for need in sorted(requirements.needs(made))]
  if made.self_teacher is not None:
    needs = [f'its own log-probs after another prompt, {made.self_teacher.context}']
  yield from ('', *_fold('runs with', ' · '.join(shown)))
  yield from _fold('needs', ' · '.join(needs) or 'nothing more')
  yield from ('', *SYMBOLS.splitlines())
  for slot, piece in requirements.components_of(made).items():
    yield from ('', *_fold(f'{slot} =', components.call_string(piece)))
    yield from _fold('  reads', ', '.join(components.fields_of(piece)))
    text = inspect.getdoc(components.function_of(piece)) or ''
    yield textwrap.indent(text, '  ')


def _ranges(function: Any, name: str) -> dict[str, Any]:
  """Returns the ranges of numbers among the options of this package's algorithms."""
  if not function.__module__.startswith(('jaxrl.algorithms.', 'jaxrl.functional.')):
    return {}
  return {
    option: limits
    for option, value in defaults(function).items()
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if (limits := components.allowed_range(name, option))
  }


def _option_lines(
  options: Mapping[str, Any], notes: Mapping[str, str], ranges: Mapping[str, Any]
) -> Iterator[str]:
  """Yields a table of options: default, description and range of each."""
  yield 'options' if options else 'options  none'
  names = max(map(len, options), default=0) if not notes else 0
  values = {name: f'{name:{names}} = {value!r}' for name, value in options.items()}
  width = min(max(map(len, values.values()), default=0), WIDTH // 3)
  for name, text in values.items():
    note = notes.get(name, '')
    if name in ranges:
      note = f'{note} It {ranges[name]}.' if note else str(ranges[name])
    if len(text) <= width:
      yield _columns(f'  {text:{width}}  ', note)
    else:
      yield from textwrap.wrap(f'  {text}', WIDTH, subsequent_indent='    ')
      yield from [_columns(' ' * (width + 4), note)] if note else []


def _docstring(component: Any, value: Any) -> str:
  if callable(value):
    return component_docstring(value)
  module = component.rpartition(':')[0]  # of a model family, its file's
  is_file = module.endswith('.py')
  return ('' if is_file else inspect.getdoc(importlib.import_module(module))) or ''


def _first_line(component: Any) -> str:
  try:
    return _docstring(component, load_component(component)).split('\n')[0]
  except ImportError:
    return 'needs a package that is missing here'


def _columns(head: str, text: str) -> str:
  """Returns a text beside a head, folded below itself."""
  lines = textwrap.wrap(text, max(WIDTH - len(head), 20)) or ['']
  return ('\n' + ' ' * len(head)).join([head + lines[0], *lines[1:]]).rstrip()


def _fold(title: str, text: str) -> list[str]:
  indent = ' ' * (len(title) + 1)
  return textwrap.wrap(f'{title} {text}', WIDTH, subsequent_indent=indent)
