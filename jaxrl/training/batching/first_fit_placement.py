"""First-fit placement decides which sequence lies in which packed row.

The longest sequences come first, and each goes into the first packed row with room;
responses to one prompt share it where they lie in the same row.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.training.batching.packing_plan import (
  PackingPlan,
  PackShape,
  most_sequences_per_row,
)
from jaxrl.types import Batch


@dataclasses.dataclass(frozen=True)
class RowLengths:
  """The lengths of a batch's rows, as first fit needs them; `[B]` int each.

  Attributes:
    tokens: All tokens of a row.
    shared: Prompt tokens, without the last one, that a row shares with its group.
    group_ids: The group of each row.
    longest: Tokens that a row has room for, an int.
  """

  tokens: np.ndarray
  shared: np.ndarray
  group_ids: np.ndarray
  longest: int


def measure_rows(batch: Batch, *, share: bool) -> RowLengths:
  """Measures the rows of a numpy batch.

  Args:
    batch: The batch.
    share: Whether prompts are shared; otherwise `shared` is 0.

  Returns:
    The lengths of all rows.
  """
  tokens = (batch.segment_ids > 0).sum(axis=1)
  shared = np.zeros_like(tokens)
  ids = np.asarray(batch.group_ids)
  if share:
    order = np.argsort(ids, kind='stable')
    for rows in np.split(order, np.flatnonzero(np.diff(ids[order])) + 1):
      if ids[rows[0]] >= 0 and len(rows) > 1:
        shared[rows] = _num_shared_tokens(batch, rows)
  return RowLengths(tokens, shared, ids, batch.tokens.shape[1])


def _num_shared_tokens(batch: Batch, rows: np.ndarray) -> int:
  """Counts the tokens that `rows` share at the start, before any row's first action.

  The last common token is left to each row, because its output differs by row.
  """
  same = (batch.tokens[rows] == batch.tokens[rows[0]]).all(axis=0)
  same &= ((batch.segment_ids[rows] == 1) & ~batch.action_mask[rows]).all(axis=0)
  if batch.routed_experts is not None:  # a shared prompt goes to the same experts
    routed = np.asarray(batch.routed_experts)
    same &= (routed[rows] == routed[rows[0]]).all(axis=(0, 2, 3))
  if batch.image_features is not None:  # and has the same images
    same &= (batch.image_features[rows] == batch.image_features[rows[0]]).all(axis=0)
  # The last common token predicts the first that is not, so it must be the row's own.
  return max(0, int(np.argmin(np.append(same, False))) - 1)


class FirstFitBins:
  """The packed rows of all micro-batches so far, and what they have room for.

  Attributes:
    pack: The shape of a micro-batch.
    lengths: The lengths of the batch's rows.
    free_slots: Free slots of each packed row, micro-batch by micro-batch.
    num_sequences: Sequences of each micro-batch.
    rows_by_group: For each packed row, the batch rows in it by group.
  """

  def __init__(self, pack: PackShape, lengths: RowLengths):
    self.pack = pack
    self.lengths = lengths
    # Lists: numpy takes longer for the few packed rows of a micro-batch.
    self.free_slots: list[int] = []
    self.num_sequences: list[int] = []
    self.rows_by_group: list[dict[int, list[int]]] = []
    self._row_sequences: list[int] = []  # sequences of each packed row
    self._most_per_row = most_sequences_per_row(
      pack.sequences, pack.length, lengths.longest
    )
    self._micro_batches_of_group: dict[int, list[int]] = {}

  def add_micro_batch(self) -> None:
    """Appends an empty micro-batch."""
    rows, length = self.pack.rows, self.pack.length
    self.free_slots += [length] * rows
    self.num_sequences.append(0)
    self._row_sequences += [0] * rows
    self.rows_by_group += [{} for _ in range(rows)]

  def try_add(self, unit: np.ndarray) -> bool:
    """Places a batch unit in the first micro-batch with room for all of its rows.

    Micro-batches that have rows of the same group come before others.

    Args:
      unit: Row numbers that stay together.

    Returns:
      Whether a micro-batch had room.
    """
    lengths, pack = self.lengths, self.pack
    fewest_slots = int((lengths.tokens[unit] - lengths.shared[unit]).max())
    group = int(lengths.group_ids[unit[0]])
    preferred = self._micro_batches_of_group.setdefault(group, [])
    others = [i for i in range(len(self.num_sequences)) if i not in preferred]
    for micro in preferred + others:
      bins = slice(micro * pack.rows, (micro + 1) * pack.rows)
      if self.num_sequences[micro] + len(unit) > pack.sequences:
        continue
      if max(self.free_slots[bins]) >= fewest_slots and self._place_unit(unit, bins):
        self.num_sequences[micro] += len(unit)
        if micro not in preferred:
          preferred.append(micro)
        return True
    return False

  def _find_bin(self, row: int, bins: slice) -> int | None:
    """Returns the first packed row with room, preferably one with the same prompt."""
    tokens, shared = int(self.lengths.tokens[row]), int(self.lengths.shared[row])
    group, first = int(self.lengths.group_ids[row]), None
    for i in range(bins.start, bins.stop):
      free_slots = self.free_slots[i]
      if self._row_sequences[i] >= self._most_per_row:
        continue
      if shared and free_slots >= tokens - shared and group in self.rows_by_group[i]:
        return i
      if first is None and free_slots >= tokens:
        first = i
        if not shared:
          break
    return first

  def _place_unit(self, unit: np.ndarray, bins: slice) -> bool:
    """Places all rows of a unit in `bins`, or none of them."""
    placed: list[tuple[int, int, int]] = []  # packed row, group, slots
    for row in unit:
      packed_row = self._find_bin(row, bins)
      if packed_row is None:
        self._undo(placed)
        return False
      # A row that shares nothing is a group of its own.
      shared = int(self.lengths.shared[row])
      group = int(self.lengths.group_ids[row]) if shared else -1 - int(row)
      same_group = self.rows_by_group[packed_row].setdefault(group, [])
      slots = int(self.lengths.tokens[row]) - (shared if same_group else 0)
      same_group.append(int(row))
      self.free_slots[packed_row] -= slots
      self._row_sequences[packed_row] += 1
      placed.append((packed_row, group, slots))
    return True

  def _undo(self, placed: list[tuple[int, int, int]]) -> None:
    for packed_row, group, slots in reversed(placed):
      self.free_slots[packed_row] += slots
      self._row_sequences[packed_row] -= 1
      self.rows_by_group[packed_row][group].pop()
      if not self.rows_by_group[packed_row][group]:
        del self.rows_by_group[packed_row][group]


def fill_bins(
  units: Sequence[np.ndarray], lengths: RowLengths, pack: PackShape
) -> FirstFitBins:
  """Places batch units in micro-batches, the longest first.

  Args:
    units: The row numbers of each unit, which stay in one micro-batch.
    lengths: The lengths of the batch's rows.
    pack: The shape of a micro-batch.

  Returns:
    The filled bins.

  Raises:
    ValueError: A unit is larger than a micro-batch.
  """
  num_tokens = [int(lengths.tokens[unit].sum()) for unit in units]
  group_of = [int(lengths.group_ids[unit[0]]) for unit in units]
  if lengths.shared.any():  # the units of a group together, the longest group first
    group_tokens: dict[int, int] = {}
    for group, tokens in zip(group_of, num_tokens, strict=True):
      group_tokens[group] = group_tokens.get(group, 0) + tokens
    order = sorted(
      range(len(units)),
      key=lambda i: (-group_tokens[group_of[i]], group_of[i], -num_tokens[i], i),
    )
  else:
    order = sorted(range(len(units)), key=lambda i: (-num_tokens[i], i))
  bins = FirstFitBins(pack, lengths)
  place_units(bins, [units[i] for i in order])
  return bins


def place_units(bins: 'FirstFitBins', units: Sequence[np.ndarray]) -> None:
  """Places units in order, each in a new micro-batch if none has room.

  Args:
    bins: Where to place them.
    units: The row numbers of each unit, which stay in one micro-batch.

  Raises:
    ValueError: A unit is larger than a micro-batch.
  """
  pack = bins.pack
  for unit in units:
    if bins.try_add(unit):
      continue
    bins.add_micro_batch()
    if not bins.try_add(unit):
      raise ValueError(
        f'{len(unit)} rows of {int(bins.lengths.tokens[unit].sum())} tokens that must '
        f'stay together do not fit a micro-batch of {pack.rows} packed rows of '
        f'{pack.length} tokens and {pack.sequences} sequences: ask for more tokens in '
        'batch.packing'
      )


def make_plan(
  bins: FirstFitBins, batch: Batch, pack: PackShape, index: np.ndarray | None
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
  fills = {
    'origin': -1,
    'segment_ids': 0,
    'positions': 0,
    'prefix_ids': 0,
    'output_origin': -1,
  }
  slots = {name: np.full(size, fill, np.int32) for name, fill in fills.items()}
  micro_batch_rows = np.full((pack.max_micro_batches, pack.sequences), -1, np.int32)
  index_of_row = index_of_rows(index, len(batch.tokens))
  for micro in range(len(bins.num_sequences)):
    bin_numbers = range(micro * pack.rows, (micro + 1) * pack.rows)
    groups = [group for i in bin_numbers for group in bins.rows_by_group[i].values()]
    rows = [row for group in groups for row in group]
    micro_batch_rows[micro, : len(rows)] = index_of_row[rows]
    rectangle_row = {row: b for b, row in enumerate(rows)}
    for r, i in enumerate(bin_numbers):
      row_slots = {name: array[micro, r] for name, array in slots.items()}
      _write_packed_row(row_slots, bins, i, batch, rectangle_row)
  if not pack.share_prefix:
    del slots['prefix_ids'], slots['output_origin']
  return PackingPlan(
    index=index,
    micro_batch_rows=micro_batch_rows,
    num_micro_batches=np.int32(len(bins.num_sequences)),
    **slots,
  )


def index_of_rows(index: np.ndarray | None, num_rows: int) -> np.ndarray:
  """Returns where each row of a batch is in a minibatch, −1 for nowhere.

  Args:
    index: Rows of the batch, −1 at padding; None for all rows in order.
    num_rows: Rows of the batch.
  """
  if index is None:
    return np.arange(num_rows)
  index_of_row = np.full(num_rows, -1)
  index_of_row[index[index >= 0]] = np.flatnonzero(index >= 0)
  return index_of_row


def _write_packed_row(
  slots: dict[str, np.ndarray],
  bins: FirstFitBins,
  bin_number: int,
  batch: Batch,
  rectangle_row: dict[int, int],
) -> None:
  """Writes one packed row: for each group its shared prompt, then the rest of its rows.

  Args:
    slots: `[L]` arrays that are written to.
    bins: What each packed row holds.
    bin_number: The packed row.
    batch: The batch.
    rectangle_row: Batch row → row of the micro-batch's rectangle.
  """
  width = batch.tokens.shape[1]
  next_slot, num_segments = 0, 0

  def write(row: int, span: slice, prefix: int, *, has_output: bool) -> None:
    nonlocal next_slot, num_segments
    ids = batch.segment_ids[row]
    origin = rectangle_row[row] * width + np.arange(width, dtype=np.int32)[span]
    part = slice(next_slot, next_slot + len(origin))
    slots['origin'][part] = origin
    slots['output_origin'][part] = origin if has_output else -1
    slots['segment_ids'][part] = num_segments + ids[span]
    slots['positions'][part] = token_positions(ids)[span]
    slots['prefix_ids'][part] = np.where(ids == 1, prefix, 0)[span]
    next_slot = part.stop
    num_segments += int(ids[span].max())

  for rows in bins.rows_by_group[bin_number].values():
    shared = int(bins.lengths.shared[rows[0]]) if len(rows) > 1 else 0
    if shared:
      write(rows[0], slice(shared), 0, has_output=False)
    prefix = num_segments if shared else 0
    for row in rows:
      span = slice(shared, int(bins.lengths.tokens[row]))
      write(row, span, prefix, has_output=True)


def token_positions(segment_ids: np.ndarray) -> np.ndarray:
  """Returns the position of each token in its segment.

  Args:
    segment_ids: Segments of one row, `[T]`.
  """
  time = np.arange(len(segment_ids))
  is_start = np.append(True, segment_ids[1:] != segment_ids[:-1])
  return time - np.maximum.accumulate(np.where(is_start, time, 0))
