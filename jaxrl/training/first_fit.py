"""First-fit: which sequence lies in which packed row of which micro-batch."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.training.packing import Pack, Plan
from jaxrl.types import Batch


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Of the rows of a batch, `[B]` each. tokens: all. shared: of the prompt, but its
  last token, that a row has in common with its whole group. groups: which that is.
  """

  tokens: np.ndarray
  shared: np.ndarray
  groups: np.ndarray


def lengths(batch: Batch, *, share: bool) -> Lengths:
  """What first-fit must know of a batch in numpy."""
  tokens = (batch.segment_ids > 0).sum(axis=1)
  shared = np.zeros_like(tokens)
  ids = np.asarray(batch.task_ids)
  if share:
    order = np.argsort(ids, kind='stable')
    for rows in np.split(order, np.flatnonzero(np.diff(ids[order])) + 1):
      if ids[rows[0]] >= 0 and len(rows) > 1:
        shared[rows] = _common(batch, rows)
  return Lengths(tokens, shared, ids)


def _common(batch: Batch, rows: np.ndarray) -> int:
  """Tokens that these rows may share: their common ones before anybody's first action.

  They lie in the first segment, and the last of them is left to each row, for what it
  says differs.
  """
  same = (batch.tokens[rows] == batch.tokens[rows[0]]).all(axis=0)
  same &= ((batch.segment_ids[rows] == 1) & ~batch.action_mask[rows]).all(axis=0)
  if batch.routed_experts is not None:  # a shared prompt takes one way through them
    routed = np.asarray(batch.routed_experts)
    same &= (routed[rows] == routed[rows[0]]).all(axis=(0, 2, 3))
  # The last common token predicts the first that is not, so it must be the row's own.
  return max(0, int(np.argmin(np.append(same, False))) - 1)


class Bins:
  """Packed rows with room: those of one micro-batch after another."""

  def __init__(self, pack: Pack, lengths: Lengths):
    self.pack, self.lengths = pack, lengths
    self.room = np.zeros(0, np.int64)
    self.count = np.zeros(0, np.int64)  # sequences of each micro-batch
    self.lying: list[dict[int, list[int]]] = []  # in each packed row, rows by group
    self._homes: dict[int, list[int]] = {}  # micro-batches that a group has rows in

  def open(self) -> None:
    """One more micro-batch."""
    self.room = np.append(self.room, np.full(self.pack.rows, self.pack.length))
    self.count = np.append(self.count, 0)
    self.lying += [{} for _ in range(self.pack.rows)]

  def _seat(self, row: int, bins: slice) -> int | None:
    """The first packed row that takes it, one that has its prompt before others."""
    tokens, shared = int(self.lengths.tokens[row]), int(self.lengths.shared[row])
    room = self.room[bins]
    if shared:
      group = int(self.lengths.groups[row])
      for i in np.flatnonzero(room >= tokens - shared):
        if group in self.lying[bins.start + i]:
          return bins.start + int(i)
    fitting = np.flatnonzero(room >= tokens)
    return bins.start + int(fitting[0]) if len(fitting) else None

  def take(self, atom: np.ndarray) -> bool:
    """Seats an atom's rows in the first micro-batch that has room for all of them.

    Those that hold rows of its group come before others.
    """
    least = int((self.lengths.tokens - self.lengths.shared)[atom].max())
    homes = self._homes.setdefault(int(self.lengths.groups[atom[0]]), [])
    others = [i for i in range(len(self.count)) if i not in homes]
    for micro in homes + others:
      bins = slice(micro * self.pack.rows, (micro + 1) * self.pack.rows)
      full = self.count[micro] + len(atom) > self.pack.sequences
      if not full and self.room[bins].max() >= least and self._seat_all(atom, bins):
        self.count[micro] += len(atom)
        if micro not in homes:
          homes.append(micro)
        return True
    return False

  def _seat_all(self, atom: np.ndarray, bins: slice) -> bool:
    done: list[tuple[int, int, int]] = []
    for row in atom:
      seat = self._seat(row, bins)
      if seat is None:
        for at, group, slots in reversed(done):
          self.room[at] += slots
          self.lying[at][group].pop()
          if not self.lying[at][group]:
            del self.lying[at][group]
        return False
      # Rows without anything to share lie there as groups of their own.
      shared = int(self.lengths.shared[row])
      group = int(self.lengths.groups[row]) if shared else -1 - int(row)
      there = self.lying[seat].setdefault(group, [])
      slots = int(self.lengths.tokens[row]) - (shared if there else 0)
      there.append(int(row))
      self.room[seat] -= slots
      done.append((seat, group, slots))
    return True


def fill(atoms: Sequence[np.ndarray], lengths: Lengths, pack: Pack) -> Bins:
  """Seats atoms, each whole in one micro-batch. Raises ValueError for one too large."""
  total = [int(lengths.tokens[atom].sum()) for atom in atoms]
  if lengths.shared.any():  # a group's rows after one another, the longest first
    of_group: dict[int, int] = {}
    for atom, tokens in zip(atoms, total, strict=True):
      group = int(lengths.groups[atom[0]])
      of_group[group] = of_group.get(group, 0) + tokens
    key = [(-of_group[g := int(lengths.groups[a[0]])], g) for a in atoms]
    order = sorted(range(len(atoms)), key=lambda i: (*key[i], -total[i], i))
  else:
    order = sorted(range(len(atoms)), key=lambda i: (-total[i], i))
  bins = Bins(pack, lengths)
  for i in order:
    if bins.take(atoms[i]):
      continue
    bins.open()
    if not bins.take(atoms[i]):
      raise ValueError(
        f'{len(atoms[i])} rows of {total[i]} tokens that must stay together do not fit '
        f'a micro-batch of {pack.rows} packed rows of {pack.length} tokens and '
        f'{pack.sequences} sequences: ask for more tokens in batch.packing'
      )
  return bins


def plan(bins: Bins, batch: Batch, pack: Pack, index: np.ndarray | None) -> Plan:
  """Writes down who lies where. index: as in `Plan`; bins hold rows of the batch."""
  size = pack.micro, pack.rows, pack.length
  slots = {
    name: np.full(size, fill, np.int32)
    for name, fill in (
      ('origin', -1),
      ('segment_ids', 0),
      ('positions', 0),
      ('prefix_ids', 0),
      ('target', -1),
    )
  }
  members = np.full((pack.micro, pack.sequences), -1, np.int32)
  where = np.arange(len(batch.tokens))
  if index is not None:
    where = np.full(len(batch.tokens), -1)
    where[index[index >= 0]] = np.flatnonzero(index >= 0)
  for micro in range(len(bins.count)):
    rows = range(micro * pack.rows, (micro + 1) * pack.rows)
    inside = [r for i in rows for of in bins.lying[i].values() for r in of]
    members[micro, : len(inside)] = where[inside]
    local = {row: b for b, row in enumerate(inside)}
    for r, i in enumerate(rows):
      _write({k: v[micro, r] for k, v in slots.items()}, bins, i, batch, local)
  if not pack.shared:
    del slots['prefix_ids'], slots['target']
  return Plan(index=index, members=members, count=np.int32(len(bins.count)), **slots)


def _write(
  slots: dict[str, np.ndarray],
  bins: Bins,
  which: int,
  batch: Batch,
  local: dict[int, int],
) -> None:
  """One packed row: for each group what it shares, then the rest of its rows."""
  width, at, segment = batch.tokens.shape[1], 0, 0

  def put(row: int, span: slice, prefix: int, *, told: bool) -> None:
    nonlocal at, segment
    ids = batch.segment_ids[row]
    origin = local[row] * width + np.arange(width, dtype=np.int32)[span]
    part = slice(at, at + len(origin))
    slots['origin'][part] = origin
    slots['target'][part] = origin if told else -1
    slots['segment_ids'][part] = segment + ids[span]
    slots['positions'][part] = _positions(ids)[span]
    slots['prefix_ids'][part] = np.where(ids == 1, prefix, 0)[span]
    at, segment = part.stop, segment + int(ids[span].max())

  for rows in bins.lying[which].values():
    shared = int(bins.lengths.shared[rows[0]]) if len(rows) > 1 else 0
    if shared:
      put(rows[0], slice(shared), 0, told=False)
    prefix = segment if shared else 0
    for row in rows:
      put(row, slice(shared, int(bins.lengths.tokens[row])), prefix, told=True)


def _positions(ids: np.ndarray) -> np.ndarray:
  """`[T]` segment numbers → places in each segment."""
  time = np.arange(len(ids))
  starts = np.append(True, ids[1:] != ids[:-1])
  return time - np.maximum.accumulate(np.where(starts, time, 0))
