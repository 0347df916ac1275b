"""From a config to the parts of a run. Everything wrong is said here, before work."""

import asyncio
import logging
import os
import pathlib
import shutil
from collections.abc import Callable

import jax

from jaxrl.algorithms import compose, describe
from jaxrl.config import Config
from jaxrl.data.seeds import fold
from jaxrl.dispatch import Dispatcher
from jaxrl.signature import ConfigError
from jaxrl.training import policy as policies
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm
from launch import (
  checks,
  engines,
  files,
  off_policy,
  placement,
  samplers,
  stored,
  teachers,
  weights,
)
from launch.algorithm import make_algorithm
from launch.datasets import load_datasets
from launch.job import Job
from launch.learners import Learners, LocalLearners, mesh_of, model_options
from launch.rollouts import Rollouts
from launch.spawn import Host, LocalHost
from launch.writers import Writers

log = logging.getLogger(__name__)


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
  algorithm = _algorithm(config)
  host, dispatcher = make_host(config), Dispatcher()
  try:
    mesh = None if host.learns else mesh_of(config)
    policy, rollouts = _parts(config, algorithm, host, dispatcher, workdir)
    offline, tokenizer = algorithm.schema != 'rollout', policy.tokenizer
    source = files.main(config, algorithm, tokenizer) if offline else None
    sampler = None
    if rollouts is not None and not offline and not config.data.source:
      sampler = samplers.make(config, algorithm, policy, rollouts)
    staff = teachers.load(config, algorithm, policy)
    learners = (
      host.learners(config, policy.folder)
      if mesh is None
      else LocalLearners(config, policy, algorithm, mesh, dispatcher, staff)
    )
    store = stored.make(config, algorithm, policy, workdir=workdir, stop=stop)
  except Exception as error:
    leave(host, error)
    raise
  job = Job(
    config,
    workdir=workdir,
    writers=writers,
    stop=stop,
    policy=policy,
    algorithm=algorithm,
    learners=learners,
    host=host,
    dispatcher=dispatcher,
    rollouts=rollouts,
    sampler=sampler,
    source=source,
    store=store,
  )
  writers.decode_with(policy.tokenizer.decode)
  told = {
    'placement': host.told,
    'rollouts': off_policy.describe(config, algorithm),
    'teacher': staff and staff.describe(),
    'data': (source and files.describe(config, source)) or (store and store.describe()),
  }
  own = _facts(config, policy, algorithm, learners)
  job.facts = own | {label: text for label, text in told.items() if text}
  job.closing['checkpoints'] = str(workdir / 'checkpoints')
  return job


def _algorithm(config: Config) -> Algorithm:
  """The algorithm, once it is sure that the config agrees with itself and with it."""
  algorithm = make_algorithm(config)
  checks.settings(config, algorithm)
  for part in (samplers, teachers, stored):
    part.check(config, algorithm)
  return algorithm


def leave(host: Host, error: Exception) -> None:
  """Closes the host after an error, and raises what lies behind it if anything does."""
  told = error if isinstance(error, ConfigError) else asyncio.run(host.explain(error))
  asyncio.run(host.close())
  if told is not error:
    raise told from error


def _parts(
  config: Config,
  algorithm: Algorithm,
  host: Host,
  dispatcher: Dispatcher,
  workdir: pathlib.Path,
) -> tuple[Policy, Rollouts | None]:
  """The policy, and what plays with it if anything does. Data first: it is cheap."""
  plays = algorithm.schema == 'rollout' and not config.data.source
  plays = plays or (config.eval.every and config.env)
  data = load_datasets(config, host) if plays else ({}, {})
  policy = make_policy(config, workdir, critic=algorithm.value_loss is not None)
  if not plays:
    return policy, None
  engines.check_model(config, policy.model.config)
  rollouts = Rollouts(config, policy, host, dispatcher, data, algorithm=algorithm)
  asyncio.run(rollouts.check_prompts())
  return policy, rollouts


def make_host(config: Config, *, learns: bool = True) -> Host:
  """learns: whether there is a learner, which has devices too."""
  if not config.cluster.ray:
    os.environ.update(placement.alone(config))
    return LocalHost(weights.plan(config))
  from launch.cluster.ray_host import RayHost  # Ray: seconds

  host = RayHost(config.cluster.address, weights.plan(config))
  try:
    hides = host.place(config, learns=learns).others.env
  except Exception:
    asyncio.run(host.close())
    raise
  if hides:  # the actors have the devices; this process must not take their memory
    jax.config.update('jax_platforms', hides['JAX_PLATFORMS'])
  return host


def make_policy(config: Config, workdir: pathlib.Path, *, critic: bool) -> Policy:
  """The checkpoint's policy, or a random one, with its teacher's tokenizer if it has
  a teacher, and else with one of the run's texts.
  """
  settings = config.model
  options = {**model_options(config), 'value_head': critic}
  if settings.checkpoint:
    return policies.load(settings.checkpoint, **options)
  if not (workdir / 'config.json').exists():  # a start that failed may have left one
    shutil.rmtree(workdir / 'model', ignore_errors=True)
  key = jax.random.key(fold(config.seed, 'model'))
  shape = policies.random_config(**settings.random)
  known = teachers.vocabulary(config)
  if known:
    options['tokenizer'], size = known
    shape = shape.replace(vocab_size=size)
  texts = () if known else files.texts(config)
  return policies.create(workdir / 'model', shape, texts, key, **options)


def _facts(
  config: Config, policy: Policy, algorithm: Algorithm, learners: Learners
) -> dict[str, str]:
  """What the run is, in lines that people read."""
  shape = policy.model.config
  count = sum(x.size for x in jax.tree.leaves(policy.params))
  parts = {
    slot: describe.call_string(part) for slot, part in compose.parts(algorithm).items()
  }
  settings = ('aggregation', 'filters', 'shapers')
  parts |= {key: text for key in settings if (text := getattr(algorithm, key))}
  if algorithm.atom == 'pair':  # its loss is a mean over pairs, whatever is set
    parts['aggregation'] = 'mean over pairs'
  return {
    'model': f'{shape.family}, {count:,} parameters, {shape.num_layers} layers, '
    f'vocabulary {shape.vocab_size}, from {config.model.checkpoint or "scratch"}',
    'devices': learners.describe(),
    'data': config.dataset.path or 'seeds',
    'algorithm': f'{config.algorithm.name}: '
    + ', '.join(f'{slot}={text}' for slot, text in parts.items()),
  }
