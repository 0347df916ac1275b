"""Reads how much memory this process may use, from the machine and its cgroups.

A container's limit is that of a cgroup, of version 1 or 2, and the kernel kills what
exceeds it. The limit of each cgroup above this process's own holds as well.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import psutil

V1, V2 = '/sys/fs/cgroup/memory', '/sys/fs/cgroup'
UNLIMITED = 1 << 60  # version 1 writes about 2^63 where there is no limit


class HostMemory(NamedTuple):
  """Holds the memory that this process may use.

  Attributes:
    limit: Bytes that this process may hold in all, with those that it already holds.
    held: Bytes that it already holds.
    source: What limits it, for people.
  """

  limit: float
  held: float
  source: str


def read_host_memory(root: str = '/') -> HostMemory:
  """Reads the memory of this process.

  Memory that other processes use is not counted as available, but files that the kernel
  has cached are.

  Args:
    root: Folder that holds the kernel's files on cgroups, in `proc` and `sys`.
  """
  base, machine = pathlib.Path(root), psutil.virtual_memory()
  held, total = float(psutil.Process().memory_info().rss), machine.total
  limits = [(machine.available + held, 'memory that is free here')]
  for folder, names in _cgroups(base):
    limit = _number(folder / names[0])
    if limit is None or limit >= min(UNLIMITED, total):
      continue
    used, cached = _number(folder / names[1]) or 0.0, _cached(folder, names[2])
    limits.append((limit - max(0.0, used - cached - held), "the cgroup's limit"))
  limit, source = min(limits)
  return HostMemory(max(limit, held), held, source)


def _cgroups(base: pathlib.Path) -> Iterator[tuple[pathlib.Path, tuple[str, str, str]]]:
  """Yields the folders of this process's cgroups, with their files' names."""
  try:
    lines = (base / 'proc/self/cgroup').read_text().splitlines()
  except OSError:
    return
  for line in lines:
    _, controllers, path = line.split(':', 2)
    if not controllers:
      root, names = V2, ('memory.max', 'memory.current', 'inactive_file')
    elif 'memory' in controllers.split(','):
      root = V1
      names = 'memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'
    else:
      continue
    mount = base / root.lstrip('/')
    # Within a container the path may be the host's, of which only the root is here.
    folder = mount / path.lstrip('/')
    for place in (folder, *folder.parents):
      if place.is_dir():
        yield place, names
      if place == mount:
        break


def _cached(folder: pathlib.Path, name: str) -> float:
  """Returns the bytes of cached files, which the kernel drops before it kills."""
  try:
    lines = (folder / 'memory.stat').read_text().splitlines()
  except OSError:
    return 0.0
  fields = dict(line.split() for line in lines if len(line.split()) == 2)
  return float(fields.get(name, 0))


def _number(path: pathlib.Path) -> float | None:
  """Returns the number in a file; None for 'max' and where there is no such file."""
  try:
    text = path.read_text().strip()
  except OSError:
    return None
  return float(text) if text.isdigit() else None
