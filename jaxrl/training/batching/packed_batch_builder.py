"""Packed batch building fills micro-batches by tokens instead of rows.

The batch is the same rectangle `[B, T]` as without packing, but the model runs on
packed rows, whose placement is the `PackingPlan` of each update.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms import requirements
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.batching import first_fit_placement, packing_plan
from jaxrl.training.batching.batch_builder import (
  BatchBuilder,
  BatchShape,
  batch_unit_size,
  batch_units,
  rows_per_micro_batch,
)
from jaxrl.training.batching.first_fit_placement import FirstFitBins, RowLengths
from jaxrl.training.batching.packing_plan import (
  SEQUENCE_CAPACITY_FACTOR,
  Packing,
  PackingPlan,
  PackShape,
)
from jaxrl.types import Batch, Group

# Fine micro-batches have this many times fewer packed rows, which are this many times
# shorter. They are used if they waste fewer slots, by more than this share of them.
FINE_ROWS_DIVISOR = 4
FINE_LENGTH_DIVISOR = 2
FINE_PENALTY = 0.01


@dataclasses.dataclass(frozen=True)
class PackedBatchBuilder(BatchBuilder):
  """A `BatchBuilder` whose micro-batches are filled by tokens.

  Rectangles have the length of the largest bucket, because the model does not run on
  them. The number of rows is the usual one times a power of two: in turn-level training
  it differs from batch to batch. A micro-batch has all the packed rows that
  `packing.tokens` make, or a few that are shorter, which leaves less of the last
  micro-batch empty.

  Attributes:
    packing: The options of packing.
  """

  packing: Packing = dataclasses.field(kw_only=True)

  @functools.cached_property
  def _sizes(self) -> tuple[tuple[int, int], ...]:
    """Returns the packed rows of a device's share of a micro-batch, and their length.

    The usual size first, then the fine one if it differs.
    """
    longest = max(self.buckets)
    unit_size = batch_unit_size(self.algorithm)
    rows, length = packing_plan.usual_packed_rows(
      self.packing, longest, unit_size, self.row_multiple
    )
    # In rows half as long only half of the attention pairs are left, and `sequences`
    # was set to have a rectangle with fewer pairs still.
    fine_length = max(longest, length // FINE_LENGTH_DIVISOR)
    if self.packing.sequences:
      fine_length = length
    usual, fine = (rows, length), (-(-rows // FINE_ROWS_DIVISOR), fine_length)
    return (usual,) if usual == fine else (usual, fine)

  @property
  def _share_prefix(self) -> bool:
    """Returns whether prompts may be shared, which alone rules out some kernels."""
    algorithm = self.algorithm
    one_row_per_group = algorithm.data_format in ('messages', 'text')
    if (
      algorithm.data_format == 'rollout'
      and requirements.row_format(algorithm) == 'trajectory'
    ):
      one_row_per_group = requirements.rows_per_group(algorithm) == 1
    return self.packing.share_prefix and not one_row_per_group

  def batch_shape(
    self, length: int = 0, num_rows: int = 0, *, fine: bool = False
  ) -> BatchShape:
    """Returns the shape of a batch.

    Args:
      length: Ignored: rectangles have the length of the largest bucket.
      num_rows: Rows that the batch must hold; 0 for a usual batch.
      fine: Whether micro-batches are small.
    """
    del length
    padded_rows = self.num_rows
    while padded_rows < num_rows:
      padded_rows *= 2
    size = self._sizes[-1 if fine else 0]
    return self._packed_shape(self._minibatch_rows(padded_rows), size)

  def warmup_shapes(self) -> list[BatchShape]:
    """Returns the shapes of a usual batch, in each size of micro-batches."""
    return [self.batch_shape(fine=fine) for fine in (False, True)[: len(self._sizes)]]

  def build_batch(
    self, groups: Sequence[Group], step: int
  ) -> tuple[Batch, BatchShape, list[PackingPlan]]:
    """Builds the batch of a step.

    Args:
      groups: The trajectories to learn from, by group.
      step: The learner's step, which the order of minibatches depends on.

    Returns:
      The batch as numpy arrays, its shape, and the plan of each update.

    Raises:
      ValueError: A row is longer than every bucket, rows that must stay together fit no
        micro-batch, or a group is not a pair although the algorithm needs pairs.
    """
    shape = self.batch_shape(num_rows=sum(len(group) for group in groups))
    while True:
      batch = self._add_default_fields(self._collate(groups, shape))
      indices = self._assign_minibatches(batch, shape.micro_rows, step)
      if indices is not None:
        break
      shape = self._packed_shape(2 * shape.micro_rows, self._sizes[0])
    shape, bins = self._place_rows(batch, indices, shape.micro_rows)
    assert shape.pack is not None
    num_micro_batches = max(len(filled.num_sequences) for filled in bins)
    max_micro_batches = shape.pack.max_micro_batches
    while max_micro_batches < num_micro_batches:
      max_micro_batches *= 2
    pack = shape.pack._replace(max_micro_batches=max_micro_batches)
    plans = [
      first_fit_placement.make_plan(filled, batch, pack, index.reshape(-1))
      for filled, index in zip(bins, indices, strict=True)
    ]
    shape = dataclasses.replace(shape, pack=pack)
    return batch, self._shape_of(shape, batch), plans

  def device_index(
    self, mesh: Mesh, shape: BatchShape, index: PackingPlan
  ) -> PackingPlan:
    """Returns the plan of an update on the devices."""
    assert shape.pack is not None
    return packing_plan.put_plan(mesh, shape.pack, index)

  def scoring_arguments(
    self, mesh: Mesh, batch: Batch, shape: BatchShape, indices: list[PackingPlan]
  ) -> tuple[PackingPlan]:
    """Returns the plan by which the whole batch is scored before its first update."""
    pack = shape.scoring_pack
    assert pack is not None
    if self.num_minibatches == 1:
      plan = _whole_batch_plan(indices[0])
    else:
      lengths = first_fit_placement.measure_rows(batch, share=self._share_prefix)
      bins = self._fill_bins(batch, lengths, shape, None)
      plan = first_fit_placement.make_plan(bins, batch, pack, None)
    return (packing_plan.put_plan(mesh, pack, plan),)

  def packing_metrics(
    self, batch: Batch, shape: BatchShape, indices: Sequence[PackingPlan]
  ) -> dict[str, float]:
    """Returns metrics of how full packed rows are and what sharing prompts saves.

    tokens/padding_share is the share of computed slots that are empty,
    tokens/shared_share the share of tokens that another row's slots stand for,
    tokens/slots the number of slots in all updates of the batch, and
    tokens/micro_batches the number of micro-batches of an update.
    """
    assert shape.pack is not None
    used = sum(int((plan.origin >= 0).sum()) for plan in indices)
    num_micro_batches = sum(int(plan.num_micro_batches) for plan in indices)
    slots = num_micro_batches * shape.pack.rows * shape.pack.length
    lengths = (batch.segment_ids > 0).sum(axis=1)
    tokens = sum(int(lengths[plan.index[plan.index >= 0]].sum()) for plan in indices)
    return {
      'tokens/padding_share': 1.0 - used / slots,
      'tokens/shared_share': 1.0 - used / tokens,
      'tokens/slots': float(slots),
      'tokens/micro_batches': num_micro_batches / len(indices),
    }

  def _place_rows(
    self, batch: Batch, indices: list[np.ndarray], minibatch_rows: int
  ) -> tuple[BatchShape, list[FirstFitBins]]:
    """Places each minibatch's rows in the size of micro-batches that costs less."""
    lengths = first_fit_placement.measure_rows(batch, share=self._share_prefix)
    candidates = []
    only_usual = self.packing.num_parallel > 1 and self._is_oversized(minibatch_rows)
    for size in self._sizes[: 1 if only_usual else None]:
      shape = self._packed_shape(minibatch_rows, size)
      try:
        bins = [self._fill_bins(batch, lengths, shape, index) for index in indices]
      except ValueError:
        if not candidates:  # the usual micro-batches are the larger ones
          raise
      else:
        candidates.append((shape, bins))
    return min(candidates, key=lambda candidate: self._cost(*candidate))

  def _minibatch_rows(self, batch_rows: int) -> int:
    """Returns the rows of each minibatch of a batch with `batch_rows` rows."""
    unit_size = batch_unit_size(self.algorithm)
    return rows_per_micro_batch(
      batch_rows, self.num_minibatches, unit_size, self.row_multiple
    )

  def _packed_shape(self, minibatch_rows: int, size: tuple[int, int]) -> BatchShape:
    """Returns the shape for a minibatch's rows in micro-batches of one of `_sizes`."""
    longest = max(self.buckets)
    rows_per_shard, length = size
    slots = rows_per_shard * self.row_multiple * length
    # Of two packed rows one is more than half full, or the second would not be there.
    max_micro_batches = -(-2 * minibatch_rows * longest // slots) + 1
    unit_size = batch_unit_size(self.algorithm)
    sequences = min(
      minibatch_rows,
      self._max_sequences(rows_per_shard * length, slots, longest, unit_size),
    )
    sequences_in_units = max(unit_size, sequences // unit_size * unit_size)
    max_micro_batches += -(-minibatch_rows // sequences_in_units)
    pack = PackShape(
      max_micro_batches,
      sequences,
      rows_per_shard * self.row_multiple,
      length,
      self._share_prefix,
      self._num_parallel(minibatch_rows),
    )
    return BatchShape(
      minibatch_rows * self.num_minibatches,
      longest,
      minibatch_rows,
      pack,
      segments=int(self.counts_segments),
    )

  def _is_oversized(self, minibatch_rows: int) -> bool:
    """Returns whether a minibatch has more rows than usual, and needs a recompile."""
    return minibatch_rows > self._minibatch_rows(self.num_rows)

  def _num_parallel(self, minibatch_rows: int) -> int:
    """Returns how many micro-batches run in parallel, whatever their size.

    There is only one if all rows fit a usual micro-batch. Oversized minibatches run
    theirs one after the other, which takes fewer programs.
    """
    if self._is_oversized(minibatch_rows):
      return 1
    rows_per_shard, length = self._sizes[0]
    slots = rows_per_shard * self.row_multiple * length
    num_needed = -(-minibatch_rows * max(self.buckets) // slots)
    if self.packing.sequences:
      num_needed = max(num_needed, -(-minibatch_rows // self.packing.sequences))
    return min(self.packing.num_parallel, num_needed)

  def _max_sequences(
    self, shard_slots: int, slots: int, longest: int, unit_size: int
  ) -> int:
    """Returns the most sequences in a micro-batch of `slots`, `shard_slots` a shard."""
    if self.packing.sequences:
      usual_slots = self._sizes[0][0] * self._sizes[0][1]
      per_shard = self.packing.sequences * shard_slots // usual_slots
      per_shard //= self.row_multiple
    else:
      per_shard = -(-SEQUENCE_CAPACITY_FACTOR * slots // (longest * self.row_multiple))
    return max(per_shard, -(-unit_size // self.row_multiple)) * self.row_multiple

  def _cost(self, shape: BatchShape, bins: list[FirstFitBins]) -> float:
    """Returns the number of slots, with a small penalty for fine micro-batches."""
    assert shape.pack is not None
    slots = sum(filled.free_slots.size for filled in bins) * shape.pack.length
    usual_rows, usual_length = self._sizes[0]
    is_fine = (
      shape.pack.rows != usual_rows * self.row_multiple
      or shape.pack.length < usual_length
    )
    return slots * (1 + FINE_PENALTY * is_fine)

  def _fill_bins(
    self,
    batch: Batch,
    lengths: RowLengths,
    shape: BatchShape,
    index: np.ndarray | None,
  ) -> FirstFitBins:
    """Packs the rows `index` of a minibatch, or all rows of the batch."""
    assert shape.pack is not None
    units = batch_units(self.algorithm, batch)
    if index is not None:
      minibatch = set(index.reshape(-1).tolist())
      units = [unit for unit in units if int(unit[0]) in minibatch]
    return first_fit_placement.fill_bins(units, lengths, shape.pack)


def _whole_batch_plan(plan: PackingPlan) -> PackingPlan:
  """Converts the plan of a whole-batch minibatch to indices of the batch's own rows."""
  is_row = plan.micro_batch_rows >= 0
  rows = np.where(is_row, plan.index[np.maximum(plan.micro_batch_rows, 0)], -1)
  return dataclasses.replace(plan, index=None, micro_batch_rows=rows.astype(np.int32))


def make_packed_batch_builder(
  packing: Packing,
  model: TransformerLM,
  mesh: Mesh,
  *,
  num_micro_batches: int,
  **options: Any,
) -> PackedBatchBuilder:
  """Creates the batch builder for a packing.

  Args:
    packing: The options of packing.
    model: The model that the batches are for.
    mesh: The mesh that it runs on.
    num_micro_batches: Micro-batches of a minibatch; must be 1.
    **options: Further attributes of `BatchBuilder`.

  Returns:
    The builder.

  Raises:
    ValueError: The packing cannot be combined with the other settings.
  """
  # Imported here because only packed rows run several micro-batches in parallel.
  from jaxrl.training.parallelism import parallel_microbatches

  packing_plan.check_packing(
    packing,
    exact=getattr(model, 'exact', None) is not None,
    context=mesh.shape.get('context', 1),
    num_micro_batches=num_micro_batches,
  )
  num_parallel = parallel_microbatches.choose_num_parallel(
    packing.num_parallel, model, mesh
  )
  packing = dataclasses.replace(packing, num_parallel=num_parallel)
  return PackedBatchBuilder(
    num_micro_batches=num_micro_batches, packing=packing, **options
  )
