"""Sparse deltas: the changes between two arrays, found and applied on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Delta(NamedTuple):
  """The changes between two arrays.

  Attributes:
    indices: `[C]` int32, ascending; n, the array's size, behind the last change.
    values: `[C]`, the new elements; 0 behind the last.
    count: An int32 scalar, all changes that there are. Where it exceeds C the delta is
      incomplete: send the array.
  """

  indices: jax.Array
  values: jax.Array
  count: jax.Array


def extract(old: jax.Array, new: jax.Array, *, capacity: int) -> Delta:
  """Finds the first changes between two arrays.

  Bits are compared: −0 differs from 0, and a NaN does not differ from itself.

  Args:
    old: The array before.
    new: The array after, of the same shape and dtype; fewer than 2³¹ elements.
    capacity: The number C of changes that there is room for.

  Returns:
    The delta.

  Raises:
    ValueError: If the arrays differ in shape or dtype.
  """
  differ = _differ(old, new)
  size = differ.size
  indices = jnp.nonzero(differ, size=capacity, fill_value=size)[0].astype(jnp.int32)
  values = new.reshape(-1).at[indices].get(mode='fill', fill_value=0)
  return Delta(indices, values, differ.sum(dtype=jnp.int32))


def reference(old: jax.Array, new: jax.Array, *, capacity: int) -> Delta:
  """Computes `extract` by sorting.

  Args:
    old: The array before.
    new: The array after, of the same shape and dtype; fewer than 2³¹ elements.
    capacity: The number C of changes that there is room for.

  Returns:
    The delta.
  """
  differ = _differ(old, new)
  size = differ.size
  places = jnp.sort(jnp.where(differ, jnp.arange(size, dtype=jnp.int32), size))
  places = jnp.pad(places, (0, capacity), constant_values=size)[:capacity]
  padded = jnp.append(new.reshape(-1), jnp.zeros((), new.dtype))
  return Delta(places, padded[places], differ.sum(dtype=jnp.int32))


def scatter(old: jax.Array, delta: Delta) -> jax.Array:
  """Applies a complete delta; donate `old` to do it in place.

  Args:
    old: The array before.
    delta: From `extract`.

  Returns:
    The new array.
  """
  flat = (
    old.reshape(-1)
    .at[delta.indices]
    .set(delta.values, mode='drop', indices_are_sorted=True)
  )
  return flat.reshape(old.shape)


def _differ(old: jax.Array, new: jax.Array) -> jax.Array:
  """Bool `[n]`."""
  if (old.shape, old.dtype) != (new.shape, new.dtype):
    raise ValueError(
      f'old is {old.dtype}{list(old.shape)} and new {new.dtype}{list(new.shape)}: a '
      'delta is between arrays of one shape and dtype'
    )
  word = jnp.dtype(f'uint{8 * old.dtype.itemsize}')
  old, new = (jax.lax.bitcast_convert_type(x.reshape(-1), word) for x in (old, new))
  return old != new
