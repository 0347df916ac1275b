"""Git operations on this machine: exporting a commit, starting a repository, patching.

Only repositories that the user named are opened. What an agent leaves behind is never
passed to git.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_GIT_TIMEOUT_S = 300.0  # seconds for one git command
_COMMIT = re.compile(r'[0-9a-f]{7,64}')
_GIT_ENVIRONMENT = {
  'GIT_CONFIG_NOSYSTEM': '1',
  'GIT_CONFIG_GLOBAL': os.devnull,
  'GIT_TERMINAL_PROMPT': '0',
  'GIT_AUTHOR_DATE': '2000-01-01T00:00:00Z',  # so that the same files are one commit
  'GIT_COMMITTER_DATE': '2000-01-01T00:00:00Z',
}
_OPTIONS = ('core.hooksPath=/dev/null', 'safe.directory=*', 'commit.gpgSign=false')
_OPTIONS = (*_OPTIONS, 'user.name=agent', 'user.email=agent@localhost', 'gc.auto=0')


def run_git(
  *arguments: str,
  folder: Path,
  stdin: bytes = b'',
  variables: Mapping[str, str] | None = None,
) -> bytes:
  """Runs a git command.

  Args:
    *arguments: The arguments of git.
    folder: The working directory.
    stdin: The standard input.
    variables: Additional environment variables.

  Returns:
    The standard output.

  Raises:
    ValueError: If git is not installed, or the command fails; the error holds its
      message.
  """
  program = shutil.which('git')
  if program is None:
    raise ValueError("git is not on this machine's PATH: install it")
  options = [part for option in _OPTIONS for part in ('-c', option)]
  env = _GIT_ENVIRONMENT | {'PATH': os.environ['PATH'], **(variables or {})}
  # Never use a repository above the folder.
  env |= {'GIT_CEILING_DIRECTORIES': str(folder.parent)}
  result = subprocess.run(
    [program, *options, *arguments],
    cwd=folder,
    env=env,
    input=stdin,
    capture_output=True,
    timeout=_GIT_TIMEOUT_S,
    check=False,
  )
  if result.returncode:
    message = result.stderr.decode('utf-8', 'replace').strip()[-500:]
    raise ValueError(f'git {arguments[0]} in {folder} failed: {message}')
  return result.stdout


def find_clone(repos: str, name: str) -> Path:
  """Finds the clone of a repository, bare or not.

  `owner/name`, `owner__name` and `name` are tried, each with and without `.git`.

  Args:
    repos: The folder of clones.
    name: The repository as `owner/name`.

  Returns:
    The path of the clone.

  Raises:
    ValueError: If there is none.
  """
  if '..' in name.split('/') or name.startswith('/'):
    raise ValueError(f'{name!r} is not the name of a repository')
  candidates = (name, name.replace('/', '__'), name.rpartition('/')[2])
  for path in candidates:
    for end in ('', '.git'):
      clone = Path(repos).expanduser() / f'{path}{end}'
      if clone.is_dir():
        return clone.resolve()
  raise ValueError(
    f'no repository {name!r} in repos={repos!r}: clone it to one of '
    f'{", ".join(candidates)}'
  )


def export_commit(repository: Path, commit: str, folder: Path) -> None:
  """Writes the files of a commit into an empty folder; submodules stay empty.

  Args:
    repository: The clone.
    commit: The commit's hexadecimal name.
    folder: The empty folder.

  Raises:
    ValueError: If the commit does not exist.
  """
  if not _COMMIT.fullmatch(commit):
    raise ValueError(f'{commit!r} is not a commit: give its hexadecimal name')
  index = f'{folder}.index'
  variables = {'GIT_INDEX_FILE': index, 'GIT_WORK_TREE': str(folder)}
  git_dir = run_git('rev-parse', '--absolute-git-dir', folder=repository)
  variables['GIT_DIR'] = git_dir.decode().removesuffix('\n')
  try:
    run_git('read-tree', f'{commit}^{{tree}}', folder=folder, variables=variables)
    run_git('checkout-index', '--all', '--force', folder=folder, variables=variables)
  finally:
    Path(index).unlink(missing_ok=True)


def init_repository(folder: Path) -> None:
  """Makes a folder a repository with one commit and no other history.

  Args:
    folder: The folder.
  """
  run_git('init', '--quiet', '--template=', folder=folder)
  run_git('add', '--all', '--force', '.', folder=folder)
  run_git('commit', '--quiet', '--allow-empty', '--message=base', folder=folder)
  with (folder / '.git' / 'config').open('a') as config:
    config.write('[user]\n\tname = agent\n\temail = agent@localhost\n')


def apply_patch(patch: str, folder: Path) -> set[str]:
  """Applies a patch to plain files.

  Args:
    patch: The patch.
    folder: The folder of the files.

  Returns:
    The paths that the patch changed.

  Raises:
    ValueError: If the patch does not apply.
  """
  before = _file_stamps(folder)
  if patch.strip():
    text = patch if patch.endswith('\n') else f'{patch}\n'
    run_git('apply', '--whitespace=nowarn', '-', folder=folder, stdin=text.encode())
  after = _file_stamps(folder)
  return {path for path in before | after if before.get(path) != after.get(path)}


def _file_stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
  """Returns what tells whether each file is still the same."""
  stamps = {}
  for parent, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(parent, name)
      stat = os.lstat(path)
      stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
      stamps[os.path.relpath(path, folder)] = stamp
  return stamps
