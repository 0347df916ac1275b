"""One update: clipped by global norm, scaled by its kind, at a schedule's rate."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.signature import call
from jaxrl.training import moments
from jaxrl.training.moments import PLAIN, Kind, Memory
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
  """Settings; see `make_optimizer`, which checks them."""

  learning_rate: float
  schedule: Fall
  warmup_steps: int
  kind: Kind
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
      **self.kind.numbers,
      'clip_norm': math.inf if self.clip_norm is None else self.clip_norm,
    }


def make_optimizer(
  *,
  learning_rate: float = 1e-6,
  schedule: str = 'constant',
  warmup_steps: int = 0,
  kind: str = 'adamw',
  clip_norm: float | None = 1.0,
  num_steps: int | None = None,
) -> Optimizer:
  """The optimizer that a call string `kind` names (see `moments`), at a schedule.

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
  return Optimizer(learning_rate, fall, warmup_steps, moments.parse(kind), clip_norm)


def init(params: Params, memory: Memory = PLAIN) -> Any:
  """The state before the first update: zeros."""
  numbers = moments.KINDS[memory.kind]().numbers
  return moments.transformation(memory, numbers).init(params)


def state_sharding(
  shapes: Params, shardings: Params, rest: Any, memory: Memory = PLAIN
) -> Any:
  """Layouts of `init`'s result: moments like their parameters, counters as `rest`.

  What is a mean along one axis of a parameter lies along the axes that are left.
  """
  state = jax.eval_shape(functools.partial(init, memory=memory), shapes)

  def place(path: Any, x: Any) -> Any:
    if not like(x, shapes):
      return rest
    field = getattr(path[-1], 'name', '')
    lay = functools.partial(_layout, field, rest)
    return jax.tree.map(lay, x, shapes, shardings)

  return jax.tree_util.tree_map_with_path(
    place, state, is_leaf=lambda x: like(x, shapes)
  )


def like(x: Any, params: Params) -> bool:
  """Whether `x` is a tree of the structure that `params` have."""
  return jax.tree.structure(x) == jax.tree.structure(params)


def _layout(field: str, rest: Any, x: Any, param: Any, sharding: NamedSharding) -> Any:
  """Of `x`, the part of a state's `field` that belongs to `param`."""
  if x.shape == param.shape:
    return sharding
  if field not in ('v_row', 'v_col') or x.shape == (1,):  # what is not kept is [1]
    return rest
  col, row = np.argsort(param.shape)[-2:]  # the axes that optax takes means along
  gone = row if field == 'v_row' else col
  spec = (*sharding.spec, *(None,) * (len(param.shape) - len(sharding.spec)))
  return NamedSharding(sharding.mesh, P(*spec[:gone], *spec[gone + 1 :]))


def update(
  params: Params,
  state: Any,
  gradients: Params,
  numbers: dict[str, Any],
  memory: Memory = PLAIN,
) -> tuple[Params, Any, dict[str, Array]]:
  """One step: returns new parameters, new state, and norms before the step.

  numbers: those of `Optimizer.numbers`, and 'seed' where a kind needs one.
  """
  norm = optax.tree.norm(gradients)
  limit = numbers['clip_norm']
  scale = jnp.where(norm > limit, limit / norm, 1.0)
  gradients = jax.tree.map(lambda g: g * scale, gradients)
  own = moments.transformation(memory, numbers)
  updates, state = own.update(gradients, state, params)
  metrics = {'grad_norm': norm, 'param_norm': optax.tree.norm(params)}
  rate = numbers['learning_rate']
  return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, metrics
