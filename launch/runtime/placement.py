"""Placement decides which devices each part of a run has, and how much memory of them.

`cluster.placement` says how: 'split' gives learner and engines devices of their own,
'colocated' has them share all devices, 'auto' chooses.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.options import ConfigError, OptionValues
from launch.settings.cluster_settings import PLACEMENT as KEY
from launch.settings.cluster_settings import (
  AutoPlacementOptions,
  ColocatedOptions,
  SplitOptions,
)
from launch.settings.run_settings import PlacementOptions, RunSettings

# The environment of processes that use no devices.
NO_DEVICES_ENV = {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': ''}
# For a learner that allocates memory as it needs it, and releases what it frees, as it
# uses the memory in turns with the engine.
ALLOCATOR_ENV = {
  'XLA_PYTHON_CLIENT_ALLOCATOR': 'platform',
  'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
}
DEVICE_COUNT_FLAG = '--xla_force_host_platform_device_count'


@dataclasses.dataclass(frozen=True)
class ClusterNode:
  """The devices of a machine."""

  gpus: int = 0
  tpus: int = 0


@dataclasses.dataclass(frozen=True)
class ActorResources:
  """Where an actor lives, and what it may use.

  Attributes:
    env: Environment variables that it is started with.
    bundle: Index of its bundle in the placement group; None for anywhere.
    claims: Ray resources that it claims.
    devices: Devices of its bundle that it sees without a claim, counted from 0.
    memory: Share of each of its devices that it may use.
    options: Further options of the engine.
  """

  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  bundle: int | None = None
  claims: Mapping[str, float] = dataclasses.field(default_factory=dict)
  devices: tuple[int, ...] = ()
  memory: float = 0.0
  options: OptionValues = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Placement:
  """Which devices each part of a run has.

  Attributes:
    name: 'split', 'colocated', 'auto' without accelerators, or 'engines'.
    learners: Of the learner's processes; empty if it lives in the run's own process.
    engines: Of the engines.
    others: Of everything that uses no devices.
    bundles: Resources that are reserved together.
    description: To be shown to the user.
  """

  name: str
  learners: tuple[ActorResources, ...] = ()
  engines: tuple[ActorResources, ...] = ()
  others: ActorResources = ActorResources()
  bundles: tuple[Mapping[str, float], ...] = ()
  description: str = ''


def _where(settings: RunSettings) -> str:
  """Returns how error messages name the placement."""
  return f'{KEY}={settings.text("cluster.placement")}'


def single_process_env(settings: RunSettings) -> dict[str, str]:
  """Returns the environment that keeps a run without Ray within its share of memory.

  It has to be set before the first use of a device.

  Raises:
    ConfigError: The placement needs several processes.
  """
  placement = settings.placement
  if not isinstance(placement, ColocatedOptions):
    return {}
  if placement.learner:
    raise ConfigError(
      f'{_where(settings)}: learner and engine share the memory of one '
      'process, so the option learner has no effect: leave it out, or set '
      '--config.cluster.ray=true'
    )
  return {'XLA_PYTHON_CLIENT_MEM_FRACTION': f'{placement.memory:g}'}


def plan_placement(
  settings: RunSettings, nodes: Sequence[ClusterNode], *, has_learner: bool = True
) -> Placement:
  """Plans which devices each part of a run has.

  Args:
    settings: The run's.
    nodes: The machines.
    has_learner: If False, every device is for the engines, and of the placement's
      options only `memory` is used.

  Raises:
    ConfigError: The run does not fit on the machines.
  """
  placement = settings.placement
  sleep = placement.sleeps and has_learner
  kind, counts = 'GPU', [n.gpus for n in nodes if n.gpus]
  if not counts:
    kind, counts = 'TPU', [n.tpus for n in nodes if n.tpus]
  if sleep:
    _check_sleep(_where(settings), settings, kind if counts else 'CPU')
    if isinstance(placement, ColocatedOptions) and placement.learner:
      raise ConfigError(
        f'{_where(settings)}: with sleep, learner and engine take turns with '
        'all of the memory, so the option learner has no effect: leave it out'
      )
  if not counts:
    return _plan_cpu(settings, placement if has_learner else AutoPlacementOptions())
  engine = _Engine.of(settings, kind)
  if not has_learner:
    memory = getattr(placement, 'memory', SplitOptions.memory)
    return _plan_engines_only(settings, kind, counts, engine, memory)
  if isinstance(placement, AutoPlacementOptions):
    placement = ColocatedOptions()
    if sum(counts) > 1:
      learners, devices = _whole_machines(
        counts, settings.cluster.num_engines, engine.size
      )
      placement = SplitOptions(learners=learners, devices=devices)
  if isinstance(placement, SplitOptions):
    return _plan_split(settings, kind, counts, engine, placement)
  assert isinstance(placement, ColocatedOptions)
  if kind == 'TPU':
    raise ConfigError(
      f'{_where(settings)}: a TPU can only be used by one process at a time: '
      'use split, or set --config.cluster.ray=false to have learner and '
      'engine in one process'
    )
  return _plan_colocated(settings, counts, engine, placement)


def _plan_cpu(settings: RunSettings, placement: PlacementOptions) -> Placement:
  """Plans for machines without accelerators, where there is no budget to keep."""
  engines = tuple(ActorResources() for _ in range(max(1, settings.cluster.num_engines)))
  if not isinstance(placement, SplitOptions):
    return Placement(
      'auto', (), engines, description='CPU alone: there is no budget to keep'
    )
  count, devices = placement.learners, placement.devices
  env = {}
  if devices:
    flags = [
      f for f in os.environ.get('XLA_FLAGS', '').split() if DEVICE_COUNT_FLAG not in f
    ]
    env['XLA_FLAGS'] = ' '.join([*flags, f'{DEVICE_COUNT_FLAG}={devices}'])
  token = {'CPU': 0.001}  # so that there is something to reserve
  learners = tuple(ActorResources(env, bundle=i) for i in range(count))
  description = f'split: learner in {count}, CPU alone: there is no budget to keep'
  return Placement(
    'split', learners, engines, bundles=(token,) * count, description=description
  )


@dataclasses.dataclass(frozen=True)
class _Engine:
  """What an engine needs.

  Attributes:
    vllm: Whether it is vLLM's.
    size: Its devices.
    memory: The share of their memory that was asked for; 0 if none was.
  """

  vllm: bool
  size: int
  memory: float

  @classmethod
  def of(cls, settings: RunSettings, kind: str) -> '_Engine':
    engine = settings.engine
    memory = engine.own_options.get('gpu_memory_utilization') or 0.0
    vllm = engine.kind == 'vllm'
    if memory and vllm and kind != 'GPU':
      raise ConfigError(f'rollout.engine: gpu_memory_utilization={memory} needs a GPU')
    return cls(vllm, engine.num_devices, float(memory))

  def resources(
    self, memory: float, *, sleep: bool = False, **fields: Any
  ) -> ActorResources:
    env = dict(fields.pop('env', {}))
    if self.vllm:
      options = {} if self.memory else {'gpu_memory_utilization': memory}
      fields['options'] = options | ({'enable_sleep_mode': True} if sleep else {})
      return ActorResources({**env, 'JAX_PLATFORMS': 'cpu'}, memory=memory, **fields)
    env['XLA_PYTHON_CLIENT_MEM_FRACTION'] = f'{memory:g}'
    return ActorResources(env, memory=memory, **fields)


def _whole_machines(counts: Sequence[int], engines: int, size: int) -> tuple[int, int]:
  """Returns the learner's number of processes, and the devices of each.

  The learner's share is what `engines` engines of `size` devices leave, or half if
  their number is open (0). If it is more than a machine has, the learner gets a process
  with the same number of devices on each of several machines, and as many devices as
  possible. Otherwise returns (1, 0), which leaves the choice to `split`.
  """
  share = sum(counts) - engines * size if engines else sum(counts) // 2
  if share <= max(counts):
    return 1, 0
  ordered = sorted(counts, reverse=True)
  choices = [
    (number, devices)
    for number, devices in enumerate(ordered, 1)
    if number * devices <= share
    and _fit(counts, [devices] * number + [size] * max(engines, 1))
  ]
  return max(choices, key=math.prod, default=(1, 0))


def _fit(counts: Sequence[int], sizes: Sequence[int]) -> bool:
  """Returns whether processes fit on machines if Ray spreads them."""
  free = list(counts)
  for size in sorted(sizes, reverse=True):
    emptiest = free.index(max(free))
    free[emptiest] -= size
    if free[emptiest] < 0:
      return False
  return True


def _plan_split(
  settings: RunSettings,
  kind: str,
  counts: Sequence[int],
  engine: _Engine,
  options: SplitOptions,
) -> Placement:
  where = _where(settings)
  learners, devices, memory = options.learners, options.devices, options.memory
  engines = settings.cluster.num_engines
  total, largest = sum(counts), max(counts)
  if not devices:
    share = total - engines * engine.size if engines else total // 2
    devices = share // learners
  if not engines:
    engines = (total - devices * learners) // engine.size
    learner_sizes = [devices] * learners
    while engines > 1 and not _fit(counts, learner_sizes + [engine.size] * engines):
      engines -= 1
  needed = devices * learners + engines * engine.size
  if devices < 1 or engines < 1 or needed > total:
    raise ConfigError(
      f'{where}: {learners} × {max(devices, 1)} {kind} for the learner and '
      f'{max(engines, 1)} × {engine.size} for engines exceed the {total} that '
      'there are: lower one of them, or use colocated'
    )
  if engine.size > largest:
    raise ConfigError(
      f'{where}: one engine would need {engine.size} {kind}, and no machine '
      f'has more than {largest}: lower the parallel sizes in rollout.engine'
    )
  if devices > largest:
    raise ConfigError(
      f'{where}: one process would need {devices} {kind}, and no machine has '
      f'more than {largest}: raise learners'
    )
  _check_budget(where, memory, engine.memory)
  env = {'XLA_PYTHON_CLIENT_MEM_FRACTION': f'{memory:g}'}
  learner_claims, engine_claims = {kind: float(devices)}, {kind: float(engine.size)}
  return Placement(
    'split',
    tuple(
      ActorResources(env, i, learner_claims, memory=memory) for i in range(learners)
    ),
    tuple(
      engine.resources(
        engine.memory or memory, bundle=learners + i, claims=engine_claims
      )
      for i in range(engines)
    ),
    ActorResources(NO_DEVICES_ENV),
    (learner_claims,) * learners + (engine_claims,) * engines,
    f'split: learner {learners} × {devices} {kind}, engines {engines} × {engine.size}, '
    f'each at most {memory:g} of its memory',
  )


def _plan_colocated(
  settings: RunSettings,
  counts: Sequence[int],
  engine: _Engine,
  options: ColocatedOptions,
) -> Placement:
  where = _where(settings)
  memory, learner, sleep = options.memory, options.learner, options.sleep
  engines = _count_engines(settings, 'GPU', counts, engine)
  if sleep:
    learner, share = memory, engine.memory or memory
    _check_budget(where, memory, share)
    env = ALLOCATOR_ENV
  else:
    learner = learner or (memory - engine.memory if engine.memory else memory / 2)
    share = engine.memory or memory - learner
    _check_budget(where, memory, learner, share)
    env = {'XLA_PYTHON_CLIENT_MEM_FRACTION': f'{learner:g}'}
  learners, engine_resources = [], []
  for bundle, count in enumerate(counts):
    learners.append(
      ActorResources(env, bundle, devices=tuple(range(count)), memory=learner)
    )
    for i in range(count // engine.size):
      if len(engine_resources) < engines:
        devices = tuple(range(i * engine.size, (i + 1) * engine.size))
        engine_resources.append(
          engine.resources(share, bundle=bundle, devices=devices, sleep=sleep)
        )
  suffix = ', in turns' if sleep else ''
  description = (
    f'colocated on {sum(counts)} GPU: learner {learner:g} of the memory of each, '
  )
  return Placement(
    'colocated',
    tuple(learners),
    tuple(engine_resources),
    ActorResources(NO_DEVICES_ENV),
    tuple({'GPU': float(count)} for count in counts),
    f'{description}{engines} engines {share:g}{suffix}',
  )


def _plan_engines_only(
  settings: RunSettings,
  kind: str,
  counts: Sequence[int],
  engine: _Engine,
  memory: float,
) -> Placement:
  """Plans for a run without a learner."""
  _check_budget(_where(settings), memory, engine.memory)
  number = _count_engines(settings, kind, counts, engine)
  share = engine.memory or memory
  claims = {kind: float(engine.size)}
  return Placement(
    'engines',
    (),
    tuple(engine.resources(share, bundle=i, claims=claims) for i in range(number)),
    ActorResources(NO_DEVICES_ENV),
    (claims,) * number,
    f'engines alone: {number} × {engine.size} {kind}, each at most {share:g} of its '
    'memory',
  )


def _count_engines(
  settings: RunSettings, kind: str, counts: Sequence[int], engine: _Engine
) -> int:
  """Returns the number of engines if all devices are for them."""
  max_engines = sum(count // engine.size for count in counts)
  engines = settings.cluster.num_engines or max_engines
  if not 0 < engines <= max_engines:
    raise ConfigError(
      f'{_where(settings)}: {max(engines, 1)} engines of {engine.size} '
      f'{kind} each do not fit on {" + ".join(map(str, counts))}; at most one engine '
      'may have a device'
    )
  return engines


def visible_devices_env(
  resources: ActorResources, device_names: Sequence[str]
) -> dict[str, str]:
  """Returns the environment in which an actor sees its `devices`.

  Ray gives a device to one actor or, by fractions, one device to several. It does not
  give several devices to several actors, so they are named in the environment.

  Args:
    resources: Of the actor.
    device_names: Names of the devices of its bundle.

  Returns:
    Environment variables; {} for an actor with claims, or without devices.
  """
  if not resources.devices:
    return {}
  return {
    'CUDA_VISIBLE_DEVICES': ','.join(device_names[i] for i in resources.devices),
    'RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES': '1',
  }


def _check_budget(where: str, memory: float, *shares: float) -> None:
  """Raises ConfigError if the parts on one device may use more than the budget."""
  total = ' + '.join(f'{share:g}' for share in shares)
  if sum(shares) > memory + 1e-9:
    raise ConfigError(
      f'{where}: the parts on one device would use {total} of its memory, more than '
      f'the budget of memory={memory:g}: lower learner, or '
      'gpu_memory_utilization in rollout.engine'
    )
  if len(shares) > 1 and min(shares) <= 0:
    raise ConfigError(
      f'{where}: shares of memory are {total}, but learner and engine must '
      'each be above 0'
    )


def _check_sleep(where: str, settings: RunSettings, kind: str) -> None:
  """Raises ConfigError if learner and engines cannot use the memory in turns.

  Args:
    where: What the error begins with.
    settings: The run's.
    kind: Of the devices.
  """
  if not settings.engine.traits.can_sleep:
    engine = settings.engine.kind
    raise ConfigError(
      f'{where}: with cluster.ray=true only vLLM can give its memory back, '
      f'and engine {engine} cannot: set --config.rollout.engine=vllm, or '
      '--config.cluster.ray=false'
    )
  if kind != 'GPU':
    raise ConfigError(
      f'{where}: sleep frees the memory of a GPU, and there is none here '
      f'(devices: {kind})'
    )
  if settings.weight_sync.sync_policy.wait_for != 'current':
    raise ConfigError(
      f'{where}: while the learner trains, the engine sleeps without memory, '
      f'but weight_sync.policy={settings.text("weight_sync.policy")} sends it '
      'weights then: use fixed or explorer'
    )
