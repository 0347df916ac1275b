"""Parse the options of an algorithm, and build it."""

from collections.abc import Mapping
from typing import Any

from jaxrl.algorithms import registry
from jaxrl.call_strings import parse_call, parse_calls
from jaxrl.config import call_arity, option_types
from jaxrl.types import Algorithm
from launch.settings.key_errors import naming_key

# Settings that are call strings; the other components are `registry.COMPONENT_MODULES`.
CALL_SETTINGS = ('aggregation', 'sampler')
CALLS_SETTINGS = ('filters', 'shapers')


def build_algorithm(spec: str, options: Mapping[str, Any] | None = None) -> Algorithm:
  """Builds an algorithm from a config's options.

  Args:
    spec: The algorithm's name or location, as for `registry.builder`.
    options: As for `registry.make`, but with call strings, such as
      `policy_loss='cispo(clip_high=.3)'`.

  Returns:
    The algorithm, validated.

  Raises:
    ConfigError: If an option is unknown or its value wrong.
  """
  return registry.make(spec, parse_algorithm_options(spec, options or {}))


def parse_algorithm_options(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
  """Parses the call strings among the options of an algorithm.

  Args:
    spec: The algorithm's name or location.
    options: Values by name; '' leaves the builder's choice.

  Returns:
    The options, with calls in place of their texts.

  Raises:
    ConfigError: If a text cannot be read.
  """
  arities = {
    **dict.fromkeys([*registry.COMPONENT_MODULES, *CALL_SETTINGS], 'one'),
    **dict.fromkeys(CALLS_SETTINGS, 'many'),
    **{
      name: call_arity(hint)
      for name, hint in option_types(registry.builder(spec)).items()
    },
  }
  own_names = option_types(registry.builder(spec)).keys()
  parsers = {'one': parse_call, 'many': parse_calls}
  parsed = dict(options)
  for name, value in options.items():
    arity = arities.get(name, 'none')
    if arity not in parsers or not isinstance(value, str):
      continue
    if value:
      with naming_key(f'algorithm.{name}', value):
        parsed[name] = parsers[arity](value)
    elif name in own_names:  # elsewhere '' leaves the builder's choice
      parsed[name] = () if arity == 'many' else None
  return parsed
