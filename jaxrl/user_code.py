"""User code is imported from modules and files; its errors name file and line."""

import functools
import importlib
import importlib.util
import os
import pathlib
import sysconfig
import traceback
from typing import Any

from jaxrl.options import ConfigError, unknown_name_error

FILE_MODULE_PREFIX = 'jaxrl_user_'  # of the modules of users' files


def import_object(target: str, where: str = '') -> Any:
  """Imports an attribute.

  Errors raised while the module is imported keep their traceback, except syntax errors
  in a file, which become a ConfigError with the file and the line.

  Args:
    target: `'pkg.mod:attr'` or `'path/file.py:attr'`.
    where: What error messages begin with, such as the config key; '' for none.

  Returns:
    The attribute.

  Raises:
    ConfigError: If there is no such module, file or attribute, or if a file is not
      valid Python.
  """
  if where:
    try:
      return import_object(target)
    except ConfigError as error:
      raise ConfigError(f'{where}: {error}') from error
  location, _, attribute = target.rpartition(':')
  if not location or not attribute:
    raise ConfigError(
      f'cannot resolve {target!r}: write package.module:name or path/file.py:name'
    )
  module = load_file(location) if location.endswith('.py') else _load(location)
  if not hasattr(module, attribute):
    names = [name for name in vars(module) if not name.startswith('_')]
    raise unknown_name_error(attribute, names, 'attribute', location)
  return getattr(module, attribute)


def _load(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    # Only the named module's own absence is the setting's fault.
    if error.name is not None and (name + '.').startswith(error.name + '.'):
      raise ConfigError(f'there is no module {name!r} to import') from error
    raise


@functools.cache
def load_file(path: str) -> Any:
  """Imports a Python file, once.

  Args:
    path: The file.

  Raises:
    ConfigError: If there is no such file, or it is not valid Python.
  """
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    looked_in = '' if file.is_absolute() else f' (looked in {pathlib.Path.cwd()})'
    raise ConfigError(f'there is no file {path!r}{looked_in}')
  spec = importlib.util.spec_from_file_location(FILE_MODULE_PREFIX + file.stem, file)
  if spec is None or spec.loader is None:
    raise ConfigError(f'{path!r} is not a Python file')
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except SyntaxError as error:  # of this file, or of one that it imports
    line = (error.text or '').strip()
    raise ConfigError(
      f'{error.filename}, line {error.lineno}: {error.msg}: {line}'
    ) from error
  return module


_LIBRARIES = tuple(
  os.path.join(folder, '')
  for folder in (
    str(pathlib.Path(__file__).parent),
    *(str(pathlib.Path(__file__).parents[1] / name) for name in ('kernels', 'launch')),
    *(sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib')),
  )
)


def describe_error(error: BaseException) -> str:
  """Describes an error, with the file and line of the user's code that raised it.

  Args:
    error: The error. One that arose within this package or a library alone has no
      place that a user could mend.

  Returns:
    Its type, its message and the place.
  """
  text, place = f'{type(error).__name__}: {error}', user_place(error)
  return f'{text} ({place})' if place else text


def user_place(error: BaseException) -> str:
  """Returns the file and line of the user's code that raised an error.

  Args:
    error: The error.

  Returns:
    The place; '' if the error arose within this package or a library alone.
  """
  for frame in reversed(traceback.extract_tb(error.__traceback__)):
    path = os.path.abspath(frame.filename)
    if not path.startswith(_LIBRARIES) and os.path.exists(path):
      return f'{frame.filename}, line {frame.lineno}'
  return ''
