"""Builds the config that every config starts from."""

from typing import Any

from jaxrl.algorithms import registry
from jaxrl.config import (
  Config,
  describe_keys,
  describe_options,
  make_section,
  to_config,
  update_section,
)
from jaxrl.envs.env_registry import find_env
from jaxrl.options import ConfigError
from jaxrl.run_options import EnvOptions, EvalSetOptions, RunOptions
from jaxrl.types import Algorithm


def env_section(env_type: str, **overrides: Any) -> Config:
  """Returns an environment tag's section: `EnvOptions`, and the class's own options.

  Args:
    env_type: The environment's short name, or its location.
    **overrides: Values for `EnvOptions`; of its sections, such as `dataset`, a dict of
      values; `env_config`, a dict, for the environment class's own options.
  """
  env, env_config = find_env(env_type), overrides.pop('env_config', {})
  config: Config = to_config(EnvOptions(env_type=env_type))
  config.env_config = make_section(env, **env_config)
  if not getattr(env, 'uses_dataset', True):
    if 'dataset' in overrides:
      raise ConfigError(
        f'env_section({env_type!r}): takes no dataset: its tasks come from seeds'
      )
    del config.dataset
  update_section(config, overrides, f'env_section({env_type!r})')
  return config


def eval_set(**overrides: Any) -> Config:
  """Returns the section of a named evaluation set, for `config.eval.sets`.

  Args:
    **overrides: Values for `EvalSetOptions`.
  """
  config = to_config(EvalSetOptions())
  update_section(config, overrides, 'eval_set()')
  return config


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns all sections at their defaults, for the algorithm of this name."""
  config: Config = to_config(RunOptions())
  builder, options = registry.builder(algorithm), registry.builder_options(algorithm)
  config.algorithm = make_section(builder, {'name': algorithm, **options})
  about = {**describe_options(Algorithm), **describe_options(builder)}
  about['name'] = 'The algorithm; set by --config=FILE:NAME.'
  describe_keys(config.algorithm, {k: about[k] for k in config.algorithm if k in about})
  return config
