"""Makes algorithms by name, swaps their parts by call string, and calls parts.

An algorithm's name is that of its file and of the function in it. A user's own is
named `package.module:function` or `path/file.py:function`.
"""

import dataclasses
import functools
import importlib
import inspect
import pathlib
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from jaxrl import signature
from jaxrl.functional import advantages, aggregation, entropy, kl, losses
from jaxrl.signature import ConfigError
from jaxrl.types import Algorithm

# The slots of an algorithm that hold parts, and where a part's name is looked up.
PARTS: dict[str, ModuleType] = {
  'advantage': advantages,
  'policy_loss': losses,
  'kl_loss': kl,
  'kl_penalty': kl,
  'entropy_loss': entropy,
  'value_loss': losses,
}
# Functions in those modules that serve parts and are none themselves.
HELPERS = frozenset(
  (
    'adaptive_coef',
    'check_pairs',
    'chord_mu',
    'full',
    'init_moments',
    'nec',
    'second_moment_keep',
    'term',
    'update_moments',
  )
)
# Other settings of an algorithm that its user may override, and their choices.
SETTINGS: dict[str, tuple[str, ...]] = {
  'aggregation': aggregation.MODES,
  'behaviour': ('rollout', 'decoupled'),
}
# Columns that cost a forward pass; any other column comes with the batch.
SCORED = {
  'old_logprobs': 'old_logprobs',
  'ref_logprobs': 'ref_logprobs',
  'teacher_logprobs': 'teacher_logprobs',
  'values': 'values',
  'old_values': 'values',
  'entropy': 'entropy',
}


@dataclasses.dataclass(frozen=True)
class Part:
  """A function with some options fixed; equal and hashable by value, unlike partial."""

  fn: Callable[..., Any]
  options: tuple[tuple[str, Any], ...] = ()

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self.fn(*args, **dict(self.options), **kwargs)


def names() -> list[str]:
  """The algorithms that come with the package."""
  folder = pathlib.Path(__file__).parent
  own = (path.stem for path in folder.glob('[a-z]*.py'))
  return sorted(name for name in own if name not in ('compose', 'describe'))


def maker(spec: str) -> Callable[..., Algorithm]:
  """The function that makes the algorithm `spec` names."""
  if ':' in spec:
    return signature.resolve(spec)
  if spec not in names():
    raise signature.unknown(spec, names(), 'algorithm', 'algorithm')
  return getattr(importlib.import_module(f'jaxrl.algorithms.{spec}'), spec)


def maker_options(spec: str) -> dict[str, Any]:
  """Every option of the algorithm with its default; parts and settings as ''."""
  own = signature.defaults(maker(spec))
  return own | {name: '' for name in (*PARTS, *SETTINGS) if name not in own}


def make(spec: str, options: Mapping[str, Any] | None = None) -> Algorithm:
  """The algorithm `spec`, with its options set and its parts swapped.

  options: the maker's own options, call strings for parts, as in
  `policy_loss='cispo(clip_high=.3)'`, and settings. '' leaves the maker's choice,
  'none' removes a part. Raises ConfigError naming what is wrong and what exists.
  """
  function = maker(spec)
  own = inspect.signature(function).parameters
  given, swaps = {}, {}
  for name, value in (options or {}).items():
    if name in own:
      given[name] = value
    elif name in PARTS or name in SETTINGS:
      swaps[name] = value
    else:
      everything = [*own, *PARTS, *SETTINGS]
      raise signature.unknown(name, everything, 'option', f'algorithm {spec}')
  signature.check_options(function, given, f'algorithm {spec}')
  algorithm = function(**given)
  changes = {
    slot: _setting(slot, text) if slot in SETTINGS else make_part(slot, text)
    for slot, text in swaps.items()
    if text != ''
  }
  algorithm = dataclasses.replace(algorithm, **changes)
  for slot in PARTS:
    part = getattr(algorithm, slot)
    if part is not None:
      signature.check_options(
        signature.unwrap(part), options_of(part), f'algorithm {spec}, {slot}'
      )
  _setting('aggregation', algorithm.aggregation)
  if algorithm.kl_loss is not None and function_of(algorithm.kl_loss) is kl.k1:
    warnings.warn(
      f'algorithm {spec}: the gradient of k1 as a loss is zero in expectation; '
      "use k2 or k3, or make it a reward penalty: kl_penalty='k1(coef=.001)'",
      stacklevel=2,
    )
  return algorithm


def make_part(slot: str, text: str) -> Callable[..., Any] | None:
  """The part a call string describes: a name in the slot's module, or dotted."""
  name, options = signature.parse_call(text)
  if name == 'none':
    return None
  if ':' in name:
    function = signature.resolve(name)
  else:
    there = parts_of(PARTS[slot])
    if name not in there:
      raise signature.unknown(name, there, slot, f'algorithm.{slot}')
    function = there[name]
  signature.check_options(function, options, f'algorithm.{slot}={text!r}')
  return functools.partial(function, **options) if options else function


def parts_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
  """The functions a module of parts offers, by name."""
  offered = getattr(module, '__all__', None)
  return {
    name: value
    for name, value in vars(module).items()
    if inspect.isfunction(value)
    and (
      name in offered if offered is not None else value.__module__ == module.__name__
    )
    and name not in HELPERS
  }


def _setting(name: str, text: str) -> str:
  head, options = signature.parse_call(text)
  if head not in SETTINGS[name]:
    raise signature.unknown(head, SETTINGS[name], name, 'algorithm')
  if name == 'aggregation':
    aggregation.check(text)
  elif options:
    raise ConfigError(f'algorithm.{name}={text!r} takes no options')
  return text


def options_of(part: Callable[..., Any]) -> dict[str, Any]:
  """The options fixed on a part, by name."""
  if isinstance(part, Part):
    return dict(part.options)
  if isinstance(part, functools.partial):
    return options_of(part.func) | part.keywords
  return {}


def function_of(part: Callable[..., Any]) -> Callable[..., Any]:
  """The plain function of a part."""
  function = signature.unwrap(part)
  return function.fn if isinstance(function, Part) else function


def columns(part: Callable[..., Any], *, required: bool = False) -> tuple[str, ...]:
  """The columns a part reads: its positional parameters, in order.

  required: leave out those with a default, which the part can do without.
  """
  return tuple(
    name
    for name, parameter in inspect.signature(function_of(part)).parameters.items()
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    and not (required and parameter.default is not parameter.empty)
  )


def parts(algorithm: Algorithm) -> dict[str, Callable[..., Any]]:
  """The parts an algorithm has, by slot."""
  found = {slot: getattr(algorithm, slot) for slot in PARTS}
  return {slot: part for slot, part in found.items() if part is not None}


def needs(algorithm: Algorithm) -> frozenset[str]:
  """What a forward pass must score for this algorithm, by name of `Batch` column.

  'old_logprobs' only under behaviour 'decoupled': otherwise the rollout's own serve.
  """
  read = {name for part in parts(algorithm).values() for name in columns(part)}
  scored = {SCORED[name] for name in read if name in SCORED}
  if algorithm.behaviour != 'decoupled':
    scored.discard('old_logprobs')
  return frozenset(scored)


def call_part(
  part: Callable[..., Any],
  columns_by_name: Mapping[str, Any],
  numbers: Mapping[str, Any] | None = None,
) -> Any:
  """Calls a part with the columns it names, and `numbers` as further options.

  Raises ConfigError when a column it requires is absent or None.
  """
  required = columns(part, required=True)
  given = {}
  for name in columns(part):
    value = columns_by_name.get(name)
    if value is not None:
      given[name] = value
    elif name in required:
      have = sorted(k for k, v in columns_by_name.items() if v is not None)
      raise ConfigError(
        f"{function_of(part).__name__} reads the column '{name}', which this batch "
        f'does not have. It has: {", ".join(have)}.'
      )
  return part(**given, **(numbers or {}))


def split_numbers(algorithm: Algorithm) -> tuple[Algorithm, dict[str, dict[str, Any]]]:
  """Parts the numeric options from the rest, so that jit can trace them.

  Returns the algorithm without them, hashable and equal by value, and a pytree
  {slot: {option: number}}; `call_part(part, columns, numbers[slot])` joins the two.
  """
  static, numbers = {}, {}
  for slot, part in parts(algorithm).items():
    keywords = options_of(part)
    function = function_of(part)
    numbers[slot] = {
      # 1 and 1.0 must not compile twice, so an option that is a float always is one.
      k: float(v) if signature.wanted_type(function, k) is float else v
      for k, v in keywords.items()
      if _is_number(v)
    }
    rest = sorted((k, v) for k, v in keywords.items() if not _is_number(v))
    static[slot] = Part(function, tuple(rest))
  if algorithm.prepare is not None:
    # Runs outside the parts that take numbers, so it keeps its own.
    whole = tuple(sorted(options_of(algorithm.prepare).items()))
    static['prepare'] = Part(function_of(algorithm.prepare), whole)
  return dataclasses.replace(algorithm, **static), numbers


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)
