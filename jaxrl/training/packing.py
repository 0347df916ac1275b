"""Packed rows: how a step's tokens are to fill micro-batches, and the plan of it.

`batch.packing` is a call string, the function here: micro-batches take tokens rather
than rows, and the forward pass runs on rows that hold several sequences each. Losses
see the rectangle `[B, T]` as ever, for what the model says is scattered back to it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl import signature
from jaxrl.signature import ConfigError
from jaxrl.training import sharding
from jaxrl.types import Rows

SPAN = 4  # packed rows are by default as long as so many of the longest sequences
ROOMY = 16  # rows that a micro-batch has room for, for each that would fill it alone


@dataclasses.dataclass(frozen=True)
class Packing:
  """tokens: slots of a micro-batch. length: of a packed row; 0: chosen. share_prefix:
  whether responses to one prompt share it. sequences: of a micro-batch, at most; 0:
  chosen. abreast: micro-batches at once, on a CPU; 0: chosen.
  """

  tokens: int
  length: int
  share_prefix: bool
  sequences: int = 0
  abreast: int = 0


def first_fit(
  *,
  tokens: int = 8192,
  length: int = 0,
  share_prefix: bool = True,
  sequences: int = 0,
  abreast: int = 0,
) -> Packing:
  """Sequences go into the first packed row with room, the longest first.

  tokens: slots of a micro-batch, on all devices together. length: slots of a packed
  row; 0: those of four of the longest sequences, or fewer if `tokens` are fewer.
  share_prefix: a prompt is computed once for those of its responses that lie in the
  same packed row. sequences: room for so many in a micro-batch of `tokens`, which then
  closes though slots are left; 0: for 16 times as many as fill it. Attention on a
  rectangle of them (`jaxrl.models.rectangle`) is taken where that is small. abreast: on
  one CPU device, so many micro-batches are done at once, a thread each; 0: two of a
  shallow model without remat, where there are processors for them.
  """
  return Packing(tokens, length, share_prefix, sequences, abreast)


def parse(text: str) -> Packing | None:
  """The call string of `batch.packing`; '' is None: a sequence a row."""
  if not text:
    return None
  return signature.call(text, {'first_fit': first_fit}, 'packing', 'batch.packing')


class Pack(NamedTuple):
  """What is compiled: up to `micro` micro-batches of `rows` packed rows of `length`.

  sequences: how many each has room for. shared: whether prompts are shared. abreast:
  how many are done at once.
  """

  micro: int
  sequences: int
  rows: int
  length: int
  shared: bool
  abreast: int = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
  """How the rows of a minibatch lie in `count` micro-batches, and those in packed rows.

  index: `[N]` int32, rows of the batch, −1 pads; None: all of them in order. members:
  `[M, B]` int32, which of the N rows a micro-batch has, −1 pads. count: int32 scalar;
  micro-batches from there on are empty. origin, segment_ids, prefix_ids, positions:
  `[M, R, L]`, each as in `Rows`, of the micro-batch's rectangle `[B, T]`. target:
  `[M, R, L]` int32, of which token a slot's score is told, −1 of none; None: origin.
  """

  index: Any
  members: Any
  count: Any
  origin: Any
  segment_ids: Any
  positions: Any
  prefix_ids: Any = None
  target: Any = None

  def rows(self, i: jax.Array, length: int) -> Rows:
    """Of micro-batch `i`, whose rectangle is `length` tokens wide."""
    origin = self.origin[i]
    target = (origin if self.target is None else self.target[i]).reshape(-1)
    size = self.members.shape[1] * length
    place = jnp.full(size, -1, jnp.int32)
    # Beyond the end is nowhere.
    place = place.at[jnp.where(target < 0, size, target)].set(
      jnp.arange(target.size, dtype=jnp.int32), mode='drop'
    )
    return Rows(
      origin=origin,
      segment_ids=self.segment_ids[i],
      prefix_ids=None if self.prefix_ids is None else self.prefix_ids[i],
      positions=self.positions[i],
      place=place.reshape(-1, length),
    )


def plan_shapes(mesh: Mesh, pack: Pack, rows: int | None) -> Plan:
  """The plan of a minibatch of so many rows, or of a whole batch: shapes, layouts."""
  whole = sharding.replicated(mesh)
  split = NamedSharding(mesh, P(None, sharding.RULES['batch']))
  size = pack.micro, pack.rows, pack.length

  def shape(size, layout):
    return jax.ShapeDtypeStruct(size, jnp.int32, sharding=layout)

  slots = shape(size, split)
  return Plan(
    index=None if rows is None else shape((rows,), whole),
    members=shape((pack.micro, pack.sequences), whole),
    count=shape((), whole),
    origin=slots,
    segment_ids=slots,
    positions=slots,
    prefix_ids=slots if pack.shared else None,
    target=slots if pack.shared else None,
  )


def put(mesh: Mesh, pack: Pack, plan: Plan) -> Plan:
  """A plan of numpy arrays on the devices."""
  rows = None if plan.index is None else len(plan.index)
  shapes = plan_shapes(mesh, pack, rows)
  return jax.tree.map(
    lambda x, s: sharding.put(np.asarray(x, np.int32), s.sharding), plan, shapes
  )


def check(packing: Packing, *, exact: bool, context: int, micro_batches: int) -> None:
  """Raises ConfigError for what packed rows do not go with.

  exact: whether the model scores as engines do, to the bit. context: of the mesh.
  """
  where = 'batch.packing'
  if packing.abreast < 0:
    raise ConfigError(
      f'{where}=first_fit(abreast={packing.abreast}) must be at least 1, or 0, which '
      'chooses'
    )
  if micro_batches != 1:
    raise ConfigError(
      f'{where} fills micro-batches by tokens, so batch.micro_batches='
      f'{micro_batches} has no meaning: leave it at 1 and set tokens=…'
    )
  if exact:
    raise ConfigError(
      f'{where}: exact mode scores a sequence a row, as it was sampled; take one of '
      'them, packing or exact mode'
    )
  if context > 1:
    raise ConfigError(
      f'{where}: a mesh with context={context} splits rows by length, '
      'and packed rows are not split; set mesh.context=1'
    )


def check_atoms(
  packing: Packing, atom: int, longest: int, length: int, rows: int
) -> None:
  """Raises ConfigError unless a micro-batch has room for the longest atom there may be.

  atom: sequences that stay together. length, rows: of the packed rows of a micro-batch.
  """
  if packing.sequences < 0:
    raise ConfigError(
      f'batch.packing=first_fit(sequences={packing.sequences}) must be at least 1, or '
      '0, which chooses'
    )
  if 0 < packing.sequences < atom:
    raise ConfigError(
      f'batch.packing=first_fit(sequences={packing.sequences}): {atom} stay '
      f'together in this algorithm; ask for at least sequences={atom}, or for 0, which '
      'chooses'
    )
  each = length // longest
  if rows * each < atom:
    raise ConfigError(
      f'batch.packing=first_fit(tokens={packing.tokens}, length={packing.length}): '
      f'{atom} sequences stay together in this algorithm, of up to {longest} tokens '
      f'each, and a micro-batch has room for {rows * each} of them: ask for at least '
      f'tokens={-(-atom // each) * length}'
    )


def usual_rows(
  packing: Packing, longest: int, atom: int, shares: int
) -> tuple[int, int]:
  """Packed rows of a device's share of a micro-batch, and their length in slots.

  longest: tokens of the longest sequence. atom: sequences that stay together. shares:
  of rows on the mesh. Raises ConfigError for what does not fit into `packing.tokens`.
  """
  length = row_length(packing, longest, shares)
  rows = packing.tokens // (length * shares)
  check_atoms(packing, atom, longest, length, rows * shares)
  return rows, length


def row_length(packing: Packing, longest: int, shares: int) -> int:
  """Slots of a packed row. longest: of all sequences. shares: of rows on the mesh."""
  where = f'batch.packing=first_fit(tokens={packing.tokens}, length={packing.length})'
  length = packing.length or min(packing.tokens // shares, SPAN * longest)
  if length < longest:
    raise ConfigError(
      f'{where}: a packed row has {length} slots, and a sequence may have {longest} '
      'tokens (batch.max_length, or the largest of batch.buckets); a trajectory is '
      f'never split: ask for at least tokens={longest * shares} and, if you set it, '
      f'length={longest}'
    )
  if packing.tokens < length * shares:
    raise ConfigError(
      f'{where}: {shares} shares of the mesh take a packed row of {length} slots each: '
      f'ask for at least tokens={length * shares}'
    )
  return length
