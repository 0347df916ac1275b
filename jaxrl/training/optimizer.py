"""AdamW with global-norm clipping and a schedule; its numbers are traced, not baked."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl.signature import call
from jaxrl.types import Array, Params


class Fall(NamedTuple):
  """How a learning rate falls: until learner step `decay_steps`, to which part."""

  shape: str
  decay_steps: int = 0
  final_fraction: float = 0.0


def _constant() -> Fall:
  return Fall('constant')


def _linear(*, decay_steps: int = 0, final_fraction: float = 0.0) -> Fall:
  return Fall('linear', decay_steps, final_fraction)


def _cosine(*, decay_steps: int = 0, final_fraction: float = 0.0) -> Fall:
  return Fall('cosine', decay_steps, final_fraction)


SCHEDULES = {'constant': _constant, 'linear': _linear, 'cosine': _cosine}


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """Settings of AdamW; see `adamw`, which checks them."""

  learning_rate: float
  schedule: Fall
  warmup_steps: int
  b1: float
  b2: float
  eps: float
  weight_decay: float
  clip_norm: float | None

  def learning_rate_at(self, step: int) -> float:
    """The learning rate of learner step `step`, counted from 0.

    Plain arithmetic on the host: nothing here is compiled. Equal to optax's schedules.
    """
    if step < self.warmup_steps:
      return self.learning_rate * (step + 1) / self.warmup_steps
    shape, end, final = self.schedule
    if shape == 'constant':
      return self.learning_rate
    done = min((step - self.warmup_steps) / (end - self.warmup_steps), 1.0)
    left = 1 - done if shape == 'linear' else (1 + math.cos(math.pi * done)) / 2
    return self.learning_rate * (final + (1 - final) * left)

  def numbers(self, step: int) -> dict[str, float]:
    """What `update` needs at `step`, as one level of plain floats."""
    return {
      'learning_rate': self.learning_rate_at(step),
      'b1': self.b1,
      'b2': self.b2,
      'eps': self.eps,
      'weight_decay': self.weight_decay,
      'clip_norm': math.inf if self.clip_norm is None else self.clip_norm,
    }


def adamw(
  *,
  learning_rate: float = 1e-6,
  schedule: str = 'constant',
  warmup_steps: int = 0,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  clip_norm: float | None = 1.0,
  num_steps: int | None = None,
) -> Optimizer:
  """AdamW (arXiv 1711.05101), decay on matrices alone, moments in float32.

  schedule: a call string. After a linear warm-up over `warmup_steps` learner steps, the
  rate stays (`constant`) or falls, along a line or a cosine, to a part of itself:
  `cosine(decay_steps=200, final_fraction=.1)`. num_steps: the run's, at which a fall
  that names no end ends, after a warm-up of at most half of them. clip_norm: the
  gradient's largest global norm; None for no limit. Raises ConfigError, ValueError.
  """
  fall = call(schedule, SCHEDULES, 'schedule', 'optimizer.schedule')
  if fall.shape != 'constant' and not fall.decay_steps and num_steps is not None:
    fall = fall._replace(decay_steps=max(num_steps, 1))
    warmup_steps = min(warmup_steps, num_steps // 2)
  if fall.shape != 'constant' and fall.decay_steps <= warmup_steps:
    raise ValueError(
      f'schedule {schedule!r} needs decay_steps, the step at which it ends, above '
      f'warmup_steps={warmup_steps}; it is {fall.decay_steps}'
    )
  if clip_norm is not None and clip_norm <= 0:
    raise ValueError(f'clip_norm={clip_norm} must be positive, or None for no limit')
  return Optimizer(
    learning_rate,
    fall,
    warmup_steps,
    b1,
    b2,
    eps,
    weight_decay,
    clip_norm,
  )


def transformation(numbers: dict[str, Any]) -> optax.GradientTransformation:
  """The part of the update that has state; `numbers` may be traced."""
  return optax.chain(
    optax.scale_by_adam(numbers['b1'], numbers['b2'], numbers['eps']),
    optax.add_decayed_weights(numbers['weight_decay'], mask=_matrices),
  )


def _matrices(params: Params) -> Params:
  """True at kernels and tables, False at scales and biases."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key in ('kernel', 'table'), params
  )


def init(params: Params) -> Any:
  """Zero moments of `params`."""
  return transformation(dict.fromkeys(('b1', 'b2', 'eps', 'weight_decay'), 0.0)).init(
    params
  )


def state_sharding(shapes: Params, shardings: Params, rest: Any) -> Any:
  """Layouts of `init`'s result: moments like their parameters, counters as `rest`."""
  state = jax.eval_shape(init, shapes)
  treedef = jax.tree.structure(shapes)

  def is_params(x: Any) -> bool:
    return jax.tree.structure(x) == treedef

  return jax.tree.map(
    lambda x: shardings if is_params(x) else rest, state, is_leaf=is_params
  )


def update(
  params: Params, state: Any, gradients: Params, numbers: dict[str, Any]
) -> tuple[Params, Any, dict[str, Array]]:
  """One step: returns new parameters, new state, and norms before the step."""
  norm = optax.tree.norm(gradients)
  limit = numbers['clip_norm']
  scale = jnp.where(norm > limit, limit / norm, 1.0)
  gradients = jax.tree.map(lambda g: g * scale, gradients)
  updates, state = transformation(numbers).update(gradients, state, params)
  metrics = {'grad_norm': norm, 'param_norm': optax.tree.norm(params)}
  rate = numbers['learning_rate']
  return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, metrics
