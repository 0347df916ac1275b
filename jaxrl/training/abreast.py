"""Micro-batches of an update abreast, on a CPU: a thread each.

XLA cuts each operation of a program among a CPU's processors, and what is too small to
be cut keeps but one of them at work. Two micro-batches side by side keep two.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.models import lora
from jaxrl.models.model import Model
from jaxrl.signature import ConfigError
from jaxrl.training import forward, step
from jaxrl.training.columns import Numbers
from jaxrl.training.packing import Plan
from jaxrl.training.state import Spec, TrainState
from jaxrl.types import Array, Batch

WAYS = 2  # each more holds one more micro-batch's activations and a sum of gradients


def ways(asked: int, model: Model, mesh: Mesh) -> int:
  """How many micro-batches are done at once; asked: as `first_fit` has it.

  Raises ConfigError for what cannot be.
  """
  cpu = mesh.size == 1 and mesh.devices.flat[0].platform == 'cpu'
  if asked < 0 or (asked > 1 and not cpu):
    raise ConfigError(
      f'batch.packing=first_fit(abreast={asked}): several micro-batches are done at '
      f'once on one CPU device, and the mesh has {mesh.size} of '
      f'{mesh.devices.flat[0].platform}: leave it at 0'
    )
  shallow = cpu and getattr(model, 'at_once', 1) > 1
  return asked or (min(WAYS, _processors()) if shallow else 1)


def _processors() -> int:
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


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
    self._ways = ways
    first = jax.jit(functools.partial(_begin, spec, ways))
    begun, totals = first.eval_shape(state, batch, plan, numbers)
    own = functools.partial(_micro_batch, spec)
    self._begin = first.lower(state, batch, plan, numbers).compile()
    i = jax.ShapeDtypeStruct((), jnp.int32)
    micro = jax.jit(own, donate_argnums=0)
    micro = micro.lower(totals[0], state.params, begun, plan, numbers, i)
    self._micro_batch = micro.compile()
    last = jax.jit(functools.partial(_finish, spec), donate_argnums=0)
    self._finish = last.lower(state, totals, numbers, begun.own).compile()

  def __call__(
    self, state: TrainState, batch: Batch, plan: Plan, numbers: Numbers
  ) -> tuple[TrainState, dict[str, Array]]:
    begun, totals = self._begin(state, batch, plan, numbers)
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


def _begin(
  spec: Spec,
  ways: int,
  state: TrainState,
  batch: Batch,
  plan: Plan,
  numbers: Numbers,
) -> tuple[step.Begun, tuple]:
  """What the micro-batches need, and a sum for each way to begin with."""
  found = step.begin(spec, state, batch, plan, numbers)
  one = step.gradient(spec, state.params, found.shared, numbers)
  trained = lora.trained(spec.model.config, state.params)
  rows = found.columns, found.weights
  start = forward.nothing(spec, plan, one, trained, *rows)
  return found, (start,) * ways


def _micro_batch(
  spec: Spec,
  total: Any,
  params: Any,
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
