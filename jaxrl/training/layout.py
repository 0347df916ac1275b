"""How groups become one batch of a shape that is compiled, and which rows go where."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl.data.collate import collate
from jaxrl.functional.losses import check_pairs
from jaxrl.training import minibatches as dealing
from jaxrl.training.programs import Shape
from jaxrl.types import Algorithm, Batch, Group


@dataclasses.dataclass(frozen=True)
class Layout:
  """num_rows: of a usual batch. multiple: what rows of a micro-batch divide into.

  buckets: lengths that rows are padded to. minibatches: updates a pass over a batch;
  micro_batches: parts of each; epochs: passes. seed: of the minibatches' order.
  """

  algorithm: Algorithm
  num_rows: int
  multiple: int
  buckets: tuple[int, ...]
  minibatches: int
  micro_batches: int
  epochs: int
  seed: int

  @property
  def _bins(self) -> int:
    return self.minibatches * self.micro_batches

  def shape(self, length: int = 0, num_rows: int = 0) -> Shape:
    """Of a batch with so many rows, in multiples of the usual number.

    Step rows differ in number from batch to batch; few shapes mean few compilations.
    """
    wanted = -(-max(num_rows, 1) // self.num_rows) * self.num_rows
    size = dealing.atom_size(self.algorithm)
    rows = dealing.micro_rows(wanted, self._bins, size, self.multiple)
    return Shape(rows * self._bins, length, rows)

  def shapes(self) -> list[Shape]:
    """Those of usual batches."""
    return [self.shape(length) for length in self.buckets]

  def lay_out(
    self, groups: Sequence[Group], step: int
  ) -> tuple[Batch, Shape, list[Any]]:
    """The batch on the host, its shape, and the rows of each update.

    Raises ValueError for rows longer than every bucket, and for groups that are no
    pairs where pairs are asked for.
    """
    shape = self.shape()
    count = sum(len(group) for group in groups)
    if count > shape.rows:
      shape = self.shape(num_rows=count)
    while True:
      batch = self._filled(self._pack(groups, shape))
      indices = self._deal(batch, shape.micro_rows, step)
      if indices is not None:
        break
      rows = shape.micro_rows + self.multiple
      shape = Shape(rows * self._bins, 0, rows)
    return batch, dataclasses.replace(shape, length=batch.tokens.shape[1]), indices

  def put(self, mesh: Mesh, shape: Shape, index: Any) -> Any:
    """The rows of an update as its program takes them."""
    del mesh, shape
    return index

  def whole(
    self, mesh: Mesh, batch: Batch, shape: Shape, indices: list[Any]
  ) -> tuple[Any, ...]:
    """What the program that scores a batch takes beside it."""
    del mesh, batch, shape, indices
    return ()

  def metrics(
    self, batch: Batch, shape: Shape, indices: Sequence[Any]
  ) -> dict[str, float]:
    """What is told of how a batch was laid out."""
    del batch, shape, indices
    return {}

  def _pack(self, groups: Sequence[Group], shape: Shape) -> Batch:
    buckets = self.buckets if shape.pack is None else (max(self.buckets),)
    return collate(groups, buckets, shape.rows)

  def _filled(self, batch: Batch) -> Batch:
    """With the columns that only some batches have, so that all compile alike."""
    rows = len(batch.tokens)
    usual = {
      'expert_mask': np.zeros(rows, bool),
      'greedy_mask': np.zeros(rows, bool),
      'loss_weights': np.ones(rows, np.float32),
    }
    missing = {k: v for k, v in usual.items() if getattr(batch, k) is None}
    if self.algorithm.atom == 'pair':
      missing['pair_ids'] = batch.task_ids
      check_pairs(batch.task_ids, batch.rewards)
    return batch.replace(**missing)

  def _deal(self, batch: Batch, capacity: int, step: int) -> list[np.ndarray] | None:
    """[micro_batches, capacity] row numbers of each update, if there is room."""
    atoms = dealing.atoms(self.algorithm, batch)
    indices = []
    for epoch in range(self.epochs):
      order = atoms
      if self.minibatches > 1:  # one minibatch holds every row in any order
        order = dealing.shuffled(atoms, self.seed, step, epoch)
      dealt = dealing.deal(order, self.minibatches, self.micro_batches, capacity)
      if dealt is None:
        return None
      indices += [index for index in dealt if (index >= 0).any()]
    return indices
