"""The algorithm registry finds algorithms by name and swaps their components.

An algorithm's name is that of its file in `jaxrl/algorithms/presets` and of the builder
function in it, and only that file is imported. An algorithm of your own is named
`package.module:function` or `path/file.py:function`.
"""

import dataclasses
import functools
import importlib
import inspect
import pathlib
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from jaxrl.algorithms import consistency, requirements
from jaxrl.component_calls import ComponentCall
from jaxrl.component_table import Component, as_call, as_calls, component_name
from jaxrl.functional import (
  advantages,
  aggregation,
  corrections,
  entropy,
  kl,
  kl_controllers,
  losses,
)
from jaxrl.functional.components import (
  allowed_range,
  fields_of,
  is_component,
  options_of,
)
from jaxrl.options import (
  NOUNS,
  ConfigError,
  Configurable,
  Keywords,
  OptionValues,
  check_callable,
  check_options,
  defaults,
  find_out_of_range,
  unknown_name_error,
  unwrap,
)
from jaxrl.types import Algorithm
from jaxrl.user_code import import_object

# The fields of `Algorithm` that hold components, and where a name is looked up.
COMPONENT_MODULES: dict[str, ModuleType] = {
  'advantage': advantages,
  'policy_loss': losses,
  'kl_loss': kl,
  'kl_penalty': kl,
  'entropy_loss': entropy,
  'value_loss': losses,
  'correction': corrections,
  'kl_controller': kl_controllers,
}
# Other settings of an algorithm that `make` may override, with the value that leaves
# the builder's choice.
SETTINGS: Keywords = {
  'aggregation': '',
  'old_logprobs_source': '',
  'sampler': '',
  'filters': '',
  'shapers': '',
  'data_format': '',
  'critic_warmup': 0,
}
# Those that a config offers for every algorithm. The others are the builder's
# decisions: a config has a key for one if the builder has such an option.
CONFIG_SETTINGS = ('aggregation', 'sampler')
SETTING_CHOICES = {
  'old_logprobs_source': ('rollout', 'decoupled'),
  'data_format': ('rollout', 'messages', 'preference', 'text'),
}


@functools.cache
def names() -> Sequence[str]:
  """Returns the names of the algorithms that come with the package, sorted."""
  folder = pathlib.Path(__file__).parent / 'presets'
  return tuple(sorted(path.stem for path in folder.glob('[a-z]*.py')))


def builder(spec: str) -> Callable[..., Algorithm]:
  """Returns the function that builds an algorithm, importing its module.

  Args:
    spec: The name of a built-in algorithm, or `package.module:function` or
      `path/file.py:function`.

  Raises:
    ConfigError: If there is no such algorithm.
  """
  if ':' in spec:
    where = f'algorithm {spec}'
    build = import_object(spec, where)
    check_callable(build, where, 'a function that returns an Algorithm')
    return build
  if spec not in names():
    raise unknown_name_error(spec, names(), 'algorithm', 'algorithm')
  return getattr(importlib.import_module(f'jaxrl.algorithms.presets.{spec}'), spec)


def builder_options(spec: str) -> Keywords:
  """Returns every option of an algorithm that a config has a key for.

  Args:
    spec: As for `builder`.

  Returns:
    The builder's own options with their defaults; components and settings, which
    override the builder's choice, with the value that leaves that choice.
  """
  own_options = defaults(builder(spec))
  settings = {name: SETTINGS[name] for name in CONFIG_SETTINGS}
  return dict.fromkeys(COMPONENT_MODULES, '') | settings | own_options


def make(spec: str, options: OptionValues | None = None) -> Algorithm:
  """Builds an algorithm, with options set and components swapped.

  Args:
    spec: As for `builder`.
    options: The builder's own options; components, each a name, a function, or a call
      such as `policy_loss=ComponentCall('cispo', {'clip_high': 0.3})`; and settings. ''
      leaves the builder's choice, 'none' removes a component.

  Returns:
    The algorithm, validated.

  Raises:
    ConfigError: If an option is unknown or its value wrong, or if the components do not
      fit together. The message says what there is.
  """
  build = builder(spec)
  parameters = inspect.signature(build).parameters
  builder_values, overrides = {}, {}
  for name, value in (options or {}).items():
    if name in parameters:
      builder_values[name] = value
    elif name in COMPONENT_MODULES or name in SETTINGS:
      overrides[name] = value
    else:
      known = [*parameters, *COMPONENT_MODULES, *SETTINGS]
      raise unknown_name_error(name, known, 'option', f'algorithm {spec}')
  algorithm = _build(spec, build, builder_values)
  changes = {
    name: _setting(name, value) if name in SETTINGS else make_component(name, value)
    for name, value in overrides.items()
    if value != SETTINGS.get(name, '')
  }
  algorithm = dataclasses.replace(algorithm, **changes)
  for field, part in requirements.components_of(algorithm).items():
    function, chosen = unwrap(part), options_of(part)
    check_options(function, chosen, f'algorithm {spec}, {field}')
    if function.__module__.startswith('jaxrl.functional'):
      _check_ranges(function.__name__, chosen, f'{field}={function.__name__}')
  for name in SETTINGS:
    _setting(name, getattr(algorithm, name))
  consistency.validate(algorithm, f'algorithm {spec}', chosen=changes)
  for message in consistency.warning_messages(algorithm):
    warnings.warn(f'algorithm {spec}: {message}', stacklevel=2)
  source = requirements.old_logprobs_source(algorithm)
  return dataclasses.replace(algorithm, old_logprobs_source=source)


def _build(
  spec: str, build: Callable[..., Algorithm], options: OptionValues
) -> Algorithm:
  check_options(build, options, f'algorithm {spec}')
  if ':' not in spec:
    _check_ranges(spec, options)
  try:
    inspect.signature(build).bind(**options)
  except TypeError as error:
    raise ConfigError(
      f'{spec} cannot be built: {error}. A builder takes options by name, each with a '
      'default, and returns an Algorithm'
    ) from error
  algorithm = build(**options)
  if not isinstance(algorithm, Algorithm):
    raise ConfigError(
      f'{spec} returns a {type(algorithm).__name__}; a builder returns an Algorithm'
    )
  return algorithm


def _check_ranges(name: str, options: OptionValues, component: str = '') -> None:
  ranges = {option: allowed_range(name, option) for option in options}
  if violation := find_out_of_range(options, ranges):
    option, allowed = violation
    value = f'{option}={options[option]}'
    where = f'{component}: {value}' if component else f'{value}:'
    raise ConfigError(f'algorithm.{where} {allowed}')


def make_component(field: str, component: Component) -> Configurable | None:
  """Makes a component.

  Args:
    field: The field of `Algorithm`, one of `COMPONENT_MODULES`.
    component: A call or name, which is looked up in the field's module or, where it has
      a colon, imported; the function itself; 'none' for no component.

  Returns:
    The function with its options fixed; None for 'none'.

  Raises:
    ConfigError: If there is no such function, or it does not take these options.
  """
  if not isinstance(component, str | ComponentCall):
    return component
  call = as_call(component)
  name, options = call.name, call.options
  if name == 'none':
    if field == 'policy_loss':
      raise ConfigError(
        f"algorithm.{field}='none': there is nothing to train without it"
      )
    return None
  if ':' in name:
    function = import_object(name, f'algorithm.{field}={str(call)!r}')
  else:
    offered = components_in(COMPONENT_MODULES[field])
    if name not in offered:
      raise unknown_name_error(name, offered, field, f'algorithm.{field}')
    function = offered[name]
  if not callable(function) or isinstance(function, type):
    kind = 'class' if isinstance(function, type) else type(function).__name__
    raise ConfigError(
      f'algorithm.{field}={str(call)!r}: {name} is a {kind}; a component is a function '
      'of arrays'
    )
  check_options(function, options, f'algorithm.{field}={str(call)!r}')
  return functools.partial(function, **options) if options else function


def parts_for(slot: str) -> dict[str, Configurable]:
  """Returns the components that fit a field of `Algorithm`, by name.

  A critic's loss fits `value_loss` only.

  Args:
    slot: The field.
  """
  offered = components_in(COMPONENT_MODULES[slot])
  if slot not in ('policy_loss', 'value_loss'):
    return offered
  wanted = slot == 'value_loss'
  return {
    name: function
    for name, function in offered.items()
    if ('values' in fields_of(function)) == wanted
  }


def components_in(module: ModuleType) -> dict[str, Configurable]:
  """Returns the components that a module offers, by name."""
  # Some modules import what they list in `__all__` when it is first used.
  names = getattr(module, '__all__', None) or vars(module)
  values = {name: getattr(module, name) for name in names if not name.startswith('_')}
  return {name: value for name, value in values.items() if is_component(value)}


def _setting(name: str, value: Any) -> Any:
  """Checks the value of a setting; 'none' empties a tuple of calls."""
  if name in ('filters', 'shapers'):
    chosen = as_calls(value)
    return () if [component_name(c) for c in chosen] == ['none'] else chosen
  if name in ('sampler', 'aggregation'):
    return _call_setting(name, value)
  expected_type = type(SETTINGS[name])
  if not isinstance(value, expected_type) or isinstance(value, bool):
    raise ConfigError(f'algorithm.{name}={value!r}: must be {NOUNS[expected_type]}')
  if name == 'critic_warmup' and value < 0:
    raise ConfigError(f'algorithm.critic_warmup={value}: must be at least 0')
  choices = SETTING_CHOICES.get(name)
  if choices and value not in choices:
    raise unknown_name_error(value, choices, name, 'algorithm')
  return value


def _call_setting(name: str, value: object) -> Any:
  """Checks `sampler` or `aggregation`; the run itself looks for the sampler."""
  if isinstance(value, str | ComponentCall):
    value = as_call(value)
    if name == 'aggregation':
      # The run supplies the length where the call leaves it out.
      aggregation.check_aggregation(value.name, value.options, length=1)
  elif name == 'aggregation' or not callable(value):
    raise ConfigError(f'algorithm.{name}={value!r} must be a name or a ComponentCall')
  return value
