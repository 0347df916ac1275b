"""Converts dumps to ATIF: `python -m launch.report.export_atif RUN_OR_FILE FOLDER`.

ATIF is Harbor's Agent Trajectory Interchange Format. FOLDER gets a folder for each part
of the dump, with a JSON document for each trajectory, and a folder of their images.
"""

import glob
import json
import pathlib
import shutil
import sys
from collections.abc import Sequence

from jaxrl.data.trajectory_writers.atif_writer import write_documents
from jaxrl.data.trajectory_writers.file_writer import IMAGES
from jaxrl.options import ConfigError
from launch.logging.error_pages import print_error
from launch.report.dump_rows import dump_patterns, read_part
from launch.runtime.signal_handler import run_command

USAGE = """\
usage: python -m launch.report.export_atif RUN_OR_FILE FOLDER

  RUN_OR_FILE  the folder of a run, or a file of a dump (.jsonl or .parquet)
  FOLDER       gets FOLDER/PART/TRAJECTORY_ID.json, in Harbor's ATIF
"""


def main(argv: Sequence[str]) -> int:
  """Converts a dump; returns the exit status."""
  if list(argv) in (['--help'], ['-h']):
    print(USAGE)
    return 0
  if len(argv) != 2:
    print(USAGE, file=sys.stderr)
    return 2
  try:
    count = export(pathlib.Path(argv[0]), pathlib.Path(argv[1]))
  except (ConfigError, OSError, ValueError) as error:
    print_error(error)
    return 2
  print(f'{argv[1]}: {count} trajectories')
  return 0


def export(source: pathlib.Path, folder: pathlib.Path) -> int:
  """Converts the dump of a run, or one file of a dump.

  Args:
    source: The folder of the run, or the file.
    folder: Where documents go; parts of the same name are replaced.

  Returns:
    The number of trajectories.

  Raises:
    ConfigError: If there is no dump.
    ValueError: If a row is not a trajectory.
  """
  count = 0
  for path in _parts(source):
    rows = []
    for number, (_, _, row) in enumerate(read_part(path), 1):
      if row is None:
        raise ValueError(f'{path}, row {number}: not a row of a dump')
      rows.append(row)
    write_documents(folder / path.stem, rows)
    if (images := path.parent / IMAGES).is_dir():
      shutil.copytree(images, folder / IMAGES, dirs_exist_ok=True)
    count += len(rows)
  return count


def _parts(source: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of a dump."""
  if source.is_file():
    return [source]
  config = source / 'config.json'
  if not config.exists():
    raise ConfigError(f'{source} is neither a file nor a folder of a run: name one')
  patterns = dump_patterns(json.loads(config.read_text('utf-8')), source)
  paths = {path for pattern in patterns for path in glob.glob(pattern)}
  if not paths:
    raise ConfigError(
      f'{source} has no dump on this machine: a run writes one with '
      '--config.trajectory_dump.path=FOLDER'
    )
  return sorted(map(pathlib.Path, paths))


if __name__ == '__main__':
  run_command(main)
