"""What a config must satisfy as a whole; said before any work."""

from collections.abc import Iterable

from jaxrl.config import Config
from jaxrl.envs.base import factory
from jaxrl.rollout.filters import make_filter
from jaxrl.signature import ConfigError, nearest
from jaxrl.types import Algorithm

ENGINES = ('jax',)
# Whole numbers, and the least that each may be.
LEAST = {
  'num_steps': 0,
  'batch.num_groups': 1,
  'batch.max_length': 2,
  'batch.minibatches': 1,
  'batch.micro_batches': 1,
  'batch.epochs': 1,
  'checkpoint.every': 0,
  'checkpoint.keep': 1,
  'cluster.num_engines': 1,
  'cluster.num_workers': 1,
  'eval.every': 0,
  'eval.group_size': 1,
  'rollout.num_slots': 1,
  'rollout.decode_steps': 1,
  'sft.num_steps': 0,
  'sft.batch_size': 1,
}


def settings(config: Config, algorithm: Algorithm) -> None:
  """Raises ConfigError, naming the key, for numbers and names that cannot be."""
  for key, least in LEAST.items():
    value = _get(config, key)
    if value < least:
      raise ConfigError(f'--config.{key}={value}: must be at least {least}')
  if not config.num_steps and not config.sft.num_steps:
    raise ConfigError('--config.num_steps=0: there is nothing to do')
  if algorithm.group_size < 1:
    raise ConfigError(
      f'--config.algorithm.group_size={algorithm.group_size}: must be at least 1'
    )
  too_long = [size for size in config.batch.buckets if size > config.batch.max_length]
  if config.batch.buckets and max(config.batch.buckets) < config.batch.max_length:
    raise ConfigError(
      f'--config.batch.buckets={tuple(config.batch.buckets)}: the largest must hold '
      f'batch.max_length={config.batch.max_length} tokens'
    )
  if too_long:
    raise ConfigError(
      f'--config.batch.buckets: {too_long[0]} is longer than any row may be, '
      f'batch.max_length={config.batch.max_length}'
    )
  _cluster(config)
  if algorithm.schema == 'rollout' or (config.eval.every and config.env):
    _rollouts(config, algorithm)


def _cluster(config: Config) -> None:
  """Without Ray there is one engine and one worker, and no cluster to join."""
  cluster = config.cluster
  for key, alone in (('num_engines', 1), ('num_workers', 1), ('address', '')):
    if not cluster.ray and cluster[key] != alone:
      raise ConfigError(
        f'--config.cluster.{key}={cluster[key]}: needs --config.cluster.ray=true; '
        'one process has one engine and one worker'
      )


def _rollouts(config: Config, algorithm: Algorithm) -> None:
  if not config.env:
    raise ConfigError('config.env names no environment: give it at least one tag')
  tags, groups = list(config.env), config.batch.num_groups
  if algorithm.schema == 'rollout' and groups < len(tags):
    raise ConfigError(
      f'--config.batch.num_groups={groups}: each of the {len(tags)} environment tags '
      f'({", ".join(tags)}) needs a group of every step'
    )
  for tag in tags:
    env = config.env[tag]
    try:
      factory(env.env_type, env.env_config.to_dict())
    except ConfigError as error:
      raise ConfigError(f'env.{tag}: {error}') from error
  make_filter(config.rollout.group_filter, config.to_dict(), {})
  _one_of('rollout.engine', config.rollout.engine, ENGINES)


def _one_of(key: str, value: str, known: Iterable[str]) -> None:
  known = list(known)
  if value in known:
    return
  near = nearest(value, known)
  hint = f'; did you mean {near!r}?' if near else ''
  raise ConfigError(f'--config.{key}={value}: there is {", ".join(known)}{hint}')


def _get(config: Config, key: str) -> int:
  for part in key.split('.'):
    config = config[part]
  return config
