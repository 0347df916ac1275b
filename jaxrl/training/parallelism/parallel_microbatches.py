"""Parallel micro-batches keep several CPU cores busy, with a thread each.

XLA splits each operation of a program among a CPU's cores, and an operation that is too
small to be split keeps only one of them busy. Two micro-batches side by side keep two
busy. `ParallelTrainStep` is called as the compiled `train_step` is.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.device_thread import cpu_count
from jaxrl.models import lora
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from jaxrl.training import forward_pass
from jaxrl.training.batch_fields import HParams
from jaxrl.training.batching import gradient_sums
from jaxrl.training.batching.packing_plan import PackingPlan
from jaxrl.training.train_state import AlgorithmState, StepSpec, TrainState
from jaxrl.training.train_step import (
  MinibatchContext,
  begin_minibatch,
  finish_minibatch,
  micro_batch_grad_fn,
  needs_rescoring,
)
from jaxrl.types import Array, Batch, Params, PyTree

# Each further one holds the activations of a micro-batch and another sum of gradients.
MAX_PARALLEL = 2


def choose_num_parallel(requested: int, model: TransformerLM, mesh: Mesh) -> int:
  """Returns how many micro-batches may run in parallel.

  Args:
    requested: The option `num_parallel` of `first_fit`; 0 to choose.
    model: Only a shallow one gets more than one by default.
    mesh: Only one CPU device can have more than one.

  Raises:
    ConfigError: More than one is requested on other devices.
  """
  if getattr(getattr(model, 'config', None), 'vision', None) is not None:
    if requested > 1:
      raise ConfigError(
        f'batch.packing=first_fit(num_parallel={requested}): micro-batches of a model '
        'that sees images do not run in parallel: leave it at 0'
      )
    return 1
  is_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == 'cpu'
  if requested > 1 and not is_cpu:
    raise ConfigError(
      f'batch.packing=first_fit(num_parallel={requested}): micro-batches can '
      'only run in parallel on a single CPU device, but the mesh has '
      f'{mesh.size} of {mesh.devices.flat[0].platform}: leave it at 0'
    )
  if requested:
    return requested
  is_shallow = is_cpu and getattr(model, 'is_shallow', False)
  return min(MAX_PARALLEL, cpu_count()) if is_shallow else 1


class ParallelTrainStep:
  """Runs the micro-batches of packed rows in several threads; donates the state.

  Thread k sums micro-batches k, k + n, k + 2n, … of n threads, and the threads' sums
  are then added in order: every run gives the same bits.

  Args:
    spec: Everything static.
    num_parallel: The number of threads.
    state: Shapes of the state.
    batch: Shapes of the batch.
    plan: Shapes of the plan.
    hparams: Shapes of the traced options.
  """

  def __init__(
    self,
    spec: StepSpec,
    num_parallel: int,
    state: TrainState,
    batch: Batch,
    plan: PackingPlan,
    hparams: HParams,
  ):
    self._num_parallel = num_parallel
    self._needs_rescoring = needs_rescoring(spec)
    index = self._begin_index(plan)
    begin_shapes = functools.partial(begin_minibatch, spec)
    minibatch = jax.eval_shape(begin_shapes, state, batch, index, hparams)
    zero_shapes = functools.partial(_zero_grads, spec)
    total = jax.eval_shape(zero_shapes, state.params, minibatch, plan, hparams)
    self._begin = _compile_begin(
      spec, num_parallel, *_flatten(total), *_flatten((state, batch, index, hparams))
    )
    i = jax.ShapeDtypeStruct((), jnp.int32)
    add = jax.jit(functools.partial(_add_micro_batch, spec), donate_argnums=0)
    self._add_micro_batch = add.lower(
      total, state.params, minibatch, plan, hparams, i
    ).compile()
    self._finish = _compile_finish(
      spec,
      *_flatten((state, (total,) * num_parallel, hparams, minibatch.algorithm_state)),
    )

  def _begin_index(self, plan: PackingPlan) -> PackingPlan | Array:
    """Returns the rows of a plan, or all of it if the minibatch is rescored."""
    return plan if self._needs_rescoring else plan.index

  def __call__(
    self, state: TrainState, batch: Batch, plan: PackingPlan, hparams: HParams
  ) -> tuple[TrainState, dict[str, Array]]:
    """Updates the state; see `jaxrl.training.train_step.train_step`."""
    index = self._begin_index(plan)
    minibatch, totals = self._begin(state, batch, index, hparams)
    num_micro_batches = int(plan.num_micro_batches)

    def run(thread: int) -> PyTree:
      total = totals[thread]
      for i in range(thread, num_micro_batches, self._num_parallel):
        total = self._add_micro_batch(
          total, state.params, minibatch, plan, hparams, np.int32(i)
        )
      return jax.block_until_ready(total)

    with ThreadPoolExecutor(self._num_parallel, 'micro-batches') as pool:
      totals = tuple(pool.map(run, range(self._num_parallel)))
    return self._finish(state, totals, hparams, minibatch.algorithm_state)


def _flatten(tree: PyTree) -> tuple[tuple, Any]:
  """Flattens a tree to hashable arguments of a cached function."""
  leaves, treedef = jax.tree.flatten(tree)
  return tuple(leaves), treedef


def _zero_grads(
  spec: StepSpec,
  params: Params,
  minibatch: MinibatchContext,
  plan: PackingPlan,
  hparams: HParams,
) -> PyTree:
  """Returns the gradient and metric sums over no micro-batches."""
  grad_fn = micro_batch_grad_fn(spec, params, minibatch.shared, hparams)
  trained = lora.trainable_params(spec.model.config, params)
  return forward_pass.zero_grads(
    spec, plan, grad_fn, trained, minibatch.fields, minibatch.weights
  )


# The first program (unless it rescores) and the last are the same for all sizes of
# micro-batches.


@functools.lru_cache(maxsize=64)
def _compile_begin(
  spec: StepSpec,
  num_parallel: int,
  total_leaves: tuple,
  total_treedef: Any,
  argument_leaves: tuple,
  argument_treedef: Any,
) -> jax.stages.Compiled:
  """Compiles (state, batch, index, hparams) → (minibatch, zero sums per thread)."""

  def begin(*arguments: PyTree) -> tuple[MinibatchContext, tuple]:
    zeros = [jnp.zeros(x.shape, x.dtype) for x in total_leaves]
    minibatch = begin_minibatch(spec, *arguments)
    return minibatch, (jax.tree.unflatten(total_treedef, zeros),) * num_parallel

  arguments = jax.tree.unflatten(argument_treedef, argument_leaves)
  return jax.jit(begin).lower(*arguments).compile()


@functools.lru_cache(maxsize=64)
def _compile_finish(spec: StepSpec, leaves: tuple, treedef: Any) -> jax.stages.Compiled:
  """Compiles (state, sums, hparams, algorithm_state) → (state, metrics).

  It donates the state.
  """
  finish = jax.jit(functools.partial(_finish, spec), donate_argnums=0)
  return finish.lower(*jax.tree.unflatten(treedef, leaves)).compile()


def _add_micro_batch(
  spec: StepSpec,
  total: PyTree,
  params: Params,
  minibatch: MinibatchContext,
  plan: PackingPlan,
  hparams: HParams,
  i: Array,
) -> PyTree:
  """Adds the gradients and metrics of micro-batch `i` to `total`."""
  grad_fn = micro_batch_grad_fn(spec, params, minibatch.shared, hparams)
  return forward_pass.add_micro_batch(
    spec, plan, grad_fn, minibatch.fields, minibatch.weights, i, total
  )


def _finish(
  spec: StepSpec,
  state: TrainState,
  totals: tuple,
  hparams: HParams,
  algorithm_state: AlgorithmState,
) -> tuple[TrainState, dict[str, Array]]:
  grads, sums = jax.tree.map(lambda *x: sum(x[1:], x[0]), *totals)
  grads = gradient_sums.stack_layers(grads)
  return finish_minibatch(spec, state, grads, sums, hparams, algorithm_state)
