"""Dump destinations: `open_dump` builds the columns and the writer of a dump."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl.call_strings import ComponentCall, ConfigError, find_component

if TYPE_CHECKING:
  from jaxrl.data.trajectory_writers.dump_columns import DumpColumns
  from jaxrl.data.trajectory_writers.file_writer import TrajectoryWriter


def open_dump(
  mode: str,
  folder: pathlib.Path,
  env_columns: Mapping[str, str] | None = None,
  writer: ComponentCall | None = None,
  *,
  path: str = '',
  columns: tuple[Any, ...] = (),
  save_arrays: bool = True,
) -> 'tuple[DumpColumns, TrajectoryWriter]':
  """Builds the columns of a dump and its writer.

  The keyword options are those of `config.trajectory_dump`.

  Args:
    mode: The mode of the rollout, which is part of the file names.
    folder: The run's own folder, where trajectories go if there is no `path`.
    env_columns: The environments' columns, as a mapping of name to type.
    writer: A user's own `TrajectoryWriter`, which is made by
      `Name(mode, types, folder, **options)` with the type of each column. Images are
      stored if it has `write_images`, as `FileWriter` has.
    path: A folder or fsspec URL for JSON lines, or one that ends in `.jsonl` or
      `.parquet`; or `atif://FOLDER` for a document of Harbor's ATIF per trajectory; or
      `odps://project/tables/table/ds=name` for MaxCompute; or a class of
      your own, `path/file.py:Name(option=1)`.
    columns: Pairs of name and type, such as `[['task_idx', 'bigint'], …]`; empty
      selects all columns.
    save_arrays: Whether save_content has the arrays of tokens, after the messages.
      Without them, no trajectory can be restored from it.

  Returns:
    A tuple of the columns and the writer.

  Raises:
    ConfigError: If the path or a column is not valid.
  """
  # Imported here because few runs keep their trajectories.
  from jaxrl.data.trajectory_writers.dump_columns import DumpColumns
  from jaxrl.data.trajectory_writers.file_writer import FileWriter, TrajectoryWriter

  dump_columns = DumpColumns(columns, env_columns, save_arrays=save_arrays)
  if writer is not None:
    where = f'trajectory_dump.path={writer}'
    _, writer_class, options = find_component(
      writer, {}, 'trajectory writer', where, where=where, base=TrajectoryWriter
    )
    custom_writer = writer_class(mode, dump_columns.types, folder, **options)
    dump_columns.write_images = getattr(custom_writer, 'write_images', None)
    return dump_columns, custom_writer
  path = path or str(folder / 'trajectories')
  if path.startswith('atif://'):
    from jaxrl.data.trajectory_writers.atif_writer import AtifWriter

    documents = AtifWriter(path, mode, dump_columns.types)
    dump_columns.write_images = documents.write_images
    return dump_columns, documents
  if path.startswith('odps:'):
    from jaxrl.data.trajectory_writers.maxcompute_writer import MaxComputeWriter

    return dump_columns, MaxComputeWriter(path, dump_columns.types, folder / 'uploads')
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
    ConfigError: If a column has different types.
  """
  merged: dict[str, str] = {}
  for env_columns in columns:
    for name, kind in env_columns.items():
      if merged.setdefault(name, kind) != kind:
        raise ConfigError(
          f'column {name!r} is a {merged[name]} in one environment and a {kind} in '
          'another'
        )
  return merged
