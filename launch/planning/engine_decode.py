"""Compiles the decode step of a config's engine from shapes alone.

The layers of the decode step are not scanned, and compilers for accelerators take many
minutes for a deep model. A model of more than `MAX_COMPILED_LAYERS` layers is therefore
compiled with one layer and, for each kind of its layers, with one more of that kind;
the difference stands for each of the others of the kind.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.models import kv_cache as caches
from jaxrl.models import layer_stack
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from jaxrl.rollout.engine import model_runner
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.parallelism.model_sharding import on_mesh
from kernels.block_rounding import BlockFormat
from launch.planning import compiled_program
from launch.planning.compiled_program import CompiledProgram
from launch.planning.planned_run import PlannedRun, encoded_shapes, served_params
from launch.planning.targets import Target
from launch.planning.traffic import Collective

MAX_COMPILED_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class PlannedEngine:
  """Describes the rollout engine that a config names.

  Attributes:
    kind: 'jax', 'vllm', or where a user's own class is.
    num_devices: Devices of one engine.
    max_num_seqs: Sequences that it decodes at the same time.
    max_length: Tokens of prompt and response.
    weights_dtype: Dtype of its weights; None leaves each as it is published.
    weights_format: How it keeps matrices in 8 bits; None for more bits.
    dtype: Dtype of products and cache.
    own_process: Whether it runs in a process of its own, not in the learner's.
    buckets: Prompt lengths that `JaxEngine` compiles for.
  """

  kind: str
  num_devices: int
  max_num_seqs: int
  max_length: int
  weights_dtype: str | None
  dtype: str
  own_process: bool
  buckets: tuple[int, ...] = ()
  weights_format: BlockFormat | None = None


def plan_engine(run: PlannedRun) -> PlannedEngine:
  """Returns the engine that the config names, whether or not it is installed here."""
  settings = run.settings
  kind, options = settings.engine.kind, settings.engine.own_options
  length = options.get('max_length', settings.batch.max_length)
  dtype = settings.model.dtype
  weights_dtype = settings.transport.options.dtype
  weights_format = settings.engine.weights_format
  if weights_format is None:
    weights_dtype = options.get('weights_dtype') or weights_dtype
  devices = 1
  if kind == 'vllm':
    dtype = options.get('dtype', dtype)
    weights_dtype, devices = dtype, settings.engine.num_devices
  slots = settings.rollout.max_num_seqs
  own_process = settings.cluster.ray
  buckets = tuple(options.get('prompt_buckets') or model_runner.default_buckets(length))
  return PlannedEngine(
    kind,
    devices,
    slots,
    length,
    weights_dtype,
    dtype,
    own_process,
    buckets,
    weights_format,
  )


def engine_model(run: PlannedRun, engine: PlannedEngine) -> TransformerLM:
  """Returns the model as the engine has it: without adapters and value head."""
  engine_settings = run.settings.engine
  return TransformerLM(
    run.shape.replace(value_head=False),
    dtype=engine.dtype,
    kernels=run.settings.kernels,
    exact=engine_settings.exact,
    router_replay=engine_settings.router_replay,
  )


def compile_decode(
  run: PlannedRun, engine: PlannedEngine, target: Target, devices: Sequence[Any]
) -> CompiledProgram:
  """Compiles the decode step, or extrapolates it for a deep model.

  Args:
    run: The run.
    engine: Its rollout engine.
    target: Machine to compile for.
    devices: Devices of the target.

  Returns:
    The decode step with its costs.

  Raises:
    ConfigError: If the target has fewer devices than the engine needs.
  """
  shape = run.shape
  if shape.num_layers <= MAX_COMPILED_LAYERS:
    return compiled_program.compile_program(
      'decode', trace_decode(run, engine, devices), target
    )

  def compile_with(layers: tuple[int, ...]) -> CompiledProgram:
    traced = trace_decode(with_layers(run, layers), engine, devices)
    return compiled_program.compile_program(f'decode of {layers}', traced, target)

  kinds = shape.layer_types or ('',) * shape.num_layers
  firsts = {kind: kinds.index(kind) for kind in kinds}
  one_layer = compile_with((0,))
  more, sources = [], {}
  for kind, first in firsts.items():
    base, source = one_layer, shape.layer(first).kv_layer
    if source >= 0:  # it needs the layer whose keys it reads
      if source not in sources:
        sources[source] = compile_with((0, source))
      base = sources[source]
    if number := kinds.count(kind) - (first == 0):
      needed = (0, source, first) if source >= 0 else (0, first)
      more.append((number, base, compile_with(needed)))
  return extrapolate_layers(one_layer, more)


def with_layers(run: PlannedRun, layers: Sequence[int]) -> PlannedRun:
  """Returns the run with some of its model's layers only."""
  shape = run.shape
  types = tuple(shape.layer_types[i] for i in layers) if shape.layer_types else ()
  kinds = []
  for kind, fields in shape.layer_kinds:
    kind_fields = dict(fields)
    if 'kv_layer' in kind_fields:
      kind_fields['kv_layer'] = (
        list(layers).index(kind_fields['kv_layer']) if kind in types else -1
      )
    kinds += [(kind, tuple(kind_fields.items()))] if kind in types else []
  changes = {'num_layers': len(layers), 'layer_types': types}
  changes |= {'layer_kinds': tuple(kinds)}
  return dataclasses.replace(run, shape=shape.replace(**changes))


def extrapolate_layers(
  one_layer: CompiledProgram,
  more: Sequence[tuple[int, CompiledProgram, CompiledProgram]],
) -> CompiledProgram:
  """Extrapolates the costs of a deep model linearly.

  Args:
    one_layer: The program compiled with one layer.
    more: For each kind of layers: how many there are beside that one, a program, and
      the program with one more of them.

  Returns:
    The estimated program of the deep model.
  """
  programs = [one_layer, *(program for _, _, program in more)]

  def extrapolate(value: Callable[[CompiledProgram], float]) -> float:
    rest = sum(count * (value(program) - value(base)) for count, base, program in more)
    return value(one_layer) + rest

  def of_kind(kind: str, name: str) -> float:
    none = Collective()
    return extrapolate(
      lambda program: getattr(program.collectives.get(kind, none), name)
    )

  names = 'flops', 'arguments', 'outputs', 'bytes_accessed'
  numbers: dict[str, Any] = {
    name: extrapolate(lambda program, name=name: getattr(program, name))
    for name in names
  }
  collectives = {
    kind: Collective(
      int(of_kind(kind, 'count')),
      of_kind(kind, 'bytes'),
      of_kind(kind, 'inter_node_bytes'),
    )
    for kind in dict.fromkeys(
      kind for program in programs for kind in program.collectives
    )
  }
  largest = max(programs[1:], key=lambda program: program.temporaries)
  return dataclasses.replace(
    largest,
    name='decode',
    collectives=collectives,
    compile_seconds=sum(program.compile_seconds for program in programs),
    **numbers,
  )


def trace_decode(run: PlannedRun, engine: PlannedEngine, devices: Sequence[Any]) -> Any:
  """Traces `TransformerLM.decode` for every slot of the engine, with a full cache.

  Weights and cache are split over the engine's devices by heads.

  Args:
    run: The run.
    engine: Its rollout engine.
    devices: Devices of the target.

  Returns:
    The traced decode step.

  Raises:
    ConfigError: If there are fewer devices than the engine needs.
  """
  if engine.num_devices > len(devices):
    raise ConfigError(
      f'--config.rollout.engine={run.settings.text("rollout.engine")}: needs '
      f'{engine.num_devices} devices; the topology has {len(devices)}'
    )
  mesh = make_mesh(
    MeshOptions(data=1, tensor=engine.num_devices),
    devices=devices[: engine.num_devices],
  )
  model = on_mesh(engine_model(run, engine), mesh)
  shape = model.config
  params = served_params(dataclasses.replace(run, shape=shape), engine.weights_dtype)
  replicated = sharding.replicated(mesh)
  layouts = sharding.params_sharding(mesh, model.logical_axes(), params)
  stacks = jax.tree.map(
    lambda s: NamedSharding(mesh, P(*s.spec[1:])), layouts['layers']
  )
  per_layer = (stacks[name] if name else stacks for name in layer_stack.stacks(shape))
  layouts |= {'layers': tuple(per_layer)}
  params = jax.eval_shape(functools.partial(layer_stack.unstack, model.config), params)
  if engine.weights_format is not None:  # one device, as `JaxEngine` has it
    params = encoded_shapes(params, engine.weights_format)
    layouts = jax.tree.map(lambda _: replicated, params)
  params = _with_layouts(params, layouts)
  cache = jax.eval_shape(
    lambda: model.init_cache(engine.max_num_seqs, engine.max_length)
  )
  split = 'tensor' if engine.num_devices > 1 else None
  for name, rows in cache.items():
    names = caches.axes(cache, name)
    heads = NamedSharding(mesh, P(*(split if n == 'kv_heads' else None for n in names)))
    cache[name] = _with_layouts(rows, jax.tree.map(lambda _, s=heads: s, rows))
  slots = jax.ShapeDtypeStruct((engine.max_num_seqs,), jnp.int32, sharding=replicated)
  limit = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
  step = jax.jit(model.decode, donate_argnums=1)
  return step.trace(params, cache, slots, slots, limit)


def _with_layouts(shapes: Any, layouts: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layouts
  )
