"""Descriptions of algorithms and components: formula, defaults, needs, paper."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl import component_calls
from jaxrl.algorithms import registry, requirements
from jaxrl.functional import components
from jaxrl.functional.reductions import MAX_EXPONENT
from jaxrl.options import defaults, unknown_name_error, unwrap
from jaxrl.types import Algorithm
from jaxrl.user_code import import_object

WIDTH = 88
SOURCE = re.compile(r'\s*\(([^()]*(?:arXiv \d{4}\.\d{5}|, (?:19|20)\d\d)[^()]*)\)\.?')
SYMBOLS = f"""\
p, o, q: log-probs by the policy, the one that sampled, the reference. r = e^(p−o).
A: advantage. R: a run's return. μ, s: mean and sample standard deviation of its group.
sg: no gradient. Exponents are clipped to ±{MAX_EXPONENT:g}."""
PROVENANCE = {
  'paper': 'the values of the paper',
  'trinity': 'the components and values of Trinity-RFT, except for the group size',
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
  'greedy_mask': 'one greedy attempt more per task, as a baseline',
}
FAMILIES = {
  'attempts at a task, compared': 'Reinforcement: whole attempts at a task',
  'turns': 'Reinforcement: turns and episodes of their own worth',
  'expert': "Reinforcement beside an expert's rows",
  'teacher': 'A teacher at hand',
  'files': 'From files of answers',
  'pairs': 'From files of preferences',
}


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


def _row(name: str, text: str, width: int, defaults: str | None = None) -> str:
  """Formats name, text and source in columns; a long text is wrapped below itself.

  Args:
    name: The name.
    text: The text, with the source in brackets.
    width: Width of the column of names.
    defaults: Text of a last column; None for no such column.
  """
  where = source(text)
  number = re.search(r'\d{4}\.\d{5}', where)
  where = number.group() if number else where
  where += '' if defaults is None else f'  {defaults:8}'
  words = SOURCE.sub('', text).removesuffix('.')
  room = WIDTH - width - 4 - len(where)
  first, *rest = textwrap.wrap(words, room) or ['']
  line = f'  {name:{width}} {first:{room}} {where}'.rstrip()
  return '\n'.join([line, *(' ' * (width + 3) + more for more in rest)])


def algorithms(locations: Iterable[str] = ()) -> str:
  """Lists every algorithm in a line of its own, by family.

  Args:
    locations: Locations of algorithms from plugins.

  Returns:
    The text.
  """
  families: dict[str, list[str]] = {title: [] for title in FAMILIES.values()}
  for name in registry.names():
    families[FAMILIES[family(registry.make(name))]].append(name)
  families['Your own'] = list(locations)
  width = max(len(n.split(':')[-1]) for names in families.values() for n in names)
  lines = [f'{"arXiv       defaults":>{WIDTH - 1}}']
  for title, names in families.items():
    rows = [
      _row(name.split(':')[-1], _saying(name), width, registry.make(name).provenance)
      for name in names
    ]
    lines += [title, *rows, ''] if rows else []
  return '\n'.join(lines).rstrip()


def _saying(spec: str) -> str:
  """Returns an algorithm's summary without the name at its start."""
  head, colon, rest = summary(spec).partition(': ')
  return rest if colon else head


def family(algorithm: Algorithm) -> str:
  """Returns which of FAMILIES an algorithm belongs to, by what it learns from.

  Args:
    algorithm: The algorithm.
  """
  reads = requirements.fields_read(algorithm)
  if algorithm.data_format == 'preference':
    return 'pairs'
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


def parts_for(slot: str) -> dict[str, Callable[..., Any]]:
  """Returns the components that fit a field of `Algorithm`.

  A critic's loss fits `value_loss` only.

  Args:
    slot: The field.

  Returns:
    Components by name.
  """
  offered = registry.components_in(registry.COMPONENT_MODULES[slot])
  if slot not in ('policy_loss', 'value_loss'):
    return offered
  wanted = slot == 'value_loss'
  return {
    n: fn
    for n, fn in offered.items()
    if ('values' in components.fields_of(fn)) == wanted
  }


def parts(locations: Iterable[str] = ()) -> str:
  """Lists every component in a line of its own, by the field that takes it.

  Args:
    locations: Locations of components from plugins.

  Returns:
    The text.
  """
  slots = {slot: parts_for(slot) for slot in registry.COMPONENT_MODULES}
  slots.pop('kl_penalty')  # takes what kl_loss takes
  width = max(len(name) for there in slots.values() for name in there)
  lines = textwrap.wrap(SYMBOLS.replace('\n', ' '), WIDTH)
  lines.append("Swap one: algorithm.policy_loss='cispo(clip_high=.3)'")
  for slot, there in slots.items():
    lines += ['', 'kl_loss, kl_penalty' if slot == 'kl_loss' else slot]
    lines += [_row(name, _first_line(fn), width) for name, fn in there.items()]
  yours = [
    _row(s.split(':')[-1], _first_line(import_object(s)), width) for s in locations
  ]
  lines += ['', 'Your own', *yours] if yours else []
  return '\n'.join(lines)


def _first_line(function: Callable[..., Any]) -> str:
  line = (inspect.getdoc(function) or '').split('\n')[0].removeprefix('Computes ')
  return re.sub(r' ((All |Both )?(are )?)?`\[B, T\]`\.$', '', line)


def describe(name: str) -> str:
  """Describes an algorithm, and the components that have its name.

  Args:
    name: A name, or the location of a function.

  Returns:
    The text.

  Raises:
    ConfigError: If there is neither.
  """
  if ':' in name:
    spec = name.split(':')[-1]
    function = import_object(name)
    whole = not components.fields_of(function)
    return algorithm(name) if whole else part(spec, function, 'a part of your own')
  sections = [algorithm(name)] if name in registry.names() else []
  seen: dict[int, tuple[Callable[..., Any], list[str]]] = {}
  for slot in registry.COMPONENT_MODULES:
    function = parts_for(slot).get(name)
    if function is not None:
      seen.setdefault(id(function), (function, []))[1].append(slot)
  sections += [part(name, fn, ' or '.join(slots)) for fn, slots in seen.values()]
  if not sections:
    known = {n for slot in registry.COMPONENT_MODULES for n in parts_for(slot)} | {
      *registry.names()
    }
    raise unknown_name_error(name, known, 'algorithm or part', 'launch.algorithms')
  rule = '\n\n' + '─' * WIDTH + '\n'
  return rule.join(sections)


def part(name: str, function: Callable[..., Any], slots: str) -> str:
  """Describes a component: its formula, batch fields and options.

  Args:
    name: Its name.
    function: The component.
    slots: The fields that take it.

  Returns:
    The text.
  """
  lines = [f'{name}: {slots}', '', inspect.getdoc(function) or '', '']
  lines += _fold('reads', ', '.join(components.fields_of(function)))
  options = defaults(function)
  is_built_in = function.__module__.startswith('jaxrl.functional')
  lines += _option_lines(function.__name__ if is_built_in else None, options)
  return '\n'.join(lines)


def algorithm(spec: str) -> str:
  """Describes an algorithm: options and defaults, settings, components, needs.

  Args:
    spec: The algorithm's name or location.

  Returns:
    The text.
  """
  function, instance = registry.builder(spec), registry.make(spec)
  lines = [
    f'{spec}: an algorithm',
    '',
    summary(spec),
    inspect.getdoc(function) or '',
    '',
  ]
  options = defaults(function)
  lines += _option_lines(None if ':' in spec else spec, options)
  if instance.provenance:
    lines += ['', f'defaults  {PROVENANCE[instance.provenance]}']
  needs = [NEEDS.get(need, need) for need in sorted(requirements.needs(instance))]
  settings = (
    'schema',
    'group_size',
    'aggregation',
    'behaviour',
    'sampler',
    'batch_unit',
  )
  shown = [
    f'{name} {getattr(instance, registry.algorithm_field(name))}' for name in settings
  ]
  extra = {
    'filters': component_calls.join_calls(instance.filters),
    'shapers': component_calls.join_calls(instance.shapers),
    'critic_warmup': instance.critic_warmup,
  }
  shown += [f'{name} {value}' for name, value in extra.items() if value]
  lines += ['', *_fold('runs with', ' · '.join(shown))]
  lines += _fold('needs', ' · '.join(needs) or 'nothing more')
  lines += ['', *SYMBOLS.splitlines()]
  for slot, piece in requirements.components_of(instance).items():
    lines += ['', *_fold(f'{slot} =', components.call_string(piece))]
    lines += _fold('  reads', ', '.join(components.fields_of(piece)))
    text = inspect.getdoc(components.function_of(piece)) or ''
    lines.append(textwrap.indent(text, '  '))
  return '\n'.join(lines)


def _option_lines(component: str | None, options: Mapping[str, Any]) -> list[str]:
  """Returns defaults, with their ranges if the component is a built-in one."""
  if not options:
    return ['options  none']
  width = max(len(name) for name in options)
  ranges = {
    name: (component and components.allowed_range(component, name)) or ''
    for name, value in options.items()
    if (value is None or isinstance(value, int | float)) and not isinstance(value, bool)
  }
  values = (
    max(len(repr(options[name])) for name in ranges) if any(ranges.values()) else 0
  )
  return [
    'options',
    *(
      f'  {name:{width}} = {value!r:{values if ranges.get(name) else 0}}'
      f'  {ranges.get(name, "")}'.rstrip()
      for name, value in options.items()
    ),
  ]


def _fold(title: str, text: str) -> list[str]:
  indent = ' ' * (len(title) + 1)
  return textwrap.wrap(f'{title} {text}', WIDTH, subsequent_indent=indent)
