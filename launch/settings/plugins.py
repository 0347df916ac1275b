"""Plugins are a folder of your own components and algorithms.

They are named as the built-in ones are.

Every public function that a `.py` file of the folder defines may be named: a function
that returns an `Algorithm` as an algorithm, any other as a component. A name stands for
`FOLDER/file.py:name`, and that is what a config contains once it is loaded, so nothing
needs to be registered in the processes that read it.
"""

import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from jaxrl import call_strings
from jaxrl.algorithms import registry
from jaxrl.call_strings import ConfigError
from jaxrl.functional import components
from jaxrl.types import Algorithm
from launch.settings.call_syntax import parse_call


@dataclasses.dataclass(frozen=True)
class Plugins:
  """What a folder offers.

  Attributes:
    algorithms: Name → 'FOLDER/file.py:name'.
    parts: Name of a component → 'FOLDER/file.py:name'.
  """

  algorithms: Mapping[str, str] = dataclasses.field(default_factory=dict)
  parts: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def algorithm(self, spec: str) -> str:
    """Returns the full name of an algorithm.

    Args:
      spec: A name or location.

    Raises:
      ConfigError: If there is none.
    """
    if spec in self.algorithms:
      return self.algorithms[spec]
    if ':' not in spec:
      _check(spec, registry.names(), self.algorithms, 'algorithm', 'algorithm')
    return spec

  def part(self, slot: str, text: str) -> str:
    """Returns a call string with its component's full name.

    Args:
      slot: The field of `Algorithm`.
      text: The call string.

    Raises:
      ConfigError: If there is no such component.
    """
    name = parse_call(text).name if text else ''
    if name in self.parts:
      return text.replace(name, self.parts[name], 1)
    if name not in ('', 'none') and ':' not in name:
      known = registry.components_in(registry.COMPONENT_MODULES[slot])
      _check(name, known, self.parts, slot, f'algorithm.{slot}')
    return text

  def name_parts(self, options: MutableMapping[str, Any]) -> None:
    """Gives the plugins among the call strings of some options their full names.

    Args:
      options: The options of an algorithm; changed in place.
    """
    for slot in registry.COMPONENT_MODULES:
      if isinstance(options.get(slot), str):
        options[slot] = self.part(slot, options[slot])


def _check(
  name: str, known: Iterable[str], own: Iterable[str], what: str, where: str
) -> None:
  if name not in known:
    raise call_strings.unknown_name_error(name, {*known, *own}, what, where)


def read(folder: str) -> Plugins:
  """Imports every file of a folder, in order of their names.

  What a file raises while it is imported is not caught: its traceback is the answer.

  Args:
    folder: The folder.

  Returns:
    What it offers.

  Raises:
    ConfigError: If there is no such folder, or if a name is already taken by a built-in
      component or algorithm, or by another file.
  """
  place = pathlib.Path(folder).expanduser()
  if not place.is_dir():
    raise ConfigError(f'--config.plugins={folder}: there is no such folder')
  try:
    parse_call(f'{place}/file.py:name')
  except ConfigError as error:
    raise ConfigError(
      f'--config.plugins={folder}: the path of this folder may only contain '
      'letters, digits and . _ - / ~, as it becomes part of call strings: '
      'rename the folder'
    ) from error
  algorithms: dict[str, str] = {}
  parts: dict[str, str] = {}
  for file in sorted(place.glob('[!_.]*.py')):
    for name, function in call_strings.functions(str(file)).items():
      makes = _makes_algorithm(function, file.stem)
      taken, own = (_algorithms(), algorithms) if makes else (_parts(), parts)
      known = taken | own
      if name in known:
        raise ConfigError(
          f'{file}: {name!r} is already the name of {known[name]}; choose another, '
          f'or begin it with an underscore if it is not meant to be named'
        )
      own[name] = f'{file}:{name}'
  return Plugins(algorithms, parts)


def _makes_algorithm(function: Callable[..., Any], stem: str) -> bool:
  """By its annotation, or by bearing the file's name and reading no columns."""
  returns = inspect.signature(function).return_annotation
  if returns in (Algorithm, 'Algorithm'):
    return True
  return function.__name__ == stem and not components.fields_of(function)


def _algorithms() -> dict[str, str]:
  return dict.fromkeys(registry.names(), 'a built-in algorithm')


def _parts() -> dict[str, str]:
  return {
    name: f'a part of {module.__name__}'
    for module in registry.COMPONENT_MODULES.values()
    for name in registry.components_in(module)
  }
