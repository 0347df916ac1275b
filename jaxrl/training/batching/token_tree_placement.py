"""Token tree placement puts sequences that begin alike into packed rows as trees.

Rows of a batch that begin with the same tokens share these, whatever group they are of
and whether or not the tokens are actions: the turns of an episode, the branches of a
session, samples that part late. In the order of a dictionary each row shares the most
tokens with its neighbours, and the rows of a packed row written in that order are a
tree whose tokens are followed by their descendants.
"""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.training.batching.first_fit_placement import (
  FirstFitBins,
  RowLengths,
  index_of_rows,
  place_units,
  token_positions,
)
from jaxrl.training.batching.packing_plan import PackingPlan, PackShape
from jaxrl.types import Batch


@dataclasses.dataclass(frozen=True)
class TreeLengths(RowLengths):
  """The lengths of a batch's rows, and how many tokens they share; `[B]` int each.

  `shared` is the most tokens that a row shares with another.

  Attributes:
    rank: The place of a row in the order of a dictionary.
    common: By rank: the tokens that a row shares with the one before it.
  """

  rank: np.ndarray
  common: np.ndarray

  def num_common(self, rank: int, other: int) -> int:
    """Returns how many tokens the rows of two ranks share."""
    first, last = sorted((rank, other))
    return int(self.common[first + 1 : last + 1].min())


def measure_trees(batch: Batch, *, share_actions: bool = True) -> TreeLengths:
  """Measures the rows of a numpy batch.

  Only tokens of first segments are shared.

  Args:
    batch: The batch.
    share_actions: Whether actions may be shared. They must not be where each row has
      tokens of its own that are scored in the place of its actions.

  Returns:
    The lengths of all rows.
  """
  tokens = (batch.segment_ids > 0).sum(axis=1)
  first = (batch.segment_ids == 1).sum(axis=1)
  texts = (batch.tokens + 1).astype('>u4')  # whose bytes are in the order of numbers
  spelt = [texts[row, : first[row]].tobytes() for row in range(len(texts))]
  order = np.array(sorted(range(len(texts)), key=spelt.__getitem__), np.int64)
  common = np.zeros(len(order) + 1, np.int64)
  for i in range(1, len(order)):
    pair = int(order[i - 1]), int(order[i])
    common[i] = _num_common_tokens(batch, pair, first, share_actions)
  rank = np.empty_like(order)
  rank[order] = np.arange(len(order))
  shared = np.maximum(common[:-1], common[1:])[rank]
  groups, longest = np.asarray(batch.group_ids), batch.tokens.shape[1]
  return TreeLengths(tokens, shared, groups, longest, rank, common[:-1])


def _num_common_tokens(
  batch: Batch, pair: tuple[int, int], first: np.ndarray, share_actions: bool
) -> int:
  """Counts the tokens at the start of two rows that have the same inputs and outputs.

  Args:
    batch: The batch.
    pair: The two rows.
    first: Length of each row's first segment.
    share_actions: Whether tokens that were sampled may be shared, too.
  """
  rows, end = list(pair), int(first[list(pair)].min())
  is_same = batch.tokens[pair[0], :end] == batch.tokens[pair[1], :end]
  if not (end := int(np.argmin(np.append(is_same, False)))):
    return 0
  is_same = is_same[:end].copy()
  if batch.routed_experts is not None:
    routed = np.asarray(batch.routed_experts)[rows, :end]
    is_same &= (routed[0] == routed[1]).all(axis=(-2, -1))
  for name in ('image_features', 'image_positions'):
    if (values := getattr(batch, name)) is not None:
      both = np.asarray(values)[rows, :end].reshape(2, end, -1)
      is_same &= (both[0] == both[1]).all(axis=-1)
  if not share_actions:
    is_same &= ~batch.action_mask[rows, :end].any(axis=0)
  return int(np.argmin(np.append(is_same, False)))


class TreeBins(FirstFitBins):
  """The packed rows of all micro-batches so far, each of which holds trees.

  Attributes:
    lengths: The lengths of the batch's rows.
  """

  lengths: TreeLengths

  def __init__(self, pack: PackShape, lengths: TreeLengths):
    super().__init__(pack, lengths)
    self._ranks: list[list[int]] = []  # ascending, of each packed row
    self._bin_of_rank = np.full(len(lengths.rank), -1)

  def add_micro_batch(self) -> None:
    """Appends an empty micro-batch."""
    super().add_micro_batch()
    self._ranks += [[] for _ in range(self.pack.rows)]

  def try_add(self, unit: np.ndarray) -> bool:
    """Places a batch unit in the first micro-batch with room for all of its rows.

    Micro-batches whose rows share the most with the unit's first come before others.

    Args:
      unit: Row numbers that stay together.

    Returns:
      Whether a micro-batch had room.
    """
    lengths, pack = self.lengths, self.pack
    fewest_slots = int((lengths.tokens[unit] - lengths.shared[unit]).max())
    preferred = self._micro_batches_near(int(lengths.rank[unit[0]]))
    others = [i for i in range(len(self.num_sequences)) if i not in preferred]
    for micro in preferred + others:
      bins = slice(micro * pack.rows, (micro + 1) * pack.rows)
      if self.num_sequences[micro] + len(unit) > pack.sequences:
        continue
      if max(self.free_slots[bins]) >= fewest_slots and self._place_unit(unit, bins):
        self.num_sequences[micro] += len(unit)
        return True
    return False

  def _micro_batches_near(self, rank: int) -> list[int]:
    """Returns the micro-batches with rows that share tokens with that of a rank."""
    common, found = self.lengths.common, {}  # micro-batch → shared tokens
    for step, most in ((1, len(common)), (-1, -1)):
      shared, other = np.iinfo(np.int64).max, rank
      while (other := other + step) != most:
        shared = min(shared, int(common[max(other, other - step)]))
        if not shared:
          break
        if (bin_number := int(self._bin_of_rank[other])) >= 0:
          micro = bin_number // self.pack.rows
          found[micro] = max(found.get(micro, 0), shared)
    return sorted(found, key=lambda micro: (-found[micro], micro))

  def _num_shared(self, rank: int, bin_number: int) -> int:
    """Returns how many tokens of a row are in a packed row already."""
    ranks = self._ranks[bin_number]
    place = bisect.bisect(ranks, rank)
    near = ranks[max(0, place - 1) : place + 1]
    return max((self.lengths.num_common(rank, other) for other in near), default=0)

  def _place_unit(self, unit: np.ndarray, bins: slice) -> bool:
    """Places all rows of a unit in `bins`, or none of them."""
    placed: list[tuple[int, int, int]] = []  # packed row, rank, slots
    for row in unit:
      rank, tokens = int(self.lengths.rank[row]), int(self.lengths.tokens[row])
      shared = [self._num_shared(rank, i) for i in range(bins.start, bins.stop)]
      slots = tokens - np.array(shared)
      fitting = np.flatnonzero(np.array(self.free_slots[bins]) >= slots)
      if not len(fitting):
        self._undo(placed)
        return False
      best = int(fitting[slots[fitting].argmin()])
      packed_row, taken = bins.start + best, int(slots[best])
      bisect.insort(self._ranks[packed_row], rank)
      self._bin_of_rank[rank] = packed_row
      self.rows_by_group[packed_row].setdefault(0, []).append(int(row))
      self.free_slots[packed_row] -= taken
      placed.append((packed_row, rank, taken))
    return True

  def _undo(self, placed: list[tuple[int, int, int]]) -> None:
    for packed_row, rank, slots in reversed(placed):
      self.free_slots[packed_row] += slots
      self._ranks[packed_row].remove(rank)
      self._bin_of_rank[rank] = -1
      self.rows_by_group[packed_row][0].pop()


def fill_tree_bins(
  units: Sequence[np.ndarray], lengths: TreeLengths, pack: PackShape
) -> TreeBins:
  """Places batch units in micro-batches, the largest trees first.

  Within a tree, the units come in falling order of a dictionary: branches together, and
  a sequence before those that it continues.

  Args:
    units: The row numbers of each unit, which stay in one micro-batch.
    lengths: The lengths of the batch's rows.
    pack: The shape of a micro-batch.

  Returns:
    The filled bins.

  Raises:
    ValueError: A unit is larger than a micro-batch.
  """
  ranks = [int(lengths.rank[unit].max()) for unit in units]
  tree_of_rank = np.cumsum(lengths.common == 0)
  own = np.zeros(len(lengths.rank), np.int64)
  own[lengths.rank] = lengths.tokens
  size = np.bincount(tree_of_rank, weights=own - lengths.common)
  order = sorted(
    range(len(units)),
    key=lambda i: (-size[tree_of_rank[ranks[i]]], tree_of_rank[ranks[i]], -ranks[i]),
  )
  bins = TreeBins(pack, lengths)
  place_units(bins, [units[i] for i in order])
  return bins


def make_tree_plan(
  bins: TreeBins, batch: Batch, pack: PackShape, index: np.ndarray | None
) -> PackingPlan:
  """Writes down the placement of rows as a plan.

  Args:
    bins: Where rows of the batch lie.
    batch: The numpy batch.
    pack: The shape that programs are compiled for; it may have more micro-batches.
    index: As in `PackingPlan`.

  Returns:
    A plan of numpy arrays.
  """
  size = pack.max_micro_batches, pack.rows, pack.length
  fills = {'origin': -1, 'segment_ids': 0, 'positions': 0, 'previous': -1, 'ends': 0}
  slots = {name: np.full(size, fill, np.int32) for name, fill in fills.items()}
  slots['ends'][:] = np.arange(1, pack.length + 1)  # padding sees itself
  micro_batch_rows = np.full((pack.max_micro_batches, pack.sequences), -1, np.int32)
  num_rows, longest = len(batch.tokens), batch.tokens.shape[1]
  size = num_rows if index is None else len(index), longest
  place = np.full(size, -1, np.int32)
  index_of_row = index_of_rows(index, len(batch.tokens))
  for micro in range(len(bins.num_sequences)):
    count = 0
    for r in range(pack.rows):
      groups = bins.rows_by_group[micro * pack.rows + r].values()
      rows = sorted(
        (row for group in groups for row in group), key=bins.lengths.rank.item
      )
      row_slots = {name: array[micro, r] for name, array in slots.items()}
      row_place = np.full((len(rows), longest), -1, np.int32)
      _write_trees(row_slots, row_place, bins.lengths, batch, rows, first=count)
      members = index_of_row[rows]
      place[members] = np.where(row_place < 0, -1, row_place + r * pack.length)
      micro_batch_rows[micro, count : count + len(rows)] = members
      count += len(rows)
  return PackingPlan(
    index=index,
    micro_batch_rows=micro_batch_rows,
    num_micro_batches=np.int32(len(bins.num_sequences)),
    place=place,
    **slots,
  )


def _write_trees(
  slots: dict[str, np.ndarray],
  place: np.ndarray,
  lengths: TreeLengths,
  batch: Batch,
  rows: Sequence[int],
  *,
  first: int,
) -> None:
  """Writes the trees of one packed row, and behind them all further segments.

  Args:
    slots: `[L]` arrays that are written to.
    place: `[len(rows), T]`, the slots of the tokens; it is written to.
    lengths: What rows have in common.
    batch: The batch.
    rows: In the order of a dictionary.
    first: Number of their first in the micro-batch's rectangle.
  """
  width = batch.tokens.shape[1]
  next_slot, num_segments = 0, 0

  def write(member: int, span: slice, before: int) -> np.ndarray:
    """Writes tokens in the next slots, the first of them after the slot `before`."""
    nonlocal next_slot
    origin = (first + member) * width + np.arange(span.start, span.stop, dtype=np.int32)
    new = np.arange(next_slot, next_slot + len(origin), dtype=np.int32)
    next_slot += len(new)
    slots['origin'][new] = origin
    slots['segment_ids'][new] = num_segments
    slots['positions'][new] = token_positions(batch.segment_ids[rows[member]])[span]
    slots['previous'][new] = np.append(np.int32(before), new)[: len(new)]
    return new

  path = np.zeros(0, np.int32)
  for member, row in enumerate(rows):
    shared, end = 0, int((batch.segment_ids[row] == 1).sum())
    if member:
      ranks = int(lengths.rank[rows[member - 1]]), int(lengths.rank[row])
      shared = lengths.num_common(*ranks)
    num_segments += not shared
    slots['ends'][path[shared:]] = next_slot  # no later row continues these
    new = write(member, slice(shared, end), path[shared - 1] if shared else -1)
    path = np.concatenate([path[:shared], new])
    place[member, :end] = path
  slots['ends'][path] = next_slot
  for member, row in enumerate(rows):
    ids = batch.segment_ids[row]
    for segment in range(2, int(ids.max(initial=0)) + 1):
      span = np.flatnonzero(ids == segment)
      num_segments += 1
      new = write(member, slice(span[0], span[-1] + 1), -1)
      place[member, span] = new
      slots['ends'][new] = next_slot
