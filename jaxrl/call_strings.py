"""Component calls name a component and its options; options fit a signature.

A default is written once, as a keyword-only parameter. Configs, call strings and
command lines are all checked against that one place. Components in a user's own files
are imported here, and their errors described.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import pathlib
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

FILE_MODULE_PREFIX = 'jaxrl_user_'  # of the modules of users' files
# An error lists at most so many names, and of more only those most like what was given.
MAX_LISTED = 60
NUM_CLOSEST = 8
Definition = TypeVar('Definition', bound=Callable[..., Any])


class ConfigError(ValueError):
  """A setting is wrong; the message says which, where, and what would be right."""


@dataclasses.dataclass(frozen=True, repr=False)
class ComponentCall:
  """Names a component and the options it is to be called with.

  `ComponentCall('reward_std', {'threshold': 0.1})` is what a config writes as
  `reward_std(threshold=0.1)`; `launch.settings` reads such texts, and everything below
  it receives these objects. They are hashable, and equal if name and options are.

  Attributes:
    name: A built-in component's name, or `package.module:name` or `path/file.py:name`.
    options: The options by name.
    text: How messages show the call; as Python would write it, unless given.

  Raises:
    ConfigError: If the name contains options.
  """

  name: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  text: str = dataclasses.field(default='', compare=False)

  def __post_init__(self) -> None:
    if '(' in self.name:
      raise ConfigError(
        f'{self.name!r} is a call string, which only configs contain: in Python write '
        "ComponentCall('name', {'option': value})"
      )
    if not self.text:
      listing = ', '.join(f'{key}={value!r}' for key, value in self.options.items())
      text = f'{self.name}({listing})' if listing else self.name
      object.__setattr__(self, 'text', text)

  def __hash__(self) -> int:
    return hash((self.name, *sorted(self.options)))  # options need not be hashable

  def __str__(self) -> str:
    return self.text

  __repr__ = __str__

  def with_options(self, **options: Any) -> 'ComponentCall':
    """Returns the call with some options added or replaced.

    Args:
      **options: The options.
    """
    return ComponentCall(self.name, {**self.options, **options})


# What names a component: a call; the function or class itself, also as a
# `functools.partial` with options; or the name of a component without options.
Component = ComponentCall | Callable[..., Any] | str


def as_call(component: ComponentCall | str) -> ComponentCall:
  """Returns a call; a text is the name of a component without options.

  Args:
    component: The call or the name.
  """
  return ComponentCall(component) if isinstance(component, str) else component


def as_calls(
  components: Sequence[Component] | Component,
) -> tuple[Component, ...]:
  """Returns components as a tuple; a single one need not be in a sequence, '' is none.

  Args:
    components: The components.
  """
  if isinstance(components, str) and not components.strip():
    return ()
  if isinstance(components, str | ComponentCall) or callable(components):
    components = (components,)
  return tuple(as_call(c) if isinstance(c, str) else c for c in components)


def join_calls(components: Iterable[Component]) -> str:
  """Returns how messages show several components: joined by ' + '.

  Args:
    components: The components.
  """
  return ' + '.join(component_name(c, whole=True) for c in components)


def component_name(component: Component, *, whole: bool = False) -> str:
  """Returns the name of a component.

  Args:
    component: The component.
    whole: Whether to show its options too.
  """
  if isinstance(component, str):
    return component
  if isinstance(component, ComponentCall):
    return str(component) if whole else component.name
  name = getattr(unwrap(component), '__name__', repr(component))
  options = component.keywords if isinstance(component, functools.partial) else {}
  return str(ComponentCall(name, options)) if whole else name


def find_component(
  component: Component,
  known: Mapping[str, Callable[..., Any] | str],
  what: str,
  key: str,
  *,
  where: str = '',
  base: type | None = None,
) -> tuple[str, Callable[..., Any], dict[str, Any]]:
  """Finds the function or class of a component, and checks its options.

  Args:
    component: The component.
    known: The built-in ones by name, or where each is, as for `resolve`. A user's own
      is named by where it is.
    what: What these are called in errors.
    key: What the error for an unknown name begins with, such as the config key.
    where: What errors about options begin with; by default `what` and the name.
    base: A class or protocol whose public methods a class must have.

  Returns:
    The name, the function or class, and a copy of the options.

  Raises:
    ConfigError: If there is no such component, it does not take these options, or it
      is a class that lacks methods.
  """
  name = component_name(component)
  if not isinstance(component, str | ComponentCall):
    is_partial = isinstance(component, functools.partial)
    options = dict(component.keywords) if is_partial else {}
    function = unwrap(component)
  else:
    options = dict(as_call(component).options)
    if name not in known and ':' not in name:
      raise unknown_name_error(name, known, what, key)
    target = known.get(name, name)
    function = resolve(target, where) if isinstance(target, str) else target
  where = where or f'{what} {name!r}'
  if base is not None and isinstance(function, type):
    required = [key for key in vars(base) if not key.startswith('_')]
    if missing := [key for key in required if not hasattr(function, key)]:
      raise ConfigError(
        f'{where}: {name} has no {", ".join(missing)}; derive it from '
        f'{base.__module__}.{base.__qualname__}'
      )
  check_options(function, options, where)
  return name, function, options


def build_component(
  component: ComponentCall | str,
  known: Mapping[str, Callable[..., Any]],
  what: str,
  key: str,
) -> Any:
  """Calls one of some functions with its options.

  Args:
    component: The call, or the name of a function that needs no options.
    known: Functions by name.
    what: What these are called in errors.
    key: The config key of the call.

  Returns:
    What the function returns.

  Raises:
    ConfigError: If a name or an option does not exist.
  """
  call = as_call(component)
  where = f'{key}={call}'
  if call.name not in known:
    raise unknown_name_error(call.name, known, what, where)
  check_options(known[call.name], call.options, where)
  return known[call.name](**call.options)


def unwrap(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the plain function under any layers of `functools.partial`.

  Args:
    fn: A callable.
  """
  while isinstance(fn, functools.partial):
    fn = fn.func
  return fn


def _options(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
  """Returns the keyword-only parameters of `fn` by name, without private ones.

  Private parameters are not options: Ray adds one to the signature of the methods of
  every class that it turns into an actor.
  """
  return {
    name: parameter
    for name, parameter in inspect.signature(fn).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and not name.startswith('_')
  }


def defaults(fn: Callable[..., Any]) -> dict[str, Any]:
  """Returns the keyword-only parameters that have a default, in order.

  Args:
    fn: A function or class.

  Returns:
    Name → default.
  """
  return {
    name: parameter.default
    for name, parameter in _options(fn).items()
    if parameter.default is not parameter.empty
  }


def closest_match(name: str, names: Iterable[str]) -> str | None:
  """Returns the most similar of some names, or None when nothing is close.

  Args:
    name: The name to match.
    names: The candidates.
  """
  matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
  return matches[0] if matches else None


def unknown_name_error(
  name: str, names: Iterable[str], what: str, where: str
) -> ConfigError:
  """Returns the error for a name that does not exist, with the closest match.

  Args:
    name: The unknown name.
    names: Those that exist.
    what: What they name, such as "option".
    where: What the message begins with.
  """
  names = sorted(names)
  guess = closest_match(name, names)
  hint = f" Did you mean '{guess}'?" if guess else ''
  if len(names) > MAX_LISTED:
    closest = difflib.get_close_matches(name, names, n=NUM_CLOSEST, cutoff=0.0)
    listing = f'There are {len(names)}, of which these are closest'
    return ConfigError(
      f"{where}: no {what} '{name}'.{hint} {listing}: {', '.join(closest)}."
    )
  listing = ', '.join(names) if names else 'none'
  return ConfigError(f"{where}: no {what} '{name}'.{hint} There are: {listing}.")


class Range(NamedTuple):
  """An interval of numbers.

  Attributes:
    low: The lowest number.
    high: The highest number.
    excludes_low: Whether `low` itself is left out.
    excludes_zero: Whether 0 is left out.
  """

  low: float = -math.inf
  high: float = math.inf
  excludes_low: bool = False
  excludes_zero: bool = False

  def __contains__(self, value: Any) -> bool:
    if (self.excludes_low and value == self.low) or (self.excludes_zero and value == 0):
      return False
    return self.low <= value <= self.high

  def __str__(self) -> str:
    if self.excludes_zero:
      return 'must not be 0'
    if self.high < math.inf:
      return f'must be in {"(" if self.excludes_low else "["}{self.low}, {self.high}]'
    return f'must be {"above" if self.excludes_low else "at least"} {self.low}'


SHARE = Range(0, 1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, excludes_low=True)
NOT_ZERO = Range(excludes_zero=True)
AT_LEAST_ONE = Range(1)


def option_ranges(
  *, ascending: Sequence[str] = (), **ranges: Range
) -> Callable[[Definition], Definition]:
  """Declares which numbers the options of a function or class may be.

  `check_options` then refuses other numbers. Options without a range, and components
  that declare none, take any number.

  Args:
    ascending: Options of which none may be larger than the next.
    **ranges: The range of each option, by name.

  Returns:
    A decorator that returns the function or class itself.
  """

  def attach(definition: Definition) -> Definition:
    setattr(definition, 'option_ranges', ranges)  # noqa: B010  # any callable has it
    setattr(definition, 'ascending_options', tuple(ascending))  # noqa: B010
    return definition

  return attach


def declared_ranges(fn: Callable[..., Any]) -> Mapping[str, Range]:
  """Returns the ranges that `option_ranges` declares, by option.

  A derived class, whose options may mean something else, does not inherit them.
  """
  return getattr(fn, '__dict__', {}).get('option_ranges', {})


def find_out_of_range(
  options: Mapping[str, Any], ranges: Mapping[str, Range | None]
) -> tuple[str, Range] | None:
  """Returns the first option that is out of range, and its range; None if all fit.

  Args:
    options: Values by name; None and what is no number fits.
    ranges: The ranges by name; an option without one may be any number.
  """
  for name, value in options.items():
    allowed = ranges.get(name)
    if allowed is not None and _is_number(value) and value not in allowed:
      return name, allowed
  return None


def _check_ranges(
  fn: Callable[..., Any], options: Mapping[str, Any], where: str
) -> None:
  if violation := find_out_of_range(options, declared_ranges(fn)):
    name, allowed = violation
    raise ConfigError(f'{where}: {name}={options[name]} {allowed}')
  all_values = defaults(fn) | dict(options)
  ascending = getattr(fn, '__dict__', {}).get('ascending_options', ())
  for low, high in itertools.pairwise(ascending):
    least, most = all_values.get(low), all_values.get(high)
    if _is_number(least) and _is_number(most) and least > most:
      raise ConfigError(f'{where}: {low}={least} must be at most {high}={most}')


def _is_number(value: Any) -> TypeGuard[float]:
  return isinstance(value, int | float) and not isinstance(value, bool)


def check_callable(fn: Any, where: str, wanted: str = 'a class or function') -> None:
  """Raises ConfigError if what a setting names cannot be called with options."""
  try:
    inspect.signature(fn)
  except (TypeError, ValueError) as error:
    raise ConfigError(f'{where}: is {fn!r:.99}, not {wanted}') from error


def check_options(
  fn: Callable[..., Any], options: Mapping[str, Any], where: str
) -> None:
  """Checks that a function takes some options.

  Names are checked against the keyword-only parameters; values against the type of the
  default, `Literal` annotations, `| None` where the value is None, and the ranges that
  `option_ranges` declares.

  Args:
    fn: A function or class.
    options: Values by name.
    where: What error messages begin with.

  Raises:
    ConfigError: If a name is unknown, or a value has another type or is out of range.
  """
  check_callable(fn, where)
  parameters = _options(fn)
  for name, value in options.items():
    if name not in parameters:
      raise unknown_name_error(name, parameters, 'option', where)
    _check_value(parameters[name], value, f'{where}: option {name!r}')
  _check_ranges(fn, options, where)


def _check_value(parameter: inspect.Parameter, value: Any, where: str) -> None:
  annotation, default = parameter.annotation, parameter.default
  if value is None:
    if default is None or 'None' in str(annotation):
      return
    raise ConfigError(f'{where} cannot be None; its default is {default!r}.')
  choices = _choices(annotation)
  if choices:
    if value not in choices:
      listing = ', '.join(repr(c) for c in choices)
      raise ConfigError(f'{where} is {value!r}; it must be one of {listing}.')
    return
  wanted = _wanted_types(annotation, default)
  if wanted and not any(_fits(value, kind) for kind in wanted):
    kinds = ' or '.join(kind.__name__ for kind in wanted)
    raise ConfigError(
      f'{where} is {value!r}, a {type(value).__name__}; it must be a {kinds}.'
    )


def _choices(annotation: Any) -> tuple[Any, ...]:
  """Returns the values of a `Literal`, also inside a union; empty if there is none."""
  if typing.get_origin(annotation) is typing.Literal:
    return typing.get_args(annotation)
  nested_choices = (
    _choices(a) for a in typing.get_args(annotation) if a is not annotation
  )
  return next((choices for choices in nested_choices if choices), ())


def _wanted_types(annotation: Any, default: Any) -> list[type]:
  union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
  members = typing.get_args(annotation) if union else (annotation,)
  plain_types = [kind for kind in members if kind in (bool, int, float, str)]
  if not plain_types and isinstance(default, bool | int | float | str):
    plain_types = [type(default)]
  return plain_types


def wanted_type(fn: Callable[..., Any], option: str) -> type | None:
  """Returns the type that an option must have.

  Args:
    fn: A function or class.
    option: The name of a parameter.

  Returns:
    bool, int, float or str, the first of several; None if the signature does not say.
  """
  parameter = inspect.signature(fn).parameters.get(option)
  if parameter is None:
    return None
  wanted = _wanted_types(parameter.annotation, parameter.default)
  return wanted[0] if wanted else None


def _fits(value: Any, wanted: type) -> bool:
  if wanted is float:
    return _is_number(value)
  if wanted is int:
    return isinstance(value, int) and not isinstance(value, bool)
  return isinstance(value, wanted)


def resolve(target: str, where: str = '') -> Any:
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
      return resolve(target)
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
