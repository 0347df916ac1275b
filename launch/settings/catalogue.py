"""Catalogue: lists every kind of component, and describes each component."""

import importlib
import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from jaxrl.algorithms import describe, registry
from jaxrl.config import describe_options
from jaxrl.options import declared_ranges, defaults, unknown_name_error
from jaxrl.user_code import import_object
from launch.settings.component_kinds import (
  KINDS,
  ComponentKind,
  component_docstring,
  defined_at,
  find_kind,
  load_component,
)
from launch.settings.plugins import Plugins

_SKIPPED_SECTIONS = re.compile(
  r'\n(?:Args|Attributes|Returns|Raises|Keyword Args):\n.*', re.DOTALL
)


def index(plugins: Plugins) -> str:
  """Lists the kinds, each with how many components it has.

  Args:
    plugins: The user's own components.

  Returns:
    The text.
  """
  rows = []
  for kind in KINDS:
    num_plugins = len(plugins.of(kind.name))
    count = f'{len(kind.built_in())}' + (
      f' + {num_plugins} of your own' if num_plugins else ''
    )
    rows.append((kind.plural, count, kind.what))
  widths = [max(len(row[i]) for row in rows) for i in range(2)]
  lines = ['Kinds of components']
  for name, count, what in rows:
    head = f'  {name:{widths[0]}} {count:>{widths[1]}}  '
    lines.append(_columns(head, what))
  return '\n'.join(lines)


def kind_page(kind: ComponentKind, plugins: Plugins) -> str:
  """Lists the components of a kind, a line each.

  Args:
    kind: The kind.
    plugins: The user's own components.

  Returns:
    The text.
  """
  plugin_components = plugins.of(kind.name)
  if kind.name == 'algorithm':
    return describe.algorithms(plugin_components.values())
  lines = textwrap.wrap(f'{kind.plural}: {kind.what}', describe.WIDTH)
  lines += _fold('named by', ', '.join(f'--config.{key}' for key in kind.keys))
  if not kind.accepts:
    lines += ['', '  all are built in: a file of your own cannot add one']
  built_in = kind.built_in()
  width = max([len(name) for name in {**built_in, **plugin_components}], default=0)
  for title, components in (('', built_in), ('Your own', plugin_components)):
    if components:
      lines += ['', title] if title else ['']
      lines += [
        _columns(f'  {name:{width}}  ', _first_line(component))
        for name, component in components.items()
      ]
  if not built_in and not plugin_components:
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
  pages, names = [], set()
  described: dict[Any, list[str]] = {}  # a component of several kinds has one page
  if ':' in name:
    value = import_object(name)
    kinds = [kind.name for kind in KINDS if kind.accepts and kind.accepts(value)]
    described[name] = kinds or ['algorithm']
  for kind in KINDS:
    components = {**kind.built_in(), **plugins.of(kind.name)}
    names |= components.keys()
    if name in components:
      described.setdefault(components[name], []).append(kind.name)
  for component, kinds in described.items():
    pages.append(_page(name.split(':')[-1], component, kinds))
  kind = find_kind(name)
  if kind is not None:
    pages.append(kind_page(kind, plugins))
  if not pages:
    known = names | {kind.name for kind in KINDS} | {kind.plural for kind in KINDS}
    raise unknown_name_error(
      name, known, 'algorithm, component or kind', 'launch.algorithms'
    )
  return pages


def _page(name: str, component: Any, kinds: list[str]) -> str:
  """Describes a component of some kinds."""
  if kinds == ['algorithm']:
    is_preset = name in registry.names() and '.presets.' in component
    page = describe.algorithm(name if is_preset else component)
  elif any(kind in registry.COMPONENT_MODULES for kind in kinds):
    of_own = isinstance(component, str) and component.rpartition(':')[0].endswith('.py')
    slots = 'a part of your own' if of_own else ' or '.join(kinds)
    page = describe.part(name, load_component(component), slots)
  else:
    page = _plain_page(name, component, kinds)
  return f'{page}\n\ndefined in  {defined_at(component)}'


def _plain_page(name: str, component: Any, kinds: list[str]) -> str:
  try:
    value = load_component(component)
  except ImportError as error:
    return f'{name}: {" or ".join(kinds)}\n\nneeds a package that is missing: {error}'
  lines = [f'{name}: {" or ".join(kinds)}', '']
  lines += _SKIPPED_SECTIONS.sub('', _docstring(component, value)).strip().splitlines()
  options = defaults(value) if callable(value) else {}
  notes = describe_options(value)
  if callable(value):
    for option, allowed in declared_ranges(value).items():
      notes[option] = f'{notes.get(option, "")} It {allowed}.'.strip()
  lines += ['', *_option_lines(options, notes)]
  return '\n'.join(lines)


def _option_lines(
  options: Mapping[str, Any], descriptions: Mapping[str, str]
) -> list[str]:
  """Returns a table of options: the default and the description of each."""
  if not options:
    return ['options  none']
  values = {name: f'{name} = {value!r}' for name, value in options.items()}
  width = min(max(map(len, values.values())), describe.WIDTH // 3)
  lines = ['options']
  for name, text in values.items():
    note = descriptions.get(name, '')
    if len(text) <= width:
      lines.append(_columns(f'  {text:{width}}  ', note))
    else:
      lines += textwrap.wrap(f'  {text}', describe.WIDTH, subsequent_indent='    ')
      lines += [_columns(' ' * (width + 4), note)] if note else []
  return lines


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
  lines = textwrap.wrap(text, max(describe.WIDTH - len(head), 20)) or ['']
  return ('\n' + ' ' * len(head)).join([head + lines[0], *lines[1:]]).rstrip()


def _fold(title: str, text: str) -> list[str]:
  indent = ' ' * (len(title) + 2)
  return textwrap.wrap(f'{title}  {text}', describe.WIDTH, subsequent_indent=indent)
