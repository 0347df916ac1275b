"""Dump destinations: `open_dump` builds the columns and the writer of a dump."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl.component_calls import ComponentCall, parse_call
from jaxrl.component_table import ComponentTable
from jaxrl.data.store import store_options
from jaxrl.options import OptionError, Options, option

if TYPE_CHECKING:
  from jaxrl.data.trajectory_writers.dump_columns import DumpColumns
  from jaxrl.data.trajectory_writers.file_writer import TrajectoryWriter

WRITERS = ComponentTable[Any](
  'trajectory writer',
  'trajectory_dump.path',
  base='jaxrl.data.trajectory_writers.file_writer:TrajectoryWriter',
)


@dataclasses.dataclass(frozen=True)
class DumpOptions(Options):
  """Where trajectories are written, and which columns they have."""

  path: str = option(
    '',
    'A folder or fsspec URL for JSON lines, or one that ends in `.jsonl` or '
    "`.parquet`; or `atif://FOLDER` for a document of Harbor's ATIF per trajectory; or "
    '`odps://project/tables/table/ds=name` for MaxCompute; or a class of your own, '
    '`path/file.py:Name(option=1)`.',
  )
  columns: tuple[Any, ...] = option(
    (),
    "Pairs of name and type, such as `[['task_idx', 'bigint'], …]`; empty selects all "
    'columns.',
  )
  save_arrays: bool = option(
    True,
    'Whether save_content has the arrays of tokens, after the messages; without them, '
    'no trajectory can be restored from it.',
  )

  @functools.cached_property
  def store(self) -> store_options.WriterOptions | None:
    """The experience store that `path` names; None for anything else."""
    if not store_options.is_store_path(self.path):
      return None
    return store_options.parse_store_options(
      self.path, store_options.WriterOptions, 'trajectory_dump.path'
    )

  @functools.cached_property
  def writer(self) -> ComponentCall | None:
    """The user's own writer that `path` names, `file.py:Name(option=1)`."""
    location, _, name = self.path.partition('(')[0].strip().rpartition(':')
    is_module = all(map(str.isidentifier, location.split('.')))
    if not name.isidentifier() or not (location.endswith('.py') or is_module):
      return None
    try:
      return parse_call(self.path)
    except ValueError as error:
      raise OptionError('path', self.path, str(error)) from error


def open_dump(
  mode: str,
  folder: pathlib.Path,
  options: DumpOptions = DumpOptions(),
  env_columns: Mapping[str, str] | None = None,
) -> 'tuple[DumpColumns, TrajectoryWriter]':
  """Builds the columns of a dump and its writer.

  A user's own `TrajectoryWriter` is made by `Name(mode, types, folder, **options)` with
  the type of each column. Images are stored if it has `write_images`, as `FileWriter`
  has.

  Args:
    mode: The mode of the rollout, which is part of the file names.
    folder: The run's own folder, where trajectories go if there is no path.
    options: Where they go, and which columns they have.
    env_columns: The environments' columns, as a mapping of name to type.

  Returns:
    A tuple of the columns and the writer.

  Raises:
    ValueError: If the path or a column is not valid.
  """
  # Imported here because few runs keep their trajectories.
  from jaxrl.data.trajectory_writers.dump_columns import DumpColumns
  from jaxrl.data.trajectory_writers.file_writer import FileWriter

  dump_columns = DumpColumns(
    options.columns, env_columns, save_arrays=options.save_arrays
  )
  writer = options.writer
  if writer is not None:
    where = f'trajectory_dump.path={writer}'
    _, writer_class, own_options = WRITERS.find(writer, where)
    custom_writer = writer_class(mode, dump_columns.types, folder, **own_options)
    dump_columns.write_images = getattr(custom_writer, 'write_images', None)
    return dump_columns, custom_writer
  path = options.path or str(folder / 'trajectories')
  if path.startswith('odps:'):
    from jaxrl.data.trajectory_writers.maxcompute_writer import MaxComputeWriter

    return dump_columns, MaxComputeWriter(path, dump_columns.types, folder / 'uploads')
  if path.startswith('atif://'):
    from jaxrl.data.trajectory_writers.atif_writer import AtifWriter as FileWriter
  files = FileWriter(path, mode, dump_columns.types)
  dump_columns.write_images = files.write_images
  return dump_columns, files


def merge_columns(columns: Iterable[Mapping[str, str]]) -> dict[str, str]:
  """Merges the columns of several environments.

  Args:
    columns: For each environment a mapping of column name to type.

  Returns:
    All columns.

  Raises:
    ValueError: If a column has different types.
  """
  merged: dict[str, str] = {}
  for env_columns in columns:
    for name, kind in env_columns.items():
      if merged.setdefault(name, kind) != kind:
        raise ValueError(
          f'column {name!r} is a {merged[name]} in one environment and a {kind} in '
          'another'
        )
  return merged
