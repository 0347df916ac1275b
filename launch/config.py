"""The command line and the config: read, overridden, checked, before any work.

`--config=configs/X.py[:ALGORITHM]` names a file with `get_config(algorithm=…)` that
returns a ConfigDict; `--config.a.b=value` sets a key of it, by the type it has. Every
mistake raises ConfigError, whose text is one line for the user.
"""

import ast
import dataclasses
import importlib.util
import inspect
import pathlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config import Optional, section
from jaxrl.signature import ConfigError, nearest

TRUE = ('true', '1', 'yes', 'on')
FALSE = ('false', '0', 'no', 'off')
NOUNS = {bool: 'true or false', int: 'a whole number', float: 'a number'}


@dataclasses.dataclass(frozen=True)
class Command:
  """A parsed command line.

  config: path of the config file. algorithm: what followed its colon, or None.
  overrides: (dotted key, text) in order; text is None for a bare `--config.flag`.
  flags: the launcher's own flags, by name.
  """

  config: str
  algorithm: str | None
  overrides: tuple[tuple[str, str | None], ...]
  flags: dict[str, str]


def parse(argv: Sequence[str], flags: Mapping[str, str] | None = None) -> Command:
  """Splits a command line (without the program). Raises ConfigError.

  flags: the launcher's own flags with their defaults; they take a value each.
  """
  values = dict(flags or {})
  spec, overrides = '', []
  items = list(argv)
  while items:
    item = items.pop(0)
    if not item.startswith('--'):
      raise ConfigError(f'cannot read {item!r}: options look like --name=value')
    name, equals, text = item[2:].partition('=')
    value = text if equals else None
    if value is None and items and not items[0].startswith('--'):
      value = items.pop(0)
    if name.startswith('config.'):
      overrides.append((name.removeprefix('config.'), value))
    elif name != 'config' and name not in values:
      _refuse_flag(name, [*values, 'config', 'help'])
    elif not value:
      raise ConfigError(f'--{name} needs a value: --{name}=…')
    elif name == 'config':
      spec = value
    else:
      values[name] = value
  if not spec:
    raise ConfigError('which config? Name one: --config=configs/quickstart.py')
  path, algorithm = split_spec(spec)
  return Command(path, algorithm, tuple(overrides), values)


def _refuse_flag(name: str, known: Sequence[str]) -> None:
  near = nearest(name, known)
  hint = f'; did you mean --{near}?' if near else ''
  more = f' A key of the config is set by --config.{name}=…' if '.' in name else ''
  raise ConfigError(f'unknown option --{name}{hint}{more}')


def split_spec(spec: str) -> tuple[str, str | None]:
  """'configs/x.py:lab.mod:fn' → ('configs/x.py', 'lab.mod:fn')."""
  head, dot_py, rest = spec.partition('.py')
  while dot_py and rest and not rest.startswith(':'):
    more, dot_py, rest = rest.partition('.py')
    head = f'{head}.py{more}'
  if not dot_py:
    raise ConfigError(f'--config={spec}: a config is a Python file: configs/NAME.py')
  if rest == ':':
    raise ConfigError(f'--config={spec}: name an algorithm after the colon')
  return f'{head}.py', rest[1:] or None


def load(
  command: Command, sections: Mapping[str, Callable[..., Any]] | None = None
) -> ConfigDict:
  """Runs get_config, applies the overrides and locks the result.

  sections: the launcher's own, name → function whose options they are; added where
    the config does not have them.
  """
  get_config = getattr(module(command.config), 'get_config', None)
  if not callable(get_config):
    raise ConfigError(f'{command.config}: defines no get_config()')
  takes = len(inspect.signature(get_config).parameters)
  if command.algorithm and not takes:
    raise ConfigError(
      f'{command.config}: takes no algorithm, but {command.algorithm!r} was named'
    )
  folder, algorithm = dict(command.overrides).get('plugins'), command.algorithm
  if folder and algorithm:
    algorithm = _plugins(folder).algorithm(algorithm)
  with _told(command.config, algorithm):
    config = get_config(algorithm) if algorithm else get_config()
  if not isinstance(config, ConfigDict):
    raise ConfigError(
      f'{command.config}: get_config() gave {type(config).__name__}, not a ConfigDict'
    )
  for name, source in (sections or {}).items():
    if name not in config:
      config[name] = section(source)
  if 'plugins' not in config:
    config.plugins = ''
  config.lock()
  for key, text in command.overrides:
    override(config, key, text)
  if config.plugins:
    _plugins(str(config.plugins)).name_parts(config.get('algorithm', {}))
  return config


def _plugins(folder: str) -> Any:
  from jaxrl.algorithms import plugins  # imports JAX

  return plugins.read(folder)


class _told:
  """Turns a config file's own exception into a line that says where it arose.

  What the user's algorithm raises while it is imported keeps its traceback.
  """

  def __init__(self, path: str, algorithm: str | None = None):
    self.path = path
    self._own = (algorithm or '').rpartition(':')[0]

  def __enter__(self) -> None:
    pass

  def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    if error is None or isinstance(error, ConfigError):
      return
    if not isinstance(error, Exception):
      return
    if self._own and self._in_own(error, trace):
      return
    file = str(pathlib.Path(self.path).resolve())
    lines = [f.lineno for f in traceback.extract_tb(trace) if f.filename == file]
    place = f'{self.path}, line {lines[-1]}' if lines else self.path
    raise ConfigError(f'{place}: {type(error).__name__}: {error}') from error

  def _in_own(self, error: Exception, trace: Any) -> bool:
    """Whether `error` arose in the user's algorithm."""
    places = [(str(getattr(error, 'filename', '')), '')]
    for frame, _ in traceback.walk_tb(trace):
      places.append((frame.f_code.co_filename, frame.f_globals.get('__name__', '')))
    path = (
      self._own if self._own.endswith('.py') else self._own.replace('.', '/') + '.py'
    )
    return any(file.endswith(path) or name == self._own for file, name in places)


def module(path: str) -> Any:
  """A config file, run. Raises ConfigError for one that cannot be."""
  file = pathlib.Path(path)
  if not file.is_file():
    near = nearest(file.name, [p.name for p in file.parent.glob('*.py')])
    hint = f'; did you mean {file.parent / near}?' if near else ''
    raise ConfigError(f'--config={path}: no such file{hint}')
  name = f'_config_{file.stem}'
  spec = importlib.util.spec_from_file_location(name, file.resolve())
  if spec is None or spec.loader is None:
    raise ConfigError(f'--config={path}: cannot be read as Python')
  made = importlib.util.module_from_spec(spec)
  sys.modules[name] = made
  with _told(path):
    try:
      spec.loader.exec_module(made)
    except SyntaxError as error:
      raise ConfigError(
        f'{error.filename}, line {error.lineno}: {error.msg}'
      ) from error
  return made


def override(config: ConfigDict, key: str, text: str | None) -> None:
  """Sets the dotted `key` to `text` read as the type it has. Raises ConfigError."""
  if key == 'algorithm.name':
    raise ConfigError(
      '--config.algorithm.name: an algorithm brings its own keys; choose it by '
      f'--config=FILE.py:{text or "NAME"}'
    )
  *parents, last = key.split('.')
  node: Any = config
  for part in [*parents, last]:
    if not isinstance(node, ConfigDict) or part not in node:
      raise ConfigError(_unknown(config, key))
    holder, node = node, node[part]
  if isinstance(node, ConfigDict):
    raise ConfigError(
      f'--config.{key} is a section: set one of its keys, '
      f'{", ".join(f"--config.{key}.{k}" for k in sorted(node))}'
    )
  optional = node is None or isinstance(holder.get_ref(last), Optional)
  try:
    value = read(text, holder.get_type(last), node, optional)
    holder[last] = value
  except (ValueError, TypeError) as error:
    raise ConfigError(f'--config.{key}={text}: {error}') from error


def _unknown(config: ConfigDict, key: str) -> str:
  known = list(keys(config))
  leaf = key.rsplit('.', 1)[-1]
  near = nearest(key, known)
  if near is None:  # the right name in another section
    near = next((k for k in known if k.rsplit('.', 1)[-1] == leaf), None)
  hint = f'; did you mean --config.{near}?' if near else ' (--help lists them all)'
  return f'unknown key --config.{key}{hint}'


def keys(config: ConfigDict, prefix: str = '') -> Iterator[str]:
  """All dotted keys, sections left out."""
  for key in config:
    value = config[key]
    if isinstance(value, ConfigDict):
      yield from keys(value, f'{prefix}{key}.')
    else:
      yield f'{prefix}{key}'


def read(text: str | None, kind: type, current: Any, optional: bool) -> Any:
  """Reads `text` as a value of type `kind`. Raises ValueError saying what it wants."""
  if text is None:
    if kind is bool:
      return True
    raise ValueError('a value is missing')
  low = text.strip().lower()
  if optional and low in ('none', 'null'):
    return None
  if kind is str:
    return text
  if kind is bool:
    if low in TRUE + FALSE:
      return low in TRUE
  elif kind in (int, float):
    number = _number(low)
    if number is not None and (kind is float or number == int(number)):
      return kind(number)
  elif kind in (tuple, list):
    return _sequence(text, kind, current)
  else:
    return _literal(text)
  noun = NOUNS[kind] + (' or none' if optional else '')
  raise ValueError(f'wants {noun}, not {text!r}')


def _number(text: str) -> int | float | None:
  try:
    return int(text)
  except ValueError:
    pass
  try:
    number = float(text)
  except ValueError:
    return None
  return number if number - number == 0 else None  # no inf, no nan


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _sequence(text: str, kind: type, current: Any) -> Any:
  """'(1, 2)', '1,2' or 'a,b'; entries take the type that the default's entries have."""
  value = _literal(text)
  if isinstance(value, str):
    value = [part.strip() for part in text.strip('()[]').split(',') if part.strip()]
  elif not isinstance(value, (tuple, list)):
    value = [value]
  types = {type(entry) for entry in current or ()}
  if len(types) == 1 and types <= {int, float, str, bool}:
    entry_kind = types.pop()
    value = [
      entry if type(entry) is entry_kind else read(str(entry), entry_kind, None, False)
      for entry in value
    ]
  return kind(value)


def check(config: Any) -> None:
  """Checks what types alone do not: the algorithm's options and call strings."""
  if not config.get('algorithm', {}).get('name'):
    return
  from jaxrl.algorithms import compose  # imports JAX: after the cheap checks

  options = config.algorithm.to_dict()
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # the run itself tells what is doubtful
    compose.make(options.pop('name'), options)


def listing(config: ConfigDict) -> str:
  """Every key with its value, as it would be set."""
  lines = []
  for key in keys(config):
    value: Any = config
    for part in key.split('.'):
      value = value[part]
    lines.append(f'  --config.{key}={value}')
  return '\n'.join(lines)
