"""A submission is what an agent left in its tree; it is unpacked here for grading."""

import fnmatch
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

PROTECTED_FILES = (
  *('conftest.py', 'pytest.ini', '.pytest.ini', 'pytest.toml', '.pytest.toml'),
  *('tox.ini', 'setup.cfg', 'pyproject.toml'),
  *('sitecustomize.py', 'usercustomize.py', '*.pth', '*.pyc', '__pycache__'),
  *('/pytest', '/pytest.py', '/_pytest', '/pluggy', '/pluggy.py', '/iniconfig'),
)
"""Files that steer a test run: patterns of their names, from the top with a slash."""


def protected_path_filter(
  patterns: Iterable[str], paths: Iterable[str]
) -> Callable[[str], bool]:
  """Returns a function that tells whether a path is protected from the agent's changes.

  Args:
    patterns: Patterns of file names, or of paths from the top if they begin with a
      slash.
    paths: Paths that are protected too.

  Returns:
    A function of a path; a path is protected if it or a folder above it is.
  """
  patterns, paths = tuple(patterns), frozenset(paths)

  def is_protected(path: str) -> bool:
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

  return is_protected


class SubmissionError(ValueError):
  """Reports that a submission cannot be graded through the agent's own fault."""


def unpack_submission(
  archive: bytes, folder: Path, is_protected: Callable[[str], bool], max_bytes: int
) -> None:
  """Writes the files of an untrusted tar archive into an empty folder.

  Protected files are left out. So is what would lie or lead outside, what is neither a
  file nor a folder nor a link, what occurs twice, and what lies beyond a link: nothing
  is ever written through a link, whatever `tarfile` makes of it.

  Args:
    archive: The tar archive.
    folder: The empty folder.
    is_protected: Tells whether a path is protected.
    max_bytes: The maximum number of bytes of all files, counting a hard link's target
      again.

  Raises:
    SubmissionError: If the data is not an archive, or is too large.
  """
  size = 0
  sizes: dict[str, int] = {}  # of the files to extract
  links: set[str] = set()

  def keep_member(member: tarfile.TarInfo, where: str) -> tarfile.TarInfo | None:
    nonlocal size
    name = os.path.normpath(member.name.lstrip('/'))
    link_target_size = (
      sizes.get(os.path.normpath(member.linkname)) if member.islnk() else 0
    )
    # Copying the tree copies a hard link's target once more.
    size += member.size + (link_target_size or 0)
    if size > max_bytes:
      raise tarfile.TarError('too large')
    if name != '.' and is_protected(name):
      return None
    prefixes = {'/'.join(name.split('/')[: n + 1]) for n in range(name.count('/') + 1)}
    if (
      link_target_size is None
      or name in sizes
      or not links.isdisjoint(prefixes)
      or '..' in member.name.split('/')
    ):
      return None
    try:
      filtered = tarfile.data_filter(member, where)
    except tarfile.FilterError:
      return None
    if member.issym():
      links.add(name)
    elif not member.isdir():
      sizes[name] = member.size + link_target_size
    return filtered

  try:
    with tarfile.open(fileobj=io.BytesIO(archive), mode='r:') as tar:
      tar.extractall(folder, filter=keep_member)
  except (tarfile.TarError, OSError, ValueError, KeyError) as error:
    raise SubmissionError(f'the tree cannot be unpacked: {error}') from error


def restore_protected(
  source: Path, folder: Path, is_protected: Callable[[str], bool]
) -> None:
  """Copies the protected files of a trusted tree over those in `folder`.

  Args:
    source: The trusted tree.
    folder: The tree to change.
    is_protected: Tells whether a path is protected.
  """
  for parent, _, names in os.walk(source):
    for name in names:
      path = os.path.relpath(os.path.join(parent, name), source)
      if is_protected(path):
        _copy_file(source / path, folder, path)


def _copy_file(source: Path, folder: Path, path: str) -> None:
  """Copies a file, through no link, replacing whatever is in its way."""
  target = folder
  *parents, last = path.split('/')
  for part in parents:
    target = target / part
    if target.is_symlink() or not target.is_dir():
      target.unlink(missing_ok=True)
      target.mkdir()
  target = target / last
  if target.is_dir() and not target.is_symlink():
    shutil.rmtree(target)
  target.unlink(missing_ok=True)
  shutil.copy2(source, target, follow_symlinks=False)
