"""How groups become one batch, and its rows packed rows, in few compiled shapes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms import compose
from jaxrl.models.model import Model
from jaxrl.training import abreast, first_fit, minibatches, packing
from jaxrl.training.layout import Layout
from jaxrl.training.packing import ROOMY, Pack, Packing, Plan, usual_rows
from jaxrl.training.programs import Shape
from jaxrl.types import Batch, Group

FINE = 4  # so many times fewer packed rows a micro-batch, where that wastes less,
HALF = 2  # and rows so many times shorter
LITTLE = 0.01  # of the slots: not worth smaller micro-batches


@dataclasses.dataclass(frozen=True)
class PackedLayout(Layout):
  """A `Layout` whose micro-batches are filled by tokens.

  Rectangles have the length of the largest bucket: the model does not run on them.
  Step rows differ in number from batch to batch: there is room for the usual number
  times a power of two. A micro-batch has all the packed rows that `packing.tokens`
  make, or a few that are shorter, which leaves less of the last one empty.
  """

  packing: Packing = dataclasses.field(kw_only=True)

  @functools.cached_property
  def _sizes(self) -> tuple[tuple[int, int], ...]:
    """Packed rows of a device's share of a micro-batch, and their length.

    The usual ones and, if they differ, the fine ones.
    """
    longest = max(self.buckets)
    atom = minibatches.atom_size(self.algorithm)
    rows, length = usual_rows(self.packing, longest, atom, self.multiple)
    # In rows half as long half the pairs are left, and `sequences` was asked for so
    # that a rectangle has fewer.
    short = length if self.packing.sequences else max(longest, length // HALF)
    usual, fine = (rows, length), (-(-rows // FINE), short)
    return (usual,) if usual == fine else (usual, fine)

  @property
  def _shares(self) -> bool:
    """Whether prompts are shared: what may be costs kernels of attention."""
    own = self.algorithm
    single = own.schema in ('messages', 'text')  # a row a group
    if own.schema == 'rollout' and compose.formulation(own) == 'trajectory':
      single = compose.rows_per_group(own) == 1
    return self.packing.share_prefix and not single

  def shape(self, length: int = 0, num_rows: int = 0, *, fine: bool = False) -> Shape:
    """Of a batch with so many rows. fine: of small micro-batches."""
    del length
    wanted = self.num_rows
    while wanted < num_rows:
      wanted *= 2
    return self._packed(self._rows(wanted), self._sizes[-1 if fine else 0])

  def _rows(self, wanted: int) -> int:
    """Of a minibatch, where a batch has so many."""
    size = minibatches.atom_size(self.algorithm)
    return minibatches.micro_rows(wanted, self.minibatches, size, self.multiple)

  def shapes(self) -> list[Shape]:
    """Those of a usual batch."""
    return [self.shape(fine=fine) for fine in (False, True)[: len(self._sizes)]]

  def _packed(self, rows: int, size: tuple[int, int]) -> Shape:
    """rows: of a minibatch. size: one of `_sizes`."""
    longest, (share, length) = max(self.buckets), size
    slots = share * self.multiple * length
    # Of two packed rows one is more than half full, or the second would not be there.
    micro = -(-2 * rows * longest // slots) + 1
    atom = minibatches.atom_size(self.algorithm)
    sequences = min(rows, self._sequences(share * length, slots, longest, atom))
    micro += -(-rows // max(atom, sequences // atom * atom))
    own = share * self.multiple, length, self._shares, self._ways(rows)
    pack = Pack(micro, sequences, *own)
    return Shape(rows * self.minibatches, longest, rows, pack)

  def _late(self, rows: int) -> bool:
    """Whether a minibatch has more rows than usual: all is compiled anew for them."""
    return rows > self._rows(self.num_rows)

  def _ways(self, rows: int) -> int:
    """Micro-batches at once of a minibatch of `rows`, of any size.

    Where all fit a usual one there is nothing to do beside it. Late ones are done one
    after the other, of few programs.
    """
    if self._late(rows):
      return 1
    share, length = self._sizes[0]
    most = -(-rows * max(self.buckets) // (share * self.multiple * length))
    if self.packing.sequences:
      most = max(most, -(-rows // self.packing.sequences))
    return min(self.packing.abreast, most)

  def _sequences(self, share: int, slots: int, longest: int, atom: int) -> int:
    """Room of a micro-batch of `slots`, `share` of them on each share of the mesh."""
    if self.packing.sequences:
      usual = self._sizes[0][0] * self._sizes[0][1]
      some = self.packing.sequences * share // usual // self.multiple
    else:
      some = -(-ROOMY * slots // (longest * self.multiple))
    return max(some, -(-atom // self.multiple)) * self.multiple

  def lay_out(
    self, groups: Sequence[Group], step: int
  ) -> tuple[Batch, Shape, list[Plan]]:
    """The batch on the host, its shape, and the rows of each update.

    Raises ValueError for rows longer than every bucket, for rows that must stay
    together and fit no micro-batch, and for groups that are no pairs where pairs are
    asked for.
    """
    shape = self.shape(num_rows=sum(len(group) for group in groups))
    while True:
      batch = self._filled(self._pack(groups, shape))
      indices = self._deal(batch, shape.micro_rows, step)
      if indices is not None:
        break
      shape = self._packed(2 * shape.micro_rows, self._sizes[0])
    of = first_fit.lengths(batch, share=self._shares)
    found = []
    late = self.packing.abreast > 1 and self._late(shape.micro_rows)
    for size in self._sizes[: 1 if late else None]:
      own = self._packed(shape.micro_rows, size)
      try:
        found.append((own, [self._fill(batch, of, own, index) for index in indices]))
      except ValueError:
        if not found:  # the usual micro-batches are the larger ones
          raise
    shape, bins = min(found, key=lambda one: self._cost(*one))
    assert shape.pack is not None
    most = max(len(one.count) for one in bins)
    micro = shape.pack.micro
    while micro < most:
      micro *= 2
    shape = dataclasses.replace(shape, pack=shape.pack._replace(micro=micro))
    plans = [
      first_fit.plan(one, batch, shape.pack, index.reshape(-1))
      for one, index in zip(bins, indices, strict=True)
    ]
    return batch, shape, plans

  def _cost(self, shape: Shape, bins: list[first_fit.Bins]) -> float:
    """Slots, a little less for larger micro-batches."""
    assert shape.pack is not None
    slots = sum(one.room.size for one in bins) * shape.pack.length
    usual = shape.pack.rows == self._sizes[0][0] * self.multiple
    return slots * (1 + LITTLE * (not usual or shape.pack.length < self._sizes[0][1]))

  def _fill(
    self, batch: Batch, of: first_fit.Lengths, shape: Shape, index: np.ndarray | None
  ) -> first_fit.Bins:
    """Packs the rows `index` of a minibatch, or all."""
    assert shape.pack is not None
    atoms = minibatches.atoms(self.algorithm, batch)
    if index is not None:
      inside = set(index.reshape(-1).tolist())
      atoms = [atom for atom in atoms if int(atom[0]) in inside]
    return first_fit.fill(atoms, of, shape.pack)

  def put(self, mesh: Mesh, shape: Shape, index: Plan) -> Plan:
    assert shape.pack is not None
    return packing.put(mesh, shape.pack, index)

  def whole(
    self, mesh: Mesh, batch: Batch, shape: Shape, indices: list[Plan]
  ) -> tuple[Plan]:
    """The plan to score all of a batch with, before its first update."""
    pack = shape.whole
    assert pack is not None
    if self.minibatches == 1:
      plan = _of_batch(indices[0])
    else:
      of = first_fit.lengths(batch, share=self._shares)
      plan = first_fit.plan(self._fill(batch, of, shape, None), batch, pack, None)
    return (packing.put(mesh, pack, plan),)

  def metrics(
    self, batch: Batch, shape: Shape, indices: Sequence[Plan]
  ) -> dict[str, float]:
    """How full the packed rows are, and what sharing prompts spares.

    tokens/padding_share: of the slots that are computed. tokens/shared_share: of the
    tokens, those of prompts that another row's slots stand for. tokens/slots: of all
    updates of a batch. tokens/micro_batches: of an update.
    """
    assert shape.pack is not None
    used = sum(int((plan.origin >= 0).sum()) for plan in indices)
    micro = sum(int(plan.count) for plan in indices)
    slots = micro * shape.pack.rows * shape.pack.length
    size = (batch.segment_ids > 0).sum(axis=1)
    tokens = sum(int(size[plan.index[plan.index >= 0]].sum()) for plan in indices)
    return {
      'tokens/padding_share': 1.0 - used / slots,
      'tokens/shared_share': 1.0 - used / tokens,
      'tokens/slots': float(slots),
      'tokens/micro_batches': micro / len(indices),
    }


def _of_batch(plan: Plan) -> Plan:
  """The plan of a minibatch that is the whole batch, by the batch's own rows."""
  there = plan.members >= 0
  members = np.where(there, plan.index[np.maximum(plan.members, 0)], -1)
  return dataclasses.replace(plan, index=None, members=members.astype(np.int32))


def layout_of(
  packed: Packing | str, model: Model, mesh: Mesh, micro_batches: int
) -> Callable[..., Layout]:
  """What makes the layout. Raises ConfigError for what packed rows do not go with."""
  if isinstance(packed, str):
    packed = packing.parse(packed) or ''
  if not packed:
    return Layout
  packing.check(
    packed,
    exact=getattr(model, 'exact', None) is not None,
    context=mesh.shape.get('context', 1),
    micro_batches=micro_batches,
  )
  ways = abreast.ways(packed.abreast, model, mesh)
  packed = dataclasses.replace(packed, abreast=ways)
  return functools.partial(PackedLayout, packing=packed)
