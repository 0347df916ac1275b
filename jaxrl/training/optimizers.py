"""Optimizers update parameters: they clip, transform and schedule gradients.

An optimizer is named by a call such as 'adamw(b2=.98)' in a config.
Its hyperparameters are traced, so that a run may change them without recompiling; what
fixes the structure of its state is static (`OptimizerStateSpec`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from jaxrl.component_table import Component, ComponentTable
from jaxrl.options import ConfigError, Options, defaults, option
from jaxrl.training.batch_fields import HParams
from jaxrl.types import Array, Params, PyTree

StateDtype = Literal['float32', 'bfloat16']
# Weight decay applies only to parameters of these names.
DECAYED_PARAMS = ('kernel', 'table', 'lora_a', 'lora_b')


class OptimizerStateSpec(NamedTuple):
  """What fixes the structure and dtypes of an optimizer's state; hashable.

  Attributes:
    name: The optimizer's name in `OPTIMIZERS`.
    options: Pairs of its static options and their values.
  """

  name: str
  options: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
  """An optimizer with its options.

  Attributes:
    state_spec: What fixes its state.
    hparams: Its traced options by name.
  """

  state_spec: OptimizerStateSpec
  hparams: dict[str, float]

  def with_default_hparams(self) -> 'OptimizerSpec':
    """Returns the spec with the same state and the default hyperparameters."""
    options = defaults(OPTIMIZERS[self.state_spec.name])
    hparams = {name: options[name] for name in self.hparams}
    return dataclasses.replace(self, hparams=hparams)


def _optimizer_spec(
  name: str, hparams: dict[str, float], **static: object
) -> OptimizerSpec:
  for name_of, value in hparams.items():
    is_decay_rate = name_of in ('b1', 'b2', 'momentum')
    if value < 0 or (is_decay_rate and value >= 1):
      bounds = 'in [0, 1)' if is_decay_rate else 'at least 0'
      raise ConfigError(f'optimizer.name: {name_of}={value} of {name} must be {bounds}')
  hparams = {option: float(value) for option, value in hparams.items()}
  state_spec = OptimizerStateSpec(name, tuple(sorted(static.items())))
  return OptimizerSpec(state_spec, hparams)


def adamw(
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  state_dtype: StateDtype = 'float32',
) -> OptimizerSpec:
  """Creates AdamW (arXiv 1711.05101), with weight decay on matrices only.

  Args:
    b1: Decay rate of the first moment.
    b2: Decay rate of the second moment.
    eps: Added to the root of the second moment.
    weight_decay: Decay of matrices per update, times the learning rate.
    state_dtype: The dtype of the state. 'bfloat16' halves it and rounds stochastically,
      so that it is right on average: at b2=.999 an update changes the second moment by
      less than bfloat16 can represent, and rounding to nearest would never change it.

  Returns:
    The spec.
  """
  hparams = {'b1': b1, 'b2': b2, 'eps': eps, 'weight_decay': weight_decay}
  return _optimizer_spec('adamw', hparams, state_dtype=state_dtype)


ADAMW_STATE = adamw().state_spec


def adafactor(
  *,
  decay_rate: float = 0.8,
  clip_threshold: float = 1.0,
  eps: float = 1e-30,
  weight_decay: float = 0.0,
  min_size: int = 128,
) -> OptimizerSpec:
  """Creates Adafactor (arXiv 1804.04235): row and column means, no full second moment.

  There is no first moment and no learning rate of its own: `learning_rate` is as for
  AdamW.

  Args:
    decay_rate: The second moment decays by 1 − t^−decay_rate.
    clip_threshold: The largest root mean square of an update of one layer's array.
    eps: Added to squared gradients.
    weight_decay: Decay of matrices per update, times the learning rate.
    min_size: Arrays with fewer than two axes of at least this many elements keep the
      whole second moment.

  Returns:
    The spec.
  """
  hparams = {
    'decay_rate': decay_rate,
    'clip_threshold': clip_threshold,
    'eps': eps,
    'weight_decay': weight_decay,
  }
  return _optimizer_spec('adafactor', hparams, min_size=min_size)


def lion(
  *,
  b1: float = 0.9,
  b2: float = 0.99,
  weight_decay: float = 0.0,
  state_dtype: StateDtype = 'float32',
) -> OptimizerSpec:
  """Creates Lion (arXiv 2302.06675): the update is the sign of a moment.

  It takes a tenth of AdamW's learning rate.

  Args:
    b1: Decay rate of the moment that gives the update.
    b2: Decay rate of the moment that is kept.
    weight_decay: Decay of matrices per update, times the learning rate.
    state_dtype: The dtype of the state, as for `adamw`.

  Returns:
    The spec.
  """
  hparams = {'b1': b1, 'b2': b2, 'weight_decay': weight_decay}
  return _optimizer_spec('lion', hparams, state_dtype=state_dtype)


def muon(
  *,
  momentum: float = 0.95,
  rms: float = 0.2,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  ns_steps: int = 5,
  state_dtype: StateDtype = 'float32',
) -> OptimizerSpec:
  """Creates Muon for hidden matrices and AdamW for the rest (arXiv 2502.16982).

  The update of a layer's kernel, or of one expert's, is its momentum with all singular
  values made about 1, by Newton-Schulz iterations. It is scaled by `rms`·√max(inputs,
  outputs), so that it is as large as one of AdamW and takes the same learning rate.
  Embeddings, the output head, the vision tower, norms and biases are AdamW's.

  Args:
    momentum: Decay rate of the momentum of matrices, with Nesterov's look-ahead.
    rms: Root mean square of the entries of a matrix's update.
    b1: Decay rate of AdamW's first moment.
    b2: Decay rate of AdamW's second moment.
    eps: Added to the root of AdamW's second moment.
    weight_decay: Decay of matrices per update, times the learning rate.
    ns_steps: Newton-Schulz iterations.
    state_dtype: The dtype of the state, as for `adamw`.

  Returns:
    The spec.
  """
  if ns_steps < 1:
    raise ConfigError(f'optimizer.name: ns_steps={ns_steps} of muon must be at least 1')
  hparams = {'momentum': momentum, 'rms': rms, 'b1': b1, 'b2': b2, 'eps': eps}
  hparams['weight_decay'] = weight_decay
  return _optimizer_spec('muon', hparams, ns_steps=ns_steps, state_dtype=state_dtype)


def sgd(*, weight_decay: float = 0.0) -> OptimizerSpec:
  """Creates stochastic gradient descent: the gradient itself, without state.

  Args:
    weight_decay: Decay of matrices per update, times the learning rate.

  Returns:
    The spec.
  """
  return _optimizer_spec('sgd', {'weight_decay': weight_decay})


OPTIMIZERS: ComponentTable[Callable[..., OptimizerSpec]] = ComponentTable(
  'kind of optimizer',
  'optimizer.name',
  {
    'adamw': adamw,
    'adafactor': adafactor,
    'lion': lion,
    'muon': muon,
    'sgd': sgd,
  },
)


def make_optimizer_spec(name: Component) -> OptimizerSpec:
  """Creates the spec that a call of one of `OPTIMIZERS` describes.

  Raises:
    ConfigError: There is no such optimizer or option, or it is out of range.
  """
  return OPTIMIZERS.build(name)


class LrDecay(NamedTuple):
  """How a learning rate decays after its warm-up.

  Attributes:
    shape: 'constant', 'linear' or 'cosine'.
    decay_steps: The learner step at which the decay ends.
    final_fraction: The share of the learning rate that is left then.
  """

  shape: str
  decay_steps: int = 0
  final_fraction: float = 0.0


def _constant() -> LrDecay:
  """Keeps the learning rate after the warm-up."""
  return LrDecay('constant')


def _linear(*, decay_steps: int = 0, final_fraction: float = 0.0) -> LrDecay:
  """Lets the learning rate fall along a line.

  Args:
    decay_steps: The learner step at which the decay ends; 0 for the end of the run.
    final_fraction: The share of the learning rate that is left then.
  """
  return LrDecay('linear', decay_steps, final_fraction)


def _cosine(*, decay_steps: int = 0, final_fraction: float = 0.0) -> LrDecay:
  """Lets the learning rate fall along half a cosine.

  Args:
    decay_steps: The learner step at which the decay ends; 0 for the end of the run.
    final_fraction: The share of the learning rate that is left then.
  """
  return LrDecay('cosine', decay_steps, final_fraction)


SCHEDULES = ComponentTable(
  'schedule',
  'optimizer.lr_schedule',
  {'constant': _constant, 'linear': _linear, 'cosine': _cosine},
)


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """The settings of an optimizer, as `make_optimizer` checks them.

  Attributes:
    learning_rate: The highest learning rate.
    schedule: How it decays.
    warmup_steps: Learner steps over which it rises.
    spec: What is done to gradients.
    max_grad_norm: The largest global norm of a gradient; None for no limit.
  """

  learning_rate: float
  schedule: LrDecay
  warmup_steps: int
  spec: OptimizerSpec
  max_grad_norm: float | None

  def learning_rate_at(self, step: int) -> float:
    """Returns the learning rate of a learner step.

    This is plain arithmetic on the host, so nothing is compiled; it equals optax's
    schedules.

    Args:
      step: The learner step, from 0.
    """
    if step < self.warmup_steps:
      return self.learning_rate * (step + 1) / self.warmup_steps
    shape, decay_steps, final = self.schedule
    if shape == 'constant':
      return self.learning_rate
    progress = (step - self.warmup_steps) / (decay_steps - self.warmup_steps)
    progress = min(progress, 1.0)
    if shape == 'linear':
      remaining = 1 - progress
    else:
      remaining = (1 + math.cos(math.pi * progress)) / 2
    return self.learning_rate * (final + (1 - final) * remaining)

  def hparams(self, step: int) -> dict[str, float]:
    """Returns the hyperparameters of `apply_gradients` at a learner step."""
    return {
      'learning_rate': self.learning_rate_at(step),
      **self.spec.hparams,
      'max_grad_norm': math.inf if self.max_grad_norm is None else self.max_grad_norm,
    }


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(Options):
  """What an optimizer does, and how its learning rate goes on."""

  learning_rate: float = option(1e-6, 'The highest learning rate.', low=0)
  lr_schedule: Component = option(
    'constant',
    'How the rate goes on after the warm-up: it stays (constant) or decays along a '
    "line or a cosine, as by 'cosine(decay_steps=200, final_fraction=.1)'.",
  )
  warmup_steps: int = option(0, 'Learner steps of a linear warm-up.', low=0)
  name: Component = option(
    'adamw', "The optimizer with its options, as in 'adamw(b2=.98)'."
  )
  max_grad_norm: float | None = option(
    1.0, 'The largest global norm of a gradient; none for no limit.', above=0
  )


def make_optimizer(
  options: OptimizerOptions = OptimizerOptions(), *, num_steps: int | None = None
) -> Optimizer:
  """Creates an optimizer.

  Args:
    options: What it does.
    num_steps: Learner steps of the run. A decay without `decay_steps` ends with it,
      after a warm-up of at most half the steps.

  Returns:
    The optimizer.

  Raises:
    ConfigError: There is no such schedule, optimizer or option.
    ValueError: A decay ends before the warm-up does.
  """
  lr_schedule, warmup_steps = options.lr_schedule, options.warmup_steps
  decay = SCHEDULES.build(lr_schedule)
  if decay.shape != 'constant' and not decay.decay_steps and num_steps is not None:
    decay = decay._replace(decay_steps=max(num_steps, 1))
    warmup_steps = min(warmup_steps, num_steps // 2)
  if decay.shape != 'constant' and decay.decay_steps <= warmup_steps:
    raise ValueError(
      f'lr_schedule {str(lr_schedule)!r} needs decay_steps, the step at which it ends, '
      f'above warmup_steps={warmup_steps}; it is {decay.decay_steps}'
    )
  return Optimizer(
    options.learning_rate,
    decay,
    warmup_steps,
    make_optimizer_spec(options.name),
    options.max_grad_norm,
  )


def init_optimizer_state(
  params: Params, state_spec: OptimizerStateSpec = ADAMW_STATE
) -> PyTree:
  """Returns the optimizer's state before the first update: zeros.

  Args:
    params: The trained parameters.
    state_spec: What fixes the state.
  """
  hparams = OPTIMIZERS[state_spec.name]().hparams
  return make_transformation(state_spec, hparams).init(params)


def optimizer_state_sharding(
  shapes: Params,
  shardings: Params,
  replicated: NamedSharding,
  state_spec: OptimizerStateSpec = ADAMW_STATE,
) -> PyTree:
  """Returns the shardings of an optimizer's state.

  Moments are sharded as their parameters are. A mean along one axis of a parameter is
  sharded as the parameter's other axes are.

  Args:
    shapes: Shapes of the trained parameters.
    shardings: Their shardings.
    replicated: The sharding of everything else, such as counters.
    state_spec: What fixes the state.
  """
  init = functools.partial(init_optimizer_state, state_spec=state_spec)
  state = jax.eval_shape(init, shapes)

  def shard(path: KeyPath, x: PyTree) -> PyTree:
    if not same_structure(x, shapes):
      return replicated
    field = getattr(path[-1], 'name', '')
    leaf_sharding = functools.partial(_moment_sharding, field, replicated)
    return jax.tree.map(leaf_sharding, x, shapes, shardings)

  return jax.tree_util.tree_map_with_path(
    shard, state, is_leaf=lambda x: same_structure(x, shapes)
  )


def _moment_sharding(
  field: str,
  replicated: NamedSharding,
  x: jax.ShapeDtypeStruct,
  param: jax.ShapeDtypeStruct,
  sharding: NamedSharding,
) -> NamedSharding:
  """Returns the sharding of `x`, the part of a state's `field` for `param`."""
  if x.shape == param.shape:
    return sharding
  if field not in ('v_row', 'v_col') or x.shape == (1,):  # [1] stands for nothing
    return replicated
  col, row = np.argsort(param.shape)[-2:]  # the axes that optax takes means along
  reduced_axis = row if field == 'v_row' else col
  spec = (*sharding.spec, *(None,) * (len(param.shape) - len(sharding.spec)))
  return NamedSharding(
    sharding.mesh, P(*spec[:reduced_axis], *spec[reduced_axis + 1 :])
  )


def same_structure(x: PyTree, params: Params) -> bool:
  """Returns whether `x` is a tree of the same structure as `params`."""
  return jax.tree.structure(x) == jax.tree.structure(params)


def apply_gradients(
  params: Params,
  state: PyTree,
  grads: Params,
  hparams: HParams,
  state_spec: OptimizerStateSpec = ADAMW_STATE,
) -> tuple[Params, PyTree, dict[str, Array]]:
  """Applies one optimizer update.

  Args:
    params: The trained parameters.
    state: The optimizer's state.
    grads: Gradients of `params`.
    hparams: Those of `Optimizer.hparams`, and 'seed' for stochastic rounding; they may
      be traced.
    state_spec: What fixes the state.

  Returns:
    New parameters, new state, and the norms of gradients and parameters before it.
  """
  norm = optax.tree.norm(grads)
  limit = hparams['max_grad_norm']
  scale = jnp.where(norm > limit, limit / norm, 1.0)
  grads = jax.tree.map(lambda g: g * scale, grads)
  updates, state = make_transformation(state_spec, hparams).update(grads, state, params)
  metrics = {'grad_norm': norm, 'param_norm': optax.tree.norm(params)}
  rate = hparams['learning_rate']
  return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, metrics


def make_transformation(
  state_spec: OptimizerStateSpec, hparams: HParams
) -> optax.GradientTransformation:
  """Returns the optax transformation of an update, without clipping and learning rate.

  Args:
    state_spec: What fixes the state.
    hparams: The optimizer's traced options, and 'seed' for stochastic rounding; they
      may be traced.
  """
  options = dict(state_spec.options)
  if state_spec.name == 'adamw':
    scale = optax.scale_by_adam(hparams['b1'], hparams['b2'], hparams['eps'])
  elif state_spec.name == 'lion':
    scale = optax.scale_by_lion(hparams['b1'], hparams['b2'])
  elif state_spec.name == 'muon':
    from jaxrl.training import muon_and_adam  # other optimizers start without it

    scale = muon_and_adam.scale_by_muon_and_adam(hparams, options['ns_steps'])
  elif state_spec.name == 'adafactor':
    scale = optax.chain(
      optax.scale_by_factored_rms(
        decay_rate=hparams['decay_rate'],
        min_dim_size_to_factor=options['min_size'],
        epsilon=hparams['eps'],
      ),
      optax.stateless(functools.partial(_clip_by_layer_rms, hparams['clip_threshold'])),
    )
  else:
    scale = optax.identity()
  if options.get('state_dtype') == 'bfloat16':
    scale = _keep_in_bfloat16(scale, hparams.get('seed', 0))
  return optax.chain(
    scale, optax.add_decayed_weights(hparams['weight_decay'], mask=_decay_mask)
  )


def _decay_mask(params: Params) -> Params:
  """Returns a mask, True for kernels and tables, False for scales and biases."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key in DECAYED_PARAMS, params
  )


def _clip_by_layer_rms(threshold: Array, updates: Params, params: Params) -> Params:
  """Scales each layer's array to a root mean square of at most `threshold`."""
  del params

  def clip(path: KeyPath, x: Array) -> Array:
    axes = tuple(range(path[0].key == 'layers', x.ndim))
    rms = jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
    return x / jnp.maximum(1.0, rms / threshold)

  return jax.tree_util.tree_map_with_path(clip, updates)


def _keep_in_bfloat16(
  inner: optax.GradientTransformation, seed: Array | int
) -> optax.GradientTransformation:
  """Wraps `inner` to keep floating-point state in bfloat16 between updates."""

  def is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)

  def init(params: Params) -> PyTree:
    return jax.tree.map(
      lambda x: x.astype(jnp.bfloat16) if is_float(x) else x, inner.init(params)
    )

  def update(
    updates: Params, state: PyTree, params: Params | None = None
  ) -> tuple[Params, PyTree]:
    state = jax.tree.map(lambda x: x.astype(jnp.float32) if is_float(x) else x, state)
    updates, state = inner.update(updates, state, params)
    count: Any = state.count  # pyright: ignore
    key = jax.random.fold_in(jax.random.key(seed), count)
    leaves, treedef = jax.tree.flatten(state)
    leaves = [
      _round_stochastically(x, jax.random.fold_in(key, i)) if is_float(x) else x
      for i, x in enumerate(leaves)
    ]
    return updates, jax.tree.unflatten(treedef, leaves)

  return optax.GradientTransformation(init, update)


def _round_stochastically(x: Array, key: Array) -> Array:
  """Rounds float32 to bfloat16, up or down at random, so that the mean is `x`."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  high = ((bits + noise) >> 16).astype(jnp.uint16)
  return jax.lax.bitcast_convert_type(high, jnp.bfloat16)
