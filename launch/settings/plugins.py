"""Plugins are a folder of your own components, which configs name by their bare names.

Every component that a `.py` file of the folder defines may be named where a built-in
one of its kind may; `launch.settings.component_kinds` says which kinds there are and
how each is recognised. A name stands for `FOLDER/file.py:name`, and that is what a
config contains once it is loaded, so nothing needs to be registered in the processes
that read it.
"""

import dataclasses
import inspect
import pathlib
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from jaxrl.component_calls import parse_call, split_terms
from jaxrl.options import ConfigError, unknown_name_error
from jaxrl.user_code import load_file
from launch.settings.component_kinds import KINDS, ComponentKind, defined_at

# A bare name at the start of a term; a name with a dot, slash or colon is a location.
_NAME = re.compile(r'\s*(isolated:|generate:)?(\w+)\s*(?=\(|$)')


@dataclasses.dataclass(frozen=True)
class Plugins:
  """What a folder offers.

  Attributes:
    names: By kind, each name and the 'FOLDER/file.py:name' that it stands for.
  """

  names: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)

  def of(self, kind: str) -> Mapping[str, str]:
    """Returns the components of a kind, by name.

    Args:
      kind: The name of the kind.
    """
    return self.names.get(kind, {})

  def algorithm(self, spec: str) -> str:
    """Returns the full name of an algorithm.

    Args:
      spec: A name or location.

    Raises:
      ConfigError: If there is none.
    """
    kind = next(kind for kind in KINDS if kind.name == 'algorithm')
    return self._full_text(kind, spec, 'algorithm') if ':' not in spec else spec

  def _full_text(self, kind: ComponentKind, text: str, where: str) -> str:
    """Returns call strings, joined by +, with their components' full names."""
    plugin_components = self.of(kind.name)
    try:
      terms = split_terms(text, ' + ' if kind.prefix else '+')
    except ConfigError:
      return text  # whoever parses it says what is wrong, and where
    full_terms = []
    for term in terms:
      match = _NAME.match(term) if term.startswith(kind.prefix) else None
      name = match.group(2) if match else ''
      if match and name in plugin_components:
        term = term[: match.start(2)] + plugin_components[name] + term[match.end(2) :]
      elif match and not kind.is_open:
        known = kind.built_in()
        if name not in known and name not in kind.other_names:
          raise unknown_name_error(name, {*known, *plugin_components}, kind.name, where)
      full_terms.append(term)
    return ' + '.join(full_terms) if full_terms != terms else text

  def name_components(self, config: MutableMapping[str, Any]) -> None:
    """Gives the plugins among a config's call strings their full names.

    Args:
      config: The config; changed in place.

    Raises:
      ConfigError: If a key names a component that there is not.
    """
    for kind in KINDS:
      for pattern in kind.keys if kind.accepts else ():
        for section, leaf, key in _find(config, pattern.split('.')):
          if isinstance(section[leaf], str) and section[leaf].strip():
            text = self._full_text(kind, section[leaf], key)
            if text != section[leaf]:
              section[leaf] = text


def _find(
  section: Any, parts: list[str], prefix: str = ''
) -> Iterator[tuple[MutableMapping[str, Any], str, str]]:
  """Yields the section, the last part and the dotted key of all keys of a pattern."""
  head, *rest = parts
  for name in list(section) if head == '*' else [head]:
    if not hasattr(section, 'keys') or name not in section:
      continue
    if not rest:
      yield section, name, f'{prefix}{name}'
    elif hasattr(section[name], 'keys'):
      yield from _find(section[name], rest, f'{prefix}{name}.')


def read(folder: str) -> Plugins:
  """Imports every file of a folder, in order of their names.

  What a file raises while it is imported is not caught: its traceback is the answer.

  Args:
    folder: The folder.

  Returns:
    What it offers.

  Raises:
    ConfigError: If there is no such folder, or if a name is already taken by a built-in
      component of the same kind, or by another file.
  """
  place = pathlib.Path(folder).expanduser()
  if not place.is_dir():
    raise ConfigError(f'--config.plugins={folder}: there is no such folder')
  try:
    parse_call(f'{place}/file.py:name')
  except ValueError as error:
    raise ConfigError(
      f'--config.plugins={folder}: the path of this folder may only contain '
      'letters, digits and . _ - / ~, as it becomes part of call strings: '
      'rename the folder'
    ) from error
  names: dict[str, dict[str, str]] = {}
  for file in sorted(place.glob('[!_.]*.py')):
    for name, value in _definitions(str(file)).items():
      for kind in KINDS:
        if kind.accepts and kind.accepts(value):
          taken = names.setdefault(kind.name, {})
          _check_is_free(kind, name, file, taken)
          taken[name] = f'{file}:{name}'
  return Plugins(names)


def _check_is_free(
  kind: ComponentKind, name: str, file: pathlib.Path, taken: Mapping[str, str]
) -> None:
  if name in taken:
    owner = taken[name]
  elif name in (known := kind.built_in()):
    owner = f'a built-in {kind.name} ({defined_at(known[name])})'
  elif name in kind.other_names:
    owner = f'a term of {kind.keys[0]}'
  else:
    return
  raise ConfigError(
    f'{file}: {name!r} is already the name of {owner}; choose another, or begin it '
    'with an underscore if it is not meant to be named'
  )


def _definitions(path: str) -> dict[str, Any]:
  """Returns what a Python file itself defines under public names, in order.

  Functions and classes that the file imports, and modules, are left out.
  """
  module = load_file(path)
  return {
    name: value
    for name, value in vars(module).items()
    if not name.startswith('_')
    and not inspect.ismodule(value)
    and (
      value.__module__ == module.__name__
      if isinstance(value, type) or inspect.isroutine(value)
      else True
    )
  }
