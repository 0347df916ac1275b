"""The train step: one optimizer update from one minibatch, as a pure function."""

import jax
import jax.numpy as jnp

from jaxrl.algorithms import compose
from jaxrl.signature import ConfigError
from jaxrl.training import critic_warmup, losses, optimizer
from jaxrl.training.columns import (
  Columns,
  Numbers,
  by_rows,
  columns_of,
  in_chunks,
  make_columns,
  makers,
  parted,
  renumbered,
  select_rows,
)
from jaxrl.training.state import Spec, TrainState
from jaxrl.types import Array, Batch, Params


def train_step(
  spec: Spec, state: TrainState, batch: Batch, index: Array, numbers: Numbers
) -> tuple[TrainState, dict[str, Array]]:
  """One update from rows `index` `[micro_batches, R]` (−1 pads) of `batch`.

  The weights that make losses and metrics one number come from the counts of the
  whole minibatch, before it is split: the split changes nothing but rounding.
  numbers: 'parts' (options by slot), 'optimizer', 'temperature', 'step', 'seed'; all
  traced. Returns the new state and scalar metrics.
  """
  columns, shared, own = _minibatch(spec, state, batch, index.reshape(-1), numbers)
  weights = losses.weights_of(spec.algorithm, columns)
  split = jax.tree.map(
    lambda x: x.reshape(index.shape + x.shape[1:]), (columns, weights)
  )
  gradient = jax.grad(losses.loss, argnums=1, has_aux=True)

  def one(micro):
    columns, weights = jax.tree.map(lambda x: by_rows(spec, x), micro)
    columns = renumbered(columns, spec.reads_after) | shared
    return gradient(spec, state.params, columns, weights, numbers)

  if spec.micro_batches == 1:
    gradients, sums = one(jax.tree.map(lambda x: x[0], split))
  else:

    def accumulate(total, micro):
      gradients, sums = one(micro)
      return jax.tree.map(jnp.add, total, gradients), sums

    start = jax.tree.map(jnp.zeros_like, state.params)
    gradients, sums = jax.lax.scan(accumulate, start, split)
    sums = jax.tree.map(lambda x: x.sum(0), sums)
  state, metrics = _update(spec, state, gradients, numbers, own)
  metrics = {f'optimizer/{name}': x for name, x in metrics.items()}
  return state, metrics | losses.finish(sums)


def _minibatch(
  spec: Spec, state: TrainState, batch: Batch, index: Array, numbers: Numbers
) -> tuple[Columns, Columns, dict]:
  """(columns with rows, columns without, the algorithm's state after `prepare`).

  `prepare` returns columns to put in the place of those it read; its 'state', if it
  returns one, is carried to the next update.
  """
  batch, own = select_rows(batch, index), state.algorithm_state
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
  if spec.micro_batches > 1 and makers(spec, fresh=True):
    now = columns | {'logprobs': _rescored(spec, state.params, columns, numbers)}
    columns |= make_columns(spec, now, numbers, fresh=True)
  columns, shared = parted(columns)
  if 'kl_controller' in own:
    shared['kl_scale'] = own['kl_controller']['scale']
  return columns, shared, own


def _rescored(spec: Spec, params: Params, columns: Columns, numbers: Numbers) -> Array:
  """`[N, T]` log-probs of the minibatch under the current parameters."""

  def score(tokens, segment_ids):
    return spec.model.policy_outputs(
      params, tokens, segment_ids, temperature=numbers['temperature']
    ).logprobs

  arrays = columns['tokens'], columns['segment_ids']
  return in_chunks(spec, spec.micro_batches, score, *arrays)


def _update(
  spec: Spec, state: TrainState, gradients: Params, numbers: Numbers, own: dict
) -> tuple[TrainState, dict[str, Array]]:
  own_numbers = numbers['optimizer'] | {'seed': numbers['seed']}
  arguments = state.params, state.opt_state, gradients, own_numbers
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
  return TrainState(params, opt_state, own), metrics
