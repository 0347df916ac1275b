"""Which devices every part of a run has, and how much of their memory: arithmetic.

`cluster.placement` says how: 'split' gives learner and engines devices of their own,
'colocated' has them share all of them, 'auto' chooses.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config import Config
from jaxrl.signature import ConfigError, check_options, defaults, parse_call, unknown
from launch import turns

KEY = '--config.cluster.placement'
HIDDEN = {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': ''}
COUNT = '--xla_force_host_platform_device_count'


@dataclasses.dataclass(frozen=True)
class Node:
  """A machine of the cluster, and its devices."""

  gpus: int = 0
  tpus: int = 0


@dataclasses.dataclass(frozen=True)
class Seat:
  """Where an actor lives. env: what it is started with. bundle: the place in the
  placement's group, None for anywhere. claims: of Ray's resources. devices: of those of
  its bundle, the places from 0 on of what it sees without a claim. memory: share of
  each of its devices that it may take. options: more for the engine.
  """

  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  bundle: int | None = None
  claims: Mapping[str, float] = dataclasses.field(default_factory=dict)
  devices: tuple[int, ...] = ()
  memory: float = 0.0
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Placement:
  """learners: none if the learner lives in the run's own process. others: for all that
  uses no devices. bundles: resources that are reserved together. told: for people.
  """

  name: str
  learners: tuple[Seat, ...] = ()
  engines: tuple[Seat, ...] = ()
  others: Seat = Seat()
  bundles: tuple[Mapping[str, float], ...] = ()
  told: str = ''


def split(*, learners: int = 1, devices: int = 0, memory: float = 0.9) -> None:
  """Devices of their own. learners: processes of the learner, one a machine. devices:
  of each of them; 0 leaves the engines theirs and takes the rest, half if their number
  is open. memory: share of each device that whoever has it may take.
  """


def colocated(
  *, memory: float = 0.9, learner: float = 0.0, sleep: bool = False
) -> None:
  """The same devices. memory: share of each that all may take together. learner: the
  learner's part of that share; 0 is what the engine leaves, or half. sleep: they have
  all of it in turns: an engine has no cache while the learner learns. In processes of
  their own it keeps no weights there either, nor the learner its state while it plays.
  """


def auto() -> None:
  """'split' from two devices on, 'colocated' on one, none of both without any.

  Where the learner's share is more than a machine has, it gets whole machines, with a
  process on each.
  """


KINDS = {'auto': auto, 'split': split, 'colocated': colocated}


def parse(config: Config) -> tuple[str, dict[str, Any]]:
  """Name and options, defaults filled in. Raises ConfigError for what is not."""
  text = config.cluster.placement
  name, options = parse_call(text)
  if name not in KINDS:
    raise unknown(name, KINDS, 'placement', KEY)
  check_options(KINDS[name], options, f'{KEY}={text}')
  options = defaults(KINDS[name]) | options
  if name == 'split' and not config.cluster.ray:
    raise ConfigError(f'{KEY}={text}: needs --config.cluster.ray=true')
  if options.get('learners', 1) < 1 or options.get('devices', 0) < 0:
    raise ConfigError(f'{KEY}={text}: learners must be at least 1, devices at least 0')
  if not 0 < options.get('memory', 1) <= 1:
    raise ConfigError(f'{KEY}={text}: memory is a share of a device, above 0 up to 1')
  return name, options


def alone(config: Config) -> dict[str, str]:
  """Without Ray: the environment that keeps one process within its share.

  It holds from before the first use of a device.
  """
  name, options = parse(config)
  if options.get('learner'):
    raise ConfigError(
      f'{KEY}={config.cluster.placement}: learner and engine are one process, whose '
      'memory is one; leave learner out, or set --config.cluster.ray=true'
    )
  share = {'XLA_PYTHON_CLIENT_MEM_FRACTION': f'{options.get("memory", 1):g}'}
  return share if name == 'colocated' else {}


def sleeps(config: Config) -> bool:
  """Whether the engine gives up its cache while the learner learns."""
  return parse(config)[1].get('sleep', False)


def plan(config: Config, nodes: Sequence[Node], *, learns: bool = True) -> Placement:
  """Seats for a run on `nodes`. Raises ConfigError for what does not fit.

  learns: without, every device is the engines', and of the options only `memory` holds.
  """
  name, options = parse(config)
  sleep = options.pop('sleep', False) and learns
  kind, counts = 'GPU', [n.gpus for n in nodes if n.gpus]
  if not counts:
    kind, counts = 'TPU', [n.tpus for n in nodes if n.tpus]
  if sleep:
    turns.check(f'{KEY}={config.cluster.placement}', config, kind if counts else 'CPU')
    if options['learner']:
      raise ConfigError(
        f'{KEY}={config.cluster.placement}: each has all of memory in turns; leave '
        'learner out'
      )
  if not counts:
    return _without(config, name if learns else 'auto', options)
  engine = _Engine.of(config, kind)
  if not learns:
    memory = options.get('memory', defaults(split)['memory'])
    return _engines_alone(config, kind, counts, engine, memory)
  if name == 'auto':
    name = 'split' if sum(counts) > 1 else 'colocated'
    options = defaults(KINDS[name])
    options.pop('sleep', None)
    if name == 'split':
      found = _whole_machines(counts, config.cluster.num_engines, engine.size)
      options['learners'], options['devices'] = found
  if name == 'split':
    return _split(config, kind, counts, engine, **options)
  if kind == 'TPU':
    raise ConfigError(
      f'{KEY}={config.cluster.placement}: a TPU serves one process. Take split, or '
      '--config.cluster.ray=false, where learner and engine are one process'
    )
  return _colocated(config, counts, engine, sleep=sleep, **options)


def _without(config: Config, name: str, options: Mapping[str, Any]) -> Placement:
  """Hosts without accelerators. Their memory is one, so there is nothing to budget."""
  engines = tuple(Seat() for _ in range(max(1, config.cluster.num_engines)))
  if name != 'split':
    return Placement('auto', (), engines, told='CPU alone: there is no budget to keep')
  count, devices = options['learners'], options['devices']
  env = {}
  if devices:
    flags = [f for f in os.environ.get('XLA_FLAGS', '').split() if COUNT not in f]
    env['XLA_FLAGS'] = ' '.join([*flags, f'{COUNT}={devices}'])
  token = {'CPU': 0.001}  # so that there is something to reserve
  seats = tuple(Seat(env, bundle=i) for i in range(count))
  told = f'split: learner in {count}, CPU alone: there is no budget to keep'
  return Placement('split', seats, engines, bundles=(token,) * count, told=told)


def engine_devices(options: Mapping[str, Any]) -> int:
  """How many an engine with these options has."""
  kinds = ('tensor', 'pipeline')
  return math.prod(options.get(f'{kind}_parallel_size', 1) for kind in kinds)


@dataclasses.dataclass(frozen=True)
class _Engine:
  """What an engine needs. size: devices. memory: the share it asks for, 0 for any."""

  vllm: bool
  size: int
  memory: float

  @classmethod
  def of(cls, config: Config, kind: str) -> '_Engine':
    name, options = parse_call(config.rollout.engine)
    asked = options.get('gpu_memory_utilization') or 0.0
    if asked and name == 'vllm' and kind != 'GPU':
      raise ConfigError(f'rollout.engine: gpu_memory_utilization={asked} needs a GPU')
    return cls(name == 'vllm', engine_devices(options), float(asked))

  def seat(self, memory: float, *, sleep: bool = False, **fields: Any) -> Seat:
    env = dict(fields.pop('env', {}))
    if self.vllm:
      options = {} if self.memory else {'gpu_memory_utilization': memory}
      fields['options'] = options | ({'enable_sleep_mode': True} if sleep else {})
      return Seat({**env, 'JAX_PLATFORMS': 'cpu'}, memory=memory, **fields)
    env['XLA_PYTHON_CLIENT_MEM_FRACTION'] = f'{memory:g}'
    return Seat(env, memory=memory, **fields)


def _whole_machines(counts: Sequence[int], engines: int, size: int) -> tuple[int, int]:
  """Learner's processes and devices of each, where its share is more than a machine.

  The share is what `engines` of `size` devices leave, or half where their number is
  open (0). Of it as many devices as the largest machines give, a process on each, all
  with the same number. (1, 0), which leaves it to `split`, where one machine has it.
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
  """Whether processes fit on machines, put there as Ray does that spreads them."""
  left = list(counts)
  for size in sorted(sizes, reverse=True):
    emptiest = left.index(max(left))
    left[emptiest] -= size
    if left[emptiest] < 0:
      return False
  return True


def _split(
  config: Config,
  kind: str,
  counts: Sequence[int],
  engine: _Engine,
  *,
  learners: int,
  devices: int,
  memory: float,
) -> Placement:
  where, engines = f'{KEY}={config.cluster.placement}', config.cluster.num_engines
  total, largest = sum(counts), max(counts)
  if not devices:
    left = total - engines * engine.size if engines else total // 2
    devices = left // learners
  if not engines:
    engines = (total - devices * learners) // engine.size
    own, theirs = [devices] * learners, [engine.size]
    while engines > 1 and not _fit(counts, own + theirs * engines):
      engines -= 1
  needed = devices * learners + engines * engine.size
  if devices < 1 or engines < 1 or needed > total:
    raise ConfigError(
      f'{where}: {learners} × {max(devices, 1)} {kind} for the learner and '
      f'{max(engines, 1)} × {engine.size} for engines are more than the {total} that '
      'there are; lower one of them, or take colocated'
    )
  if engine.size > largest:
    raise ConfigError(
      f'{where}: one engine would have {engine.size} {kind}, and no machine has more '
      f'than {largest}; lower the parallel sizes in rollout.engine'
    )
  if devices > largest:
    raise ConfigError(
      f'{where}: one process would have {devices} {kind}, and no machine has more than '
      f'{largest}; raise learners'
    )
  _check(where, memory, engine.memory)
  env = {'XLA_PYTHON_CLIENT_MEM_FRACTION': f'{memory:g}'}
  own, theirs = {kind: float(devices)}, {kind: float(engine.size)}
  return Placement(
    'split',
    tuple(Seat(env, i, own, memory=memory) for i in range(learners)),
    tuple(
      engine.seat(engine.memory or memory, bundle=learners + i, claims=theirs)
      for i in range(engines)
    ),
    Seat(HIDDEN),
    (own,) * learners + (theirs,) * engines,
    f'split: learner {learners} × {devices} {kind}, engines {engines} × {engine.size}, '
    f'each at most {memory:g} of its memory',
  )


def _colocated(
  config: Config,
  counts: Sequence[int],
  engine: _Engine,
  *,
  memory: float,
  learner: float,
  sleep: bool,
) -> Placement:
  where = f'{KEY}={config.cluster.placement}'
  engines = _number(config, 'GPU', counts, engine)
  if sleep:
    learner, share = memory, engine.memory or memory
    _check(where, memory, share)
    env = turns.GIVES_BACK
  else:
    learner = learner or (memory - engine.memory if engine.memory else memory / 2)
    share = engine.memory or memory - learner
    _check(where, memory, learner, share)
    env = {'XLA_PYTHON_CLIENT_MEM_FRACTION': f'{learner:g}'}
  learners, seats = [], []
  for bundle, count in enumerate(counts):
    learners.append(Seat(env, bundle, devices=tuple(range(count)), memory=learner))
    for i in range(count // engine.size):
      if len(seats) < engines:
        mine = tuple(range(i * engine.size, (i + 1) * engine.size))
        seats.append(engine.seat(share, bundle=bundle, devices=mine, sleep=sleep))
  how = ', in turns' if sleep else ''
  told = f'colocated on {sum(counts)} GPU: learner {learner:g} of the memory of each, '
  return Placement(
    'colocated',
    tuple(learners),
    tuple(seats),
    Seat(HIDDEN),
    tuple({'GPU': float(count)} for count in counts),
    f'{told}{engines} engines {share:g}{how}',
  )


def _engines_alone(
  config: Config, kind: str, counts: Sequence[int], engine: _Engine, memory: float
) -> Placement:
  """Where nobody learns."""
  _check(f'{KEY}={config.cluster.placement}', memory, engine.memory)
  number, share = _number(config, kind, counts, engine), engine.memory or memory
  claims = {kind: float(engine.size)}
  return Placement(
    'engines',
    (),
    tuple(engine.seat(share, bundle=i, claims=claims) for i in range(number)),
    Seat(HIDDEN),
    (claims,) * number,
    f'engines alone: {number} × {engine.size} {kind}, each at most {share:g} of its '
    'memory',
  )


def _number(config: Config, kind: str, counts: Sequence[int], engine: _Engine) -> int:
  """How many engines there are, where all devices are for them."""
  most = sum(count // engine.size for count in counts)
  engines = config.cluster.num_engines or most
  if not 0 < engines <= most:
    raise ConfigError(
      f'{KEY}={config.cluster.placement}: {max(engines, 1)} engines of {engine.size} '
      f'{kind} each do not fit on {" + ".join(map(str, counts))}; at most one engine '
      'may have a device'
    )
  return engines


def visible(seat: Seat, known: Sequence[str]) -> dict[str, str]:
  """The environment by which a seat sees its `devices`, of those `known` by their names
  that its bundle has; {} for a seat with none, or with claims.

  Ray gives a device to one actor or, by fractions, one device to several: neither
  is several devices for several actors, so the devices are named by hand.
  """
  if not seat.devices:
    return {}
  return {
    'CUDA_VISIBLE_DEVICES': ','.join(known[place] for place in seat.devices),
    'RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES': '1',
  }


def _check(where: str, memory: float, *shares: float) -> None:
  """Raises ConfigError when those on one device may take more than the budget."""
  told = ' + '.join(f'{share:g}' for share in shares)
  if sum(shares) > memory + 1e-9:
    raise ConfigError(
      f'{where}: on one device {told} of its memory would be taken; the budget is '
      f'memory={memory:g}. Lower learner, or gpu_memory_utilization in rollout.engine'
    )
  if len(shares) > 1 and min(shares) <= 0:
    raise ConfigError(
      f'{where}: {told} of the memory: learner and engine each need a share'
    )
