"""What an algorithm or a part is, in words: formula, defaults, needs, paper."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from jaxrl import signature
from jaxrl.algorithms import compose
from jaxrl.functional.groups import MAX_EXPONENT
from jaxrl.types import Algorithm

WIDTH = 88
SOURCE = re.compile(r'\s*\(([^()]*(?:arXiv \d{4}\.\d{5}|, (?:19|20)\d\d)[^()]*)\)\.?')
SYMBOLS = f"""\
p, o, q: log-probs by the policy, the one that sampled, the reference. r = e^(p−o).
A: advantage. R: a run's return. μ, s: mean and sample standard deviation of its group.
sg: no gradient. Exponents are clipped to ±{MAX_EXPONENT:g}."""
NEEDS = {
  'old_logprobs': "the learner's own log-probs of what was sampled",
  'ref_logprobs': 'a reference model, the initial weights',
  'teacher_logprobs': 'a teacher: --config.teacher.checkpoint',
  'teacher_topk': "a teacher's likeliest tokens: --config.teacher.checkpoint",
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
  """One line: what the file of the algorithm says first, its paper included."""
  function = compose.maker(spec)
  text = signature.unwrap(function).__globals__.get('__doc__')
  return (text or inspect.getdoc(function) or '').split('\n')[0]


def source(text: str) -> str:
  """Where a text says that something comes from, '' where it does not."""
  found = SOURCE.search(text)
  return found.group(1) if found else ''


def _row(name: str, text: str, width: int) -> str:
  """Name, text and source in columns; the text goes on below where it is too long."""
  where = source(text)
  number = re.search(r'\d{4}\.\d{5}', where)
  where = number.group() if number else where
  words = SOURCE.sub('', text).removesuffix('.')
  room = WIDTH - width - 4 - len(where)
  first, *rest = textwrap.wrap(words, room) or ['']
  line = f'  {name:{width}} {first:{room}} {where}'.rstrip()
  return '\n'.join([line, *(' ' * (width + 3) + more for more in rest)])


def algorithms(own: Iterable[str] = ()) -> str:
  """Every algorithm in a line of its own, by family; `own`: those of plugins."""
  families: dict[str, list[str]] = {title: [] for title in FAMILIES.values()}
  for name in compose.names():
    families[FAMILIES[family(compose.make(name))]].append(name)
  families['Your own'] = list(own)
  width = max(len(n.split(':')[-1]) for names in families.values() for n in names)
  lines = [f'{"":{width + 3}}{"arXiv":>{WIDTH - width - 4}}']
  for title, names in families.items():
    rows = [_row(name.split(':')[-1], _saying(name), width) for name in names]
    lines += [title, *rows, ''] if rows else []
  return '\n'.join(lines).rstrip()


def _saying(spec: str) -> str:
  """The summary without the name that it begins with."""
  head, colon, rest = summary(spec).partition(': ')
  return rest if colon else head


def family(algorithm: Algorithm) -> str:
  """Which of FAMILIES it belongs to, by what it learns from."""
  reads = compose.reads(algorithm)
  if algorithm.schema == 'preference':
    return 'pairs'
  if {'teacher_logprobs', 'teacher_topk'} & compose.needs(algorithm):
    return 'teacher'
  if algorithm.schema != 'rollout':
    return 'files'
  if 'expert_mask' in reads:
    return 'expert'
  advantage = algorithm.advantage and compose.function_of(algorithm.advantage)
  if 'step_ids' in reads or getattr(advantage, '__name__', '') == 'agentic_reinforce':
    return 'turns'
  return 'attempts at a task, compared'


def parts_for(slot: str) -> dict[str, Callable[..., Any]]:
  """The parts that fit a slot, by name: a critic's loss is no policy loss."""
  there = compose.parts_of(compose.PARTS[slot])
  if slot not in ('policy_loss', 'value_loss'):
    return there
  wanted = slot == 'value_loss'
  return {
    n: fn for n, fn in there.items() if ('values' in compose.columns(fn)) == wanted
  }


def parts(own: Iterable[str] = ()) -> str:
  """Every part in a line of its own, by the slot that takes it."""
  slots = {slot: parts_for(slot) for slot in compose.PARTS}
  slots.pop('kl_penalty')  # takes what kl_loss takes
  width = max(len(name) for there in slots.values() for name in there)
  lines = textwrap.wrap(SYMBOLS.replace('\n', ' '), WIDTH)
  lines.append("Swap one: --config.algorithm.policy_loss='cispo(clip_high=.3)'")
  for slot, there in slots.items():
    lines += ['', 'kl_loss, kl_penalty' if slot == 'kl_loss' else slot]
    lines += [_row(name, _first_line(fn), width) for name, fn in there.items()]
  yours = [
    _row(s.split(':')[-1], _first_line(signature.resolve(s)), width) for s in own
  ]
  lines += ['', 'Your own', *yours] if yours else []
  return '\n'.join(lines)


def _first_line(function: Callable[..., Any]) -> str:
  line = (inspect.getdoc(function) or '').split('\n')[0]
  return re.sub(r' ((All |Both )?(are )?)?`\[B, T\]`\.$', '', line)


def describe(name: str) -> str:
  """All there is to know of an algorithm, and of the parts that have its name."""
  if ':' in name:
    spec = name.split(':')[-1]
    function = signature.resolve(name)
    whole = not compose.columns(function)
    return algorithm(name) if whole else part(spec, function, 'a part of your own')
  found = [algorithm(name)] if name in compose.names() else []
  seen: dict[int, tuple[Callable[..., Any], list[str]]] = {}
  for slot in compose.PARTS:
    function = parts_for(slot).get(name)
    if function is not None:
      seen.setdefault(id(function), (function, []))[1].append(slot)
  found += [part(name, fn, ' or '.join(slots)) for fn, slots in seen.values()]
  if not found:
    known = {n for slot in compose.PARTS for n in parts_for(slot)} | {*compose.names()}
    raise signature.unknown(name, known, 'algorithm or part', 'launch.algorithms')
  rule = '\n\n' + '─' * WIDTH + '\n'
  return rule.join(found)


def part(name: str, function: Callable[..., Any], slots: str) -> str:
  """A part by itself: its formula, columns and options."""
  lines = [f'{name}: {slots}', '', inspect.getdoc(function) or '', '']
  lines += _fold('reads', ', '.join(compose.columns(function)))
  options = signature.defaults(function)
  lines += ['options'] if options else ['options  none']
  lines += [f'  {option} = {value!r}' for option, value in options.items()]
  return '\n'.join(lines)


def algorithm(spec: str) -> str:
  """Several paragraphs: options and their defaults, settings, parts, needs."""
  function, made = compose.maker(spec), compose.make(spec)
  lines = [
    f'{spec}: an algorithm',
    '',
    summary(spec),
    inspect.getdoc(function) or '',
    '',
  ]
  options = signature.defaults(function)
  width = max([len(name) for name in options], default=0)
  lines += ['options' if options else 'options  none']
  lines += [f'  {name:{width}} = {value!r}' for name, value in options.items()]
  needs = [NEEDS.get(need, need) for need in sorted(compose.needs(made))]
  settings = ('schema', 'group_size', 'aggregation', 'behaviour', 'sampler', 'atom')
  shown = [f'{name} {getattr(made, name)}' for name in settings]
  extra = ('filters', 'shapers', 'critic_warmup')
  shown += [f'{name} {getattr(made, name)}' for name in extra if getattr(made, name)]
  lines += ['', *_fold('runs with', ' · '.join(shown))]
  lines += _fold('needs', ' · '.join(needs) or 'nothing more')
  lines += ['', *SYMBOLS.splitlines()]
  for slot, piece in compose.parts(made).items():
    lines += ['', *_fold(f'{slot} =', call_string(piece))]
    lines += _fold('  reads', ', '.join(compose.columns(piece)))
    text = inspect.getdoc(compose.function_of(piece)) or ''
    lines.append(textwrap.indent(text, '  '))
  return '\n'.join(lines)


def _fold(title: str, text: str) -> list[str]:
  indent = ' ' * (len(title) + 1)
  return textwrap.wrap(f'{title} {text}', WIDTH, subsequent_indent=indent)


def call_string(part: Callable[..., Any]) -> str:
  """The part as a call string, with every option it runs with."""
  function = compose.function_of(part)
  options = signature.defaults(function) | compose.options_of(part)
  given = ', '.join(f'{name}={value!r}' for name, value in options.items())
  return f'{function.__name__}({given})'
