"""Parses the options of algorithms and environments by the types they declare.

A parameter that is annotated as `ComponentCall` is a call string in a config, one that
is annotated as `tuple[ComponentCall, ...]` several, joined by +. A component of a
user's own has such options without registering anything.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.algorithms import registry
from jaxrl.component_calls import ComponentCall, parse_call, parse_calls
from jaxrl.config import option_types
from jaxrl.envs.env_registry import find_env, num_players
from jaxrl.options import Kind, check_options, error_prefix, value_kind
from jaxrl.types import Algorithm
from jaxrl.user_code import import_object

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
  return registry.make(spec, _parse_algorithm_options(spec, options or {}))


def _parse_algorithm_options(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
  """Returns an algorithm's options, with calls in place of their texts."""
  own_hints = option_types(registry.builder(spec))
  kinds = {
    **dict.fromkeys([*registry.COMPONENT_MODULES, *CALL_SETTINGS], Kind(ComponentCall)),
    **dict.fromkeys(CALLS_SETTINGS, Kind(ComponentCall, is_many=True)),
    **{name: value_kind(hint) for name, hint in own_hints.items()},
  }
  parsed = dict(options)
  for name, value in options.items():
    kind = kinds.get(name, Kind(None))
    if kind.type is not ComponentCall or not isinstance(value, str):
      continue
    if value:
      with error_prefix(f'--config.algorithm.{name}={value}'):
        parsed[name] = parse_calls(value) if kind.is_many else parse_call(value)
    elif name in own_hints:  # elsewhere '' leaves the builder's choice
      parsed[name] = () if kind.is_many else None
  return parsed


def parse_env_config(
  env_type: str, env_config: Mapping[str, Any], where: str
) -> dict[str, Any]:
  """Parses `env.<tag>.env_config`, and that of an environment inside.

  Args:
    env_type: The environment's name or location.
    env_config: Its options, as the config has them.
    where: Key of the section, such as 'env.math.env_config'.

  Returns:
    The options as the environment's class takes them.

  Raises:
    ConfigError: If there is no such environment, or a text cannot be read.
  """
  env = find_env(env_type)
  options = _parse_typed_options(env, env_config, where)
  wraps = getattr(env, 'wraps', None)
  if wraps is not None:
    check_options(env, options, f'environment {env_type!r}')
    inner_type, inner_config = wraps(**options)
    if inner_type:
      key = f'{where}.env_config'
      options['env_config'] = parse_env_config(inner_type, inner_config, key)
  return options


def _parse_typed_options(
  function: Callable[..., Any], options: Mapping[str, Any], where: str
) -> dict[str, Any]:
  """Parses those options whose declared types are not plain values."""
  hints = option_types(function)
  parsed = dict(options)
  for name, value in options.items():
    if not isinstance(value, str):
      continue
    with error_prefix(f'--config.{where}.{name}={value}'):
      parsed[name] = _parse_value(value, hints.get(name))
  return parsed


def _parse_value(text: str, hint: Any) -> Any:
  kind = value_kind(hint)
  if kind.type is not ComponentCall:
    return text
  known: Mapping[str, Any] = next(iter(getattr(hint, '__metadata__', ())), {})
  if kind.is_many:
    return tuple(_parse_nested(call, known) for call in parse_calls(text))
  return None if kind.is_optional and not text.strip() else parse_call(text)


def _parse_nested(call: ComponentCall, known: Mapping[str, Any]) -> ComponentCall:
  """Parses the options of a built-in component, which may be call strings too."""
  if call.name not in known or not any(
    isinstance(x, str) for x in call.options.values()
  ):
    return call
  target = known[call.name]
  function = import_object(target) if isinstance(target, str) else target
  hints = option_types(function)
  options = {
    name: _parse_value(value, hints.get(name)) if isinstance(value, str) else value
    for name, value in call.options.items()
  }
  return dataclasses.replace(call, options=options)


def parse_grader_calls(text: str) -> tuple[ComponentCall, ...]:
  """Parses a sum of graders, whose own options may be call strings too.

  Args:
    text: Call strings joined by +.

  Raises:
    ConfigError: If the text cannot be read.
  """
  # Imported here because only runs with graders need it.
  from jaxrl.envs.graders.composite import GraderCalls

  return _parse_value(text, GraderCalls)


def check_env_manager(
  call: ComponentCall, tag: str, env_type: str, env_config: Mapping[str, Any]
) -> None:
  """Checks that the class that `env.<tag>.manager` names can play episodes.

  Args:
    call: A call of the user's own class.
    tag: Environment tag.
    env_type: The environment's name or location.
    env_config: The environment's options.

  Raises:
    ConfigError: If the class cannot be used as a manager.
  """
  # Imported here because few runs have a manager of their own.
  from jaxrl.rollout.custom_env_manager import find_env_manager

  is_agent = getattr(find_env(env_type), 'played_by_agent', False)
  where = f'env.{tag}.manager={call}'
  with error_prefix(where):
    has_players = num_players(env_type, env_config) > 1
    find_env_manager(call, where, is_agent=is_agent, has_players=has_players)
