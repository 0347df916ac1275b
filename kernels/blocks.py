"""An axis taken some elements at a time, where their number may not divide it."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar('T')


class Block(NamedTuple):
  """`size` elements from `start` on. Those before `first` are of the block before, too:
  the last block ends where the axis does. An axis is 0 or positive. Nothing here is to
  be differentiated.
  """

  start: jax.Array
  first: jax.Array
  size: int

  def take(self, x: jax.Array, axis: int) -> jax.Array:
    cut = jax.lax.dynamic_slice_in_dim
    return _moved(lambda x: cut(x, self.start, self.size, axis), x)

  def put(self, into: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """`into`, with x where `take` takes from."""
    put = jax.lax.dynamic_update_slice_in_dim
    return _moved(lambda into, x: put(into, x, self.start, axis), into, x)

  def add(self, into: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """`into`, with x added where `take` takes from, but for what was added before."""
    return self.put(into, self.take(into, axis) + self.new(x, axis), axis)

  def new(self, x: jax.Array, axis: int) -> jax.Array:
    """x, as `take` gives it, with zeros for what is of the block before, too."""
    new = self.start + jnp.arange(self.size) >= self.first
    return jnp.where(new.reshape(-1, *(1,) * (x.ndim - axis - 1)), x, 0)


def _moved(move: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
  """move(*arrays), of one type, whose elements it leaves as they are.

  XLA for CPU has no narrow floats, and would widen all of an array to cut from it or to
  put into it.
  """
  dtype, as_type = arrays[0].dtype, jax.lax.bitcast_convert_type
  if dtype not in (jnp.bfloat16, jnp.float16):
    return move(*arrays)

  def by_bits(*arrays: jax.Array) -> jax.Array:
    return as_type(move(*(as_type(x, jnp.uint16) for x in arrays)), dtype)

  return jax.lax.platform_dependent(*arrays, cpu=by_bits, default=move)


def each_block(
  step: Callable[[T, Block], T], carry: T, length: int, size: int, multiple: int = 1
) -> T:
  """carry, after step(carry, block) of all blocks of an axis of at least 1 element.

  Blocks are as even as can be: of at most `size` elements, rounded up to a multiple of
  `multiple` where there are several, so that little is done twice.
  """
  count = -(-length // min(length, size))
  if count == 1:
    return step(carry, Block(jnp.int32(0), jnp.int32(0), length))
  even = -(-length // count)
  size = min(length, -(-even // multiple) * multiple)

  def body(carry, index):
    first = index * size
    return step(carry, Block(jnp.minimum(first, length - size), first, size)), None

  return jax.lax.scan(body, carry, jnp.arange(-(-length // size)))[0]
