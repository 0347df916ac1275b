"""Options of functions are keyword-only parameters; those of parts, frozen dataclasses.

A default is written once: in the signature of the function that takes it, or in the
field of an `Options` class beside the part that takes it. `check_options` compares
values with a signature. An `Options` object checks its values when it is made: types by
the annotations, numbers by `low` and `high`, names by `choices`. A field whose type has
a `from_text`, such as `ComponentCall`, takes a text too.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import itertools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

# An error lists at most so many names, and of more only those most like what was given.
MAX_LISTED = 60
NUM_CLOSEST = 8
JsonObject = dict[str, Any]  # of JSON, YAML or TOML, as Python reads it
OptionValues = Mapping[str, Any]  # by the options' names
Keywords = dict[str, Any]  # arguments of a call, by name
Configurable = Callable[..., Any]  # its keyword-only parameters are options
Definition = TypeVar('Definition', bound=Configurable)


class ConfigError(ValueError):
  """A setting is wrong; the message says which, where, and what would be right."""


def unwrap(fn: Configurable) -> Configurable:
  """Returns the plain function under any layers of `functools.partial`.

  Args:
    fn: A callable.
  """
  while isinstance(fn, functools.partial):
    fn = fn.func
  return fn


def _options(fn: Configurable) -> dict[str, inspect.Parameter]:
  """Returns the keyword-only parameters of `fn` by name, without private ones.

  Private parameters are not options: Ray adds one to the signature of the methods of
  every class that it turns into an actor.
  """
  return {
    name: parameter
    for name, parameter in inspect.signature(fn).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and not name.startswith('_')
  }


def defaults(fn: Configurable) -> dict[str, Any]:
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
  """Returns the most similar of several names, or None when nothing is close.

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


def declared_ranges(fn: Configurable) -> Mapping[str, Range]:
  """Returns the ranges that a function or class declares, by option.

  The fields of an `Options` class declare their own. Any other derived class, whose
  options may mean something else, does not inherit them.
  """
  if isinstance(fn, type) and issubclass(fn, Options):
    fields = {field.name: field.metadata for field in dataclasses.fields(fn)}
    return {name: data['range'] for name, data in fields.items() if 'range' in data}
  return getattr(fn, '__dict__', {}).get('option_ranges', {})


def find_out_of_range(
  options: OptionValues, ranges: Mapping[str, Range | None]
) -> tuple[str, Range] | None:
  """Returns the first option that is out of range, and its range; None if all fit.

  Args:
    options: Values by name; None and other types than numbers fit.
    ranges: The ranges by name; an option without one may be any number.
  """
  for name, value in options.items():
    allowed = ranges.get(name)
    if allowed is not None and _is_number(value) and value not in allowed:
      return name, allowed
  return None


def _check_ranges(fn: Configurable, options: OptionValues, where: str) -> None:
  if violation := find_out_of_range(options, declared_ranges(fn)):
    name, allowed = violation
    raise ConfigError(f'{where}: {name}={options[name]} {allowed}')
  all_values = defaults(fn) | dict(options)
  ascending = getattr(fn, '__dict__', {}).get('ascending_options', ())
  for low, high in itertools.pairwise(ascending):
    least, most = all_values.get(low), all_values.get(high)
    if _is_number(least) and _is_number(most) and least > most:
      raise ConfigError(f'{where}: {low}={least} must be at most {high}={most}')


def _is_number(value: object) -> TypeGuard[float]:
  return isinstance(value, int | float) and not isinstance(value, bool)


@contextlib.contextmanager
def error_prefix(where: str, *others: type[Exception]) -> Iterator[None]:
  """Turns a ValueError of a block into a ConfigError that says what was being made.

  Args:
    where: What the message begins with, unless it does already.
    *others: Other exceptions that are turned, too.

  Raises:
    ConfigError: In place of the block's error.
  """
  try:
    yield
  except (ValueError, *others) as error:
    text = str(error)
    if isinstance(error, ConfigError) and text.startswith(where):
      raise
    raise ConfigError(f'{where}: {text}') from error


def require_package(module: str, who: str, extra: str) -> None:
  """Raises ConfigError if an optional package is not installed.

  Args:
    module: The module that the package brings.
    who: Who needs it, such as "the grader 'math'".
    extra: The extra of `setup.py` that installs it.
  """
  if importlib.util.find_spec(module) is None:
    package = module.replace('_', '-')
    raise ConfigError(f"{who} needs {package}: pip install -e '.[{extra}]'")


def check_callable(fn: Any, where: str, wanted: str = 'a class or function') -> None:
  """Raises ConfigError if what a setting names cannot be called with options."""
  try:
    inspect.signature(fn)
  except (TypeError, ValueError) as error:
    raise ConfigError(f'{where}: is {fn!r:.99}, not {wanted}') from error


def check_options(fn: Configurable, options: OptionValues, where: str) -> None:
  """Checks that a function has the given options, and their values.

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
    if problem := _parameter_problem(parameters[name], value):
      raise ConfigError(f'{where}: {name}={value!r}: {problem}')
  _check_ranges(fn, options, where)


def _parameter_problem(parameter: inspect.Parameter, value: object) -> str:
  """Says why a parameter cannot have a value; '' if it can."""
  annotation, default = parameter.annotation, parameter.default
  if value is None:
    takes_none = default is None or 'None' in str(annotation)
    return '' if takes_none else f'must not be none; the default is {default!r}'
  value = tuple(value) if isinstance(value, list) else value
  return _problem(_parameter_kind(parameter), value)


def _parameter_kind(parameter: inspect.Parameter) -> 'Kind':
  """Returns how a parameter's values are read; its default speaks for an annotation."""
  annotation, default = parameter.annotation, parameter.default
  kind = value_kind(annotation)
  is_known = kind.type is not None or len(_members(annotation)) > 1
  if not is_known and isinstance(default, SCALARS):
    return kind._replace(types=(type(default),))
  return kind


def wanted_type(fn: Configurable, option: str) -> type | None:
  """Returns the type that an option must have.

  Args:
    fn: A function or class.
    option: The name of a parameter.

  Returns:
    bool, int, float or str, the first of several; None if the signature does not say.
  """
  parameter = inspect.signature(fn).parameters.get(option)
  wanted = _parameter_kind(parameter).types if parameter else ()
  return wanted[0] if wanted else None


def _fits(value: object, wanted: type) -> bool:
  if wanted is float:
    return _is_number(value)
  if wanted is int:
    return isinstance(value, int) and not isinstance(value, bool)
  return isinstance(value, wanted)


SCALARS = (bool, int, float, str)
PLAIN_TYPES = (*SCALARS, tuple)
NOUNS = {
  bool: 'true or false',
  int: 'a whole number',
  float: 'a number',
  str: 'a text',
  tuple: 'a list',
}


class OptionError(ConfigError):
  """The value of an option is wrong.

  Attributes:
    option: The option's name.
    value: Its value.
    problem: What is wrong with it.
  """

  def __init__(self, option: str, value: object, problem: str):
    super().__init__(f'{option}={value}: {problem}')
    self.option, self.value, self.problem = option, value, problem

  def __reduce__(self) -> Any:  # it may come from another process
    return type(self), (self.option, self.value, self.problem)


class Kind(NamedTuple):
  """How the values of a field are read.

  Attributes:
    type: A plain type; one with a `from_text`; `Options`, for options of their own;
      `Mapping`, for options by name; None for anything else.
    is_optional: Whether a value may be None.
    is_many: Whether a value is a tuple of what `type` reads, as in 'a + b'.
    options: The class of nested options, or of those in a mapping.
    entry: The plain type of a tuple's entries; None if they may be anything.
    types: The plain types of which a value has one; () for any.
    choices: The values that the annotation lists; () for any.
  """

  type: Any
  is_optional: bool = False
  is_many: bool = False
  options: 'type[Options] | None' = None
  entry: Any = None
  types: tuple[Any, ...] = ()
  choices: tuple[Any, ...] = ()


def option(
  default: object,
  doc: str,
  *,
  low: float = -math.inf,
  high: float = math.inf,
  above: float | None = None,
  choices: Iterable[Any] = (),
  read: Callable[[str], Any] | None = None,
) -> Any:
  """Declares a field of an `Options` class.

  Args:
    default: The default. A mapping is copied for every object.
    doc: What the option does, a sentence.
    low: The lowest number.
    high: The highest number.
    above: A number that values must be above.
    choices: The values that there are.
    read: Reads a value that is a text, if that is more than a text or a call.

  Returns:
    A field for `dataclasses.dataclass`.
  """
  allowed = None
  if (low, high, above) != (-math.inf, math.inf, None):
    allowed = Range(low if above is None else above, high, above is not None)
  metadata = {'doc': doc, 'range': allowed, 'read': read, 'choices': tuple(choices)}
  if isinstance(default, dict):
    return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)


def section(cls: 'type[Options]', doc: str = '', **overrides: object) -> Any:
  """Declares a field that holds options of their own.

  Args:
    cls: The class of the options.
    doc: What they are about.
    **overrides: Defaults that differ from those of the class.
  """
  return dataclasses.field(
    default_factory=functools.partial(cls, **overrides), metadata={'doc': doc}
  )


@dataclasses.dataclass(frozen=True)
class Options:
  """Checks the values of its fields; the base of all classes of options.

  Raises:
    OptionError: If a value has another type than its field, or is out of range.
  """

  def __post_init__(self) -> None:
    kinds = field_kinds(type(self))
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      read = _read(field, kinds[field.name], value)
      if read is not value:
        object.__setattr__(self, field.name, read)

  def replace(self, **changes: object) -> typing.Self:
    """Returns the options with some of them changed.

    Args:
      **changes: The new values by name.
    """
    return dataclasses.replace(self, **changes)

  def as_dict(self) -> dict[str, Any]:
    """Returns the options by name; nothing is copied."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _read(field: dataclasses.Field[Any], kind: Kind, value: object) -> Any:
  """Returns a field's value, with calls in place of their texts."""
  name = field.name
  read = field.metadata.get('read')
  if read is None and hasattr(kind.type, 'from_text'):
    read = functools.partial(_from_text, kind)
  if read is not None and isinstance(value, str):
    try:
      value = read(value)
    except ValueError as error:
      raise OptionError(name, value, str(error)) from error
  if value is None and kind.is_optional:
    return None
  if kind.type is tuple and isinstance(value, list):
    value = tuple(value)
  if kind.type is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if problem := _problem(kind, value, field.metadata.get('choices', ())):
    raise OptionError(name, repr(value), problem)
  if violation := find_out_of_range({name: value}, {name: field.metadata.get('range')}):
    raise OptionError(name, value, str(violation[1]))
  return value


def _problem(kind: Kind, value: object, choices: Sequence[object] = ()) -> str:
  """Says why an option cannot have a value; '' if it can."""
  if (choices := choices or kind.choices) and value not in choices:
    names = [str(choice) or "''" for choice in choices]
    guess = closest_match(str(value), names)
    hint = f'; did you mean {guess!r}?' if guess else ''
    return f'is not one of {", ".join(names)}{hint}'
  if kind.types and not any(_fits(value, wanted) for wanted in kind.types):
    nouns = [NOUNS[wanted] for wanted in kind.types] + ['none'] * kind.is_optional
    return f'must be {" or ".join(nouns)}'
  for entry in value if kind.entry and isinstance(value, tuple) else ():
    if not _fits(entry, kind.entry):
      return f'{entry!r} in it must be {NOUNS[kind.entry]}'
  return ''


def _from_text(kind: Kind, text: str) -> Any:
  if kind.is_many:
    return kind.type.many_from_text(text)
  is_none = kind.is_optional and not text.strip()
  return None if is_none else kind.type.from_text(text)


@functools.cache
def field_kinds(cls: type[Options]) -> Mapping[str, Kind]:
  """Returns how the values of each field of a class are read.

  Args:
    cls: A class of options.
  """
  hints = typing.get_type_hints(cls)
  return {
    field.name: value_kind(hints[field.name]) for field in dataclasses.fields(cls)
  }


def _members(annotation: object) -> list[Any]:
  """Returns the types that a union allows; one alone for any other annotation."""
  is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
  return list(typing.get_args(annotation)) if is_union else [annotation]


def value_kind(hint: object) -> Kind:
  """Returns how the values of an option are read.

  Args:
    hint: The annotation of the option; None for none.
  """
  if typing.get_origin(hint) is typing.Annotated:
    hint = typing.get_args(hint)[0]
  members = _members(hint)
  is_optional = type(None) in members
  members = [member for member in members if member is not type(None)]
  texts = [member for member in members if hasattr(member, 'from_text')]
  takes_functions = any(typing.get_origin(x) is Callable for x in members)
  if texts and (takes_functions or str not in members):  # the others are what it makes
    return Kind(texts[0], is_optional)
  if len(members) != 1:
    scalars = tuple(member for member in members if member in SCALARS)
    return Kind(None, is_optional, types=() if texts else scalars)
  (member,) = members
  origin, arguments = typing.get_origin(member), typing.get_args(member)
  entry = value_kind(arguments[0]).type if origin is tuple and arguments else None
  if hasattr(entry, 'many_from_text'):
    return Kind(entry, is_many=True)
  if isinstance(member, type) and issubclass(member, Options):
    return Kind(Options, options=member)
  if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
    inner = arguments[-1]
    is_section = isinstance(inner, type) and issubclass(inner, Options)
    return Kind(Mapping, options=inner if is_section else None)
  if origin is typing.Literal:
    return Kind(type(arguments[0]), is_optional, choices=arguments)
  plain = origin or member
  if plain not in PLAIN_TYPES:
    return Kind(None, is_optional)
  has_entries = plain is tuple and arguments and arguments[0] in PLAIN_TYPES
  entry = arguments[0] if has_entries else None
  return Kind(plain, is_optional, entry=entry, types=(plain,))


def descriptions(cls: type[Options]) -> dict[str, str]:
  """Returns the description of each field of a class.

  Args:
    cls: A class of options.
  """
  return {field.name: field.metadata['doc'] for field in dataclasses.fields(cls)}
