"""The ledger of a dump: every item once, whenever the process is killed.

Items that are played go into a file of this machine, one line each. When a part has
all of its items they are written to the sink at once, under the part's own name, then
the part is noted as done. A kill loses the items in play, which are played again;
between the last two steps it has the same part written again, in its own place.
"""

import json
import os
import pathlib
import urllib.parse
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl.data.sinks.columns import Row
from jaxrl.data.sinks.parts import Parts

DONE = 'done.txt'


class Part(NamedTuple):
  """The part `number` of a tag's items."""

  tag: str
  number: int

  @property
  def name(self) -> str:
    """For files; no two parts have the same."""
    return f'{urllib.parse.quote(self.tag, safe="")}-{self.number:05}'


class Ledger:
  """Items of a run, numbered 0, 1, 2 … within their tag.

  folder: on this machine's disk, for one process at a time. part_size: items of a
  part; that of the folder, once it has one. Opening it seals the parts that a killed
  process left whole. Raises ConfigError as `Parts.check`, and ValueError for a folder
  that no ledger wrote.
  """

  def __init__(self, folder: pathlib.Path, sink: Parts, *, part_size: int = 64):
    self._folder, self._sink = folder, sink
    size = folder / 'part_size.txt'
    sink.check(fresh=not size.exists())
    folder.mkdir(parents=True, exist_ok=True)
    if not size.exists():
      _replace(size, f'{part_size}\n')
    self.part_size = int(size.read_text())
    self._done = {Part(tag, number) for tag, number in self._read(DONE)}
    self._open: dict[Part, set[int]] = defaultdict(set)
    for path in sorted(folder.glob('*.jsonl')):
      self._recover(path)
    self.seal()

  def _recover(self, path: pathlib.Path) -> None:
    tag, _, number = path.stem.rpartition('-')
    part = Part(urllib.parse.unquote(tag), int(number))
    if part in self._done:
      path.unlink()
    else:
      self._open[part] = {item for item, _ in self._read(path.name)}

  def _read(self, name: str) -> list:
    """The lines of a file as JSON; a last one that a kill tore is cut off."""
    path = self._folder / name
    if not path.exists():
      return []
    data = path.read_bytes()
    whole = data.rfind(b'\n') + 1
    if whole < len(data):
      os.truncate(path, whole)
    try:
      return [json.loads(line) for line in data[:whole].splitlines()]
    except ValueError as error:
      raise ValueError(f'{path}: not a ledger that this program wrote') from error

  def played(self, tag: str) -> set[int]:
    """The items of a tag that need not be played again."""
    size = self.part_size
    found = {i for part, items in self._open.items() if part.tag == tag for i in items}
    for part in self._done:
      if part.tag == tag:
        found.update(range(part.number * size, (part.number + 1) * size))
    return found

  def has(self, tag: str, item: int) -> bool:
    part = Part(tag, item // self.part_size)
    return part in self._done or item in self._open.get(part, ())

  def add(self, tag: str, item: int, rows: Sequence[Row]) -> None:
    """Keeps a played item; one that is there already changes nothing."""
    if self.has(tag, item):
      return
    part = Part(tag, item // self.part_size)
    self._append(f'{part.name}.jsonl', json.dumps([item, list(rows)], allow_nan=False))
    self._open[part].add(item)

  def seal(self, *, all_played: bool = False) -> int:
    """Writes the parts that are whole to the sink; returns how many there were.

    all_played: no more items will come, so parts are whole as they are.
    """
    whole = [
      part
      for part, items in self._open.items()
      if items and (all_played or len(items) >= self.part_size)
    ]
    for part in sorted(whole):
      items = sorted(self._read(f'{part.name}.jsonl'), key=lambda item: item[0])
      self._sink.write(part.name, [row for _, rows in items for row in rows])
      self._append(DONE, json.dumps(part), sync=True)
      self._done.add(part)
      del self._open[part]
      (self._folder / f'{part.name}.jsonl').unlink()
    return len(whole)

  def _append(self, name: str, line: str, *, sync: bool = False) -> None:
    with open(self._folder / name, 'ab') as file:
      file.write(line.encode() + b'\n')
      file.flush()
      if sync:
        os.fsync(file.fileno())


def _replace(path: pathlib.Path, text: str) -> None:
  half = path.with_name(f'.{path.name}')
  half.write_text(text)
  os.replace(half, path)
