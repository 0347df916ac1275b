"""What an algorithm is, in words: formula, defaults, needs, paper; from its parts."""

import inspect
import textwrap

from jaxrl import signature
from jaxrl.algorithms import compose


def summary(spec: str) -> str:
  """One line: what the file of the algorithm says first, its paper included."""
  function = compose.maker(spec)
  module = inspect.getmodule(function)
  text = inspect.getdoc(module) or inspect.getdoc(function) or ''
  return text.split('\n')[0]


def describe(spec: str) -> str:
  """Several paragraphs: options and their defaults, settings, parts, needs."""
  function, algorithm = compose.maker(spec), compose.make(spec)
  lines = [f'{spec} – {summary(spec)}', inspect.getdoc(function) or '', '', 'Options:']
  options = signature.defaults(function)
  lines += [f'  {name} = {value!r}' for name, value in options.items()] or ['  none']
  lines += ['', 'Settings:']
  for name in ('aggregation', 'behaviour', 'group_size', 'schema', 'sampler', 'atom'):
    lines.append(f'  {name} = {getattr(algorithm, name)!r}')
  for slot, part in compose.parts(algorithm).items():
    lines += ['', f'{slot} = {call_string(part)}']
    lines.append(f'  reads {", ".join(compose.columns(part))}')
    text = inspect.getdoc(compose.function_of(part)) or ''
    lines.append(textwrap.indent(text, '  '))
  needs = sorted(compose.needs(algorithm))
  lines += ['', 'Scored by a forward pass: ' + (', '.join(needs) or 'nothing more')]
  return '\n'.join(lines)


def call_string(part) -> str:
  """The part as a call string, with every option it runs with."""
  function = compose.function_of(part)
  options = signature.defaults(function) | compose.options_of(part)
  given = ', '.join(f'{name}={value!r}' for name, value in options.items())
  return f'{function.__name__}({given})'
