"""Harbor artifacts are what an agent hands over to tests in another sandbox.

They are the folder `/logs/artifacts` and what task.toml lists under `artifacts`. What
is not there is left out, and so are links that lead out of an artifact and special
files.
"""

import dataclasses
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from jaxrl.envs.sandbox.sandbox_api import Sandbox, SandboxError

ARTIFACTS_DIR = '/logs/artifacts'  # is handed over whatever the task lists
MAX_ARTIFACT_BYTES = 64 << 20  # of one artifact, packed
_FIELDS = {'source', 'destination', 'exclude', 'service'}


@dataclasses.dataclass(frozen=True)
class Artifact:
  """A file or folder that is handed over.

  Attributes:
    source: Its path, in both sandboxes.
    exclude: Patterns, as `tar --exclude` takes them, of what stays behind.
  """

  source: str
  exclude: tuple[str, ...] = ()


def read_artifacts(folder: Path, entries: object) -> tuple[Artifact, ...]:
  """Reads `artifacts` of task.toml.

  Args:
    folder: The folder of the task.
    entries: Each a path, or a table with `source` and `exclude`.

  Returns:
    The artifacts, with `ARTIFACTS_DIR` first if it is not listed.

  Raises:
    ValueError: If they are wrong, or ask for something that is not supported.
  """
  where = f'{folder}/task.toml: artifacts'
  if not isinstance(entries, list):
    raise ValueError(f'{where} must be a list')
  artifacts = []
  for entry in entries:
    table = {'source': entry} if isinstance(entry, str) else entry
    if not isinstance(table, dict) or not isinstance(table.get('source'), str):
      raise ValueError(f'{where}: {entry!r} must be a path, or a table with a source')
    if unknown := set(table) - _FIELDS:
      raise ValueError(f'{where}: {min(unknown)} is not supported')
    if table.get('service') not in (None, 'main'):
      raise ValueError(f'{where}: service is not supported: there is one container')
    path, exclude = PurePosixPath(table['source']), table.get('exclude', [])
    if not path.is_absolute() or '..' in path.parts or len(path.parts) < 2:
      raise ValueError(f'{where}: {entry!r} must be a path from the root, without ..')
    if not isinstance(exclude, list) or not all(isinstance(e, str) for e in exclude):
      raise ValueError(f'{where}: exclude of {path} must be a list of patterns')
    artifacts.append(Artifact(str(path), tuple(exclude)))
  if not any(artifact.source == ARTIFACTS_DIR for artifact in artifacts):
    artifacts.insert(0, Artifact(ARTIFACTS_DIR))
  return tuple(artifacts)


def collect_artifacts(
  sandbox: Sandbox, artifacts: Sequence[Artifact], scratch: Path
) -> list[tuple[str, Path]]:
  """Copies artifacts out of a sandbox.

  Args:
    sandbox: The agent's.
    artifacts: What to copy.
    scratch: An empty folder to copy to.

  Returns:
    The path inside, and the copy, of each that is there.

  Raises:
    SandboxError: One is too large.
  """
  copies = []
  for number, artifact in enumerate(artifacts):
    path = PurePosixPath(artifact.source)
    is_folder = sandbox.exec(['test', '-d', artifact.source]).code == 0
    what = [artifact.source, '.'] if is_folder else [str(path.parent), path.name]
    exclude = [f'--exclude={pattern}' for pattern in artifact.exclude if is_folder]
    packed = sandbox.exec(
      ['tar', '-cf', '-', *exclude, '-C', what[0], '--', what[1]],
      output=MAX_ARTIFACT_BYTES,
    )
    if packed.limit:
      raise SandboxError(
        f'the artifact {path} reached the limit of {packed.limit} '
        f'({MAX_ARTIFACT_BYTES >> 20} MiB)'
      )
    if packed.code:
      continue  # it is not there
    folder = scratch / str(number)
    folder.mkdir()
    _unpack(packed.stdout, folder)
    copy = folder if is_folder else folder / path.name
    if copy.exists() and not copy.is_symlink():
      copies.append((artifact.source, copy))
  return copies


def _unpack(data: bytes, folder: Path) -> None:
  with tarfile.open(fileobj=io.BytesIO(data)) as archive:
    for member in archive:
      try:
        archive.extract(member, folder, filter='data')
      except (tarfile.FilterError, KeyError):  # leads out, is special, or a lost link
        continue


def hand_over_artifacts(sandbox: Sandbox, copies: Sequence[tuple[str, Path]]) -> None:
  """Puts copies of artifacts into a sandbox, under the paths that they had."""
  for path, copy in copies:
    if copy.is_dir():
      sandbox.put(path, str(copy))
      continue
    sandbox.write(path, copy.read_bytes())
    sandbox.exec(['chmod', f'{copy.stat().st_mode & 0o777:o}', '--', path])
