"""Packed batch building fills micro-batches by tokens instead of rows.

The batch is the same rectangle `[B, T]` as without packing, but the model runs on
packed rows, whose placement is the `PackingPlan` of each update.
"""

import dataclasses
import functools
import logging
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
  TREE_CAPACITY_FACTOR,
  Packing,
  PackingPlan,
  PackShape,
)
from jaxrl.types import Batch, Group
from kernels.dispatch import platform_of

log = logging.getLogger(__name__)

# Fine micro-batches have this many times fewer packed rows, which are this many times
# shorter. They are used if they waste fewer slots, by more than this share of them.
FINE_ROWS_DIVISOR = 4
FINE_LENGTH_DIVISOR = 2
FINE_PENALTY = 0.01
# Trees need programs of their own. Where they are not the rule, they are used if at
# most this share of the slots is left.
TREE_SHARE = 0.8


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

  @property
  def _expects_trees(self) -> bool:
    """Returns whether every batch is packed as trees.

    It is if rows are the turns of episodes, each of which continues the one before.
    """
    if self.packing.share_tree is not None:
      return self.packing.share_tree
    algorithm = self.algorithm
    is_rollout = algorithm.data_format == 'rollout'
    return is_rollout and requirements.row_format(algorithm) == 'step'

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
    needed_rows = num_rows or self.num_rows * self.rows_per_sample
    padded_rows = self.num_rows
    while padded_rows < needed_rows:
      padded_rows *= 2
    size = self._sizes[-1 if fine else 0]
    minibatch_rows = self._minibatch_rows(padded_rows)
    return self._packed_shape(minibatch_rows, size, tree=self._expects_trees)

  def warmup_shapes(self) -> list[BatchShape]:
    """Returns the shapes of a usual batch, in each size of micro-batches."""
    usual = self.batch_shape()
    if self._has_one_size(usual.micro_rows):
      return [usual]
    return [usual, self.batch_shape(fine=True)]

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
    count = sum(len(group) for group in groups)
    shape = self.batch_shape(num_rows=max(count, 1))
    while True:
      batch = self._add_default_fields(self._collate(groups, shape))
      indices = self._assign_minibatches(batch, shape.micro_rows, step)
      if indices is not None:
        break
      rows, size = 2 * shape.micro_rows, self._sizes[0]
      shape = self._packed_shape(rows, size, tree=self._expects_trees)
    shape, bins = self._place_rows(batch, indices, shape.micro_rows)
    assert shape.pack is not None
    num_micro_batches = max(len(filled.num_sequences) for filled in bins)
    max_micro_batches = shape.pack.max_micro_batches
    while max_micro_batches < num_micro_batches:
      max_micro_batches *= 2
    pack = shape.pack._replace(max_micro_batches=max_micro_batches)
    plans = [
      _make_plan(filled, batch, pack, index.reshape(-1))
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
      plan = _whole_batch_plan(indices[0], len(batch.tokens))
    else:
      lengths = self._measure(batch, tree=pack.tree)
      plan = _make_plan(self._fill_bins(batch, lengths, shape, None), batch, pack, None)
    return (packing_plan.put_plan(mesh, pack, plan),)

  def packing_metrics(
    self, batch: Batch, shape: BatchShape, indices: Sequence[PackingPlan]
  ) -> dict[str, float]:
    """Returns metrics of how full packed rows are and what sharing prompts saves.

    tokens/padding_share is the share of computed slots that are empty,
    tokens/shared_share the share of tokens that another row's slots stand for,
    tokens/in_trees 1 if tokens are shared in trees and 0 if not, tokens/slots the
    number of slots in all updates of the batch, and tokens/micro_batches the number of
    micro-batches of an update.
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
      'tokens/in_trees': float(shape.pack.tree),
      'tokens/slots': float(slots),
      'tokens/micro_batches': num_micro_batches / len(indices),
    }

  def _place_rows(
    self, batch: Batch, indices: list[np.ndarray], minibatch_rows: int
  ) -> tuple[BatchShape, list[FirstFitBins]]:
    """Places each minibatch's rows in the size of micro-batches that costs less."""
    sizes, best = self._sizes, []
    if self._has_one_size(minibatch_rows):
      sizes = sizes[:1]
    for tree in (False, True):
      if tree < self._expects_trees or (tree and self.packing.share_tree is False):
        continue
      lengths = self._measure(batch, tree=tree)
      if tree and best and not self._may_save_slots(lengths, best[0][1]):
        continue
      candidates = []
      for size in sizes:
        shape = self._packed_shape(minibatch_rows, size, tree=tree)
        try:
          bins = [self._fill_bins(batch, lengths, shape, index) for index in indices]
        except ValueError:
          if not candidates:  # the usual micro-batches are the larger ones
            raise
        else:
          candidates.append((shape, bins))
      best.append(min(candidates, key=lambda candidate: self._cost(*candidate)))
    if len(best) > 1 and self._cost(*best[1]) > TREE_SHARE * self._cost(*best[0]):
      return best[0]
    return best[-1]

  def _may_save_slots(self, lengths: Any, bins: Sequence[FirstFitBins]) -> bool:
    """Returns whether trees of all rows would have few enough slots, at best."""
    used = sum(f.pack.length * len(f.free_slots) - sum(f.free_slots) for f in bins)
    fewest = lengths.tokens.sum() - lengths.common.sum()
    return fewest <= TREE_SHARE * used

  def _measure(self, batch: Batch, *, tree: bool) -> RowLengths:
    """Measures the rows of a batch, and what they share in trees or as prompts."""
    if not tree:
      return first_fit_placement.measure_rows(batch, share=self._share_prefix)
    from jaxrl.training.batching import token_tree_placement  # few batches have trees

    reads_topk = 'topk_logprobs' in requirements.fields_read(self.algorithm)
    return token_tree_placement.measure_trees(batch, share_actions=not reads_topk)

  def _minibatch_rows(self, batch_rows: int) -> int:
    """Returns the rows of each minibatch of a batch with `batch_rows` rows."""
    unit_size = batch_unit_size(self.algorithm)
    return rows_per_micro_batch(
      batch_rows, self.num_minibatches, unit_size, self.row_multiple
    )

  def _packed_shape(
    self, minibatch_rows: int, size: tuple[int, int], *, tree: bool
  ) -> BatchShape:
    """Returns the shape for a minibatch's rows in micro-batches of one of `_sizes`."""
    longest = max(self.buckets)
    rows_per_shard, length = size
    slots = rows_per_shard * self.row_multiple * length
    # Of two packed rows one is more than half full, or the second would not be there.
    max_micro_batches = -(-2 * minibatch_rows * longest // slots) + 1
    unit_size = batch_unit_size(self.algorithm)
    sequences = min(
      minibatch_rows,
      self._max_sequences(rows_per_shard * length, slots, unit_size, tree=tree),
    )
    sequences_in_units = max(unit_size, sequences // unit_size * unit_size)
    max_micro_batches += -(-minibatch_rows // sequences_in_units)
    # A packed row with fewer rows than this has room for any other.
    rows_in_slots = rows_per_shard * (length // longest)
    if self.row_multiple == 1 and minibatch_rows <= min(rows_in_slots, sequences):
      max_micro_batches = 1  # a program that sums over one keeps no sum of gradients
    pack = PackShape(
      max_micro_batches,
      sequences,
      rows_per_shard * self.row_multiple,
      length,
      self._share_prefix and not tree,
      self._num_parallel(minibatch_rows),
      tree,
    )
    return BatchShape(
      minibatch_rows * self.num_minibatches,
      longest,
      minibatch_rows,
      pack,
      segments=int(self.counts_segments),
    )

  def _is_oversized(self, minibatch_rows: int) -> bool:
    """Returns whether a minibatch has more rows than samples."""
    return minibatch_rows > self._minibatch_rows(self.num_rows)

  def _has_one_size(self, minibatch_rows: int) -> bool:
    """Returns whether there are no fine micro-batches, as they need programs too."""
    if len(self._sizes) == 1:
      return True
    return self.packing.num_parallel > 1 and self._is_oversized(minibatch_rows)

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
    self, shard_slots: int, slots: int, unit_size: int, *, tree: bool
  ) -> int:
    """Returns the most sequences in a micro-batch of `slots`, `shard_slots` a shard."""
    factor = TREE_CAPACITY_FACTOR if tree else SEQUENCE_CAPACITY_FACTOR
    if self.packing.sequences:
      usual_slots = self._sizes[0][0] * self._sizes[0][1]
      per_shard = self.packing.sequences * shard_slots // usual_slots
      per_shard //= self.row_multiple
    else:
      per_shard = -(-factor * slots // (max(self.buckets) * self.row_multiple))
    return max(per_shard, -(-unit_size // self.row_multiple)) * self.row_multiple

  def _cost(self, shape: BatchShape, bins: list[FirstFitBins]) -> float:
    """Returns the number of slots, with a small penalty for fine micro-batches."""
    assert shape.pack is not None
    slots = sum(len(filled.free_slots) for filled in bins) * shape.pack.length
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
    if not shape.pack.tree:
      return first_fit_placement.fill_bins(units, lengths, shape.pack)
    from jaxrl.training.batching import token_tree_placement  # few batches have trees

    assert isinstance(lengths, token_tree_placement.TreeLengths)
    return token_tree_placement.fill_tree_bins(units, lengths, shape.pack)


def _make_plan(
  bins: FirstFitBins, batch: Batch, pack: PackShape, index: np.ndarray | None
) -> PackingPlan:
  """Writes down a placement as a plan."""
  if not pack.tree:
    return first_fit_placement.make_plan(bins, batch, pack, index)
  from jaxrl.training.batching import token_tree_placement  # few batches have trees

  assert isinstance(bins, token_tree_placement.TreeBins)
  return token_tree_placement.make_tree_plan(bins, batch, pack, index)


def _whole_batch_plan(plan: PackingPlan, num_rows: int) -> PackingPlan:
  """Converts the plan of a whole-batch minibatch to indices of the batch's own rows."""
  index, is_row = plan.index, plan.micro_batch_rows >= 0
  rows = np.where(is_row, index[np.maximum(plan.micro_batch_rows, 0)], -1)
  plan = dataclasses.replace(plan, index=None, micro_batch_rows=rows.astype(np.int32))
  if plan.place is None:
    return plan
  place = np.full((num_rows, plan.place.shape[1]), -1, np.int32)
  place[index[index >= 0]] = plan.place[index >= 0]
  return dataclasses.replace(plan, place=place)


def _choose_trees(packing: Packing, model: TransformerLM) -> bool | None:
  """Returns whether tokens are shared in trees; None for where it pays.

  Raises:
    ValueError: They should be, but cannot be.
  """
  setting = 'batch.packing=first_fit(share_tree=True)'
  if packing.share_tree and not packing.share_prefix:
    raise ValueError(f'{setting} shares prompts too: leave out share_prefix=False')
  if not packing.share_prefix or packing.share_tree is False:
    return False
  config = getattr(model, 'config', None)
  if getattr(config, 'has_linear_attention', False):
    if packing.share_tree:
      raise ValueError(
        f'{setting}: the gated DeltaNet layers of this model keep no state at the '
        'forks of a tree: leave share_tree out, and prompts alone are shared'
      )
    log.info(
      'packed rows share prompts, not trees: the model has gated DeltaNet layers'
    )
    return False
  platform = platform_of(getattr(model, 'platform', None))
  if packing.share_tree is None and platform != 'cpu':
    log.info(
      'packed rows share prompts, not trees: no kernel for %s has trees', platform
    )
    return False
  return packing.share_tree


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
  packing = dataclasses.replace(
    packing, num_parallel=num_parallel, share_tree=_choose_trees(packing, model)
  )
  return PackedBatchBuilder(
    num_micro_batches=num_micro_batches, packing=packing, **options
  )
