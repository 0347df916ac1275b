"""Compiled steps hold the programs of a training step, cached by spec and shape.

A step has two programs: the advantage step, once per batch, and the train step, once
per minibatch. Each is compiled ahead of time for a `BatchShape`; two learners with
equal specs on one mesh share them.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.training import batch_fields
from jaxrl.training.advantage_step import score_and_compute_advantages
from jaxrl.training.batch_fields import HParams
from jaxrl.training.batching.batch_builder import BatchShape
from jaxrl.training.batching.packing_plan import plan_shapes
from jaxrl.training.parallelism import sharding
from jaxrl.training.train_state import (
  StepSpec,
  TrainState,
  reference_shapes,
  shardings_of,
  state_shapes,
  with_shardings,
)
from jaxrl.training.train_step import train_step
from jaxrl.types import MAX_REWARD_TERMS, Batch, PyTree

# The leaves' shapes and the structure of the traced options: a hashable cache key.
_HParamsKey = tuple[tuple[jax.ShapeDtypeStruct, ...], jax.tree_util.PyTreeDef]


class CompiledSteps:
  """Compiles the programs of one spec on one mesh, each once per process.

  Args:
    spec: Everything static that the programs depend on.
    mesh: The devices they run on.
    hparams: An example of the traced options; only structure and dtypes count.
  """

  def __init__(self, spec: StepSpec, mesh: Mesh, hparams: HParams):
    self._spec = spec
    self._mesh = mesh
    replicated = sharding.replicated(mesh)
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), hparams
    )
    leaves, treedef = jax.tree.flatten(shapes)
    self._hparams_key = (tuple(leaves), treedef)

  def advantage_step(self, shape: BatchShape) -> Callable[..., PyTree]:
    """Returns the compiled advantage step for batches of a shape.

    It maps `(params, ref_params, algorithm_state, batch, hparams)`, and the scoring
    plan if rows are packed, to `(changed_fields, algorithm_state, metrics)`.
    """
    return _compile_advantage_step(self._spec, self._mesh, shape, self._hparams_key)

  def train_step(self, shape: BatchShape) -> Callable[..., PyTree]:
    """Returns the compiled train step for batches of a shape.

    It maps `(state, batch, index, hparams)` to `(state, metrics)` and donates `state`.
    """
    return _compile_train_step(self._spec, self._mesh, shape, self._hparams_key)

  def compile(self, shape: BatchShape) -> dict[str, Callable[..., PyTree]]:
    """Returns the compiled programs for batches of a shape.

    Returns:
      They by name, 'prepare' (if there is an advantage step) and 'train'.
    """
    programs = {}
    if self._spec.has_advantage_step:
      programs['prepare'] = self.advantage_step(shape)
    return programs | {'train': self.train_step(shape)}

  def trace(self, shape: BatchShape) -> dict[str, jax.stages.Traced]:
    """Traces the programs for batches of a shape, without compiling them.

    Returns:
      `jax.stages.Traced` objects by name, 'prepare' (if there is an advantage step) and
      'train'. The update is always one program here, even if `train_step` runs several
      micro-batches in parallel.
    """
    arguments = self._spec, self._mesh, shape, self._hparams_key
    traced = {}
    if self._spec.has_advantage_step:
      traced['prepare'] = _trace_advantage_step(*arguments)
    return traced | {'train': _trace_train_step(*arguments)}


def batch_shapes(spec: StepSpec, mesh: Mesh, shape: BatchShape) -> Batch:
  """Returns shapes of what learner and teachers put on the devices for a batch."""
  layout = sharding.rows_sharding(mesh)

  def field_shape(name: str) -> jax.ShapeDtypeStruct:
    size = (shape.rows, shape.length)
    if name in batch_fields.PER_ROW_FIELDS:
      size = (shape.rows,)
    if name in batch_fields.REWARD_FIELDS:
      size += (MAX_REWARD_TERMS,)
    if name in batch_fields.TOPK_FIELDS:
      size += (spec.top_k,)
    if name == 'routed_experts':
      config = spec.model.config
      size += (config.num_layers, config.num_experts_per_token)
    dtype = batch_fields.FIELD_DTYPES.get(name, jnp.int32)
    return jax.ShapeDtypeStruct(size, dtype, sharding=layout)

  present = {*spec.input_fields, *spec.teacher_fields}
  present -= set(batch_fields.IMAGE_FIELDS)
  names = [field.name for field in dataclasses.fields(Batch)]
  batch = Batch(
    **{name: field_shape(name) if name in present else None for name in names}
  )
  if shape.patches is None:
    return batch
  from jaxrl.training.batching import batch_images  # few models see images

  vision = spec.model.config.vision
  assert vision is not None  # or there would be no images
  rows = (shape.rows, shape.length)
  fields = batch_images.field_shapes(vision, rows, shape.patches, layout)
  return batch.replace(**fields)


@functools.lru_cache(maxsize=64)
def _compile_advantage_step(
  spec: StepSpec, mesh: Mesh, shape: BatchShape, hparams_key: _HParamsKey
) -> jax.stages.Compiled:
  return _trace_advantage_step(spec, mesh, shape, hparams_key).lower().compile()


def _trace_advantage_step(
  spec: StepSpec, mesh: Mesh, shape: BatchShape, hparams_key: _HParamsKey
) -> jax.stages.Traced:
  spec = _with_segments(spec, shape)
  function = functools.partial(score_and_compute_advantages, spec, shape.num_chunks)
  arguments = _advantage_step_arguments(spec, mesh, shape, hparams_key)
  if shape.scoring_pack is not None:
    arguments += (
      plan_shapes(mesh, shape.scoring_pack, None, (shape.rows, shape.length)),
    )
  replicated = sharding.replicated(mesh)
  layouts = (sharding.rows_sharding(mesh), replicated, replicated)
  return jax.jit(function, out_shardings=layouts).trace(*arguments)


@functools.lru_cache(maxsize=64)
def _compile_train_step(
  spec: StepSpec, mesh: Mesh, shape: BatchShape, hparams_key: _HParamsKey
) -> Callable[..., PyTree]:
  if shape.num_parallel > 1:
    # Imported here because only shallow models on a CPU need it.
    from jaxrl.training.parallelism.parallel_microbatches import ParallelTrainStep

    arguments = _train_step_arguments(spec, mesh, shape, hparams_key)
    spec = _with_segments(spec, shape)
    return ParallelTrainStep(spec, shape.num_parallel, *arguments)
  return _trace_train_step(spec, mesh, shape, hparams_key).lower().compile()


def _trace_train_step(
  spec: StepSpec, mesh: Mesh, shape: BatchShape, hparams_key: _HParamsKey
) -> jax.stages.Traced:
  arguments = _train_step_arguments(spec, mesh, shape, hparams_key)
  jitted = jax.jit(
    functools.partial(train_step, _with_segments(spec, shape)),
    donate_argnums=0,
    out_shardings=(shardings_of(arguments[0]), sharding.replicated(mesh)),
  )
  return jitted.trace(*arguments)


def _with_segments(spec: StepSpec, shape: BatchShape) -> StepSpec:
  """Returns the spec with a model that knows how many segments a sequence has."""
  if not shape.segments:
    return spec
  model = dataclasses.replace(spec.model, row_segments=shape.segments)
  return dataclasses.replace(spec, model=model)


def _advantage_step_arguments(
  spec: StepSpec, mesh: Mesh, shape: BatchShape, hparams_key: _HParamsKey
) -> tuple[PyTree, ...]:
  """Returns shapes and shardings of the advantage step's arguments except the plan."""
  state = state_shapes(spec, mesh)
  return (
    state.params,
    reference_shapes(spec, mesh),
    state.algorithm_state,
    batch_shapes(spec, mesh, shape),
    jax.tree.unflatten(hparams_key[1], hparams_key[0]),
  )


def _train_step_arguments(
  spec: StepSpec, mesh: Mesh, shape: BatchShape, hparams_key: _HParamsKey
) -> tuple[TrainState, Batch, PyTree, HParams]:
  """Returns shapes and shardings of the train step's arguments."""
  batch = batch_shapes(spec, mesh, shape)
  if spec.has_advantage_step:
    # The fields are the same whether or not the model runs on packed rows. Segments
    # matter to no shape, but to which kernel the log names.
    unpacked = _with_segments(dataclasses.replace(spec, packed=False), shape)
    function = functools.partial(
      score_and_compute_advantages, unpacked, shape.num_chunks
    )
    arguments = _advantage_step_arguments(spec, mesh, shape, hparams_key)
    changed = jax.eval_shape(function, *arguments)[0]
    layout = sharding.rows_sharding(mesh)
    layouts = jax.tree.map(lambda _: layout, changed)
    batch = batch.replace(**with_shardings(changed, layouts))
  if shape.pack is not None:
    index = plan_shapes(
      mesh, shape.pack, shape.micro_rows, (shape.micro_rows, shape.length)
    )
  else:
    size = spec.num_micro_batches, shape.micro_rows
    replicated = sharding.replicated(mesh)
    index = jax.ShapeDtypeStruct(size, jnp.int32, sharding=replicated)
  hparams = jax.tree.unflatten(hparams_key[1], hparams_key[0])
  return state_shapes(spec, mesh), batch, index, hparams
