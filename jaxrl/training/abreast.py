"""Micro-batches of an update abreast, on a CPU: a thread each.

XLA cuts each operation of a program among a CPU's processors, and what is too small to
be cut keeps but one of them at work. Two micro-batches side by side keep two.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl import processors
from jaxrl.models import lora
from jaxrl.models.model import Model
from jaxrl.signature import ConfigError
from jaxrl.training import forward, step
from jaxrl.training.columns import Numbers
from jaxrl.training.packing import Plan
from jaxrl.training.state import Spec, TrainState
from jaxrl.types import Array, Batch, Params

WAYS = 2  # each more holds one more micro-batch's activations and a sum of gradients


def ways(asked: int, model: Model, mesh: Mesh) -> int:
  """How many micro-batches may be done at once; asked: as `first_fit` has it.

  Raises ConfigError for what cannot be.
  """
  cpu = mesh.size == 1 and mesh.devices.flat[0].platform == 'cpu'
  if asked > 1 and not cpu:
    raise ConfigError(
      f'batch.packing=first_fit(abreast={asked}): several micro-batches are done at '
      f'once on one CPU device, and the mesh has {mesh.size} of '
      f'{mesh.devices.flat[0].platform}: leave it at 0'
    )
  shallow = cpu and getattr(model, 'shallow', False)
  return asked or (min(WAYS, processors.count()) if shallow else 1)


class Step:
  """The train step of packed rows, called as the compiled one is: state is donated.

  Its sums are those over micro-batches 0, ways, 2·ways …, over 1, ways + 1 … and so on,
  and then over these: the same bits in every run.
  """

  def __init__(
    self,
    spec: Spec,
    ways: int,
    state: TrainState,
    batch: Batch,
    plan: Plan,
    numbers: Numbers,
  ):
    """Compiles for arguments of these shapes."""
    self._ways, self._rescores = ways, step.rescores(spec)
    index = self._index(plan)
    begun = jax.eval_shape(
      functools.partial(step.begin, spec), state, batch, index, numbers
    )
    nothing = functools.partial(_nothing, spec)
    total = jax.eval_shape(nothing, state.params, begun, plan, numbers)
    own = spec, ways, *_flat(total)
    self._begin = _compile_begin(*own, *_flat((state, batch, index, numbers)))
    i = jax.ShapeDtypeStruct((), jnp.int32)
    micro = jax.jit(functools.partial(_micro_batch, spec), donate_argnums=0)
    micro = micro.lower(total, state.params, begun, plan, numbers, i)
    self._micro_batch = micro.compile()
    last = state, (total,) * ways, numbers, begun.own
    self._finish = _compile_finish(spec, *_flat(last))

  def _index(self, plan: Plan) -> Any:
    """What the first program is told of a plan: but for rescoring, the rows alone."""
    return plan if self._rescores else plan.index

  def __call__(
    self, state: TrainState, batch: Batch, plan: Plan, numbers: Numbers
  ) -> tuple[TrainState, dict[str, Array]]:
    begun, totals = self._begin(state, batch, self._index(plan), numbers)
    count = int(plan.count)

    def run(way: int) -> Any:
      total = totals[way]
      for i in range(way, count, self._ways):
        i = np.int32(i)
        total = self._micro_batch(total, state.params, begun, plan, numbers, i)
      return jax.block_until_ready(total)

    with ThreadPoolExecutor(self._ways, 'micro-batches') as pool:
      summed = tuple(pool.map(run, range(self._ways)))
    return self._finish(state, summed, numbers, begun.own)


def _flat(tree: Any) -> tuple[tuple, Any]:
  leaves, form = jax.tree.flatten(tree)
  return tuple(leaves), form


def _nothing(
  spec: Spec, params: Params, begun: step.Begun, plan: Plan, numbers: Numbers
) -> Any:
  """The sum of no micro-batches."""
  one = step.gradient(spec, params, begun.shared, numbers)
  trained = lora.trained(spec.model.config, params)
  return forward.nothing(spec, plan, one, trained, begun.columns, begun.weights)


# The first program, but for what rescores, and the last are those of all sizes.


@functools.lru_cache(maxsize=64)
def _compile_begin(
  spec: Spec, ways: int, total: tuple, form: Any, leaves: tuple, tree: Any
) -> Any:
  """(state, batch, index, numbers) → what micro-batches need; a sum for each way."""

  def begin(*arguments: Any) -> tuple[step.Begun, tuple]:
    start = [jnp.zeros(x.shape, x.dtype) for x in total]
    return step.begin(spec, *arguments), (jax.tree.unflatten(form, start),) * ways

  return jax.jit(begin).lower(*jax.tree.unflatten(tree, leaves)).compile()


@functools.lru_cache(maxsize=64)
def _compile_finish(spec: Spec, leaves: tuple, tree: Any) -> Any:
  """(state, sums, numbers, own state) → state, metrics; state is donated."""
  last = jax.jit(functools.partial(_finish, spec), donate_argnums=0)
  return last.lower(*jax.tree.unflatten(tree, leaves)).compile()


def _micro_batch(
  spec: Spec,
  total: Any,
  params: Params,
  begun: step.Begun,
  plan: Plan,
  numbers: Numbers,
  i: Array,
) -> Any:
  """`total` and what micro-batch `i` adds to it."""
  one = step.gradient(spec, params, begun.shared, numbers)
  rows = begun.columns, begun.weights
  return jax.tree.map(jnp.add, total, forward.one(spec, plan, one, *rows, i))


def _finish(
  spec: Spec, state: TrainState, totals: tuple, numbers: Numbers, own: dict[str, Any]
) -> tuple[TrainState, dict[str, Array]]:
  gradients, sums = jax.tree.map(lambda *x: sum(x[1:], x[0]), *totals)
  return step.finish(spec, state, gradients, sums, numbers, own)
