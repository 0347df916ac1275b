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
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.parallelism.model_sharding import on_mesh
from launch.planning import compiled_program
from launch.planning.compiled_program import CompiledProgram
from launch.planning.planned_run import PlannedRun, encoded_shapes, served_params
from launch.planning.targets import Target
from launch.planning.traffic import Collective

MAX_COMPILED_LAYERS = 4


def engine_model(run: PlannedRun) -> TransformerLM:
  """Returns the model as the engine has it: without adapters and value head."""
  engine = run.settings.engine
  return TransformerLM(
    run.shape.replace(value_head=False),
    dtype=run.engine_dtype,
    kernels=run.settings.kernels,
    exact=engine.exact,
    router_replay=engine.router_replay,
  )


def engine_cache(run: PlannedRun, model: TransformerLM) -> dict[str, Any]:
  """Returns the shapes of the cache of an engine, which has this model."""
  slots, length = run.settings.rollout.max_num_seqs, run.settings.batch.max_length
  return jax.eval_shape(lambda: model.init_cache(slots, length))


def compile_decode(
  run: PlannedRun, target: Target, devices: Sequence[Any]
) -> CompiledProgram:
  """Compiles the decode step, or extrapolates it for a deep model.

  Args:
    run: The run.
    target: Machine to compile for.
    devices: Devices of the target.

  Returns:
    The decode step with its costs.

  Raises:
    ConfigError: If the target has fewer devices than the engine needs.
  """
  shape = run.shape
  if shape.num_layers <= MAX_COMPILED_LAYERS:
    traced = trace_decode(run, devices)
    return compiled_program.compile_program('decode', traced, target)

  def compile_with(layers: tuple[int, ...]) -> CompiledProgram:
    traced = trace_decode(with_layers(run, layers), devices)
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

  def extrapolate(
    part: Callable[[CompiledProgram], Any], names: Sequence[str]
  ) -> dict[str, Any]:
    """Extrapolates numbers of a part of the programs, by their names."""
    numbers = {name: getattr(part(one_layer), name) for name in names}
    for count, base, program in more:
      for name in names:
        numbers[name] += count * (
          getattr(part(program), name) - getattr(part(base), name)
        )
    return numbers

  def find_collective(kind: str) -> Callable[[CompiledProgram], Collective]:
    return lambda program: program.collectives.get(kind, Collective())

  kinds = dict.fromkeys(kind for program in programs for kind in program.collectives)
  fields = [field.name for field in dataclasses.fields(Collective)]
  collectives = {
    kind: Collective(**extrapolate(find_collective(kind), fields)) for kind in kinds
  }
  numbers = extrapolate(
    lambda program: program, ('flops', 'arguments', 'outputs', 'bytes_accessed')
  )
  largest = max(programs[1:], key=lambda program: program.temporaries)
  return dataclasses.replace(
    largest,
    name='decode',
    collectives=collectives,
    compile_seconds=sum(program.compile_seconds for program in programs),
    **numbers,
  )


def trace_decode(run: PlannedRun, devices: Sequence[Any]) -> Any:
  """Traces `TransformerLM.decode` for every slot of the engine, with a full cache.

  Weights and cache are split over the engine's devices by heads.

  Args:
    run: The run.
    devices: Devices of the target.

  Returns:
    The traced decode step.

  Raises:
    ConfigError: If there are fewer devices than the engine needs.
  """
  engine = run.settings.engine
  if engine.num_devices > len(devices):
    raise ConfigError(
      f'--config.rollout.engine={run.settings.text("rollout.engine")}: needs '
      f'{engine.num_devices} devices; the topology has {len(devices)}'
    )
  options = MeshOptions(data=1, tensor=engine.num_devices)
  mesh = make_mesh(options, devices=devices[: engine.num_devices])
  model = on_mesh(engine_model(run), mesh)
  shape = model.config
  params = served_params(dataclasses.replace(run, shape=shape), run.weights_dtype)
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
  cache = engine_cache(run, model)
  split = 'tensor' if engine.num_devices > 1 else None
  for name, rows in cache.items():
    names = caches.axes(cache, name)
    heads = NamedSharding(mesh, P(*(split if n == 'kv_heads' else None for n in names)))
    cache[name] = _with_layouts(rows, jax.tree.map(lambda _, s=heads: s, rows))
  num_slots = run.settings.rollout.max_num_seqs
  slots = jax.ShapeDtypeStruct((num_slots,), jnp.int32, sharding=replicated)
  limit = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
  step = jax.jit(model.decode, donate_argnums=1)
  return step.trace(params, cache, slots, slots, limit)


def _with_layouts(shapes: Any, layouts: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layouts
  )
