"""Self-teacher scoring adds the log-probs of a policy that is shown more to a batch.

The teacher is the policy itself, with its own, its first or its averaged parameters.
It scores the student's own tokens after another prompt, which the row brings in
`extras['teacher_prompt']`; what it says of them moves to where they stand in the row.
"""

import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.models import lora
from jaxrl.training import batch_fields, train_state
from jaxrl.training.batching.batch_builder import SEGMENT_LENGTHS_KEY
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.parallelism import sharding
from jaxrl.training.train_state import StepSpec
from jaxrl.types import (
  TEACHER_PROMPT_KEY,
  Array,
  Batch,
  Group,
  Params,
  PolicyOutputs,
  Trajectory,
)

log = logging.getLogger(__name__)


def make_self_teacher(
  spec: StepSpec,
  mesh: Mesh,
  num_rows: int,
  options: LearnerOptions,
  longest: int,
  temperature: float,
) -> 'SelfTeacherScorer':
  """Makes the teacher of an algorithm that has none but the policy itself.

  Args:
    spec: What the learner's programs depend on.
    mesh: The learner's mesh.
    num_rows: Rows of a usual batch.
    options: How the learner divides a batch; about a micro-batch is scored at once.
    longest: Tokens of the longest row.
    temperature: The temperature that rollouts are sampled at.
  """
  if options.packing_plan is not None:
    chunk_rows = max(1, options.packing_plan.tokens // longest)
  else:
    parts = options.num_minibatches * max(1, options.num_micro_batches)
    chunk_rows = -(-num_rows // parts)
  return SelfTeacherScorer(
    spec, mesh, chunk_rows=chunk_rows, longest=longest, temperature=temperature
  )


class SelfTeacherScorer:
  """Scores the teacher fields of a batch with the policy itself.

  A row without a prompt for the teacher, or with one of too many tokens, is scored
  after its own prompt, and its `teacher_mask` is False.

  Args:
    spec: What the learner's programs depend on.
    mesh: The learner's mesh.
    chunk_rows: Rows scored at once, rounded up to a multiple that the mesh divides.
    longest: Tokens of the longest row; a teacher's prompt may have twice as many,
      unless the algorithm says another number.
    temperature: The temperature that rollouts are sampled at.

  Attributes:
    fields: Names of the teacher fields.
    chunk_rows: Rows scored at once.
    max_tokens: Tokens that a teacher's prompt may have.
    params: Nothing: what it needs is among the learner's own arrays.
  """

  params: Sequence[Params] = ()

  def __init__(
    self,
    spec: StepSpec,
    mesh: Mesh,
    *,
    chunk_rows: int,
    longest: int,
    temperature: float = 1.0,
  ):
    teacher = spec.algorithm.self_teacher
    assert teacher is not None
    if spec.top_k > spec.model.config.vocab_size:
      raise ValueError(
        f'top_k={spec.top_k}: the policy only has {spec.model.config.vocab_size} tokens'
      )
    self.fields = spec.teacher_fields
    multiple = sharding.num_row_shards(mesh)
    self.chunk_rows = -(-chunk_rows // multiple) * multiple
    window = spec.model.config.max_position
    self.max_tokens = min(teacher.max_tokens or 2 * longest, window)
    # Most prompts are short, and what a row has room for is computed.
    self._room = sorted({-(-self.max_tokens // 4), self.max_tokens})
    self._teacher = teacher
    self._spec = spec
    self._mesh = mesh
    self._temperature = float(temperature)
    self._policies: tuple[Params, Params | None] | None = None
    self._has_warned = False

  def follow(self, params: Params, ref_params: Params | None) -> Params | None:
    """Takes over the student's parameters, for the next batch that is scored.

    Args:
      params: The student's.
      ref_params: The teacher's own; None if it has none.

    Returns:
      The teacher's own, one step of the average later if it averages.
    """
    if self._teacher.params == 'ema':
      trained = lora.trainable_params(self._spec.model.config, params)
      rate = np.float32(self._teacher.update_rate)
      ref_params = _compile_average(self._spec, self._mesh)(ref_params, trained, rate)
    self._policies = params, ref_params
    return ref_params

  def warmup(self, rows: int, lengths: Iterable[int]) -> None:
    """Compiles the programs for batches of so many rows, at each of these lengths."""
    for length, room in itertools.product(lengths, self._room):
      self._compiled(rows, length, room)
    if self._teacher.params == 'ema':
      _compile_average(self._spec, self._mesh)

  def trace(self, rows: int, length: int) -> dict[str, jax.stages.Traced]:
    """Traces the program that scores `chunk_rows` rows of a batch.

    Args:
      rows: Rows of the batch.
      length: Tokens of a row.

    Returns:
      The traced program by name, to be lowered and compiled on any machine.
    """
    return {'teacher': _trace_score(*self._program(rows, length, self.max_tokens))}

  def score(self, batch: Batch, groups: Sequence[Group]) -> dict[str, Array]:
    """Computes the teacher fields of a batch, after `follow`.

    Args:
      batch: The batch on the devices.
      groups: The groups that it was built from, in order; further rows are padding.

    Returns:
      Arrays by field name, on the devices.
    """
    assert self._policies is not None
    policies, self._policies = self._policies, None  # the update donates them
    rows = [row for group in groups for row in group]
    num_rows, length = batch.tokens.shape
    prompts = [self._usable_prompt(row) for row in rows]
    self._warn_about_long_prompts(rows, prompts)
    longest = max((len(prompt) for prompt in prompts if prompt is not None), default=0)
    room = next(room for room in self._room if longest <= room)
    shown = lay_out_prompts(rows, prompts, (num_rows, length, room))
    layout = sharding.rows_sharding(self._mesh)
    shown = jax.tree.map(lambda x: sharding.put_array(x, layout), shown)
    make_zeros, score = self._compiled(num_rows, length, room)
    fields = make_zeros()
    for first in range(0, len(rows), self.chunk_rows):
      index = np.full(self.chunk_rows, -1, np.int32)
      chunk = range(first, min(first + self.chunk_rows, len(rows)))
      index[: len(chunk)] = chunk
      fields = score(*policies, batch.tokens, batch.segment_ids, shown, index, fields)
    return fields

  def _usable_prompt(self, row: Trajectory) -> np.ndarray | None:
    """Returns the prompt of a row's teacher if there is one, and room for it."""
    if SEGMENT_LENGTHS_KEY in row.extras:
      raise ValueError(
        f'row {row.trajectory_id}: it holds several turns end to end, and a '
        "self-teacher's prompt belongs to one reply: leave row_format=concatenated out"
      )
    prompt = row.extras.get(TEACHER_PROMPT_KEY)
    if prompt is None or not np.any(row.action_mask):
      return None
    reply = len(row.tokens) - np.argmax(row.action_mask)
    window = self._spec.model.config.max_position
    has_room = len(prompt) <= self.max_tokens and len(prompt) + reply <= window
    return np.asarray(prompt, np.int32) if has_room else None

  def _warn_about_long_prompts(
    self, rows: Sequence[Trajectory], prompts: Sequence[np.ndarray | None]
  ) -> None:
    lengths = [
      len(row.extras[TEACHER_PROMPT_KEY])
      for row, prompt in zip(rows, prompts, strict=True)
      if prompt is None and TEACHER_PROMPT_KEY in row.extras
    ]
    if lengths and not self._has_warned:
      self._has_warned = True
      log.warning(
        "%d rows of %d are not distilled: their teacher's prompt takes up to %d "
        'tokens, and there is room for %d: raise context_tokens of the algorithm',
        len(lengths),
        len(rows),
        max(lengths),
        self.max_tokens,
      )

  def _program(self, rows: int, length: int, room: int) -> tuple[Any, ...]:
    sizes = rows, length, length + room
    options = self.fields, self._temperature
    return self._spec, self._mesh, self.chunk_rows, sizes, *options

  def _compiled(
    self, rows: int, length: int, room: int
  ) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    program = self._program(rows, length, room)
    return _compile_zeros(*program), _compile_score(*program)


def lay_out_prompts(
  rows: Sequence[Trajectory],
  prompts: Sequence[np.ndarray | None],
  sizes: tuple[int, int, int],
) -> dict[str, np.ndarray]:
  """Lays out what a self-teacher reads: its prompt and the row's reply, in each row.

  Args:
    rows: The rows of a batch.
    prompts: The prompt of each row's teacher; None shows it the row as it is.
    sizes: Rows of the batch B, tokens of a row T, and tokens of a prompt P.

  Returns:
    'tokens' and 'segment_ids' `[B, P + T]`; 'shift' `[B]`, how much further to the
    right a token of the reply stands there; and 'has_prompt' `[B]`.
  """
  num_rows, length, room = sizes
  shown = {
    'tokens': np.zeros((num_rows, room + length), np.int32),
    'segment_ids': np.zeros((num_rows, room + length), np.int32),
    'shift': np.zeros(num_rows, np.int32),
    'has_prompt': np.zeros(num_rows, bool),
  }
  for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
    tokens = np.asarray(row.tokens)
    if prompt is not None:
      start = int(np.argmax(row.action_mask))
      tokens = np.concatenate([prompt, tokens[start:]])
      shown['shift'][i] = len(prompt) - start
      shown['has_prompt'][i] = True
    shown['tokens'][i, : len(tokens)] = tokens
    shown['segment_ids'][i, : len(tokens)] = 1
  return shown


@functools.lru_cache(maxsize=64)
def _compile_average(spec: StepSpec, mesh: Mesh) -> jax.stages.Compiled:
  shapes = train_state.reference_shapes(spec, mesh)
  layouts = jax.tree.map(lambda x: x.sharding, shapes)
  jitted = jax.jit(_move_average, donate_argnums=0, out_shardings=layouts)
  return jitted.lower(shapes, shapes, np.float32(0)).compile()


def _move_average(average: Params, params: Params, rate: Array) -> Params:
  """Computes (1 − rate)·average + rate·params."""

  def move(a: Array, p: Array) -> Array:
    a, dtype = a.astype(jnp.float32), a.dtype
    return (a + rate * (p.astype(jnp.float32) - a)).astype(dtype)

  return jax.tree.map(move, average, params)


def _field_shapes(
  spec: StepSpec, mesh: Mesh, sizes: tuple[int, int, int], names: tuple[str, ...]
) -> dict[str, jax.ShapeDtypeStruct]:
  layout = sharding.rows_sharding(mesh)
  return {
    name: jax.ShapeDtypeStruct(
      (*sizes[:2], *((spec.top_k,) if name in batch_fields.TOPK_FIELDS else ())),
      batch_fields.FIELD_DTYPES.get(name, jnp.int32),
      sharding=layout,
    )
    for name in names
  }


@functools.lru_cache(maxsize=64)
def _compile_zeros(
  spec: StepSpec,
  mesh: Mesh,
  chunk_rows: int,
  sizes: tuple[int, int, int],
  names: tuple[str, ...],
  temperature: float,
) -> jax.stages.Compiled:
  shapes = _field_shapes(spec, mesh, sizes, names)
  zeros = lambda: {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}  # noqa: E731
  layouts = {name: x.sharding for name, x in shapes.items()}
  return jax.jit(zeros, out_shardings=layouts).lower().compile()


@functools.lru_cache(maxsize=64)
def _compile_score(*program: Any) -> jax.stages.Compiled:
  return _trace_score(*program).lower().compile()


def _trace_score(
  spec: StepSpec,
  mesh: Mesh,
  chunk_rows: int,
  sizes: tuple[int, int, int],
  names: tuple[str, ...],
  temperature: float,
) -> jax.stages.Traced:
  """Traces (params, ref_params, tokens, segment_ids, shown, index, fields) → fields."""
  rows, length, width = sizes
  layout = sharding.rows_sharding(mesh)

  def shape(
    *size: int, dtype: jax.typing.DTypeLike = jnp.int32
  ) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, dtype, sharding=layout)

  fields = _field_shapes(spec, mesh, sizes, names)
  shown = {
    'tokens': shape(rows, width),
    'segment_ids': shape(rows, width),
    'shift': shape(rows),
    'has_prompt': shape(rows, dtype=jnp.bool_),
  }
  index = jax.ShapeDtypeStruct(
    (chunk_rows,), jnp.int32, sharding=sharding.replicated(mesh)
  )
  jitted = jax.jit(
    functools.partial(_score, spec, temperature),
    donate_argnums=6,
    out_shardings={name: x.sharding for name, x in fields.items()},
  )
  tokens = shape(rows, length)
  params = train_state.params_shapes(spec, mesh)
  reference = train_state.reference_shapes(spec, mesh)
  return jitted.trace(params, reference, tokens, tokens, shown, index, fields)


def _score(
  spec: StepSpec,
  temperature: float,
  params: Params,
  ref_params: Params | None,
  tokens: Array,
  segment_ids: Array,
  shown: dict[str, Array],
  index: Array,
  fields: dict[str, Array],
) -> dict[str, Array]:
  """Scores rows `index` `[R]` of a batch; −1 stands for none."""
  teacher, model = spec.algorithm.self_teacher, spec.model
  assert teacher is not None
  is_row, rows = index >= 0, jnp.maximum(index, 0)
  num_shown, length = shown['tokens'].shape[1], tokens.shape[1]
  shift = shown['shift'][rows]

  def outputs(
    params: Params, tokens: Array, segments: Array, **options: Any
  ) -> PolicyOutputs:
    segments = jnp.where(is_row[:, None], segments[rows], 0)
    return model.policy_outputs(
      params,
      model.constrain(tokens[rows], 'rows', None),
      model.constrain(segments, 'rows', None),
      temperature=temperature,
      **options,
    )

  options, asked = {}, None
  if 'teacher_topk_ids' in fields and teacher.support == 'teacher':
    options['top_k'] = spec.top_k
  elif 'teacher_topk_ids' in fields:
    asked = outputs(params, tokens, segment_ids, top_k=spec.top_k).topk_ids
    options['topk_ids'] = _move_right(asked, shift, num_shown)
  if teacher.params != 'live':
    params = lora.merge_trainable(model.config, params, ref_params)
  said = outputs(params, shown['tokens'], shown['segment_ids'], **options)
  back = functools.partial(_move_right, shift=-shift, length=length)
  mask = jnp.broadcast_to(shown['has_prompt'][rows][:, None], tokens[rows].shape)
  scored = {'teacher_logprobs': back(said.logprobs), 'teacher_mask': mask}
  if options:
    ids = back(said.topk_ids) if asked is None else asked
    topk_logprobs = back(said.topk_logprobs)
    scored |= {'teacher_topk_ids': ids, 'teacher_topk_logprobs': topk_logprobs}
  target = jnp.where(is_row, index, len(tokens))  # beyond the end: dropped
  return {
    name: field.at[target].set(scored[name], mode='drop')
    for name, field in fields.items()
  }


def _move_right(x: Array, shift: Array, length: int) -> Array:
  """Moves each row of `[R, T, …]` to the right by its own shift, to `length` places.

  Places that nothing is moved to have the value of the nearest that something is.
  """
  places = jnp.clip(jnp.arange(length) - shift[:, None], 0, x.shape[1] - 1)
  return jnp.take_along_axis(
    x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1
  )
