"""What an agent left in its tree, made ready to be graded."""

import fnmatch
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

PROTECTED = (
  *('conftest.py', 'pytest.ini', '.pytest.ini', 'pytest.toml', '.pytest.toml'),
  *('tox.ini', 'setup.cfg', 'pyproject.toml'),
  *('sitecustomize.py', 'usercustomize.py', '*.pth', '*.pyc', '__pycache__'),
  *('/pytest', '/pytest.py', '/_pytest', '/pluggy', '/pluggy.py', '/iniconfig'),
)
"""Files that steer a test run: patterns of their names, from the top with a slash."""


def guard(patterns: Iterable[str], paths: Iterable[str]) -> Callable[[str], bool]:
  """Tells of a path whether it, or a folder that it lies in, is not the agent's."""
  patterns, paths = tuple(patterns), frozenset(paths)

  def guarded(path: str) -> bool:
    if path in paths:
      return True
    parts = path.split('/')
    return parts[0] == '.git' or any(
      fnmatch.fnmatchcase(f'/{"/".join(parts[: n + 1])}', pattern)
      if pattern.startswith('/')
      else fnmatch.fnmatchcase(part, pattern)
      for n, part in enumerate(parts)
      for pattern in patterns
    )

  return guarded


class SubmissionError(ValueError):
  """What the agent left cannot be graded, and that is the agent's doing."""


def unpack(
  archive: bytes, folder: Path, guarded: Callable[[str], bool], most: int
) -> None:
  """Writes the files of a tar archive that nobody trusts into an empty folder.

  Files that are guarded are left out; so is what would lie, or lead, outside, what is
  neither a file, nor a folder, nor a link, what comes twice, and what lies beyond a
  link: nothing is written through one, whatever `tarfile` itself makes of it. most:
  bytes of all the files, a hard link's counted again; SubmissionError for more, and for
  what is no archive.
  """
  size = 0
  sizes: dict[str, int] = {}  # of the files that are kept
  links: set[str] = set()

  def keep(member: tarfile.TarInfo, where: str) -> tarfile.TarInfo | None:
    nonlocal size
    name = os.path.normpath(member.name.lstrip('/'))
    file = sizes.get(os.path.normpath(member.linkname)) if member.islnk() else 0
    size += member.size + (file or 0)  # whoever copies the tree copies it once more
    if size > most:
      raise tarfile.TarError('too large')
    if name != '.' and guarded(name):
      return None
    way = {'/'.join(name.split('/')[: n + 1]) for n in range(name.count('/') + 1)}
    if file is None or name in sizes or not links.isdisjoint(way) or _climbs(member):
      return None
    try:
      kept = tarfile.data_filter(member, where)
    except tarfile.FilterError:
      return None
    if member.issym():
      links.add(name)
    elif not member.isdir():
      sizes[name] = member.size + file
    return kept

  try:
    with tarfile.open(fileobj=io.BytesIO(archive), mode='r:') as tar:
      tar.extractall(folder, filter=keep)
  except (tarfile.TarError, OSError, ValueError, KeyError) as error:
    raise SubmissionError(f'the tree cannot be unpacked: {error}') from error


def _climbs(member: tarfile.TarInfo) -> bool:
  return '..' in member.name.split('/')


def restore(source: Path, folder: Path, guarded: Callable[[str], bool]) -> None:
  """Copies the guarded files of `source`, which is trusted, over those in `folder`."""
  for parent, _, names in os.walk(source):
    for name in names:
      path = os.path.relpath(os.path.join(parent, name), source)
      if guarded(path):
        _place(source / path, folder, path)


def _place(source: Path, folder: Path, path: str) -> None:
  """Puts a file there, through no link, in place of whatever stands in its way."""
  here = folder
  *parents, last = path.split('/')
  for part in parents:
    here = here / part
    if here.is_symlink() or not here.is_dir():
      here.unlink(missing_ok=True)
      here.mkdir()
  here = here / last
  if here.is_dir() and not here.is_symlink():
    shutil.rmtree(here)
  here.unlink(missing_ok=True)
  shutil.copy2(source, here, follow_symlinks=False)
