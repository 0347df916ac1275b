"""Compiled programs, by everything they depend on, and a count of compilations."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.models import lora
from jaxrl.training import (
  abreast,
  columns,
  expert_parallel,
  optimizer,
  scoring,
  sharding,
  teacher_columns,
)
from jaxrl.training.checkpoint import flatten
from jaxrl.training.packing import Pack, plan_shapes
from jaxrl.training.state import NARROW, Spec, TrainState
from jaxrl.training.step import train_step
from jaxrl.types import Batch, Params

_DTYPES = {
  'action_mask': jnp.bool_,
  'expert_mask': jnp.bool_,
  'greedy_mask': jnp.bool_,
  'rollout_logprobs': jnp.float32,
  'rewards': jnp.float32,
  'loss_weights': jnp.float32,
  'teacher_logprobs': jnp.float32,
  'teacher_topk_logprobs': jnp.float32,
  'routed_experts': jnp.int16,
}
_ROWS = ('task_ids', 'run_ids', 'step_ids', 'expert_mask', 'loss_weights', *NARROW)


@dataclasses.dataclass(frozen=True)
class Shape:
  """Rows of the batch, tokens a row, rows of a micro-batch.

  pack: how rows are packed, if they are; micro_rows are then a minibatch's.
  """

  rows: int
  length: int
  micro_rows: int
  pack: Pack | None = None

  @property
  def whole(self) -> Pack | None:
    """Of all minibatches' rows at once, as they are scored."""
    if self.pack is None:
      return None
    return self.pack._replace(micro=self.pack.micro * (self.rows // self.micro_rows))


@functools.lru_cache(maxsize=64)
def params_shapes(spec: Spec, mesh: Mesh) -> Params:
  """Shapes, dtypes and layouts of the model's parameters."""
  shapes = jax.eval_shape(spec.model.init, jax.random.key(0))
  axes = spec.model.logical_axes(shapes)
  return _with(shapes, sharding.params_sharding(mesh, axes, shapes))


def _with(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )


def flat_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """Dotted name → shape of every array of a tree."""
  return {name: tuple(x.shape) for name, x in flatten(tree).items()}


def shardings_of(tree: Any) -> Any:
  return jax.tree.map(lambda x: x.sharding, tree)


@functools.lru_cache(maxsize=64)
def state_shapes(spec: Spec, mesh: Mesh) -> TrainState:
  """Shapes, dtypes and layouts of the whole train state."""
  expert_parallel.check(spec.model.config, mesh)
  params, whole = params_shapes(spec, mesh), sharding.replicated(mesh)
  memory, make = spec.memory, functools.partial(optimizer.init, memory=spec.memory)
  trained = lora.trained(spec.model.config, params)
  layout = optimizer.state_sharding(trained, shardings_of(trained), whole, memory)
  moments = _with(jax.eval_shape(make, trained), layout)
  own = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, spec.init_state()))
  own = _with(own, jax.tree.map(lambda _: whole, own))
  return TrainState(params, moments, own)


def reference_shapes(spec: Spec, mesh: Mesh) -> Params | None:
  """Of the reference policy what may differ from the learner's; None without one."""
  if 'ref_logprobs' not in spec.needs:
    return None
  return lora.trained(spec.model.config, params_shapes(spec, mesh))


def init_state(spec: Spec, mesh: Mesh, params: Params) -> TrainState:
  """A fresh state around a *copy* of params, which the train step may then donate.

  Of params that are shapes alone: the shapes of the state.
  """
  shapes = state_shapes(spec, mesh)
  if are_shapes(params):
    return shapes
  params = place(params, shapes.params)
  layout = shardings_of(shapes.opt_state)
  make = functools.partial(optimizer.init, memory=spec.memory)
  trained = lora.trained(spec.model.config, params)
  moments = jax.jit(make, out_shardings=layout)(trained)
  layout = shardings_of(shapes.algorithm_state)
  own = jax.tree.map(sharding.put, spec.init_state(), layout)
  return TrainState(params, moments, own)


def place(params: Params, shapes: Params) -> Params:
  """A copy of `params` in type and layout of `shapes`, sharing no memory with it."""
  if are_shapes(params):
    return shapes
  return jax.tree.map(
    lambda x, s: sharding.put(_typed(x, s.dtype), s.sharding, copy=True), params, shapes
  )


def _typed(x: Any, dtype: Any) -> Any:
  return x if x.dtype == dtype else x.astype(dtype)


def are_shapes(params: Params) -> bool:
  """Whether these are no arrays: programs can be compiled for them, and not run."""
  return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))


def batch_shapes(spec: Spec, mesh: Mesh, shape: Shape) -> Batch:
  """What learner and teachers put on the devices for a batch of this shape."""
  rows = sharding.rows(mesh)

  def column(name):
    size = (shape.rows,) if name in _ROWS else (shape.rows, shape.length)
    if name in teacher_columns.TOPK:
      size += (spec.top_k,)
    if name == 'routed_experts':
      config = spec.model.config
      size += (config.num_layers, config.num_experts_per_token)
    return jax.ShapeDtypeStruct(size, _DTYPES.get(name, jnp.int32), sharding=rows)

  there = {*spec.batch_columns, *spec.teacher_columns}
  names = [field.name for field in dataclasses.fields(Batch)]
  return Batch(**{name: column(name) if name in there else None for name in names})


def _abstract(numbers: Any, mesh: Mesh) -> Any:
  whole = sharding.replicated(mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), numbers
  )


class Programs:
  """The programs of one spec on one mesh; equal programs are compiled once a process.

  numbers: an example of the traced options: its structure and dtypes count.
  """

  def __init__(self, spec: Spec, mesh: Mesh, numbers: columns.Numbers):
    self._spec, self._mesh = spec, mesh
    leaves, treedef = jax.tree.flatten(_abstract(numbers, mesh))
    self._numbers = (tuple(leaves), treedef)

  def prepare(self, shape: Shape) -> Callable[..., Any]:
    """(params, ref_params, own state, batch, numbers) → columns, state, metrics."""
    return _compile_prepare(self._spec, self._mesh, shape, self._numbers)

  def train(self, shape: Shape) -> Callable[..., Any]:
    """(state, batch, index, numbers) → state, metrics; `state` is donated."""
    return _compile_train(self._spec, self._mesh, shape, self._numbers)

  def traced(self, shape: Shape) -> dict[str, Any]:
    """Each program of a batch of this shape by name, traced; the update as one program,
    also where `train` has several micro-batches at once.
    """
    own = self._spec, self._mesh, shape, self._numbers
    before = {'prepare': _trace_prepare(*own)} if self._spec.prepares else {}
    return before | {'train': _trace_train(*own)}


@functools.lru_cache(maxsize=64)
def _compile_prepare(spec: Spec, mesh: Mesh, shape: Shape, numbers: tuple) -> Any:
  return _trace_prepare(spec, mesh, shape, numbers).lower().compile()


def _trace_prepare(spec: Spec, mesh: Mesh, shape: Shape, numbers: tuple) -> Any:
  state = state_shapes(spec, mesh)
  function = functools.partial(scoring.prepare, spec, shape.rows // shape.micro_rows)
  arguments = (
    state.params,
    reference_shapes(spec, mesh),
    state.algorithm_state,
    batch_shapes(spec, mesh, shape),
    jax.tree.unflatten(numbers[1], numbers[0]),
  )
  if shape.whole is not None:
    arguments += (plan_shapes(mesh, shape.whole, None),)
  whole = sharding.replicated(mesh)
  layouts = (sharding.rows(mesh), whole, whole)
  return jax.jit(function, out_shardings=layouts).trace(*arguments)


@functools.lru_cache(maxsize=64)
def _compile_train(spec: Spec, mesh: Mesh, shape: Shape, numbers: tuple) -> Any:
  if shape.pack is not None and shape.pack.abreast > 1:
    arguments = _train_arguments(spec, mesh, shape, numbers)
    return abreast.Step(spec, shape.pack.abreast, *arguments)
  return _trace_train(spec, mesh, shape, numbers).lower().compile()


def _trace_train(spec: Spec, mesh: Mesh, shape: Shape, numbers: tuple) -> Any:
  arguments = _train_arguments(spec, mesh, shape, numbers)
  step = jax.jit(
    functools.partial(train_step, spec),
    donate_argnums=0,
    out_shardings=(shardings_of(arguments[0]), sharding.replicated(mesh)),
  )
  return step.trace(*arguments)


def _train_arguments(
  spec: Spec, mesh: Mesh, shape: Shape, leaves: tuple
) -> tuple[TrainState, Batch, Any, columns.Numbers]:
  """Shapes and layouts of what the train step is given."""
  state, batch = state_shapes(spec, mesh), batch_shapes(spec, mesh, shape)
  numbers = jax.tree.unflatten(leaves[1], leaves[0])
  whole = sharding.replicated(mesh)
  if spec.prepares:
    arguments = (
      state.params,
      reference_shapes(spec, mesh),
      state.algorithm_state,
      batch,
      numbers,
    )
    # The columns are the same however the model is run.
    plain = dataclasses.replace(spec, packed=False)
    function = functools.partial(scoring.prepare, plain, shape.rows // shape.micro_rows)
    changed = jax.eval_shape(function, *arguments)[0]
    rows = sharding.rows(mesh)
    batch = batch.replace(**_with(changed, jax.tree.map(lambda _: rows, changed)))
  if shape.pack is not None:
    index = plan_shapes(mesh, shape.pack, shape.micro_rows)
  else:
    size = spec.micro_batches, shape.micro_rows
    index = jax.ShapeDtypeStruct(size, jnp.int32, sharding=whole)
  return state, batch, index, numbers


class CompileCounter:
  """Counts programs compiled, or fetched from the cache on disk, while it is open.

  `with CompileCounter() as counter: …; counter.count`. All threads are counted.
  """

  EVENT = '/jax/core/compile/backend_compile_duration'

  def __init__(self) -> None:
    self.count, self.seconds = 0, 0.0
    self._lock = threading.Lock()

  def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
    del kwargs
    if event == self.EVENT:
      with self._lock:
        self.count, self.seconds = self.count + 1, self.seconds + duration_secs

  def __enter__(self) -> 'CompileCounter':
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def __exit__(self, *_: Any) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)
