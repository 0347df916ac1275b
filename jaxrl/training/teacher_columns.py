"""The columns that speak for a teacher: which are read, how wide, and from the data."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxrl import signature
from jaxrl.algorithms import compose
from jaxrl.signature import ConfigError
from jaxrl.types import Algorithm, Trajectory

COLUMNS = ('teacher_logprobs', 'teacher_topk_ids', 'teacher_topk_logprobs')
TOPK = frozenset(COLUMNS[1:])


def columns(algorithm: Algorithm) -> tuple[str, ...]:
  """Those of COLUMNS that a batch must have for this algorithm."""
  read = set(compose.reads(algorithm))
  if read & TOPK:
    read |= TOPK
  return tuple(name for name in COLUMNS if name in read)


def top_k(algorithm: Algorithm) -> int:
  """How many of a teacher's tokens its parts read, by their option `top_k`; or 0."""
  widths = [0]
  for slot, part in compose.parts(algorithm).items():
    if TOPK & set(compose.columns(part)):
      options = signature.defaults(compose.function_of(part)) | compose.options_of(part)
      if not isinstance(options.get('top_k'), int) or options['top_k'] < 1:
        raise ConfigError(
          f"algorithm.{slot} reads a teacher's likeliest tokens: its option top_k, how "
          f'many, is {options.get("top_k")!r} and must be at least 1'
        )
      widths.append(options['top_k'])
  return max(widths)


def given(rows: Sequence[Trajectory], names: Sequence[str], *, required: bool) -> bool:
  """Whether the rows bring the columns `names` in their extras.

  required: nobody else can give them. Raises ValueError, naming the first row that
  lacks some, when only a part of the rows bring them, or none though they must.
  """
  there = [all(name in row.extras for name in names) for row in rows]
  if all(there) or not (required or any(there)):
    return all(there)
  row = rows[there.index(False)]
  missing = [name for name in names if name not in row.extras]
  others = 'other rows bring theirs' if any(there) else 'there is no teacher to ask'
  raise ValueError(
    f'row {row.trajectory_id}: its extras lack {", ".join(missing)}, but {others}; '
    'either all rows of a batch bring what their teacher said, or none'
  )


def from_data(
  rows: Sequence[Trajectory], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
  """Columns of these shapes, `[B, T]` or `[B, T, K]`, from the rows' extras.

  An extra is `[T]`, or `[T, K]` with the likeliest tokens first, of which more than K
  may be there. Rows after the last are 0. Raises ValueError for another shape.
  """
  packed = {name: np.zeros(x.shape, x.dtype) for name, x in shapes.items()}
  for name, column in packed.items():
    for i, row in enumerate(rows):
      value, width = np.asarray(row.extras[name]), column.shape[2:]
      wanted = (len(row.tokens), *width)
      cut = value[:, : width[0]] if width and value.ndim == 2 else value
      if cut.shape != wanted:
        raise ValueError(
          f'row {row.trajectory_id}: {name} in its extras has shape '
          f'{list(value.shape)}, but its tokens ask for {list(wanted)}'
        )
      column[i, : len(cut)] = cut
  return packed
