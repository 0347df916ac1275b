"""What a config must satisfy as a whole; said before any work."""

from jaxrl.algorithms import compose
from jaxrl.config import Config
from jaxrl.data.dataset import GlobalDataset
from jaxrl.envs.base import core, factory
from jaxrl.models import huggingface, lora
from jaxrl.rollout.filters import make_filter
from jaxrl.rollout.shapers import make_shaper
from jaxrl.rollout.shares import share_groups
from jaxrl.signature import ConfigError, defaults, unknown
from jaxrl.training import packing
from jaxrl.types import Algorithm
from kernels.dispatch import check_asked
from launch import engines, files, off_policy, placement, rewards, weights

DTYPES = ('float32', 'bfloat16', 'float16')
# Whole numbers, and the least that each may be.
LEAST = {
  'num_steps': 0,
  'num_epochs': 0,
  'batch.num_groups': 1,
  'batch.max_length': 2,
  'batch.minibatches': 1,
  'batch.micro_batches': 1,
  'batch.epochs': 1,
  'checkpoint.every': 0,
  'checkpoint.keep': 1,
  'cluster.num_engines': 0,  # as many as there are devices for
  'cluster.num_workers': 1,
  'eval.every': 0,
  'eval.group_size': 1,
  'eval.num_tasks': -1,  # all
  'rollout.num_slots': 1,
  'rollout.max_lost': 1,
  'sft.num_steps': 0,
  'sft.batch_size': 1,
}


def settings(config: Config, algorithm: Algorithm) -> None:
  """Raises ConfigError, naming the key, for numbers and names that cannot be."""
  agreement(config, algorithm)
  _checkpoint(config)
  _curriculum(config, algorithm)
  files.check(config, algorithm)
  rewards.check(config, algorithm)
  if algorithm.schema == 'rollout' or (config.eval.every and config.env):
    _rollouts(config, algorithm)
    engines.parse(config)


def agreement(config: Config, algorithm: Algorithm) -> None:
  """As `settings`, as far as neither files nor packages must be here."""
  numbers(config)
  if not (config.num_steps or config.num_epochs or config.sft.num_steps):
    raise ConfigError('--config.num_steps=0: there is nothing to do')
  if algorithm.group_size < 1:
    raise ConfigError(
      f'--config.algorithm.group_size={algorithm.group_size}: must be at least 1'
    )
  if 'values' in compose.needs(algorithm) and algorithm.value_loss is None:
    raise ConfigError(
      f'algorithm {config.algorithm.name} reads the values of a critic, and nothing '
      'trains one: set --config.algorithm.value_loss=value_loss'
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
  if lora.parse(config.model.lora) and engines.exact(config):
    raise ConfigError(
      f'--config.model.lora={config.model.lora}: exact engines serve the very weights '
      'that are trained, and adapters are merged for them: take one or the other'
    )
  if packed := packing.parse(config.batch.packing):
    packing.check(
      packed,
      exact=algorithm.schema == 'rollout' and engines.exact(config) is not None,
      context=config.mesh.context,
      micro_batches=config.batch.micro_batches,
    )
  cluster(config)
  off_policy.check(config, algorithm)
  if algorithm.schema == 'rollout':
    engines.parse(config, here=False)


def numbers(config: Config) -> None:
  """Raises ConfigError for one that is too low, kernels or a dtype that are none."""
  for key, least in LEAST.items():
    value = _get(config, key)
    if value < least:
      raise ConfigError(f'--config.{key}={value}: must be at least {least}')
  if config.model.dtype not in DTYPES:
    raise unknown(config.model.dtype, DTYPES, 'dtype', '--config.model.dtype')
  try:
    check_asked(config.kernels)
  except ValueError as error:
    raise ConfigError(f'--config.{error}') from error


def _checkpoint(config: Config) -> None:
  folder = config.model.checkpoint
  try:
    if folder:
      huggingface.load_config(folder)
  except (OSError, ValueError) as error:
    raise ConfigError(f'--config.model.checkpoint={folder}: {error}') from error


def cluster(config: Config) -> None:
  """Raises ConfigError for parts of a run that cannot live where they are to.

  Without Ray there is one engine and one worker, and no cluster to join.
  """
  asked = config.cluster
  for key, alone in (('num_engines', 1), ('num_workers', 1), ('address', '')):
    if not asked.ray and asked[key] != alone:
      raise ConfigError(
        f'--config.cluster.{key}={asked[key]}: needs --config.cluster.ray=true; '
        'one process has one engine and one worker'
      )
  weights.plan(config)
  placement.parse(config)


def _rollouts(config: Config, algorithm: Algorithm) -> None:
  if not config.env:
    raise ConfigError('config.env names no environment: give it at least one tag')
  if algorithm.schema == 'rollout':
    shares = {tag: env.share for tag, env in config.env.items()}
    share_groups(config.batch.num_groups, shares)
  for tag, env in config.env.items():
    if env.concurrency < 1:
      raise ConfigError(
        f'--config.env.{tag}.concurrency={env.concurrency}: must be at least 1'
      )
    try:
      factory(env.env_type, env.env_config.to_dict())
    except ConfigError as error:
      raise ConfigError(f'env.{tag}: {error}') from error
    _end(config, tag)
    _formulation(config, algorithm, tag)
  _groups(config, algorithm)


def _end(config: Config, tag: str) -> None:
  """An evaluation of a tag whose tasks are seeds must be told when it is over."""
  env, count = config.env[tag], config.eval.num_tasks
  plays = core(env.env_type, env.env_config)
  if config.eval.every and count < 1 and not getattr(plays, 'uses_dataset', True):
    raise ConfigError(
      f'--config.eval.num_tasks={count}: env.{tag} has no data set to come to the end '
      'of: say how many tasks an evaluation plays'
    )


def _formulation(config: Config, algorithm: Algorithm, tag: str) -> None:
  """Steps that are joined in a row can neither be told apart nor be scored exactly."""
  if config.env[tag].formulation != 'concatenated':
    return
  where = f'--config.env.{tag}.formulation=concatenated'
  if compose.formulation(algorithm) == 'step':
    raise ConfigError(
      f'{where}: algorithm {config.algorithm.name} tells the steps of an episode '
      "apart: set 'step'"
    )
  if engines.exact(config) is not None:
    raise ConfigError(f"{where}: an exact engine's learner has one sequence a row")


def _groups(config: Config, algorithm: Algorithm) -> None:
  """What happens to groups between being played and being trained on."""
  rollout, trains = config.rollout, algorithm.schema == 'rollout'
  size = algorithm.group_size if trains else None
  for key, spec in (
    ('rollout.group_filter', rollout.group_filter),
    ('algorithm.filters', algorithm.filters),
  ):
    try:
      make_filter(spec, config.to_dict(), {}, group_size=size)
    except ConfigError as error:
      raise ConfigError(f'--config.{key}: {error}') from error
  for key, spec in (
    ('rollout.shapers', rollout.shapers),
    ('algorithm.shapers', algorithm.shapers),
  ):
    try:
      make_shaper(spec, {'max_length': config.batch.max_length})
    except ConfigError as error:
      raise ConfigError(f'--config.{key}: {error}') from error
  for key, all_tokens in (('top_p', 1), ('top_k', 0)):
    if trains and rollout[key] != all_tokens:
      raise ConfigError(
        f'--config.rollout.{key}={rollout[key]}: which tokens this leaves is not '
        'kept, so the learner cannot give the log-probs they were sampled with. '
        f'Train with {key}={all_tokens}, and lower rollout.temperature instead'
      )


def _curriculum(config: Config, algorithm: Algorithm) -> None:
  """A curriculum chooses among the rows that are played."""
  spec = config.dataset.curriculum
  if spec == defaults(GlobalDataset)['curriculum']:
    return
  envs = [core(env.env_type, env.env_config) for env in config.env.values()]
  plays = algorithm.schema == 'rollout' and not config.data.source
  if not plays or not any(getattr(env, 'uses_dataset', True) for env in envs):
    raise ConfigError(
      f'--config.dataset.curriculum={spec}: has no effect here: no environment of this '
      'run takes its tasks from the data set'
    )


def _get(config: Config, key: str) -> int:
  for part in key.split('.'):
    config = config[part]
  return config
