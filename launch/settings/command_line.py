"""Reads the command line and the config file, and applies overrides.

`--config=configs/X.py[:ALGORITHM]` names a file with `get_config(algorithm=…)` that
returns a ConfigDict; `--config.a.b=value` sets one of its keys, by the type it has.
Every mistake raises ConfigError, whose text is one line for the user.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import pathlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config import OptionalField, describe_keys, from_config, to_config
from jaxrl.data.trajectory_writers.writer import DumpOptions
from jaxrl.options import NOUNS, ConfigError, Options, closest_match, error_prefix
from launch.settings.logging_settings import LoggingOptions

TRUE = ('true', '1', 'yes', 'on')
FALSE = ('false', '0', 'no', 'off')
# Sections that take keys of any name.
OPEN_SECTIONS = ('model.template_options', 'teacher.by_tag')


@dataclasses.dataclass(frozen=True)
class Command:
  """Holds a parsed command line.

  Attributes:
    config: Path of the config file.
    algorithm: What followed its colon, or None.
    overrides: (dotted key, text) in order; text is None for a bare `--config.flag`.
    flags: The command's own flags, by name.
  """

  config: str
  algorithm: str | None
  overrides: tuple[tuple[str, str | None], ...]
  flags: dict[str, str]

  def flag(self, name: str, kind: type) -> Any:
    """Returns one of the command's own flags as a value.

    Args:
      name: The flag's name.
      kind: Bool, int or float.

    Raises:
      ConfigError: If the text is not such a value.
    """
    text = self.flags[name]
    with error_prefix(f'--{name}={text}'):
      return parse_value(text, kind, None, False)


def parse(
  argv: Sequence[str], flags: Mapping[str, str] | None = None, *, without: str = ''
) -> Command:
  """Splits a command line.

  Args:
    argv: The command line, without the program.
    flags: The command's own flags with their defaults; each takes a value, but one
      whose default is 'true' or 'false' may stand alone, for 'true'.
    without: One of these flags, which takes the place of a config; the command's
      `config` is then ''.

  Raises:
    ConfigError: For an unknown option or a missing value.
  """
  values = dict(flags or {})
  spec, overrides = '', []
  items = list(argv)
  while items:
    item = items.pop(0)
    if not item.startswith('--'):
      raise ConfigError(f'unexpected argument {item!r}: options look like --name=value')
    name, equals, text = item[2:].partition('=')
    value = text if equals else None
    if value is None and items and not items[0].startswith('--'):
      value = items.pop(0)
    if name.startswith('config.'):
      overrides.append((name.removeprefix('config.'), value))
    elif name != 'config' and name not in values:
      _refuse_flag(name, [*values, 'config', 'help'])
    elif value is None and values.get(name) in ('true', 'false'):
      values[name] = 'true'
    elif not value:
      raise ConfigError(f'--{name} needs a value: --{name}=…')
    elif name == 'config':
      spec = value
    else:
      values[name] = value
  if values.get(without):
    if spec:
      raise ConfigError(f'--{without} brings its own config: leave out --config={spec}')
    return Command('', None, tuple(overrides), values)
  if not spec:
    raise ConfigError(
      'no config given: set --config=FILE.py, as in --config=configs/quickstart.py'
    )
  path, algorithm = split_spec(spec)
  return Command(_find_installed(path), algorithm, tuple(overrides), values)


def _find_installed(path: str) -> str:
  """Returns the path of 'configs/NAME.py' as installed, where it is not below here."""
  file = pathlib.Path(path)
  if file.exists() or file.parts[0] != 'configs':
    return path
  import configs

  installed = pathlib.Path(configs.__path__[0]).parent / file
  return str(installed) if installed.is_file() else path


def _refuse_flag(name: str, known: Sequence[str]) -> None:
  from configs import base
  from launch.settings.foreign_keys import describe_foreign_key

  keys = list(dotted_keys(base.get_config()))
  wanted = name.replace('-', '_')
  near = closest_match(name, known)
  key = next((k for k in keys if k == wanted), None)
  key = key or next((k for k in keys if k.rpartition('.')[2] == wanted), None)
  if key is None and near is None:
    if answer := describe_foreign_key(wanted):
      raise ConfigError(f'unknown option --{name}; {answer}')
    key = closest_match(wanted, keys)
  hint = f'; did you mean --{near}?' if near else ''
  hint = f'; did you mean --config.{key}?' if key else hint
  more = f' A key of the config is set by --config.{name}=…' if '.' in name else ''
  raise ConfigError(f'unknown option --{name}{hint}{more}')


def split_spec(spec: str) -> tuple[str, str | None]:
  """Splits 'configs/x.py:lab.mod:fn' into ('configs/x.py', 'lab.mod:fn')."""
  match = re.fullmatch(r'(.*?\.py)(?::(.*))?', spec, re.DOTALL)
  if match is None:
    raise ConfigError(f'--config={spec}: a config is a Python file: configs/NAME.py')
  if match[2] == '':
    raise ConfigError(f'--config={spec}: name an algorithm after the colon')
  return match[1], match[2]


def load(command: Command, *, dumps: bool = False) -> ConfigDict:
  """Runs get_config, and completes what it returns.

  Args:
    command: The command line.
    dumps: Whether the command writes trajectories, and has a section for them.

  Raises:
    ConfigError: For a file, key or value that cannot be.
  """
  get_config = getattr(module(command.config), 'get_config', None)
  if not callable(get_config):
    raise ConfigError(f'{command.config}: does not define get_config()')
  takes = len(inspect.signature(get_config).parameters)
  if command.algorithm and not takes:
    raise ConfigError(
      f'{command.config}: its get_config() takes no algorithm, but --config '
      f'names {command.algorithm!r}'
    )
  folder, algorithm = dict(command.overrides).get('plugins'), command.algorithm
  own_envs: Any = contextlib.nullcontext()
  if folder:
    from jaxrl.envs import env_registry

    plugins = _plugins(folder)
    algorithm = algorithm and plugins.algorithm(algorithm)
    own_envs = env_registry.naming(plugins.of('env'))  # for `env_section`
  if algorithm and ':' in algorithm:
    from jaxrl.algorithms import registry

    with contextlib.suppress(ConfigError):  # the config may take it for something else
      registry.builder(algorithm)  # what it raises when imported keeps its traceback
  with _naming_place(command.config), own_envs:
    config = get_config(algorithm) if algorithm else get_config()
  if not isinstance(config, ConfigDict):
    raise ConfigError(
      f'{command.config}: get_config() returned a {type(config).__name__}, '
      'not a ConfigDict'
    )
  return complete(config, command, dumps=dumps)


def complete(
  config: ConfigDict, command: Command, *, dumps: bool = False
) -> ConfigDict:
  """Adds the launcher's own sections, applies overrides and locks the config.

  Args:
    config: The config, changed in place.
    command: The command line.
    dumps: As for `load`.

  Raises:
    ConfigError: For an unknown key, or text that is no such value.
  """
  sections: dict[str, type[Options]] = {'logging': LoggingOptions}
  if dumps:
    sections['trajectory_dump'] = DumpOptions
  for name, options in sections.items():
    section: Any = config.get(name, {})
    config[name] = to_config(from_config(options, section, name))
  if 'plugins' not in config:
    config.plugins = ''
    describe_keys(config, {'plugins': 'Folder whose files define components by name.'})
  config.lock()
  for key, text in command.overrides:
    override(config, key, text)
  if config.plugins:
    _plugins(str(config.plugins)).name_components(config)
  return config


def _plugins(folder: str) -> Any:
  from launch.settings import plugins  # imports JAX

  return plugins.read(folder)


@contextlib.contextmanager
def _naming_place(path: str) -> Iterator[None]:
  """Turns a config file's own exception into a line that says where it arose."""
  try:
    yield
  except ConfigError:
    raise
  except Exception as error:
    file = str(pathlib.Path(path).resolve())
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == file]
    place = f'{path}, line {lines[-1]}' if lines else path
    raise ConfigError(f'{place}: {type(error).__name__}: {error}') from error


def module(path: str) -> Any:
  """Runs a config file and returns its module.

  Raises:
    ConfigError: For a file that is missing or cannot be run.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    near = closest_match(file.name, [p.name for p in file.parent.glob('*.py')])
    hint = f'; did you mean {file.parent / near}?' if near else ''
    raise ConfigError(f'--config={path}: no such file{hint}')
  name = f'_config_{file.stem}'
  spec = importlib.util.spec_from_file_location(name, file.resolve())
  if spec is None or spec.loader is None:
    raise ConfigError(f'--config={path}: cannot be read as Python')
  config_module = importlib.util.module_from_spec(spec)
  sys.modules[name] = config_module
  with _naming_place(path):
    try:
      spec.loader.exec_module(config_module)
    except SyntaxError as error:
      raise ConfigError(
        f'{error.filename}, line {error.lineno}: {error.msg}'
      ) from error
  return config_module


def override(config: ConfigDict, key: str, text: str | None) -> None:
  """Sets a key of the config.

  Args:
    config: The config, changed in place.
    key: The dotted key.
    text: The value as text, which is read as the type that the key has.

  Raises:
    ConfigError: For an unknown key, or text that is no such value.
  """
  if key == 'algorithm.name':
    raise ConfigError(
      '--config.algorithm.name: each algorithm has its own keys, so choose '
      f'it by --config=FILE.py:{text or "NAME"}'
    )
  *parents, last = key.split('.')
  if '.'.join(parents) in OPEN_SECTIONS and text is not None:
    section: Any = config
    for part in parents:
      section = section[part]
    with section.unlocked():
      section[last] = _open_value(text)
    return
  if key in OPEN_SECTIONS:
    values = _literal(text or '')
    if not isinstance(values, dict):
      raise ConfigError(
        f'--config.{key}={text}: set its options one by one, --config.{key}.NAME=VALUE'
      )
    for name, value in values.items():
      override(config, f'{key}.{name}', str(value))
    return
  node: Any = config
  for part in [*parents, last]:
    if not isinstance(node, ConfigDict) or part not in node:
      raise ConfigError(_unknown_key(list(dotted_keys(config)), key))
    holder, node = node, node[part]
  if isinstance(node, ConfigDict):
    raise ConfigError(
      f'--config.{key} is a section: set one of its keys, '
      f'{", ".join(f"--config.{key}.{k}" for k in sorted(node))}'
    )
  optional = node is None or isinstance(holder.get_ref(last), OptionalField)
  try:
    value = parse_value(text, holder.get_type(last), node, optional)
    holder[last] = value
  except (ValueError, TypeError) as error:
    raise ConfigError(f'--config.{key}={text}: {error}') from error


@contextlib.contextmanager
def naming_flag(flag: str, key: str) -> Iterator[None]:
  """Makes the errors of a block name a command-line flag in place of the key it sets.

  Args:
    flag: The flag, such as 'checkpoint'.
    key: The dotted key.

  Raises:
    ConfigError: An error of the block, with the flag.
  """
  try:
    yield
  except ConfigError as error:
    text = re.sub(rf'(?:--config\.)?\b{re.escape(key)}=', f'--{flag}=', str(error))
    raise ConfigError(text) from error


def _unknown_key(known: Sequence[str], key: str) -> str:
  from launch.settings.foreign_keys import describe_foreign_key

  leaf = key.rsplit('.', 1)[-1]
  near = closest_match(key, known)
  # A key of another framework, unless its last part is one of ours in another section.
  is_ours = any(k.rsplit('.', 1)[-1] == leaf for k in known)
  if answer := describe_foreign_key(key, whole=is_ours):
    return f'unknown key --config.{key}; {answer}'
  if near is None:  # the right name in another section
    near = next((k for k in known if k.rsplit('.', 1)[-1] == leaf), None)
  hint = f'; did you mean --config.{near}?' if near else ' (--help lists them all)'
  return f'unknown key --config.{key}{hint}'


def dotted_keys(config: ConfigDict, prefix: str = '') -> Iterator[str]:
  """Yields all dotted keys of values; sections are left out."""
  for key in config:
    value = config[key]
    if isinstance(value, ConfigDict):
      yield from dotted_keys(value, f'{prefix}{key}.')
    else:
      yield f'{prefix}{key}'


def parse_value(text: str | None, kind: type, current: Any, optional: bool) -> Any:
  """Reads text as a value.

  Args:
    text: The text; None for a bare flag.
    kind: Type of the value.
    current: The present value, whose entries give the type of a sequence's entries.
    optional: Whether the value may be None.

  Raises:
    ValueError: If the text is not such a value; the message says what is wanted.
  """
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
  raise ValueError(f'must be {noun}, not {text!r}')


def _number(text: str) -> int | float | None:
  for kind in (int, float):
    with contextlib.suppress(ValueError):
      number = kind(text)
      return number if number - number == 0 else None  # no inf, no nan
  return None


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _open_value(text: str) -> Any:
  """Reads a value whose type nothing tells: true, 7, [1, 2] or any other text."""
  low = text.strip().lower()
  return low == 'true' if low in ('true', 'false') else _literal(text)


def _sequence(text: str, kind: type, current: Any) -> Any:
  """Reads '(1, 2)', '1,2' or 'a,b'; entries take the type of the default's entries."""
  value = _literal(text)
  if isinstance(value, str):
    value = [part.strip() for part in text.strip('()[]').split(',') if part.strip()]
  elif not isinstance(value, (tuple, list)):
    value = [value]
  types = {type(entry) for entry in current or ()}
  if len(types) == 1 and types <= {int, float, str, bool}:
    (entry_kind,) = types
    value = [
      x if type(x) is entry_kind else parse_value(str(x), entry_kind, None, False)
      for x in value
    ]
  return kind(value)


def check_algorithm(config: Any) -> Any:
  """Checks the algorithm's options and call strings, which have no types.

  Returns:
    The `Algorithm`; None if the config names none.

  Raises:
    ConfigError: For an option that cannot be.
  """
  if not config.get('algorithm', {}).get('name'):
    return None
  from launch.settings.component_options import build_algorithm  # imports JAX: now

  options = config.algorithm.to_dict()
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # the run itself tells what is doubtful
    return build_algorithm(options.pop('name'), options)


def split_help(argv: Sequence[str]) -> tuple[list[str], str | None]:
  """Takes `--help`, `-h` or `--help=WORD` out of a command line.

  Args:
    argv: The command line.

  Returns:
    The rest, and the word to filter keys by: '' for all keys, None without --help.
  """
  rest, word = [], None
  for item in argv:
    if item in ('--help', '-h'):
      word = word or ''
    elif item.startswith('--help='):
      word = item.partition('=')[2]
    else:
      rest.append(item)
  return rest, word
