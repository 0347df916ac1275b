"""Which rows go into which minibatch and micro-batch; atoms stay whole."""

from collections.abc import Sequence

import numpy as np

from jaxrl.types import Algorithm, Batch


def atom_size(algorithm: Algorithm) -> int:
  """Rows in an atom of this algorithm, as a rule."""
  return {'row': 1, 'pair': 2, 'group': algorithm.group_size}[algorithm.atom]


def micro_rows(num_rows: int, bins: int, size: int, multiple: int) -> int:
  """Rows of each of `bins` micro-batches that hold `num_rows` rows between them.

  size: rows of an atom. multiple: what the rows must divide into, for the mesh.
  """
  atoms = -(-num_rows // size)
  return -(-(-(-atoms // bins) * size) // multiple) * multiple


def atoms(algorithm: Algorithm, batch: Batch) -> list[np.ndarray]:
  """The row numbers of each atom, padding rows left out, in the batch's order."""
  rows = np.flatnonzero(batch.task_ids >= 0)
  if algorithm.atom == 'row':
    return [rows[i : i + 1] for i in range(len(rows))]
  ids = batch.task_ids if algorithm.atom == 'group' else batch.pair_ids
  if ids is None:
    raise ValueError("atom='pair' needs pair_ids, which this batch does not have")
  ids = np.asarray(ids)[rows]
  first = np.unique(ids, return_index=True)[1]
  return [rows[ids == ids[i]] for i in np.sort(first)]


def deal(
  atoms: Sequence[np.ndarray], minibatches: int, micro_batches: int, capacity: int
) -> np.ndarray | None:
  """Deals atoms, in order, to the emptiest micro-batch each; −1 where none came.

  Returns `[minibatches, micro_batches, capacity]` int32 row numbers, or None when an
  atom fits nowhere. Minibatches fill evenly.
  """
  bins: list[list[int]] = [[] for _ in range(minibatches * micro_batches)]
  fill = np.zeros((minibatches, micro_batches), np.int64)
  for atom in atoms:
    room = fill.min(axis=1) + len(atom) <= capacity
    if not room.any():
      return None
    totals = np.where(room, fill.sum(axis=1), np.iinfo(np.int64).max)
    mini = int(totals.argmin())
    micro = int(fill[mini].argmin())
    bins[mini * micro_batches + micro].extend(int(row) for row in atom)
    fill[mini, micro] += len(atom)
  index = np.full((len(bins), capacity), -1, np.int32)
  for i, chosen in enumerate(bins):
    index[i, : len(chosen)] = chosen
  return index.reshape(minibatches, micro_batches, capacity)


def shuffled(
  atoms: Sequence[np.ndarray], seed: int, step: int, epoch: int
) -> list[np.ndarray]:
  """The atoms in an order that depends on the three numbers alone."""
  order = np.random.default_rng([seed, step, epoch]).permutation(len(atoms))
  return [atoms[i] for i in order]
