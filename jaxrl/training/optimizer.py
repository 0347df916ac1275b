"""AdamW with global-norm clipping and a schedule; its numbers are traced, not baked."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxrl.types import Array, Params

SCHEDULES = ('constant', 'linear', 'cosine')


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """Settings of AdamW; see `adamw`, which checks them."""

  learning_rate: float
  schedule: str
  warmup_steps: int
  decay_steps: int
  final_fraction: float
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
    if self.schedule == 'constant':
      return self.learning_rate
    done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
    done = min(done, 1.0)
    left = 1 - done if self.schedule == 'linear' else (1 + math.cos(math.pi * done)) / 2
    final = self.final_fraction
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
  schedule: Literal['constant', 'linear', 'cosine'] = 'constant',
  warmup_steps: int = 0,
  decay_steps: int = 0,
  final_fraction: float = 0.0,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  clip_norm: float | None = 1.0,
) -> Optimizer:
  """AdamW (arXiv 1711.05101), decay on matrices alone, moments in float32.

  schedule: after a linear warm-up over `warmup_steps` learner steps, the rate stays
  or falls, along a line or a cosine, to `final_fraction` of itself at step
  `decay_steps`. clip_norm: the gradient's largest global norm; None for no limit.
  """
  if schedule not in SCHEDULES:
    raise ValueError(f'schedule {schedule!r} is not one of {", ".join(SCHEDULES)}')
  if schedule != 'constant' and decay_steps <= warmup_steps:
    raise ValueError(
      f'schedule {schedule!r} needs decay_steps, the step at which it ends, above '
      f'warmup_steps={warmup_steps}; it is {decay_steps}'
    )
  if clip_norm is not None and clip_norm <= 0:
    raise ValueError(f'clip_norm={clip_norm} must be positive, or None for no limit')
  return Optimizer(
    learning_rate,
    schedule,
    warmup_steps,
    decay_steps,
    final_fraction,
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
