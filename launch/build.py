"""From a config to the parts of a run. Everything wrong is said here, before work."""

import asyncio
import pathlib
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxrl.algorithms import compose, describe
from jaxrl.config import Config
from jaxrl.data.seeds import base_seed, fold
from jaxrl.data.sources import load_rows
from jaxrl.dispatch import Dispatcher
from jaxrl.signature import ConfigError
from jaxrl.training import policy as policies
from jaxrl.training.mesh import make_mesh
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm
from launch import checks
from launch.job import Job
from launch.rollouts import Rollouts, load_datasets
from launch.spawn import Host, LocalHost
from launch.writers import Writers

TEXTS = 2000  # rows that a fresh tokenizer is trained on
ROLES = ('system', 'user', 'assistant', 'tool')


def build(
  config: Config,
  *,
  workdir: pathlib.Path,
  writers: Writers,
  stop: Callable[[], bool],
) -> Job:
  """Assembles a run in `workdir`. Raises ConfigError for what cannot be.

  writers: takes what the run tells. stop: True when the user asked to end.
  """
  algorithm = make_algorithm(config)
  try:
    mesh = make_mesh(**config.mesh)
  except ValueError as error:
    raise ConfigError(f'--config.mesh: {error}') from error
  checks.settings(config, algorithm)
  host, dispatcher = make_host(config), Dispatcher()
  try:
    parts = _parts(config, algorithm, host, dispatcher, workdir)
  except Exception:
    asyncio.run(host.close())
    raise
  policy, rollouts = parts
  job = Job(
    config,
    workdir=workdir,
    writers=writers,
    stop=stop,
    policy=policy,
    algorithm=algorithm,
    mesh=mesh,
    host=host,
    dispatcher=dispatcher,
    rollouts=rollouts,
  )
  writers.decode_with(policy.tokenizer.decode)
  job.facts = _facts(config, policy, algorithm, mesh)
  job.closing['checkpoints'] = str(workdir / 'checkpoints')
  return job


def _parts(
  config: Config,
  algorithm: Algorithm,
  host: Host,
  dispatcher: Dispatcher,
  workdir: pathlib.Path,
) -> tuple[Policy, Rollouts | None]:
  """The policy, and what plays with it if anything does. Data first: it is cheap."""
  plays = algorithm.schema == 'rollout' or (config.eval.every and config.env)
  data = load_datasets(config, host) if plays else ({}, {})
  policy = make_policy(config, workdir, critic=algorithm.value_loss is not None)
  if not plays:
    return policy, None
  size = algorithm.group_size
  rollouts = Rollouts(config, policy, host, dispatcher, data, group_size=size)
  asyncio.run(rollouts.check_prompts())
  return policy, rollouts


def make_algorithm(config: Config) -> Algorithm:
  options = config.algorithm.to_dict()
  return compose.make(options.pop('name'), options)


def make_host(config: Config) -> Host:
  if not config.cluster.ray:
    return LocalHost()
  from launch.cluster.ray_host import RayHost  # Ray: seconds

  return RayHost(config.cluster.address)


def make_policy(config: Config, workdir: pathlib.Path, *, critic: bool) -> Policy:
  """The checkpoint's policy, or a random one with a tokenizer of the run's texts."""
  settings = config.model
  options = {'dtype': settings.dtype, 'remat': settings.remat, 'value_head': critic}
  if settings.checkpoint:
    return policies.load(settings.checkpoint, **options)
  if not (workdir / 'config.json').exists():  # a start that failed may have left one
    shutil.rmtree(workdir / 'model', ignore_errors=True)
  key = jax.random.key(fold(config.seed, 'model'))
  shape = policies.random_config(**settings.random)
  return policies.create(workdir / 'model', shape, _texts(config), key, **options)


def _texts(config: Config) -> Iterable[str]:
  """What a fresh tokenizer learns from: the texts that the model will meet."""
  data = config.dataset
  paths = {config.sft.path or data.path, data.path} - {''}
  if not paths:
    raise ConfigError(
      'a random model needs texts to train its tokenizer on: set '
      '--config.dataset.path or --config.sft.path, or --config.model.checkpoint'
    )
  keys = (data.question_key, data.answer_key, config.sft.solution_key)
  for path in sorted(paths):
    for row in load_rows(path, data.split, TEXTS):
      yield from (str(row[key]) for key in keys if key in row)
      for message in row.get('messages', ()):
        yield str(message['content'])
      yield '\n'.join(ROLES)  # as often as messages: a role is then one token


def _facts(
  config: Config, policy: Policy, algorithm: Algorithm, mesh: Any
) -> dict[str, str]:
  """What the run is, in lines that people read."""
  shape = policy.model.config
  count = sum(x.size for x in jax.tree.leaves(policy.params))
  kinds = {device.device_kind for device in mesh.devices.flat}
  axes = ' × '.join(f'{name} {size}' for name, size in mesh.shape.items())
  parts = {
    slot: describe.call_string(part) for slot, part in compose.parts(algorithm).items()
  }
  return {
    'model': f'{shape.family}, {count:,} parameters, {shape.num_layers} layers, '
    f'vocabulary {shape.vocab_size}, from {config.model.checkpoint or "scratch"}',
    'devices': f'{mesh.size} × {", ".join(sorted(kinds))} ({axes})',
    'data': config.dataset.path or 'seeds',
    'algorithm': f'{config.algorithm.name}: '
    + ', '.join(f'{slot}={text}' for slot, text in parts.items()),
  }


class Player:
  """One manager outside any queue, for `launch.play`."""

  def __init__(self, config: Config, workdir: pathlib.Path):
    host, self._dispatcher = LocalHost(), Dispatcher()
    checks.settings(config, make_algorithm(config))
    data = load_datasets(config, host)
    policy = make_policy(config, workdir, critic=False)
    self._rollouts = Rollouts(
      config, policy, host, self._dispatcher, data, group_size=1
    )
    self._params = policy.params
    tag = self._rollouts.tags[0]
    self.manager = self._rollouts.manager(tag, 'sample')
    self.base_seed = base_seed(config.seed, 'train', tag)
    self.decode: Callable[..., str] = policy.tokenizer.decode

  async def start(self) -> None:
    await self._rollouts.weights.publish(0, self._params)

  async def close(self) -> None:
    self._dispatcher.close()


def player(config: Config) -> Player:
  """What plays one episode of the first tag, as training would."""
  import tempfile

  with tempfile.TemporaryDirectory() as folder:
    return Player(config, pathlib.Path(folder))
