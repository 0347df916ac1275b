"""Sparse deltas hold the changes between two arrays, and are applied on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Delta(NamedTuple):
  """The changes between two arrays of n elements.

  Attributes:
    indices: Flat indices of the changed elements, `[C]` int32, ascending. Unused slots
      at the end hold n.
    values: New values of these elements, `[C]`. Unused slots hold 0.
    count: Number of all changes, an int32 scalar. If it exceeds C, the delta is
      incomplete, and the whole array must be sent.
  """

  indices: jax.Array
  values: jax.Array
  count: jax.Array


def extract(old: jax.Array, new: jax.Array, *, capacity: int) -> Delta:
  """Finds the first changes between two arrays.

  The comparison is bitwise: −0 differs from 0, and a NaN equals a NaN with the same
  bits.

  Args:
    old: Array before the change.
    new: Array after the change, of the same shape and dtype, with fewer than 2³¹
      elements.
    capacity: Maximum number C of changes that the delta can hold.

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
    old: Array before the change.
    new: Array after the change, of the same shape and dtype, with fewer than 2³¹
      elements.
    capacity: Maximum number C of changes that the delta can hold.

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
  """Applies a complete delta to an array, in place if `old` is donated.

  Args:
    old: Array before the change.
    delta: Complete delta from `extract`.

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
  """Returns the mask `[n]` of elements whose bits differ."""
  if (old.shape, old.dtype) != (new.shape, new.dtype):
    raise ValueError(
      f'old is {old.dtype}{list(old.shape)} and new {new.dtype}{list(new.shape)}: a '
      'delta is between arrays of one shape and dtype'
    )
  word = jnp.dtype(f'uint{8 * old.dtype.itemsize}')
  old, new = (jax.lax.bitcast_convert_type(x.reshape(-1), word) for x in (old, new))
  return old != new
