"""Git on this machine: a commit's files, a fresh repository of them, a patch applied.

Only repositories that the user named are opened; what an agent leaves behind is
never handed to git.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from jaxrl.signature import ConfigError

_PATIENCE = 300.0  # seconds for one of git's commands
_COMMIT = re.compile(r'[0-9a-f]{7,64}')
_QUIET = {
  'GIT_CONFIG_NOSYSTEM': '1',
  'GIT_CONFIG_GLOBAL': os.devnull,
  'GIT_TERMINAL_PROMPT': '0',
  'GIT_AUTHOR_DATE': '2000-01-01T00:00:00Z',  # so that the same files are one commit
  'GIT_COMMITTER_DATE': '2000-01-01T00:00:00Z',
}
_OPTIONS = ('core.hooksPath=/dev/null', 'safe.directory=*', 'commit.gpgSign=false')
_OPTIONS = (*_OPTIONS, 'user.name=agent', 'user.email=agent@localhost', 'gc.auto=0')


def git(
  *arguments: str,
  folder: Path,
  stdin: bytes = b'',
  variables: Mapping[str, str] | None = None,
) -> bytes:
  """What a git command says; ValueError with its words when it fails."""
  program = shutil.which('git')
  if program is None:
    raise ConfigError("this needs git: install it, it is not on this machine's PATH")
  options = [part for option in _OPTIONS for part in ('-c', option)]
  env = _QUIET | {'PATH': os.environ['PATH'], **(variables or {})}
  env |= {'GIT_CEILING_DIRECTORIES': str(folder.parent)}  # none but the folder's own
  done = subprocess.run(
    [program, *options, *arguments],
    cwd=folder,
    env=env,
    input=stdin,
    capture_output=True,
    timeout=_PATIENCE,
    check=False,
  )
  if done.returncode:
    said = done.stderr.decode('utf-8', 'replace').strip()[-500:]
    raise ValueError(f'git {arguments[0]} in {folder} failed: {said}')
  return done.stdout


def find(repos: str, name: str) -> Path:
  """The repository `owner/name` below `repos`: a clone, bare or not.

  `owner/name`, `owner__name` and `name` are tried, each with and without `.git`.
  """
  if '..' in name.split('/') or name.startswith('/'):
    raise ValueError(f'{name!r} is no name of a repository')
  tried = (name, name.replace('/', '__'), name.rpartition('/')[2])
  for path in tried:
    for end in ('', '.git'):
      found = Path(repos).expanduser() / f'{path}{end}'
      if found.is_dir():
        return found.resolve()
  raise ValueError(
    f'no repository {name!r} in repos={repos!r}: clone it to one of {", ".join(tried)}'
  )


def export(repository: Path, commit: str, folder: Path) -> None:
  """Writes the files of a commit into an empty folder; submodules stay empty."""
  if not _COMMIT.fullmatch(commit):
    raise ValueError(f'{commit!r} is no commit: give its hexadecimal name')
  index = f'{folder}.index'
  where = {'GIT_INDEX_FILE': index, 'GIT_WORK_TREE': str(folder)}
  said = git('rev-parse', '--absolute-git-dir', folder=repository)
  where['GIT_DIR'] = said.decode().removesuffix('\n')
  try:
    git('read-tree', f'{commit}^{{tree}}', folder=folder, variables=where)
    git('checkout-index', '--all', '--force', folder=folder, variables=where)
  finally:
    Path(index).unlink(missing_ok=True)


def begin(folder: Path) -> None:
  """Makes a folder a repository of one commit, without any other history."""
  git('init', '--quiet', '--template=', folder=folder)
  git('add', '--all', '--force', '.', folder=folder)
  git('commit', '--quiet', '--allow-empty', '--message=base', folder=folder)
  with (folder / '.git' / 'config').open('a') as config:
    config.write('[user]\n\tname = agent\n\temail = agent@localhost\n')


def apply(patch: str, folder: Path) -> set[str]:
  """Applies a patch to plain files; returns the paths that it changed."""
  before = _stamps(folder)
  if patch.strip():
    text = patch if patch.endswith('\n') else f'{patch}\n'
    git('apply', '--whitespace=nowarn', '-', folder=folder, stdin=text.encode())
  after = _stamps(folder)
  return {path for path in before | after if before.get(path) != after.get(path)}


def _stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
  """What tells of each file whether it is still the same one."""
  found = {}
  for parent, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(parent, name)
      stat = os.lstat(path)
      stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
      found[os.path.relpath(path, folder)] = stamp
  return found
