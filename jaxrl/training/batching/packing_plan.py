"""Sequence packing places several sequences in one row, and its plan records where.

With `batch.packing` set, a micro-batch is filled by tokens rather than by rows: the
forward pass runs on packed rows that hold several sequences each. Losses still see the
rectangle `[B, T]`, because the model's outputs are scattered back to it. This module
has the options of packing and the `PackingPlan` that the compiled steps read;
`first_fit_placement` decides where each sequence lies.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.component_table import Component, ComponentTable
from jaxrl.options import ConfigError
from jaxrl.training.parallelism import sharding
from jaxrl.types import AnyArray, PackedRows, TokenTree

# By default a packed row is as long as this many of the longest sequences.
SEQUENCES_PER_ROW = 4
# By default a micro-batch may hold this many times the longest sequences that fill it,
# and this many if they are in trees.
SEQUENCE_CAPACITY_FACTOR = 16
TREE_CAPACITY_FACTOR = 64


@dataclasses.dataclass(frozen=True)
class Packing:
  """The options of packing; `first_fit` describes them.

  Attributes:
    tokens: Slots of a micro-batch.
    length: Slots of a packed row; 0 to choose.
    share_prefix: Whether responses to one prompt share it.
    sequences: The most sequences of a micro-batch; 0 to choose.
    num_parallel: Micro-batches that run in parallel on a CPU; 0 to choose.
    share_tree: Whether tokens may be shared in trees; None to choose.
  """

  tokens: int
  length: int
  share_prefix: bool
  sequences: int = 0
  num_parallel: int = 0
  share_tree: bool | None = None


def first_fit(
  *,
  tokens: int = 8192,
  length: int = 0,
  share_prefix: bool = True,
  sequences: int = 0,
  num_parallel: int = 0,
  share_tree: bool | None = None,
) -> Packing:
  """Places each sequence, the longest first, in the first packed row that has room.

  Args:
    tokens: Slots of a micro-batch, on all devices together.
    length: Slots of a packed row. 0: as many as four of the longest sequences have, or
      `tokens` if these are fewer.
    share_prefix: Whether a prompt is computed once for those of its responses that lie
      in the same packed row.
    sequences: The most sequences of a micro-batch of `tokens`, which then closes even
      if slots are left. 0: 16 times as many as fill it. A small number allows attention
      on an unpacked rectangle, which is cheaper for short sequences.
    num_parallel: How many micro-batches run in parallel on one CPU device, each in a
      thread. 0: two for a shallow model without remat, if there are processors for
      them.
    share_tree: Whether rows that begin alike, such as the turns of an episode, share
      all tokens up to where they part, actions too. None: on a CPU, for rows of single
      turns and in batches where it saves a fifth of the slots.

  Returns:
    The options.
  """
  return Packing(tokens, length, share_prefix, sequences, num_parallel, share_tree)


PACKINGS = ComponentTable('packing', 'batch.packing', {'first_fit': first_fit})


def make_packing(packing: Component | Packing | None) -> Packing | None:
  """Returns how sequences share rows; None gives each sequence its own.

  Args:
    packing: A call of one of `PACKINGS`, or what such a call makes.

  Raises:
    ConfigError: If there is no such packing or option.
  """
  if packing is None or isinstance(packing, Packing):
    return packing
  return PACKINGS.build(packing)


class PackShape(NamedTuple):
  """The shape of packed rows, for which programs are compiled.

  Attributes:
    max_micro_batches: The most micro-batches of an update.
    sequences: The most sequences of a micro-batch.
    rows: Packed rows of a micro-batch.
    length: Slots of a packed row.
    share_prefix: Whether prompts are shared.
    num_parallel: Micro-batches that run in parallel.
    tree: Whether tokens are shared in trees.
  """

  max_micro_batches: int
  sequences: int
  rows: int
  length: int
  share_prefix: bool
  num_parallel: int = 1
  tree: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackingPlan:
  """Where the rows of a minibatch lie in micro-batches and packed rows.

  Attributes:
    index: `[N]` int32, rows of the batch, −1 at padding; None for all rows in order.
    micro_batch_rows: `[M, B]` int32, which of the N rows a micro-batch has, −1 at
      padding.
    num_micro_batches: int32 scalar; micro-batches from this one on are empty.
    origin: `[M, R, L]` int32, as in `PackedRows`, for the rectangle `[B, T]` of a
      micro-batch; so are `segment_ids`, `positions` and `prefix_ids`.
    segment_ids: `[M, R, L]` int32.
    positions: `[M, R, L]` int32.
    prefix_ids: `[M, R, L]` int32, or None if prompts are not shared.
    output_origin: `[M, R, L]` int32, the token that a slot's output belongs to, −1 if
      it belongs to none; None if that is always `origin`.
    previous: `[M, R, L]` int32, as in `TokenTree`, as is `ends`; None without trees.
    ends: `[M, R, L]` int32, or None.
    place: `[N, T]` int32, as in `PackedRows` for the micro-batch that has the row; None
      if it follows from `output_origin`.
  """

  index: AnyArray
  micro_batch_rows: AnyArray
  num_micro_batches: AnyArray
  origin: AnyArray
  segment_ids: AnyArray
  positions: AnyArray
  prefix_ids: AnyArray = None
  output_origin: AnyArray = None
  previous: AnyArray = None
  ends: AnyArray = None
  place: AnyArray = None

  def packed_rows(self, i: jax.Array | int, length: int) -> PackedRows:
    """Returns the packed rows of one micro-batch.

    Args:
      i: The micro-batch, an int32 scalar.
      length: Tokens of a row of its rectangle.
    """
    origin = self.origin[i]
    if self.place is not None:
      rows, place = jnp.asarray(self.micro_batch_rows)[i], jnp.asarray(self.place)
      return PackedRows(
        origin=origin,
        segment_ids=self.segment_ids[i],
        prefix_ids=None,
        positions=self.positions[i],
        place=jnp.where(rows[:, None] < 0, -1, place[jnp.maximum(rows, 0)]),
        tree=TokenTree(self.previous[i], self.ends[i]),
      )
    target = origin if self.output_origin is None else self.output_origin[i]
    target = target.reshape(-1)
    size = self.micro_batch_rows.shape[1] * length
    place = jnp.full(size, -1, jnp.int32)
    # Slots without a target write beyond the end, where writes are dropped.
    place = place.at[jnp.where(target < 0, size, target)].set(
      jnp.arange(target.size, dtype=jnp.int32), mode='drop'
    )
    return PackedRows(
      origin=origin,
      segment_ids=self.segment_ids[i],
      prefix_ids=None if self.prefix_ids is None else self.prefix_ids[i],
      positions=self.positions[i],
      place=place.reshape(-1, length),
    )


BatchIndex = np.ndarray | PackingPlan  # rows of an update, or where they lie


def most_sequences_per_row(sequences: int, length: int, longest: int) -> int:
  """Returns the most sequences of a packed row, which attention may have to know.

  Args:
    sequences: The most sequences of a micro-batch.
    length: Slots of a packed row.
    longest: Tokens of the longest sequence that there is room for.
  """
  return min(sequences, SEQUENCE_CAPACITY_FACTOR * -(-length // longest))


def plan_shapes(
  mesh: Mesh, pack: PackShape, num_rows: int | None, rectangle: tuple[int, int]
) -> PackingPlan:
  """Returns the shapes and shardings of a plan.

  Args:
    mesh: The devices.
    pack: The shape of the packed rows.
    num_rows: Rows of the minibatch; None for the plan of a whole batch.
    rectangle: Rows of the minibatch or batch, and tokens of each.
  """
  replicated = sharding.replicated(mesh)
  by_row = NamedSharding(mesh, P(None, sharding.LOGICAL_AXIS_RULES['batch']))

  def shape(size: tuple[int, ...], layout: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, jnp.int32, sharding=layout)

  slots = shape((pack.max_micro_batches, pack.rows, pack.length), by_row)
  return PackingPlan(
    index=None if num_rows is None else shape((num_rows,), replicated),
    micro_batch_rows=shape((pack.max_micro_batches, pack.sequences), replicated),
    num_micro_batches=shape((), replicated),
    origin=slots,
    segment_ids=slots,
    positions=slots,
    prefix_ids=slots if pack.share_prefix else None,
    output_origin=slots if pack.share_prefix else None,
    previous=slots if pack.tree else None,
    ends=slots if pack.tree else None,
    place=shape(rectangle, replicated) if pack.tree else None,
  )


def put_plan(mesh: Mesh, pack: PackShape, plan: PackingPlan) -> PackingPlan:
  """Copies a plan of numpy arrays to the devices."""
  num_rows = None if plan.index is None else len(plan.index)
  rectangle = (0, 0) if plan.place is None else plan.place.shape
  shapes = plan_shapes(mesh, pack, num_rows, rectangle)
  return jax.tree.map(
    lambda x, shape: sharding.put_array(np.asarray(x, np.int32), shape.sharding),
    plan,
    shapes,
  )


def check_packing(
  packing: Packing, *, exact: bool, context: int, num_micro_batches: int
) -> None:
  """Raises ConfigError for settings that packing cannot be combined with.

  Args:
    packing: The options.
    exact: Whether the model scores bit for bit as engines do.
    context: The size of the mesh's context axis.
    num_micro_batches: The setting `batch.num_micro_batches`.
  """
  key = 'batch.packing'
  if packing.num_parallel < 0:
    raise ConfigError(
      f'{key}=first_fit(num_parallel={packing.num_parallel}): must be at '
      'least 1, or 0 to choose automatically'
    )
  if num_micro_batches != 1:
    raise ConfigError(
      f'{key} fills micro-batches by tokens, so '
      f'batch.num_micro_batches={num_micro_batches} has no effect: leave it '
      'at 1 and set tokens=…'
    )
  if exact:
    raise ConfigError(
      f'{key}: packing and exact mode exclude each other, as exact mode needs '
      'each sequence in its own row: set one of the two'
    )
  if context > 1:
    raise ConfigError(
      f'{key}: packed rows cannot be split over context={context}: leave '
      'context out of the mesh'
    )


def check_batch_unit_fits(
  packing: Packing, unit_size: int, longest: int, length: int, rows: int
) -> None:
  """Raises ConfigError unless a micro-batch has room for the longest batch unit.

  Args:
    packing: The options, which the message quotes.
    unit_size: Sequences that stay together.
    longest: Tokens of the longest sequence.
    length: Slots of a packed row.
    rows: Packed rows of a micro-batch.
  """
  if packing.sequences < 0:
    raise ConfigError(
      f'batch.packing=first_fit(sequences={packing.sequences}): must be at '
      'least 1, or 0 to choose automatically'
    )
  if 0 < packing.sequences < unit_size:
    raise ConfigError(
      f'batch.packing=first_fit(sequences={packing.sequences}): this '
      f'algorithm keeps {unit_size} sequences together: set at least '
      f'sequences={unit_size}, or 0 to choose automatically'
    )
  per_row = length // longest
  if rows * per_row < unit_size:
    raise ConfigError(
      f'batch.packing=first_fit(tokens={packing.tokens}, '
      f'length={packing.length}): this algorithm keeps {unit_size} sequences '
      f'of up to {longest} tokens together, but a micro-batch has room for '
      f'{rows * per_row}: set at least '
      f'tokens={-(-unit_size // per_row) * length}'
    )


def usual_packed_rows(
  packing: Packing, longest: int, unit_size: int, row_shards: int
) -> tuple[int, int]:
  """Returns the packed rows of a usual micro-batch.

  Args:
    packing: The options.
    longest: Tokens of the longest sequence.
    unit_size: Sequences that stay together.
    row_shards: Shares that the mesh splits rows into.

  Returns:
    `(rows, length)`: packed rows of a device's share, and slots of each.

  Raises:
    ConfigError: The batch unit or a sequence does not fit into `packing.tokens`.
  """
  length = packed_row_length(packing, longest, row_shards)
  rows = packing.tokens // (length * row_shards)
  check_batch_unit_fits(packing, unit_size, longest, length, rows * row_shards)
  return rows, length


def packed_row_length(packing: Packing, longest: int, row_shards: int) -> int:
  """Returns the slots of a packed row.

  Args:
    packing: The options.
    longest: Tokens of the longest sequence.
    row_shards: Shares that the mesh splits rows into.

  Raises:
    ConfigError: The row is shorter than a sequence, or the micro-batch is smaller than
      one row for each share.
  """
  setting = f'batch.packing=first_fit(tokens={packing.tokens}, length={packing.length})'
  length = packing.length or min(
    packing.tokens // row_shards, SEQUENCES_PER_ROW * longest
  )
  if length < longest:
    raise ConfigError(
      f'{setting}: a packed row has {length} slots, but a sequence may have '
      f'{longest} tokens (batch.max_length, or the largest of '
      f'batch.length_buckets): set at least tokens={longest * row_shards} '
      f'and, if you set it, length={longest}'
    )
  if packing.tokens < length * row_shards:
    raise ConfigError(
      f'{setting}: each of the {row_shards} shards of the mesh needs a packed '
      f'row of {length} slots: set at least tokens={length * row_shards}'
    )
  return length
