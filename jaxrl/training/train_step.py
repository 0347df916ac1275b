"""The train step is one optimizer update from one minibatch, as a pure function.

A training step of the learner has two pure functions. The advantage step scores a batch
and computes advantages, once per batch. `train_step` then runs once per minibatch:

1. `begin_minibatch` selects its rows and computes what depends on all of them, such as
   the weights that reduce losses.
2. `micro_batch_grad_fn` gives the gradient of one micro-batch; gradients are summed.
3. `finish_minibatch` applies the optimizer and finishes the metrics.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.functional.components import call_component
from jaxrl.models import lora
from jaxrl.options import ConfigError
from jaxrl.training import forward_pass, optimizers
from jaxrl.training.batch_fields import (
  BatchFields,
  HParams,
  densify_ids,
  make_batch_fields,
  precompute_fields,
  precompute_fns,
  select_batch_rows,
  split_shared,
)
from jaxrl.training.batching.packing_plan import PackingPlan
from jaxrl.training.minibatch_loss import (
  LossWeights,
  MetricSums,
  finish_metrics,
  micro_batch_loss,
  minibatch_weights,
)
from jaxrl.training.train_state import StepSpec, TrainState
from jaxrl.types import Array, Batch, Params


def train_step(
  spec: StepSpec,
  state: TrainState,
  batch: Batch,
  index: Array | PackingPlan,
  hparams: HParams,
) -> tuple[TrainState, MetricSums]:
  """Updates the train state from one minibatch.

  The weights that reduce losses and metrics come from counts of the whole minibatch,
  before it is split: the split changes nothing but rounding.

  Args:
    spec: Everything static.
    state: The state before the update.
    batch: The scored batch, with advantages.
    index: `[num_micro_batches, R]` int32 rows of the batch, −1 at padding; or the plan
      of the minibatch's packed rows.
    hparams: The traced options: 'parts' (options by component), 'optimizer',
      'temperature', 'step' and 'seed'.

  Returns:
    The new state and scalar metrics.
  """
  config = spec.model.config

  def encode(trained: Params) -> tuple[Params, Params]:
    merged = lora.merge_trainable(config, state.params, trained)
    encoded = forward_pass.with_images(spec, merged, batch)
    return lora.trainable_params(config, encoded), encoded

  trained, params = lora.trainable_params(config, state.params), state.params
  through_tower = None
  if batch.patch_rows is not None:  # the images of all rows, each once
    trained, through_tower, params = jax.vjp(encode, trained, has_aux=True)
  encoded = dataclasses.replace(state, params=params)
  minibatch = begin_minibatch(spec, encoded, batch, index, hparams)
  grad_fn = micro_batch_grad_fn(spec, params, minibatch.shared, hparams)
  fields, weights = minibatch.fields, minibatch.weights
  if isinstance(index, PackingPlan):
    grads, sums = forward_pass.accumulate_micro_batches(
      spec, index, grad_fn, trained, fields, weights
    )
  else:
    grads, sums = _accumulate(spec, grad_fn, trained, index.shape, fields, weights)
  if through_tower is not None:
    (grads,) = through_tower(grads)
  return finish_minibatch(spec, state, grads, sums, hparams, minibatch.algorithm_state)


class MinibatchContext(NamedTuple):
  """What the micro-batches of an update have in common.

  Attributes:
    fields: Fields of the minibatch's rows `[N, …]`.
    weights: What reduces losses and metrics, for these rows.
    shared: Fields that all rows share.
    algorithm_state: The algorithm's state after `prepare`.
  """

  fields: BatchFields
  weights: LossWeights
  shared: BatchFields
  algorithm_state: dict[str, Any]


def needs_rescoring(spec: StepSpec) -> bool:
  """Returns whether an update runs the model before its micro-batches."""
  return spec.is_split and bool(precompute_fns(spec.algorithm, reads_logprobs=True))


def begin_minibatch(
  spec: StepSpec,
  state: TrainState,
  batch: Batch,
  index: Array | PackingPlan,
  hparams: HParams,
) -> MinibatchContext:
  """Does what comes before the micro-batches: prepares fields and computes weights.

  The algorithm's `prepare` returns fields that replace those it read; if it returns a
  'state', that is carried to the next update. The arguments are those of `train_step`.

  Raises:
    ConfigError: `prepare` returns a state although the algorithm has none.
  """
  algorithm, algorithm_state = spec.algorithm, state.algorithm_state
  rows = index.index if isinstance(index, PackingPlan) else index
  batch = select_batch_rows(batch, rows.reshape(-1))
  fields = make_batch_fields(algorithm, batch, algorithm_state, hparams)
  fields |= {'tokens': batch.tokens, 'segment_ids': batch.segment_ids}
  fields = densify_ids(fields, spec.update_fields)
  if algorithm.prepare is not None:
    prepared = call_component(algorithm.prepare, fields)
    if 'state' in prepared and 'prepare' not in algorithm_state:
      raise ConfigError("prepare returns a 'state': give the algorithm an init_state")
    fields |= prepared
  if 'prepare' in algorithm_state:
    algorithm_state = algorithm_state | {'prepare': fields['state']}
  fields |= precompute_fields(algorithm, fields, hparams, reads_logprobs=False)
  if needs_rescoring(spec):
    logprobs = _rescore(spec, index, state.params, fields, hparams)
    rescored = fields | {'logprobs': logprobs}
    fields |= precompute_fields(algorithm, rescored, hparams, reads_logprobs=True)
  fields, shared = split_shared(fields)
  if 'kl_controller' in algorithm_state:
    shared['kl_scale'] = algorithm_state['kl_controller']['scale']
  weights = minibatch_weights(algorithm, fields)
  return MinibatchContext(fields, weights, shared, algorithm_state)


def micro_batch_grad_fn(
  spec: StepSpec, params: Params, shared: BatchFields, hparams: HParams
) -> Callable[[BatchFields, LossWeights], tuple[Params, MetricSums]]:
  """Returns the function that computes the gradient of one micro-batch.

  Args:
    spec: Everything static.
    params: All parameters of the model.
    shared: Fields that all rows share.
    hparams: The traced options.

  Returns:
    A function from fields and weights of a micro-batch to the gradients of the trained
    parameters and sums of metrics.
  """
  config = spec.model.config
  trained = lora.trainable_params(config, params)

  def loss(
    trained: Params, fields: BatchFields, weights: LossWeights
  ) -> tuple[Array, MetricSums]:
    merged = lora.merge_trainable(config, params, trained)
    return micro_batch_loss(spec, merged, fields, weights, hparams)

  grad = jax.grad(loss, has_aux=True)

  def grad_fn(fields: BatchFields, weights: LossWeights) -> tuple[Params, MetricSums]:
    fields = densify_ids(fields, spec.update_fields) | shared
    return grad(trained, fields, weights)

  return grad_fn


def finish_minibatch(
  spec: StepSpec,
  state: TrainState,
  grads: Params,
  sums: MetricSums,
  hparams: HParams,
  algorithm_state: dict[str, Any],
) -> tuple[TrainState, MetricSums]:
  """Applies the optimizer and finishes the metrics.

  Args:
    spec: Everything static.
    state: The state before the update.
    grads: Gradients of the trained parameters, summed over all micro-batches.
    sums: Metrics, summed over all micro-batches.
    hparams: The traced options.
    algorithm_state: The algorithm's state after `prepare`.

  Returns:
    The new state and scalar metrics.
  """
  config = spec.model.config
  trained = lora.trainable_params(config, state.params)
  optimizer_hparams = hparams['optimizer'] | {'seed': hparams['seed']}
  if spec.algorithm.critic_warmup:
    from jaxrl.training import critic_warmup  # few algorithms have a critic

    params, opt_state, metrics, warmup_state = (
      critic_warmup.apply_gradients_with_warmup(
        trained,
        state.opt_state,
        grads,
        optimizer_hparams,
        hparams['step'] < spec.algorithm.critic_warmup,
        algorithm_state['critic_warmup'],
        spec.optimizer_state,
      )
    )
    algorithm_state = algorithm_state | {'critic_warmup': warmup_state}
  else:
    params, opt_state, metrics = optimizers.apply_gradients(
      trained, state.opt_state, grads, optimizer_hparams, spec.optimizer_state
    )
  params = lora.merge_trainable(config, state.params, params)
  metrics = {f'optimizer/{name}': x for name, x in metrics.items()}
  state = TrainState(params, opt_state, algorithm_state)
  return state, metrics | finish_metrics(sums)


def _accumulate(
  spec: StepSpec,
  grad_fn: Callable[[BatchFields, LossWeights], tuple[Params, MetricSums]],
  params: Params,
  shape: tuple[int, ...],
  fields: BatchFields,
  weights: LossWeights,
) -> tuple[Params, MetricSums]:
  """Sums gradients and metrics over `shape` [num_micro_batches, R] of the rows."""
  split = jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), (fields, weights))

  def run(micro_batch: Any) -> tuple[Params, MetricSums]:
    constrain = lambda x: forward_pass.constrain_rows(spec, x)  # noqa: E731
    return grad_fn(*jax.tree.map(constrain, micro_batch))

  if spec.num_micro_batches == 1:
    return run(jax.tree.map(lambda x: x[0], split))

  def add(total: Params, micro_batch: Any) -> tuple[Params, MetricSums]:
    grads, sums = run(micro_batch)
    return jax.tree.map(jnp.add, total, grads), sums

  start = jax.tree.map(jnp.zeros_like, params)
  grads, sums = jax.lax.scan(add, start, split)
  return grads, jax.tree.map(lambda x: x.sum(0), sums)


def _rescore(
  spec: StepSpec,
  index: Array | PackingPlan,
  params: Params,
  fields: BatchFields,
  hparams: HParams,
) -> Array:
  """Computes log-probs `[N, T]` of the minibatch under the current parameters."""

  def score(*inputs: Any) -> Array:
    return forward_pass.compute_outputs(
      spec.model, params, *inputs, temperature=hparams['temperature']
    ).logprobs

  chunks = index if isinstance(index, PackingPlan) else spec.num_micro_batches
  inputs = [fields[name] for name in ('tokens', 'segment_ids', 'routed_experts')]
  inputs.append(forward_pass.image_options(fields))
  return forward_pass.map_micro_batches(spec, chunks, score, *inputs)
