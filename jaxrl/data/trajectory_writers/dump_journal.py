"""DumpJournal makes a dump resumable: every item is written once, even after a kill.

Played items are appended to a local file, one line each. When a part has all of its
items, they are passed to the writer at once, under the part's own name, and then the
part is recorded as done. A kill loses only the items in play, which are played again. A
kill between the last two steps rewrites the same part in the same place.
"""

import json
import os
import pathlib
import urllib.parse
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl.data.trajectory_writers.dump_columns import DumpRow
from jaxrl.data.trajectory_writers.file_writer import TrajectoryWriter

DONE = 'done.txt'


class DumpPart(NamedTuple):
  """Identifies one part of a tag's items.

  Attributes:
    tag: The environment's tag.
    number: The number of the part within its tag.
  """

  tag: str
  number: int

  @property
  def name(self) -> str:
    """Returns a file name that no other part has."""
    return f'{urllib.parse.quote(self.tag, safe="")}-{self.number:05}'


class DumpJournal:
  """Records the items of a run, numbered 0, 1, 2 and so on within their tag.

  Opening it writes the complete parts that a killed process left behind.

  Args:
    folder: A folder on this machine's disk, for one process at a time.
    sink: Writes complete parts.
    part_size: The number of items per part; a folder that already has one keeps it.

  Raises:
    ValueError: If the writer's `check` fails, or the folder's files were not written by
      a journal.
  """

  def __init__(
    self, folder: pathlib.Path, writer: TrajectoryWriter, *, part_size: int = 64
  ):
    self._folder = folder
    self._writer = writer
    size_file = folder / 'part_size.txt'
    writer.check(fresh=not size_file.exists())
    folder.mkdir(parents=True, exist_ok=True)
    if not size_file.exists():
      _write_atomically(size_file, f'{part_size}\n')
    self.part_size = int(size_file.read_text())
    self._done_parts = {DumpPart(tag, number) for tag, number in self._read(DONE)}
    self._open_parts: dict[DumpPart, set[int]] = defaultdict(set)
    for path in sorted(folder.glob('*.jsonl')):
      self._recover(path)
    self.flush()

  def _recover(self, path: pathlib.Path) -> None:
    tag, _, number = path.stem.rpartition('-')
    part = DumpPart(urllib.parse.unquote(tag), int(number))
    if part in self._done_parts:
      path.unlink()
    else:
      self._open_parts[part] = {item for item, _ in self._read(path.name)}

  def _read(self, name: str) -> list:
    """Parses the lines of a file as JSON; a last line torn by a kill is cut off."""
    path = self._folder / name
    if not path.exists():
      return []
    data = path.read_bytes()
    end = data.rfind(b'\n') + 1
    if end < len(data):
      os.truncate(path, end)
    lines = []
    for number, line in enumerate(data[:end].splitlines(), 1):
      try:
        lines.append(json.loads(line))
      except (ValueError, RecursionError) as error:
        raise ValueError(
          f'{path}, line {number}: not a journal that this program wrote: {error}; '
          'restore the file, or name another folder'
        ) from error
    return lines

  def played_items(self, tag: str) -> set[int]:
    """Returns the items of a tag that need not be played again.

    Args:
      tag: The environment's tag.

    Returns:
      The numbers of the items.
    """
    size = self.part_size
    items_found = {
      i for part, items in self._open_parts.items() if part.tag == tag for i in items
    }
    for part in self._done_parts:
      if part.tag == tag:
        items_found.update(range(part.number * size, (part.number + 1) * size))
    return items_found

  def has(self, tag: str, item: int) -> bool:
    """Returns whether an item has been recorded.

    Args:
      tag: The environment's tag.
      item: The number of the item.

    Returns:
      True if it has.
    """
    part = DumpPart(tag, item // self.part_size)
    return part in self._done_parts or item in self._open_parts.get(part, ())

  def add(self, tag: str, item: int, rows: Sequence[DumpRow]) -> None:
    """Records a played item; an item that is already there changes nothing.

    Args:
      tag: The environment's tag.
      item: The number of the item.
      rows: The item's rows.
    """
    if self.has(tag, item):
      return
    part = DumpPart(tag, item // self.part_size)
    self._append(f'{part.name}.jsonl', json.dumps([item, list(rows)], allow_nan=False))
    self._open_parts[part].add(item)

  def flush(self, *, all_played: bool = False) -> int:
    """Writes the complete parts.

    Args:
      all_played: Whether no more items will come, so that all parts are complete.

    Returns:
      The number of parts that were written.
    """
    complete = [
      part
      for part, items in self._open_parts.items()
      if items and (all_played or len(items) >= self.part_size)
    ]
    for part in sorted(complete):
      items = sorted(self._read(f'{part.name}.jsonl'), key=lambda item: item[0])
      self._writer.write(part.name, [row for _, rows in items for row in rows])
      self._append(DONE, json.dumps(part), sync=True)
      self._done_parts.add(part)
      del self._open_parts[part]
      (self._folder / f'{part.name}.jsonl').unlink()
    return len(complete)

  def _append(self, name: str, line: str, *, sync: bool = False) -> None:
    with open(self._folder / name, 'ab') as file:
      file.write(line.encode() + b'\n')
      file.flush()
      if sync:
        os.fsync(file.fileno())


def _write_atomically(path: pathlib.Path, text: str) -> None:
  partial = path.with_name(f'.{path.name}')
  partial.write_text(text)
  os.replace(partial, path)
