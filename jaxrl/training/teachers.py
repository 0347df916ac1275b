"""Teachers: other policies, whose say on the student's rows is what it learns from."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms import compose
from jaxrl.models.model import Model
from jaxrl.signature import ConfigError
from jaxrl.training import programs, sharding, teacher_columns
from jaxrl.training.per_device import on_mesh
from jaxrl.training.policy import Policy
from jaxrl.training.state import Spec
from jaxrl.types import Algorithm, Array, Batch, Group, Params

Shapes = tuple[tuple[str, jax.ShapeDtypeStruct], ...]  # of columns, by name


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
  """A teacher on the mesh. spec: what its programs depend on."""

  spec: Spec
  params: Params


class Teachers:
  """Gives the rows of a batch what their teachers say of them.

  algorithm: which columns it reads, and how many tokens of each distribution. default:
  the teacher of every tag that `by_tag` does not name. mesh: the learner's; parameters
  are split over it. chunk_rows: rows scored at once, rounded up to what the mesh
  divides. temperature: the rollouts'. tags: those that rows will have, if known.

  Rows that hold the columns in their `extras`, by name, are taken at their word, if
  all do; where there is no teacher at all, all must. Raises ConfigError for a tag
  that has no teacher.
  """

  def __init__(
    self,
    algorithm: Algorithm,
    default: Policy | None = None,
    by_tag: Mapping[str, Policy] | None = None,
    *,
    mesh: Mesh,
    chunk_rows: int,
    temperature: float = 1.0,
    tags: Iterable[str] = (),
  ):
    self.columns = teacher_columns.columns(algorithm)
    self.top_k = teacher_columns.top_k(algorithm)
    multiple = sharding.rows_multiple(mesh)
    self.chunk_rows = -(-chunk_rows // multiple) * multiple
    self._mesh, self._temperature = mesh, float(temperature)
    static = compose.split_numbers(algorithm)[0]
    policies = [default, *(by_tag or {}).values()]
    placed = {id(policy): self._place(policy, static) for policy in policies if policy}
    self._default = default and placed[id(default)]
    self._by_tag = {tag: placed[id(one)] for tag, one in (by_tag or {}).items()}
    self._all = list(placed.values())
    for tag in tags if self._all else ():
      self._teacher_of(tag)

  def _place(self, policy: Policy, algorithm: Algorithm) -> Placed:
    vocabulary = policy.model.config.vocab_size
    if self.top_k > vocabulary:
      raise ConfigError(
        f'top_k={self.top_k}: the teacher in {policy.folder} knows {vocabulary} tokens'
      )
    spec = Spec(on_mesh(policy.model, self._mesh), algorithm)
    shapes = programs.params_shapes(spec, self._mesh)
    return Placed(spec, programs.place(policy.params, shapes))

  @property
  def params(self) -> list[Params]:
    """Of each teacher on the devices."""
    return [one.params for one in self._all]

  def shapes(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What `score` gives for a batch of so many rows and tokens."""
    layout = sharding.rows(self._mesh)

    def column(name):
      topk = (self.top_k,) if name in teacher_columns.TOPK else ()
      dtype = jnp.int32 if name == 'teacher_topk_ids' else jnp.float32
      return jax.ShapeDtypeStruct((rows, length, *topk), dtype, sharding=layout)

    return {name: column(name) for name in self.columns}

  def warmup(self, rows: int, lengths: Iterable[int]) -> None:
    """Compiles what batches of so many rows need, at each of these lengths."""
    for length in lengths if self._all and self.columns else ():
      for teacher in self._all:
        self._programs(teacher, rows, length)

  def traced(self, rows: int, length: int) -> dict[str, Any]:
    """The program of each teacher that scores `chunk_rows` rows of such a batch, by
    name, as JAX traced it: to be lowered and compiled, on any machine.
    """
    many = len(self._all) > 1
    return {
      f'teacher {i}' if many else 'teacher': self._traced(teacher, rows, length)
      for i, teacher in enumerate(self._all if self.columns else (), 1)
    }

  def score(self, batch: Batch, groups: Sequence[Group]) -> dict[str, Any]:
    """The columns that the algorithm reads, for a batch on the devices.

    groups: what the batch was packed of, in order; its further rows are padding.
    Raises ValueError, naming the row, when only some rows bring their columns.
    """
    rows = [row for group in groups for row in group]
    count, length = batch.tokens.shape
    if teacher_columns.given(rows, self.columns, required=not self._all):
      found = teacher_columns.from_data(rows, self.shapes(count, length))
      layout = sharding.rows(self._mesh)
      return jax.tree.map(lambda x: sharding.put(x, layout), found)
    mine: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
      teacher = self._teacher_of(row.tag, f' of row {row.trajectory_id}')
      mine.setdefault(self._all.index(teacher), []).append(i)
    found = None
    for which, indices in mine.items():
      teacher = self._all[which]
      start, score = self._programs(teacher, count, length)
      found = start() if found is None else found
      for first in range(0, len(indices), self.chunk_rows):
        index = np.full(self.chunk_rows, -1, np.int32)
        chosen = indices[first : first + self.chunk_rows]
        index[: len(chosen)] = chosen
        found = score(teacher.params, batch.tokens, batch.segment_ids, index, found)
    assert found is not None  # a batch has rows
    return found

  def _teacher_of(self, tag: str, whose: str = '') -> Placed:
    teacher = self._by_tag.get(tag, self._default)
    if teacher is None:
      raise ConfigError(
        f'tag {tag!r}{whose} has no teacher; those of {", ".join(self._by_tag)} have: '
        'name one in --config.teacher.by_tag, or one for the rest in '
        '--config.teacher.checkpoint'
      )
    return teacher

  def _programs(self, teacher: Placed, rows: int, length: int) -> tuple[Any, Any]:
    shapes = tuple(self.shapes(rows, length).items())
    return _compile_start(shapes), _compile_score(*self._of(teacher), shapes)

  def _traced(self, teacher: Placed, rows: int, length: int) -> Any:
    shapes = tuple(self.shapes(rows, length).items())
    return _trace_score(*self._of(teacher), shapes)

  def _of(self, teacher: Placed) -> tuple[Spec, Mesh, int, float]:
    return teacher.spec, self._mesh, self.chunk_rows, self._temperature


@functools.lru_cache(maxsize=64)
def _compile_start(shapes: Shapes) -> Any:
  """() → columns of zeros."""
  zeros = lambda: {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes}  # noqa: E731
  layouts = {name: x.sharding for name, x in shapes}
  return jax.jit(zeros, out_shardings=layouts).lower().compile()


@functools.lru_cache(maxsize=64)
def _compile_score(
  spec: Spec, mesh: Mesh, chunk: int, temperature: float, shapes: Shapes
) -> Any:
  return _trace_score(spec, mesh, chunk, temperature, shapes).lower().compile()


def _trace_score(
  spec: Spec, mesh: Mesh, chunk: int, temperature: float, shapes: Shapes
) -> Any:
  """(params, tokens, segment_ids, index, columns) → the columns, rows of index set."""
  columns = dict(shapes)
  like = next(iter(columns.values()))
  tokens = jax.ShapeDtypeStruct(like.shape[:2], jnp.int32, sharding=like.sharding)
  index = jax.ShapeDtypeStruct((chunk,), jnp.int32, sharding=sharding.replicated(mesh))
  topk = columns.get('teacher_topk_ids')
  function = functools.partial(
    _score, spec.model, 0 if topk is None else topk.shape[2], temperature
  )
  layouts = {name: x.sharding for name, x in shapes}
  jitted = jax.jit(function, donate_argnums=4, out_shardings=layouts)
  params = programs.params_shapes(spec, mesh)
  return jitted.trace(params, tokens, tokens, index, columns)


def _score(
  model: Model,
  top_k: int,
  temperature: float,
  params: Params,
  tokens: Array,
  segment_ids: Array,
  index: Array,
  columns: dict[str, Array],
) -> dict[str, Array]:
  """Scores rows `index` `[R]` of tokens, segment_ids `[B, T]`; −1 is no row."""
  there = index >= 0
  rows = jnp.maximum(index, 0)
  outputs = model.policy_outputs(
    params,
    model.constrain(tokens[rows], 'rows', None),
    model.constrain(jnp.where(there[:, None], segment_ids[rows], 0), 'rows', None),
    temperature=temperature,
    top_k=top_k,
  )
  found = {
    'teacher_logprobs': outputs.logprobs,
    'teacher_topk_ids': outputs.topk_ids,
    'teacher_topk_logprobs': outputs.topk_logprobs,
  }
  target = jnp.where(there, index, len(tokens))  # beyond the end: dropped
  return {
    name: column.at[target].set(found[name], mode='drop')
    for name, column in columns.items()
  }
