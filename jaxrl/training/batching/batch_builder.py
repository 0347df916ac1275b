"""Batch building turns groups of trajectories into a padded batch and its minibatches.

`collate` pads ragged trajectories to one rectangle `[B, T]`. `BatchBuilder` chooses the
rectangle among few shapes, so that few programs are compiled, and assigns its rows to
minibatches (one optimizer update each) and micro-batches (one gradient each).
`jaxrl.training.batching.packed_batch_builder` does the same for packed rows.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jaxrl.functional import losses
from jaxrl.functional.components import component_info
from jaxrl.group_stats import number_episodes
from jaxrl.models.model_config import VisionConfig
from jaxrl.training.batching.packing_plan import BatchIndex, PackingPlan, PackShape
from jaxrl.types import MAX_REWARD_TERMS, Algorithm, Batch, Group, Trajectory

ROUTED_EXPERTS_KEY = (
  'routed_experts'  # key in a row's extras: `[T, L, k]`, −1 where unknown
)
SEGMENT_LENGTHS_KEY = 'segments'  # key in a row's extras: the lengths of its segments
STEP_ENDS_KEY = 'step_ends'  # key in a row's extras: last tokens of rewarded steps


@dataclasses.dataclass(frozen=True)
class BatchShape:
  """The shape of a batch, which decides what programs learn from it.

  Attributes:
    rows: Rows of the batch.
    length: Tokens of a row.
    micro_rows: Rows of a micro-batch or, if rows are packed, of a minibatch.
    pack: The shape of the packed rows, if rows are packed.
    patches: Rows of patches of images, and their length, if there are images.
    segments: The most segments of a sequence, 1 or a higher power of two; 0 where
      programs do not depend on it.
  """

  rows: int
  length: int
  micro_rows: int
  pack: PackShape | None = None
  patches: tuple[int, int] | None = None
  segments: int = 0

  @property
  def num_chunks(self) -> int:
    """Returns the number of chunks of `micro_rows` rows."""
    return self.rows // self.micro_rows

  @property
  def num_parallel(self) -> int:
    """Returns the number of micro-batches that run in parallel."""
    return 1 if self.pack is None else self.pack.num_parallel

  @property
  def scoring_pack(self) -> PackShape | None:
    """Returns the packed shape for scoring the rows of all minibatches at once."""
    if self.pack is None:
      return None
    return self.pack._replace(
      max_micro_batches=self.pack.max_micro_batches * self.num_chunks
    )


@dataclasses.dataclass(frozen=True)
class BatchBuilder:
  """Builds batches of few shapes and assigns their rows to minibatches.

  Attributes:
    algorithm: Decides which rows must stay together.
    num_rows: Rows of a batch if each sample is one row.
    row_multiple: What the rows of a micro-batch must be a multiple of, for the mesh.
    buckets: The lengths that rows are padded to, ascending.
    num_minibatches: Optimizer updates in one pass over a batch.
    num_micro_batches: Micro-batches of a minibatch.
    num_epochs: Passes over a batch.
    seed: Seed of the order in which rows are assigned to minibatches.
    vision: The tower of a model that sees images.
    counts_segments: Whether programs depend on how many segments a sequence has: those
      for GPUs do, whose attention must know it to do without a mask.
    rows_per_sample: The usual rows of a sample: in self-play, one for each player.
  """

  algorithm: Algorithm
  num_rows: int
  row_multiple: int
  buckets: tuple[int, ...]
  num_minibatches: int
  num_micro_batches: int
  num_epochs: int
  seed: int
  vision: VisionConfig | None = None
  counts_segments: bool = False
  rows_per_sample: int = 1

  @property
  def _num_chunks(self) -> int:
    return self.num_minibatches * self.num_micro_batches

  def batch_shape(self, length: int = 0, num_rows: int = 0) -> BatchShape:
    """Returns the shape of a batch.

    The number of rows is a multiple of the usual number: in turn-level training it
    differs from batch to batch, and few shapes mean few compilations.

    Args:
      length: Tokens of a row.
      num_rows: Rows that the batch must hold; 0 for a usual batch.
    """
    times = -(-num_rows // self.num_rows) or self.rows_per_sample
    padded_rows = times * self.num_rows
    unit_size, chunks = batch_unit_size(self.algorithm), self._num_chunks
    micro_rows = rows_per_micro_batch(padded_rows, chunks, unit_size, self.row_multiple)
    return BatchShape(
      micro_rows * chunks, length, micro_rows, segments=int(self.counts_segments)
    )

  def warmup_shapes(self) -> list[BatchShape]:
    """Returns the shapes of usual batches, which warm-up compiles for."""
    return [self.batch_shape(length) for length in self.buckets]

  def build_batch(
    self, groups: Sequence[Group], step: int
  ) -> tuple[Batch, BatchShape, Sequence[BatchIndex]]:
    """Builds the batch of a step.

    Args:
      groups: The trajectories to learn from, by group.
      step: The learner's step, which the order of minibatches depends on.

    Returns:
      The batch as numpy arrays, its shape, and the row indices of each update,
      `[num_micro_batches, R]` int32, −1 at padding.

    Raises:
      ValueError: A row is longer than every bucket, or a group is not a pair although
        the algorithm needs pairs.
    """
    shape = self.batch_shape(num_rows=self.num_rows)
    count = sum(len(group) for group in groups)
    if count > shape.rows:
      shape = self.batch_shape(num_rows=count)
    while True:
      batch = self._add_default_fields(self._collate(groups, shape))
      indices = self._assign_minibatches(batch, shape.micro_rows, step)
      if indices is not None:
        break
      micro_rows = shape.micro_rows + self.row_multiple
      shape = BatchShape(micro_rows * self._num_chunks, 0, micro_rows)
    shape = dataclasses.replace(shape, length=batch.tokens.shape[1])
    return batch, self._shape_of(shape, batch), indices

  def device_index(
    self, mesh: Mesh, shape: BatchShape, index: BatchIndex
  ) -> BatchIndex:
    """Returns the row indices of an update as the compiled train step takes them."""
    del mesh, shape
    return index

  def scoring_arguments(
    self, mesh: Mesh, batch: Batch, shape: BatchShape, indices: Sequence[BatchIndex]
  ) -> tuple[PackingPlan, ...]:
    """Returns further arguments of the compiled advantage step."""
    del mesh, batch, shape, indices
    return ()

  def packing_metrics(
    self, batch: Batch, shape: BatchShape, indices: Sequence[BatchIndex]
  ) -> dict[str, float]:
    """Returns metrics of how full packed rows are; none if rows are not packed."""
    del batch, shape, indices
    return {}

  def _shape_of(self, shape: BatchShape, batch: Batch) -> BatchShape:
    """Returns the shape with what a batch adds: its images and its segments."""
    if batch.patch_rows is not None:
      shape = dataclasses.replace(shape, patches=batch.patch_rows.image_ids.shape)
    if not self.counts_segments:
      return shape
    most = int(batch.segment_ids.max(initial=1))
    return dataclasses.replace(shape, segments=1 << (most - 1).bit_length())

  def _collate(self, groups: Sequence[Group], shape: BatchShape) -> Batch:
    buckets = self.buckets if shape.pack is None else (max(self.buckets),)
    whole = component_info(self.algorithm.advantage).whole_episodes
    batch = collate(groups, buckets, shape.rows, whole_episodes=whole)
    if not any(row.images for group in groups for row in group):
      return batch
    # Imported here because few models see images.
    from jaxrl.training.batching import batch_images

    return batch_images.add_to_batch(self.vision, batch, groups, self.row_multiple)

  def _add_default_fields(self, batch: Batch) -> Batch:
    """Adds the fields that only some batches have, so that all compile alike."""
    rows = len(batch.tokens)
    defaults = {
      'expert_mask': np.zeros(rows, bool),
      'greedy_mask': np.zeros(rows, bool),
      'loss_weights': np.ones(rows, np.float32),
    }
    missing = {k: v for k, v in defaults.items() if getattr(batch, k) is None}
    if self.algorithm.batch_unit == 'pair':
      missing['pair_ids'] = batch.group_ids
      losses.check_pairs(batch.group_ids, batch.rewards)
    return batch.replace(**missing)

  def _assign_minibatches(
    self, batch: Batch, capacity: int, step: int
  ) -> list[np.ndarray] | None:
    """Returns row indices of each update, `[num_micro_batches, capacity]`, or None."""
    units = batch_units(self.algorithm, batch)
    indices = []
    for epoch in range(self.num_epochs):
      ordered = units
      if self.num_minibatches > 1:  # one minibatch holds every row in any order
        ordered = shuffle_units(units, self.seed, step, epoch)
      assigned = assign_rows(
        ordered, self.num_minibatches, self.num_micro_batches, capacity
      )
      if assigned is None:
        return None
      indices += [index for index in assigned if (index >= 0).any()]
    return indices


def batch_unit_size(algorithm: Algorithm) -> int:
  """Returns the usual number of rows that an algorithm keeps together."""
  return {'row': 1, 'pair': 2, 'group': algorithm.group_size}[algorithm.batch_unit]


def rows_per_micro_batch(
  num_rows: int, num_micro_batches: int, unit_size: int, row_multiple: int
) -> int:
  """Returns the rows of each micro-batch such that all of them hold `num_rows`.

  Args:
    num_rows: Rows to hold.
    num_micro_batches: Micro-batches that hold them.
    unit_size: Rows that stay together.
    row_multiple: What the result must be a multiple of, for the mesh.
  """
  units = -(-num_rows // unit_size)
  rows = -(-units // num_micro_batches) * unit_size
  return -(-rows // row_multiple) * row_multiple


def batch_units(algorithm: Algorithm, batch: Batch) -> list[np.ndarray]:
  """Returns the row numbers of each batch unit, in the order of the batch.

  Args:
    algorithm: Its `batch_unit` says which rows stay together.
    batch: A numpy batch; its padding rows are in no unit.

  Raises:
    ValueError: The units are pairs and the batch has no `pair_ids`.
  """
  rows = np.flatnonzero(batch.group_ids >= 0)
  if algorithm.batch_unit == 'row':
    return [rows[i : i + 1] for i in range(len(rows))]
  ids = batch.group_ids if algorithm.batch_unit == 'group' else batch.pair_ids
  if ids is None:
    raise ValueError("batch_unit='pair' needs pair_ids, which this batch does not have")
  ids = np.asarray(ids)[rows]
  first = np.unique(ids, return_index=True)[1]
  return [rows[ids == ids[i]] for i in np.sort(first)]


def assign_rows(
  units: Sequence[np.ndarray],
  num_minibatches: int,
  num_micro_batches: int,
  capacity: int,
) -> np.ndarray | None:
  """Assigns each batch unit, in order, to the emptiest micro-batch.

  Args:
    units: The row numbers of each unit.
    num_minibatches: Minibatches, which fill evenly.
    num_micro_batches: Micro-batches of each minibatch.
    capacity: Rows of a micro-batch.

  Returns:
    `[num_minibatches, num_micro_batches, capacity]` int32 row numbers, −1 at padding,
    or None if a unit fits nowhere.
  """
  assigned: list[list[int]] = [[] for _ in range(num_minibatches * num_micro_batches)]
  num_assigned = [[0] * num_micro_batches for _ in range(num_minibatches)]
  for unit in units:
    have_room = [
      i for i, n in enumerate(num_assigned) if min(n) + len(unit) <= capacity
    ]
    if not have_room:
      return None
    mini = min(have_room, key=lambda i: sum(num_assigned[i]))
    micro = num_assigned[mini].index(min(num_assigned[mini]))
    assigned[mini * num_micro_batches + micro].extend(unit.tolist())
    num_assigned[mini][micro] += len(unit)
  index = np.full((len(assigned), capacity), -1, np.int32)
  for i, rows in enumerate(assigned):
    index[i, : len(rows)] = rows
  return index.reshape(num_minibatches, num_micro_batches, capacity)


def shuffle_units(
  units: Sequence[np.ndarray], seed: int, step: int, epoch: int
) -> list[np.ndarray]:
  """Returns the batch units in an order that only the three numbers determine."""
  order = np.random.default_rng([seed, step, epoch]).permutation(len(units))
  return [units[i] for i in order]


def pick_bucket(length: int, buckets: Sequence[int]) -> int:
  """Returns the smallest bucket that holds a row.

  Args:
    length: Tokens of the row.
    buckets: Lengths to choose from.

  Raises:
    ValueError: No bucket is long enough.
  """
  fitting = [bucket for bucket in buckets if bucket >= length]
  if not fitting:
    raise ValueError(
      f'a trajectory of {length} tokens is longer than the largest length bucket, '
      f'{max(buckets)}; add a larger bucket or lower the maximal length'
    )
  return min(fitting)


def collate(
  groups: Sequence[Group],
  buckets: Sequence[int],
  num_rows: int | None = None,
  *,
  multiple: int = 1,
  pad_id: int = 0,
  whole_episodes: bool = False,
) -> Batch:
  """Joins groups of ragged trajectories into one rectangular batch.

  Rows keep their order. `group_ids` number the groups and `episode_ids` the episodes;
  padding rows have ids −1, no action and segment 0. `segment_ids` number the segments
  of a row from 1. `weights_version` is −1 where a token is not an action.

  Args:
    groups: The trajectories by group.
    buckets: Lengths to choose from; the smallest that holds the longest row is taken.
    num_rows: Rows of the batch; default, the number of rows rounded up to `multiple`.
    multiple: What the default number of rows is a multiple of.
    pad_id: The token at padding.
    whole_episodes: Whether all players of an episode share its id; else each has one.

  Returns:
    A batch of numpy arrays. It has `state_hash` and `routed_experts` if a row has them
    in its extras, and `expert_mask`, `greedy_mask` and `loss_weights` if a row differs
    from the default.

  Raises:
    ValueError: There are no rows or too many, a row is longer than every bucket, or its
      segments do not add up to its tokens.
  """
  rows = [row for group in groups for row in group]
  if not rows:
    raise ValueError('there is nothing to collate: no group holds a trajectory')
  count = -(-len(rows) // multiple) * multiple if num_rows is None else num_rows
  if len(rows) > count:
    raise ValueError(f'{len(rows)} rows do not fit a batch of {count}')
  width = pick_bucket(max(len(row.tokens) for row in rows), buckets)
  episode_ids = number_episodes(groups, whole=whole_episodes)
  return _collate_rows(groups, rows, count, width, pad_id, episode_ids)


def _collate_rows(
  groups: Sequence[Group],
  rows: Sequence[Trajectory],
  count: int,
  width: int,
  pad_id: int,
  episode_ids: Sequence[int],
) -> Batch:
  """Joins rows into a batch of `count` rows by `width` tokens."""
  lengths = np.array([len(row.tokens) for row in rows])
  is_token = np.pad(
    np.arange(width) < lengths[:, None], ((0, count - len(rows)), (0, 0))
  )

  def token_field(name: str, dtype: type, fill: int = 0) -> np.ndarray:
    values = np.full((count, width), fill, dtype)
    values[is_token] = np.concatenate([getattr(row, name) for row in rows])
    return values

  def pad_ids(ids: Sequence[int]) -> np.ndarray:
    padded = np.full(count, -1, np.int32)
    padded[: len(rows)] = ids
    return padded

  def optional_field(name: str, default: float | np.float32) -> np.ndarray | None:
    values = np.full(count, default)
    values[: len(rows)] = [getattr(row, name) for row in rows]
    return values if (values != default).any() else None

  state_hash = None
  if any('state_hash' in row.extras for row in rows):
    state_hash = pad_ids([row.extras.get('state_hash', -1) for row in rows])
  role_ids = None
  if any('role' in row.extras for row in rows):
    role_ids = pad_ids([row.extras.get('role', 0) for row in rows])
  routed_experts, recorded = None, [row.extras.get(ROUTED_EXPERTS_KEY) for row in rows]
  if any(experts is not None for experts in recorded):
    # Imported here because only mixtures of experts have routers.
    from jaxrl.training.batching import router_replay

    routed_experts = router_replay.collect_experts(rows, recorded, is_token)
  terms = _reward_terms(rows, episode_ids, count)
  return Batch(
    tokens=token_field('tokens', np.int32, pad_id),
    segment_ids=_segment_ids(rows, is_token),
    action_mask=token_field('action_mask', bool),
    rollout_logprobs=token_field('rollout_logprobs', np.float32),
    rewards=token_field('rewards', np.float32),
    group_ids=pad_ids([i for i, group in enumerate(groups) for _ in group]),
    episode_ids=pad_ids(episode_ids),
    turn_ids=pad_ids([row.turn for row in rows]),
    weights_version=token_field('weights_version', np.int32, -1),
    expert_mask=optional_field('is_expert', False),
    greedy_mask=optional_field('is_greedy', False),
    loss_weights=optional_field('weight', np.float32(1)),
    state_hash=state_hash,
    role_ids=role_ids,
    reward_terms=terms[0],
    reward_weights=terms[1],
    step_ends=_step_ends(rows, is_token),
    routed_experts=routed_experts,
  )


def _reward_terms(
  rows: Sequence[Trajectory], episode_ids: Sequence[int], count: int
) -> np.ndarray:
  """Returns scores and weights of each row's rewards, `[2, B, MAX_REWARD_TERMS]`.

  An episode that nobody but its environment rewarded has its return alone.
  """
  terms = np.zeros((2, count, MAX_REWARD_TERMS), np.float32)
  totals = np.bincount(episode_ids, [row.score for row in rows]) if rows else ()
  for i, (row, episode) in enumerate(zip(rows, episode_ids, strict=True)):
    listed = row.extras.get('reward_terms') or [(totals[episode], 1.0)]
    listed = listed[:MAX_REWARD_TERMS]
    terms[:, i, : len(listed)] = np.transpose(listed)
  return terms


def _step_ends(rows: Sequence[Trajectory], is_token: np.ndarray) -> np.ndarray:
  """Returns where steps end, `[B, T]` bool: with the turn, if nobody rewarded steps."""
  ends = np.zeros(is_token.shape, bool)
  for i, row in enumerate(rows):
    is_last = row.action_mask & ~np.append(row.action_mask[1:], False)
    ends[i, : len(is_last)] = is_last
    ends[i, row.extras.get(STEP_ENDS_KEY, [])] = True
  return ends


def _segment_ids(rows: Sequence[Trajectory], is_token: np.ndarray) -> np.ndarray:
  """Returns the segments of each row, counted from 1, `[B, T]` int32; 0 at padding."""
  ids = is_token.astype(np.int32)
  for i, row in enumerate(rows):
    sizes = row.extras.get(SEGMENT_LENGTHS_KEY)
    if sizes is None:
      continue
    if sum(sizes) != len(row.tokens) or min(sizes) < 1:
      raise ValueError(
        f'row {row.trajectory_id} of {len(row.tokens)} tokens has segments of {sizes}'
      )
    ids[i, : len(row.tokens)] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
  return ids
