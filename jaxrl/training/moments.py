"""Kinds of optimizer: what each keeps of past gradients, and in what precision.

A kind is named by a call string, `adamw(b2=.98, moments='bfloat16')`. Its numbers are
traced, so that a run may change them; what fixes the state's arrays is static.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl.signature import ConfigError, call, defaults
from jaxrl.types import Array, Params

Moments = Literal['float32', 'bfloat16']
MATRICES = ('kernel', 'table', 'lora_a', 'lora_b')  # which alone decay


class Memory(NamedTuple):
  """What fixes an optimizer's state, hashable: the kind's name, its static options."""

  kind: str
  options: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind with its options. numbers: those that are traced, by name."""

  memory: Memory
  numbers: dict[str, float]

  def fresh(self) -> 'Kind':
    """The same state with the numbers that the kind has by default."""
    own = defaults(KINDS[self.memory.kind])
    numbers = {name: own[name] for name in self.numbers}
    return dataclasses.replace(self, numbers=numbers)


def _kind(name: str, numbers: dict[str, float], **static: Any) -> Kind:
  for option, value in numbers.items():
    share = option in ('b1', 'b2')
    if value < 0 or (share and value >= 1):
      bounds = 'in [0, 1)' if share else 'at least 0'
      raise ConfigError(
        f'--config.optimizer.kind: {option}={value} of {name} must be {bounds}'
      )
  numbers = {option: float(value) for option, value in numbers.items()}
  return Kind(Memory(name, tuple(sorted(static.items()))), numbers)


def adamw(
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  moments: Moments = 'float32',
) -> Kind:
  """AdamW (arXiv 1711.05101), decay on matrices alone.

  moments: 'bfloat16' halves the state. It is rounded up or down by chance, so that on
  average it is right: at b2=.999 a step changes the second moment by less than
  bfloat16 can tell, and rounding to the nearest would leave it where it is for ever.
  """
  numbers = {'b1': b1, 'b2': b2, 'eps': eps, 'weight_decay': weight_decay}
  return _kind('adamw', numbers, moments=moments)


PLAIN = adamw().memory


def adafactor(
  *,
  decay_rate: float = 0.8,
  clip_threshold: float = 1.0,
  eps: float = 1e-30,
  weight_decay: float = 0.0,
  min_size: int = 128,
) -> Kind:
  """Adafactor (arXiv 1804.04235): row and column means in the second moment's place.

  No first moment, no rate of its own: `learning_rate` is as for AdamW. decay_rate: the
  second moment forgets by 1 − t^−decay_rate. clip_threshold: the largest root mean
  square of an update of one layer's array. min_size: arrays with fewer than two axes
  of at least so many elements keep the whole second moment.
  """
  numbers = {
    'decay_rate': decay_rate,
    'clip_threshold': clip_threshold,
    'eps': eps,
    'weight_decay': weight_decay,
  }
  return _kind('adafactor', numbers, min_size=min_size)


def lion(
  *,
  b1: float = 0.9,
  b2: float = 0.99,
  weight_decay: float = 0.0,
  moments: Moments = 'float32',
) -> Kind:
  """Lion (arXiv 2302.06675): the sign of one moment. Rates a tenth of AdamW's.

  moments: as for `adamw`.
  """
  numbers = {'b1': b1, 'b2': b2, 'weight_decay': weight_decay}
  return _kind('lion', numbers, moments=moments)


def sgd(*, weight_decay: float = 0.0) -> Kind:
  """The gradient itself; no state."""
  return _kind('sgd', {'weight_decay': weight_decay})


KINDS: dict[str, Callable[..., Kind]] = {
  'adamw': adamw,
  'adafactor': adafactor,
  'lion': lion,
  'sgd': sgd,
}


def parse(text: str) -> Kind:
  """The kind that a call string names. Raises ConfigError."""
  return call(text, KINDS, 'kind of optimizer', 'optimizer.kind')


def transformation(
  memory: Memory, numbers: dict[str, Any]
) -> optax.GradientTransformation:
  """The part of an update that has state; `numbers` may be traced.

  numbers: those of the kind, and 'seed' where moments are rounded by chance.
  """
  options = dict(memory.options)
  if memory.kind == 'adamw':
    scaled = optax.scale_by_adam(numbers['b1'], numbers['b2'], numbers['eps'])
  elif memory.kind == 'lion':
    scaled = optax.scale_by_lion(numbers['b1'], numbers['b2'])
  elif memory.kind == 'adafactor':
    scaled = optax.chain(
      optax.scale_by_factored_rms(
        decay_rate=numbers['decay_rate'],
        min_dim_size_to_factor=options['min_size'],
        epsilon=numbers['eps'],
      ),
      optax.stateless(functools.partial(_clipped, numbers['clip_threshold'])),
    )
  else:
    scaled = optax.identity()
  if options.get('moments') == 'bfloat16':
    scaled = _narrow(scaled, numbers.get('seed', 0))
  return optax.chain(
    scaled, optax.add_decayed_weights(numbers['weight_decay'], mask=_matrices)
  )


def _matrices(params: Params) -> Params:
  """True at kernels and tables, False at scales and biases."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key in MATRICES, params
  )


def _clipped(threshold: Array, updates: Params, params: Params) -> Params:
  """Each layer's array shrunk to a root mean square of at most `threshold`."""
  del params

  def one(path: Any, x: Array) -> Array:
    axes = tuple(range(path[0].key == 'layers', x.ndim))
    size = jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
    return x / jnp.maximum(1.0, size / threshold)

  return jax.tree_util.tree_map_with_path(one, updates)


def _narrow(
  inner: optax.GradientTransformation, seed: Array | int
) -> optax.GradientTransformation:
  """`inner`, its state's floating-point arrays kept in bfloat16 between updates."""

  def real(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)

  def init(params: Params) -> Any:
    return jax.tree.map(
      lambda x: x.astype(jnp.bfloat16) if real(x) else x, inner.init(params)
    )

  def update(updates: Params, state: Any, params: Params | None = None) -> Any:
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if real(x) else x, state)
    updates, wide = inner.update(updates, wide, params)
    count: Any = wide.count  # pyright: ignore
    key = jax.random.fold_in(jax.random.key(seed), count)
    leaves, treedef = jax.tree.flatten(wide)
    leaves = [
      _rounded(x, jax.random.fold_in(key, i)) if real(x) else x
      for i, x in enumerate(leaves)
    ]
    return updates, jax.tree.unflatten(treedef, leaves)

  return optax.GradientTransformation(init, update)


def _rounded(x: Array, key: Array) -> Array:
  """float32 → bfloat16, up or down by chance: its expectation is `x`."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  high = ((bits + noise) >> 16).astype(jnp.uint16)
  return jax.lax.bitcast_convert_type(high, jnp.bfloat16)
