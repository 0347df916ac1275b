"""A Dockerfile's files, variables and commands, for where there is no container.

FROM's image is not there: this machine's own programs take its place.
"""

import dataclasses
import json
import shlex
import shutil
import string
from pathlib import Path, PurePosixPath

_SILENT = ('FROM', 'CMD', 'ENTRYPOINT', 'EXPOSE', 'LABEL', 'MAINTAINER', 'HEALTHCHECK')
_SILENT = (*_SILENT, 'STOPSIGNAL', 'VOLUME', 'USER')  # say nothing of the files
_SYSTEM = ('usr', 'bin', 'sbin', 'lib', 'lib32', 'lib64', 'etc', 'dev', 'proc', 'sys')


@dataclasses.dataclass
class Staged:
  """What a Dockerfile asks for.

  folders: path inside → folder on this machine. workdir: where commands start.
  commands: what RUN says, each with the folder where it starts, in order; all files
  are there before the first of them.
  """

  folders: dict[str, str] = dataclasses.field(default_factory=dict)
  workdir: str = '/app'
  environment: dict[str, str] = dataclasses.field(default_factory=dict)
  commands: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def stage(context: Path, scratch: Path) -> Staged:
  """Reads `context`'s Dockerfile and copies its files below `scratch`.

  ValueError for what cannot be done outside a container: files placed in the system's
  folders, a second stage, addresses, unknown instructions.
  """
  staged = Staged()
  file = context / 'Dockerfile'
  for name, rest in _instructions(file.read_text() if file.is_file() else ''):
    if name == 'WORKDIR':
      path = PurePosixPath(staged.workdir) / _filled(rest, staged)
      staged.workdir = str(path)
      _host(scratch, staged.workdir).mkdir(parents=True, exist_ok=True)
    elif name in ('ENV', 'ARG'):
      staged.environment |= _variables(name, rest, staged)
    elif name in ('COPY', 'ADD'):
      _copy(context, scratch, rest, staged)
    elif name == 'RUN':
      staged.commands.append((staged.workdir, _shell_form(rest)))
    elif name not in _SILENT:
      raise ValueError(f'{file}: {name} can only be done in a container')
  _host(scratch, staged.workdir).mkdir(parents=True, exist_ok=True)
  staged.folders = {f'/{top.name}': str(top) for top in sorted(scratch.iterdir())}
  return staged


def _instructions(text: str) -> list[tuple[str, str]]:
  """Each instruction's name and the rest of it, lines joined, comments left out."""
  found, held = [], ''
  for line in text.splitlines():
    if line.lstrip().startswith('#') or (not held and not line.strip()):
      continue
    if line.rstrip().endswith('\\'):
      held += line.rstrip()[:-1] + ' '
      continue
    name, _, rest = (held + line).strip().partition(' ')
    if '<<' in rest and name.upper() in ('RUN', 'COPY'):
      raise ValueError(f'a Dockerfile with a here-document needs a container: {rest}')
    found.append((name.upper(), rest.strip()))
    held = ''
  if sum(name == 'FROM' for name, _ in found) > 1:
    raise ValueError('a Dockerfile of several stages needs a container')
  return found


def _filled(text: str, staged: Staged) -> str:
  return string.Template(text).safe_substitute(staged.environment)


def _variables(name: str, rest: str, staged: Staged) -> dict[str, str]:
  """ENV's and ARG's: a=1 b=2, or for ENV the old `a 1`."""
  words = shlex.split(_filled(rest, staged))
  if words and '=' not in words[0]:
    return {} if name == 'ARG' else {words[0]: ' '.join(words[1:])}
  pairs = (word.partition('=') for word in words)
  return {key: value for key, mark, value in pairs if mark}


def _shell_form(rest: str) -> str:
  """RUN's command; one written as a JSON list is quoted."""
  if rest.startswith('['):
    return shlex.join(json.loads(rest))
  return rest


def _copy(context: Path, scratch: Path, rest: str, staged: Staged) -> None:
  """COPY and ADD, of files of the context."""
  text = _filled(rest, staged)
  while text.startswith('--'):  # such as an owner, of which there is but one here
    flag, _, text = text.partition(' ')
    text = text.lstrip()
    if flag.startswith('--from'):
      raise ValueError(f'COPY {rest} needs a container')
  words = json.loads(text) if text.startswith('[') else shlex.split(text)
  if len(words) < 2:
    raise ValueError(f'COPY {rest}: give files and where they go')
  *sources, target = words
  place = _host(scratch, str(PurePosixPath(staged.workdir) / target))
  into = target.endswith(('/', '/.')) or target == '.' or len(sources) > 1
  for source in sources:
    if '://' in source:
      raise ValueError(f'ADD {source}: nothing is fetched')
    plain = PurePosixPath(source.strip('/'))
    found = sorted(context.glob(str(plain))) if plain.parts else [context]
    if not found:
      raise ValueError(f'COPY {source}: there is no such file in {context}')
    for path in found:
      if not path.resolve().is_relative_to(context.resolve()):
        raise ValueError(f'COPY {source} leads out of {context}')
      if path.is_dir():
        hide = _hide if path.samefile(context) else None
        shutil.copytree(path, place, symlinks=True, dirs_exist_ok=True, ignore=hide)
        continue
      whole = place / path.name if into or place.is_dir() else place
      whole.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(path, whole)


def _hide(folder: str, names: list[str]) -> list[str]:
  """Of a whole task that is copied, what would give its tests and solution away."""
  if not (Path(folder) / 'task.yaml').is_file():
    return []
  secret = ('task.yaml', 'tests', 'run-tests.sh')
  return [name for name in names if name in secret or name.startswith('solution')]


def _host(scratch: Path, path: str) -> Path:
  """Where below `scratch` lies what is at `path` inside."""
  parts = [part for part in PurePosixPath(path).parts if part != '/']
  if not parts or parts[0] in _SYSTEM or '..' in parts:
    raise ValueError(f'{path} can only be written to in a container')
  return scratch.joinpath(*parts)
