"""Opponent models: makes what `env.<tag>.opponent` names, a model or a program.

`model(checkpoint='FOLDER')` is served by the run, on an engine of its own, and
`model(url='…', model='…')` by an OpenAI-compatible server: both as judges are.
"""

from typing import Any

from jaxrl.device_thread import DeviceThread
from jaxrl.envs.env_registry import num_players
from jaxrl.options import error_prefix, unknown_name_error
from jaxrl.rollout.opponents import (
  OPPONENTS,
  ModelOpponent,
  check_players,
  make_opponent,
)
from launch.rollouts.reward_terms import Spawn, make_model_asker, make_spawn
from launch.runtime.runtime_base import Runtime
from launch.settings.run_settings import RunSettings

MODEL = 'model'


def validate_opponents(settings: RunSettings) -> None:
  """Checks who plays environments of several players, without loading any weights.

  Raises:
    ConfigError: For an opponent that cannot be, or that has nothing to play.
  """
  for tag, env in settings.env.items():
    with error_prefix(f'env.{tag}'):
      count = num_players(env.env_type, env.env_config)
      check_players(env.env_type, count, env.opponent, env.policy_role)
    _make(settings, tag, lambda *args, **options: None)


def make_opponents(
  settings: RunSettings, runtime: Runtime, device_thread: DeviceThread
) -> dict[str, Any]:
  """Returns what `make_env_context` takes as opponent, by tag.

  Those that programs play stay calls, which each worker builds for itself.

  Raises:
    ConfigError: For a model or server that cannot be used.
  """
  opponents: dict[str, Any] = {}
  for tag, env in settings.env.items():
    if env.opponent is not None:
      spawn = make_spawn(settings, runtime, device_thread, _key(tag))
      opponents[tag] = _make(settings, tag, spawn)
  return opponents


def _key(tag: str) -> str:
  return f'--config.env.{tag}.opponent'


def _make(settings: RunSettings, tag: str, spawn: Spawn) -> Any:
  call = settings.env[tag].opponent
  if call is None:
    return None
  where = f'{_key(tag)}={call}'
  if call.name != MODEL:
    if call.name not in OPPONENTS and ':' not in call.name:
      raise unknown_name_error(call.name, {*OPPONENTS, MODEL}, 'opponent', where)
    make_opponent(call, where)
    return call
  with error_prefix(where):
    return make_model_asker(MODEL, ModelOpponent, dict(call.options), spawn)
