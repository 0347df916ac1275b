"""The decode step of a config's engine, of shapes alone.

Its layers are not scanned, and compilers for accelerators take many minutes for many of
them. All are alike, so that of more than `WHOLE` layers two are compiled, and one, and
the difference stands for each of the others.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.models import cache as caches
from jaxrl.models.model import Model
from jaxrl.rollout import jax_engine
from jaxrl.signature import ConfigError, parse_call
from jaxrl.training import sharding
from jaxrl.training.mesh import make_mesh
from jaxrl.training.per_device import on_mesh
from launch import engines, placement, weights
from launch.planning import program
from launch.planning.abstract import Run, served
from launch.planning.program import Program
from launch.planning.traffic import Collective
from launch.targets import Target

WHOLE = 4


@dataclasses.dataclass(frozen=True)
class Engine:
  """kind: 'jax' or 'vllm'. devices: of one engine. weights: the dtype of these; None
  leaves each as it is published. dtype: of products and cache. alone: whether it is a
  process of its own, and not in the learner's. buckets: of prompts, `JaxEngine`'s.
  """

  kind: str
  devices: int
  num_slots: int
  max_length: int
  weights: str | None
  dtype: str
  alone: bool
  buckets: tuple[int, ...] = ()


def engine_of(run: Run) -> Engine:
  """The engine that the config names, whether or not it is installed here."""
  config = run.config
  kind, options = parse_call(config.rollout.engine)
  length = options.get('max_length', config.batch.max_length)
  dtype = config.model.dtype
  plan = weights.plan(config)
  held = plan.options.get('dtype')
  devices = 1
  if kind == 'vllm':
    dtype = options.get('dtype', dtype)
    held, devices = dtype, placement.engine_devices(options)
  slots = config.rollout.num_slots
  alone = bool(config.cluster.ray)
  buckets = tuple(options.get('prompt_buckets') or jax_engine.default_buckets(length))
  return Engine(kind, devices, slots, length, held, dtype, alone, buckets)


def model_of(run: Run, engine: Engine) -> Model:
  """The model as the engine has it: without adapters and value head."""
  return Model(
    run.shape.replace(value_head=False),
    dtype=engine.dtype,
    kernels=run.config.kernels,
    exact=engines.exact(run.config),
    router_replay=engines.replays(run.config),
  )


def build(run: Run, engine: Engine, target: Target, devices: Sequence[Any]) -> Program:
  """The decode step, compiled. Raises ConfigError for an engine that has no room."""
  count = run.shape.num_layers
  if count <= WHOLE:
    return program.build('decode', trace(run, engine, devices), target)
  one, two = (
    program.build(f'decode of {n}', trace(shorter(run, n), engine, devices), target)
    for n in (1, 2)
  )
  return extended(one, two, count)


def shorter(run: Run, layers: int) -> Run:
  return dataclasses.replace(run, shape=run.shape.replace(num_layers=layers))


def extended(one: Program, two: Program, count: int) -> Program:
  """What `count` layers take, by what one and two of them do."""

  def line(a: float, b: float) -> float:
    return a + (count - 1) * (b - a)

  names = 'flops', 'arguments', 'outputs', 'moved'
  numbers = {name: line(getattr(one, name), getattr(two, name)) for name in names}
  none, found = Collective(), {}
  for kind in {*one.collectives, *two.collectives}:
    a, b = one.collectives.get(kind, none), two.collectives.get(kind, none)
    found[kind] = Collective(
      int(line(a.count, b.count)), line(a.bytes, b.bytes), line(a.far, b.far)
    )
  return dataclasses.replace(
    two,
    name='decode',
    collectives=found,
    compiled=one.compiled + two.compiled,
    **numbers,
  )


def trace(run: Run, engine: Engine, devices: Sequence[Any]) -> Any:
  """`Model.decode` for every slot of the engine, its cache as long as it can be.

  Weights and cache are split over the engine's devices by heads.
  """
  if engine.devices > len(devices):
    raise ConfigError(
      f'--config.rollout.engine={run.config.rollout.engine}: needs {engine.devices} '
      f'devices; the topology has {len(devices)}'
    )
  mesh = make_mesh(data=1, tensor=engine.devices, devices=devices[: engine.devices])
  model = on_mesh(model_of(run, engine), mesh)
  shape = model.config
  params = served(dataclasses.replace(run, shape=shape), engine.weights)
  layouts = sharding.params_sharding(mesh, model.logical_axes(), params)
  one = jax.tree.map(lambda s: NamedSharding(mesh, P(*s.spec[1:])), layouts['layers'])
  layouts |= {'layers': (one,) * shape.num_layers}
  params = _with(jax.eval_shape(model.unstack, params), layouts)
  cache = jax.eval_shape(lambda: model.init_cache(engine.num_slots, engine.max_length))
  split = 'tensor' if engine.devices > 1 else None
  names = caches.axes(cache)
  heads = NamedSharding(mesh, P(*(split if n == 'kv_heads' else None for n in names)))
  cache = _with(cache, jax.tree.map(lambda _: heads, cache))
  whole = sharding.replicated(mesh)
  slots = jax.ShapeDtypeStruct((engine.num_slots,), jnp.int32, sharding=whole)
  limit = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
  step = jax.jit(model.decode, donate_argnums=1)
  return step.trace(params, cache, slots, slots, limit)


def _with(shapes: Any, layouts: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layouts
  )
