"""What `dump.*` asks for: columns, and where they go."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl.data.sinks.columns import Columns
from jaxrl.data.sinks.maxcompute import Table
from jaxrl.data.sinks.parts import Files, Parts
from jaxrl.signature import ConfigError


def open_dump(
  mode: str,
  folder: pathlib.Path,
  own: Mapping[str, str] | None = None,
  *,
  path: str = '',
  columns: tuple[Any, ...] = (),
) -> tuple[Columns, Parts]:
  """The columns of a dump and its sink; the keyword options are `config.dump`.

  path: a folder or fsspec URL for JSON lines, or one that ends in `.jsonl` or
  `.parquet`; or `odps://project/tables/table/ds=name` (`maxcompute`). columns: pairs of
  name and type, `[['task_idx', 'bigint'], …]`; none: all there are. folder: the run's
  own, where they go when `path` says nothing. own: the environments' columns. mode:
  in the names of the files.

  Raises ConfigError for what is none of these.
  """
  chosen = Columns(columns, own)
  path = path or str(folder / 'trajectories')
  if path.startswith('odps:'):
    return chosen, Table(path, chosen.types, folder / 'uploads')
  return chosen, Files(path, mode, chosen.types)


def merge(columns: Iterable[Mapping[str, str]]) -> dict[str, str]:
  """The columns of several environments. Raises ConfigError where types differ."""
  found: dict[str, str] = {}
  for own in columns:
    for name, kind in own.items():
      if found.setdefault(name, kind) != kind:
        raise ConfigError(
          f'column {name!r} is a {found[name]} in one environment and a {kind} in '
          'another'
        )
  return found
