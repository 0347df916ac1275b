"""The train step: one optimizer update from one minibatch, as a pure function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.algorithms import compose
from jaxrl.models import lora
from jaxrl.signature import ConfigError
from jaxrl.training import critic_warmup, forward, losses, optimizer
from jaxrl.training.columns import (
  Columns,
  Numbers,
  by_rows,
  columns_of,
  make_columns,
  makers,
  parted,
  renumbered,
  select_rows,
)
from jaxrl.training.packing import Plan
from jaxrl.training.state import Spec, TrainState
from jaxrl.types import Array, Batch, Params


def train_step(
  spec: Spec, state: TrainState, batch: Batch, index: Array | Plan, numbers: Numbers
) -> tuple[TrainState, dict[str, Array]]:
  """One update from rows `index` `[micro_batches, R]` (−1 pads) of `batch`.

  Or from those of a plan, on packed rows.

  The weights that make losses and metrics one number come from the counts of the
  whole minibatch, before it is split: the split changes nothing but rounding.
  numbers: 'parts' (options by slot), 'optimizer', 'temperature', 'step', 'seed'; all
  traced. Returns the new state and scalar metrics.
  """
  found = begin(spec, state, batch, index, numbers)
  one = gradient(spec, state.params, found.shared, numbers)
  trained = lora.trained(spec.model.config, state.params)
  rows = found.columns, found.weights
  if isinstance(index, Plan):
    gradients, sums = forward.accumulate(spec, index, one, trained, *rows)
  else:
    gradients, sums = _accumulate(spec, one, trained, index.shape, rows)
  return finish(spec, state, gradients, sums, numbers, found.own)


class Begun(NamedTuple):
  """What the micro-batches of an update have in common.

  columns, weights: of the minibatch's rows `[N, …]`. shared: columns without rows. own:
  the algorithm's state after `prepare`.
  """

  columns: Columns
  weights: losses.Weights
  shared: Columns
  own: dict[str, Any]


def rescores(spec: Spec) -> bool:
  """Whether an update runs the model before its micro-batches."""
  return spec.split and bool(makers(spec, fresh=True))


def begin(
  spec: Spec, state: TrainState, batch: Batch, index: Array | Plan, numbers: Numbers
) -> Begun:
  """All of a train step that comes before its micro-batches."""
  columns, shared, own = _minibatch(spec, state, batch, index, numbers)
  return Begun(columns, losses.weights_of(spec.algorithm, columns), shared, own)


def gradient(
  spec: Spec, params: Params, shared: Columns, numbers: Numbers
) -> Callable[[Columns, losses.Weights], tuple[Params, dict[str, Array]]]:
  """`(columns, weights)` of a micro-batch → gradients of what is trained, and sums."""
  config = spec.model.config
  trained = lora.trained(config, params)

  def loss(trained, *rest):
    return losses.loss(spec, lora.join(config, params, trained), *rest)

  slope = jax.grad(loss, has_aux=True)

  def one(columns, weights):
    columns = renumbered(columns, spec.reads_after) | shared
    return slope(trained, columns, weights, numbers)

  return one


def finish(
  spec: Spec,
  state: TrainState,
  gradients: Params,
  sums: dict[str, Array],
  numbers: Numbers,
  own: dict[str, Any],
) -> tuple[TrainState, dict[str, Array]]:
  """The optimizer's update, by sums over all micro-batches; and the metrics."""
  state, metrics = _update(spec, state, gradients, numbers, own)
  metrics = {f'optimizer/{name}': x for name, x in metrics.items()}
  return state, metrics | losses.finish(sums)


def _accumulate(
  spec: Spec,
  function: Callable[..., tuple[Params, dict]],
  params: Params,
  shape: tuple[int, ...],
  rows: tuple[Columns, losses.Weights],
) -> tuple[Params, dict[str, Array]]:
  """Sums `function(columns, weights)` over `shape` [micro_batches, R] of the rows."""
  split = jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), rows)

  def one(micro):
    return function(*jax.tree.map(lambda x: by_rows(spec, x), micro))

  if spec.micro_batches == 1:
    return one(jax.tree.map(lambda x: x[0], split))

  def add(total, micro):
    gradients, sums = one(micro)
    return jax.tree.map(jnp.add, total, gradients), sums

  start = jax.tree.map(jnp.zeros_like, params)
  gradients, sums = jax.lax.scan(add, start, split)
  return gradients, jax.tree.map(lambda x: x.sum(0), sums)


def _minibatch(
  spec: Spec, state: TrainState, batch: Batch, index: Array | Plan, numbers: Numbers
) -> tuple[Columns, Columns, dict]:
  """(columns with rows, columns without, the algorithm's state after `prepare`).

  `prepare` returns columns to put in the place of those it read; its 'state', if it
  returns one, is carried to the next update.
  """
  if isinstance(index, Plan):
    plan, rows = index, index.index
  else:
    plan, rows = None, index
  batch, own = select_rows(batch, rows.reshape(-1)), state.algorithm_state
  columns = columns_of(spec, batch, own, numbers)
  columns |= {'tokens': batch.tokens, 'segment_ids': batch.segment_ids}
  columns = renumbered(columns, spec.reads_after)
  if spec.algorithm.prepare is not None:
    changed = compose.call_part(spec.algorithm.prepare, columns)
    if 'state' in changed and 'prepare' not in own:
      raise ConfigError("prepare returns a 'state': give the algorithm an init_state")
    columns |= changed
  if 'prepare' in own:
    own = own | {'prepare': columns['state']}
  columns |= make_columns(spec, columns, numbers, fresh=False)
  if rescores(spec):
    parts = spec.micro_batches if plan is None else plan
    again = _rescored(spec, parts, state.params, columns, numbers)
    now = columns | {'logprobs': again}
    columns |= make_columns(spec, now, numbers, fresh=True)
  columns, shared = parted(columns)
  if 'kl_controller' in own:
    shared['kl_scale'] = own['kl_controller']['scale']
  return columns, shared, own


def _rescored(
  spec: Spec, parts: int | Plan, params: Params, columns: Columns, numbers: Numbers
) -> Array:
  """`[N, T]` log-probs of the minibatch under the current parameters."""

  def score(*rows):
    return forward.outputs(
      spec.model, params, *rows, temperature=numbers['temperature']
    ).logprobs

  arrays = (columns[name] for name in ('tokens', 'segment_ids', 'routed_experts'))
  return forward.in_parts(spec, parts, score, *arrays)


def _update(
  spec: Spec, state: TrainState, gradients: Params, numbers: Numbers, own: dict
) -> tuple[TrainState, dict[str, Array]]:
  own_numbers = numbers['optimizer'] | {'seed': numbers['seed']}
  config = spec.model.config
  trained = lora.trained(config, state.params)
  arguments = trained, state.opt_state, gradients, own_numbers
  if spec.algorithm.critic_warmup:
    params, opt_state, metrics, warm = critic_warmup.update(
      *arguments,
      numbers['step'] < spec.algorithm.critic_warmup,
      own['critic_warmup'],
      spec.memory,
    )
    own = own | {'critic_warmup': warm}
  else:
    params, opt_state, metrics = optimizer.update(*arguments, spec.memory)
  return TrainState(lora.join(config, state.params, params), opt_state, own), metrics
