"""Teacher scoring adds the log-probs of teacher models to a batch.

A teacher is another policy whose log-probabilities the student learns from. Its fields
come from a model on the learner's mesh, or from the rows themselves.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms import requirements
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from jaxrl.training import batch_fields, train_state
from jaxrl.training.batching.batch_builder import SEGMENT_LENGTHS_KEY
from jaxrl.training.parallelism import sharding
from jaxrl.training.parallelism.model_sharding import on_mesh
from jaxrl.training.train_state import StepSpec
from jaxrl.types import Algorithm, Array, Batch, Group, Params, Trajectory
from kernels.dispatch import platform_of

_FieldShapes = tuple[tuple[str, jax.ShapeDtypeStruct], ...]  # by field name


def missing_teacher_error(
  what: str, tag: str, tags_with_teacher: Iterable[str]
) -> ConfigError:
  """Returns the error for a tag that no teacher is named for.

  Args:
    what: The tag, or the row with the tag, for the message.
    tag: The tag.
    tags_with_teacher: The tags that have one.
  """
  return ConfigError(
    f'tag {what} has no teacher, only {", ".join(tags_with_teacher)}: set '
    f'teacher.by_tag.{tag}=FOLDER, or teacher.checkpoint=FOLDER for all tags'
  )


class TeacherModel(Protocol):
  """A model with its parameters, such as a `jaxrl.model_loading.LoadedModel`."""

  @property
  def model(self) -> TransformerLM:
    """Returns the model."""
    ...

  @property
  def params(self) -> Params:
    """Returns the model's parameters."""
    ...

  @property
  def folder(self) -> pathlib.Path:
    """Returns the folder that the model was loaded from, for error messages."""
    ...


# Teachers of the same rows, with weights that sum up to 1.
WeightedTeachers = Sequence[tuple[TeacherModel, float]]


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedTeacher:
  """A teacher on the mesh.

  Attributes:
    spec: What its programs depend on.
    params: Its parameters, on the devices.
  """

  spec: StepSpec
  params: Params


_PlacedTerms = tuple[tuple[ShardedTeacher, float], ...]


class Teachers:
  """Scores the teacher fields of a batch, each row with its tag's teacher.

  Several teachers of a tag have weights w_k. Their log-prob of a token is the mean
  Σ w_k·log π_k, so that the gap to the student's is what the weighted sum of the
  divergences KL(student‖teacher_k) asks for at the sampled token.

  If all rows have the fields in their `extras`, by name, these are used; if there is no
  teacher at all, all rows must have them.

  Args:
    algorithm: Which fields it reads, and how many tokens of top-k fields.
    default: The teacher of every tag that `by_tag` does not name.
    by_tag: Teachers by tag.
    mesh: The learner's mesh; parameters are split over it.
    chunk_rows: Rows scored at once, rounded up to a multiple that the mesh divides.
    temperature: The temperature that rollouts are sampled at.
    tags: The tags that rows will have, if known.

  Attributes:
    fields: Names of the teacher fields.
    top_k: Tokens of top-k fields.
    chunk_rows: Rows scored at once.

  Raises:
    ConfigError: A tag has no teacher, a teacher's vocabulary is smaller than top-k, or
      several teachers of a tag are asked for their likeliest tokens.
  """

  def __init__(
    self,
    algorithm: Algorithm,
    default: TeacherModel | WeightedTeachers | None = None,
    by_tag: Mapping[str, TeacherModel | WeightedTeachers] | None = None,
    *,
    mesh: Mesh,
    chunk_rows: int,
    temperature: float = 1.0,
    tags: Iterable[str] = (),
  ):
    self.fields = batch_fields.teacher_fields(algorithm)
    self.top_k = batch_fields.teacher_top_k(algorithm)
    multiple = sharding.num_row_shards(mesh)
    self.chunk_rows = -(-chunk_rows // multiple) * multiple
    self._mesh = mesh
    self._temperature = float(temperature)
    weighted = {tag: _with_weights(each) for tag, each in (by_tag or {}).items()}
    usual = _with_weights(default) if default else None
    several = (usual or (), *weighted.values())
    if self.top_k and any(len(terms) > 1 for terms in several):
      raise ConfigError(
        'several teachers of the same rows have no likeliest tokens in common, which '
        'this algorithm compares: name one teacher for each tag, or take an algorithm '
        'that asks for the log-probs of the sampled tokens, such as on_policy_distill'
      )
    static_algorithm = requirements.split_hparams(algorithm)[0]
    sharded: dict[int, ShardedTeacher] = {}
    for teacher, _ in (term for terms in several for term in terms):
      if id(teacher) not in sharded:
        sharded[id(teacher)] = self._shard(teacher, static_algorithm)
    self._teachers = list(sharded.values())

    def place(terms: WeightedTeachers) -> _PlacedTerms:
      return tuple((sharded[id(teacher)], weight) for teacher, weight in terms)

    self._default = place(usual) if usual else None
    self._by_tag = {tag: place(terms) for tag, terms in weighted.items()}
    for tag in tags if self._teachers else ():
      self._teachers_of(tag)

  def _shard(self, teacher: TeacherModel, algorithm: Algorithm) -> ShardedTeacher:
    vocab_size = teacher.model.config.vocab_size
    if self.top_k > vocab_size:
      raise ConfigError(
        f'top_k={self.top_k}: the teacher in {teacher.folder} only has '
        f'{vocab_size} tokens'
      )
    model = on_mesh(teacher.model, self._mesh)
    # A row usually holds one sequence, and attention on a GPU is faster for knowing it.
    if platform_of(self._mesh.devices.flat[0].platform) == 'gpu':
      model = dataclasses.replace(model, row_segments=1)
    spec = StepSpec(model, algorithm)
    shapes = train_state.params_shapes(spec, self._mesh)
    return ShardedTeacher(spec, train_state.place_params(teacher.params, shapes))

  @property
  def params(self) -> list[Params]:
    """Returns the parameters of each teacher, on the devices."""
    return [teacher.params for teacher in self._teachers]

  def field_shapes(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of what `score` returns for a batch.

    Args:
      rows: Rows of the batch.
      length: Tokens of a row.
    """
    layout = sharding.rows_sharding(self._mesh)

    def field_shape(name: str) -> jax.ShapeDtypeStruct:
      top_k = (self.top_k,) if name in batch_fields.TOPK_FIELDS else ()
      dtype = batch_fields.FIELD_DTYPES.get(name, jnp.int32)
      return jax.ShapeDtypeStruct((rows, length, *top_k), dtype, sharding=layout)

    return {name: field_shape(name) for name in self.fields}

  def warmup(self, rows: int, lengths: Iterable[int]) -> None:
    """Compiles the programs for batches of so many rows, at each of these lengths."""
    for length in lengths if self._teachers and self.fields else ():
      for teacher in self._teachers:
        self._compiled(teacher, rows, length)

  def trace(self, rows: int, length: int) -> dict[str, jax.stages.Traced]:
    """Traces each teacher's program that scores `chunk_rows` rows of a batch.

    Args:
      rows: Rows of the batch.
      length: Tokens of a row.

    Returns:
      The traced programs by name, to be lowered and compiled on any machine.
    """
    shapes = tuple(self.field_shapes(rows, length).items())
    has_several = len(self._teachers) > 1
    return {
      f'teacher {i}' if has_several else 'teacher': _trace_score(
        teacher.spec, self._mesh, self.chunk_rows, self._temperature, shapes
      )
      for i, teacher in enumerate(self._teachers if self.fields else (), 1)
    }

  def follow(self, params: Params, ref_params: Params | None) -> Params | None:
    """Returns the reference as it is: these teachers do not follow their student."""
    return ref_params

  def score(self, batch: Batch, groups: Sequence[Group]) -> dict[str, Array]:
    """Computes the teacher fields of a batch.

    Args:
      batch: The batch on the devices.
      groups: The groups that it was built from, in order; further rows are padding.

    Returns:
      Arrays by field name, on the devices.

    Raises:
      ValueError: Only some rows have the fields in their extras.
      ConfigError: A row's tag has no teacher.
    """
    rows = [row for group in groups for row in group]
    num_rows, length = batch.tokens.shape
    if has_teacher_fields(rows, self.fields, required=not self._teachers):
      arrays = teacher_fields_from_data(rows, self.field_shapes(num_rows, length))
      layout = sharding.rows_sharding(self._mesh)
      return jax.tree.map(lambda x: sharding.put_array(x, layout), arrays)
    rows_of_teacher: dict[int, list[tuple[int, float]]] = {}
    for i, row in enumerate(rows):
      for teacher, weight in self._teachers_of(row.tag, f' of row {row.trajectory_id}'):
        which = self._teachers.index(teacher)
        rows_of_teacher.setdefault(which, []).append((i, weight))
    is_whole = not any(SEGMENT_LENGTHS_KEY in row.extras for row in rows)
    fields = None
    for which, indices in rows_of_teacher.items():
      teacher = self._teachers[which]
      make_zeros, score = self._compiled(teacher, num_rows, length, is_whole)
      fields = make_zeros() if fields is None else fields
      for first in range(0, len(indices), self.chunk_rows):
        index = np.full(self.chunk_rows, -1, np.int32)
        weights = np.zeros(self.chunk_rows, np.float32)
        chunk = indices[first : first + self.chunk_rows]
        index[: len(chunk)], weights[: len(chunk)] = zip(*chunk, strict=True)
        arrays = batch.tokens, batch.segment_ids, index, weights
        fields = score(teacher.params, *arrays, fields)
    assert fields is not None  # a batch has rows
    return fields

  def _teachers_of(self, tag: str, of_row: str = '') -> _PlacedTerms:
    terms = self._by_tag.get(tag, self._default)
    if terms is None:
      raise missing_teacher_error(f'{tag!r}{of_row}', tag, self._by_tag)
    return terms

  def _compiled(
    self, teacher: ShardedTeacher, rows: int, length: int, is_whole: bool = True
  ) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """Returns the compiled (zeros, score) for a teacher and a batch.

    Args:
      teacher: The teacher.
      rows: Rows of the batch.
      length: Tokens of each row.
      is_whole: Whether each row holds one sequence.
    """
    spec = teacher.spec
    if not is_whole and getattr(spec.model, 'row_segments', 0):
      model = dataclasses.replace(spec.model, row_segments=0)
      spec = dataclasses.replace(spec, model=model)
    shapes = tuple(self.field_shapes(rows, length).items())
    score = _compile_score(spec, self._mesh, self.chunk_rows, self._temperature, shapes)
    return _compile_zeros(shapes), score


def _with_weights(teacher: TeacherModel | WeightedTeachers) -> WeightedTeachers:
  return teacher if isinstance(teacher, Sequence) else ((teacher, 1.0),)


def has_teacher_fields(
  rows: Sequence[Trajectory], names: Sequence[str], *, required: bool
) -> bool:
  """Returns whether rows have fields in their extras.

  Args:
    rows: The rows of a batch.
    names: Names of the fields.
    required: Whether nobody else can compute the fields.

  Raises:
    ValueError: Only some rows have the fields, or none although they are required.
  """
  has_fields = [all(name in row.extras for name in names) for row in rows]
  if all(has_fields) or not (required or any(has_fields)):
    return all(has_fields)
  row = rows[has_fields.index(False)]
  missing = [name for name in names if name not in row.extras]
  reason = (
    'other rows bring theirs' if any(has_fields) else 'there is no teacher to ask'
  )
  raise ValueError(
    f'row {row.trajectory_id}: its extras lack {", ".join(missing)}, but '
    f"{reason}: either all rows of a batch must have their teacher's "
    'outputs, or none'
  )


def teacher_fields_from_data(
  rows: Sequence[Trajectory], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
  """Builds teacher fields from the rows' extras.

  Args:
    rows: The rows; an extra is `[T]`, or `[T, K]` with the likeliest tokens first, of
      which there may be more than needed.
    shapes: Shapes of the fields, `[B, T]` or `[B, T, K]`.

  Returns:
    numpy arrays of these shapes; rows after the last are 0.

  Raises:
    ValueError: An extra has another shape.
  """
  fields = {name: np.zeros(x.shape, x.dtype) for name, x in shapes.items()}
  for name, field in fields.items():
    top_k = field.shape[2:]
    for i, row in enumerate(rows):
      value = np.asarray(row.extras[name])
      expected_shape = (len(row.tokens), *top_k)
      cut = value[:, : top_k[0]] if top_k and value.ndim == 2 else value
      if cut.shape != expected_shape:
        raise ValueError(
          f'row {row.trajectory_id}: {name} in its extras has shape '
          f'{list(value.shape)}, but its tokens ask for {list(expected_shape)}'
        )
      field[i, : len(cut)] = cut
  return fields


@functools.lru_cache(maxsize=64)
def _compile_zeros(shapes: _FieldShapes) -> jax.stages.Compiled:
  """Compiles a function () → fields of zeros."""
  zeros = lambda: {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes}  # noqa: E731
  layouts = {name: x.sharding for name, x in shapes}
  return jax.jit(zeros, out_shardings=layouts).lower().compile()


@functools.lru_cache(maxsize=64)
def _compile_score(
  spec: StepSpec, mesh: Mesh, chunk_rows: int, temperature: float, shapes: _FieldShapes
) -> jax.stages.Compiled:
  return _trace_score(spec, mesh, chunk_rows, temperature, shapes).lower().compile()


def _trace_score(
  spec: StepSpec, mesh: Mesh, chunk_rows: int, temperature: float, shapes: _FieldShapes
) -> jax.stages.Traced:
  """Traces (params, tokens, segment_ids, index, weights, fields) → fields.

  The rows `index` of the fields are set.
  """
  fields = dict(shapes)
  first = next(iter(fields.values()))
  tokens = jax.ShapeDtypeStruct(first.shape[:2], jnp.int32, sharding=first.sharding)
  index = jax.ShapeDtypeStruct(
    (chunk_rows,), jnp.int32, sharding=sharding.replicated(mesh)
  )
  weights = jax.ShapeDtypeStruct(
    (chunk_rows,), jnp.float32, sharding=sharding.replicated(mesh)
  )
  topk = fields.get('teacher_topk_ids')
  function = functools.partial(
    _score, spec.model, 0 if topk is None else topk.shape[2], temperature
  )
  layouts = {name: x.sharding for name, x in shapes}
  jitted = jax.jit(function, donate_argnums=5, out_shardings=layouts)
  params = train_state.params_shapes(spec, mesh)
  return jitted.trace(params, tokens, tokens, index, weights, fields)


def _score(
  model: TransformerLM,
  top_k: int,
  temperature: float,
  params: Params,
  tokens: Array,
  segment_ids: Array,
  index: Array,
  weights: Array,
  fields: dict[str, Array],
) -> dict[str, Array]:
  """Scores rows `index` `[R]` of tokens and segment_ids `[B, T]`; −1 stands for none.

  The log-probs of the rows' tokens are added, times weights `[R]`.
  """
  is_row = index >= 0
  rows = jnp.maximum(index, 0)
  outputs = model.policy_outputs(
    params,
    model.constrain(tokens[rows], 'rows', None),
    model.constrain(jnp.where(is_row[:, None], segment_ids[rows], 0), 'rows', None),
    temperature=temperature,
    top_k=top_k,
  )
  scored = {
    'teacher_logprobs': outputs.logprobs,
    'teacher_topk_ids': outputs.topk_ids,
    'teacher_topk_logprobs': outputs.topk_logprobs,
    'teacher_mask': jnp.ones_like(outputs.logprobs, bool),
  }
  target = jnp.where(is_row, index, len(tokens))  # beyond the end: dropped
  if 'teacher_logprobs' in fields:
    earlier = jnp.where(is_row[:, None], fields['teacher_logprobs'][rows], 0)
    scored['teacher_logprobs'] = earlier + weights[:, None] * outputs.logprobs
  return {
    name: field.at[target].set(scored[name], mode='drop')
    for name, field in fields.items()
  }
