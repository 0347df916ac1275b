"""A folder of your own parts and algorithms, each named as the built-in ones are.

Every public function that a `.py` file of the folder defines may be named: a function
that returns an `Algorithm` as an algorithm, any other as a part. A name stands for
`FOLDER/file.py:name`, and that is what a config holds once it is loaded, so nothing
needs to be registered in the processes that read it.
"""

import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from jaxrl import signature
from jaxrl.algorithms import compose
from jaxrl.signature import ConfigError
from jaxrl.types import Algorithm


@dataclasses.dataclass(frozen=True)
class Plugins:
  """What a folder offers: name → 'FOLDER/file.py:name'."""

  algorithms: Mapping[str, str] = dataclasses.field(default_factory=dict)
  parts: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def algorithm(self, spec: str) -> str:
    """The algorithm `spec` by its full name; ConfigError when there is none."""
    if spec in self.algorithms:
      return self.algorithms[spec]
    if ':' not in spec:
      _check(spec, compose.names(), self.algorithms, 'algorithm', 'algorithm')
    return spec

  def part(self, slot: str, text: str) -> str:
    """The call string `text` with its part's full name; ConfigError when unknown."""
    name = signature.parse_call(text)[0] if text else ''
    if name in self.parts:
      return text.replace(name, self.parts[name], 1)
    if name not in ('', 'none') and ':' not in name:
      known = compose.parts_of(compose.PARTS[slot])
      _check(name, known, self.parts, slot, f'algorithm.{slot}')
    return text

  def name_parts(self, options: MutableMapping[str, Any]) -> None:
    """Gives the plugins among the call strings of `options` their full names."""
    for slot in compose.PARTS:
      if isinstance(options.get(slot), str):
        options[slot] = self.part(slot, options[slot])


def _check(
  name: str, known: Iterable[str], own: Iterable[str], what: str, where: str
) -> None:
  if name not in known:
    raise signature.unknown(name, {*known, *own}, what, where)


def read(folder: str) -> Plugins:
  """Imports every file of `folder`, in order of their names.

  Raises ConfigError when there is no such folder, or when a name is taken: by a
  built-in part or algorithm, or by another file. What a file itself raises while it
  is imported is not caught: its traceback is the answer.
  """
  place = pathlib.Path(folder).expanduser()
  if not place.is_dir():
    raise ConfigError(f'--config.plugins={folder}: there is no such folder')
  try:
    signature.parse_call(f'{place}/file.py:name')
  except ConfigError as error:
    raise ConfigError(
      f'--config.plugins={folder}: a call string names a part by its path, which may '
      'hold letters, digits and . _ - / ~ alone: rename the folder'
    ) from error
  algorithms: dict[str, str] = {}
  parts: dict[str, str] = {}
  for file in sorted(place.glob('[!_.]*.py')):
    for name, function in signature.functions(str(file)).items():
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
  return function.__name__ == stem and not compose.columns(function)


def _algorithms() -> dict[str, str]:
  return dict.fromkeys(compose.names(), 'a built-in algorithm')


def _parts() -> dict[str, str]:
  return {
    name: f'a part of {module.__name__}'
    for module in compose.PARTS.values()
    for name in compose.parts_of(module)
  }
