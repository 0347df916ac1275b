"""Dockerfiles are carried out here without a container, for local sandboxes.

FROM's image is not available; this machine's own programs take its place.
"""

import dataclasses
import json
import shlex
import shutil
import string
from pathlib import Path, PurePosixPath

_IGNORED = ('FROM', 'CMD', 'ENTRYPOINT', 'EXPOSE', 'LABEL', 'MAINTAINER', 'HEALTHCHECK')
_IGNORED = (*_IGNORED, 'STOPSIGNAL', 'VOLUME', 'USER')  # do not affect the files
_SYSTEM_FOLDERS = (
  'usr',
  'bin',
  'sbin',
  'lib',
  'lib32',
  'lib64',
  'etc',
  'dev',
  'proc',
  'sys',
)


@dataclasses.dataclass
class StagedDockerfile:
  """The result of reading a Dockerfile.

  Attributes:
    folders: Paths inside, mapped to folders on this machine.
    workdir: Where commands start.
    environment: The environment variables.
    commands: The commands of RUN in order, each with the folder where it starts. All
      files are there before the first of them.
  """

  folders: dict[str, str] = dataclasses.field(default_factory=dict)
  workdir: str = '/app'
  environment: dict[str, str] = dataclasses.field(default_factory=dict)
  commands: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def stage_dockerfile(context: Path, scratch: Path) -> StagedDockerfile:
  """Reads a Dockerfile and copies the files that it names.

  Args:
    context: The folder of the Dockerfile.
    scratch: The folder to copy to.

  Returns:
    What the Dockerfile asks for.

  Raises:
    ValueError: If something needs a container: files in the system's folders, a second
      stage, URLs, unknown instructions.
  """
  staged = StagedDockerfile()
  file = context / 'Dockerfile'
  for name, arguments in _instructions(file.read_text() if file.is_file() else ''):
    if name == 'WORKDIR':
      path = PurePosixPath(staged.workdir) / _expand_variables(arguments, staged)
      staged.workdir = str(path)
      _host_path(scratch, staged.workdir).mkdir(parents=True, exist_ok=True)
    elif name in ('ENV', 'ARG'):
      staged.environment |= _variables(name, arguments, staged)
    elif name in ('COPY', 'ADD'):
      _copy(context, scratch, arguments, staged)
    elif name == 'RUN':
      staged.commands.append((staged.workdir, _shell_form(arguments)))
    elif name not in _IGNORED:
      raise ValueError(
        f'{file}: {name} needs a container: use the sandbox docker or podman'
      )
  _host_path(scratch, staged.workdir).mkdir(parents=True, exist_ok=True)
  staged.folders = {f'/{top.name}': str(top) for top in sorted(scratch.iterdir())}
  return staged


def _instructions(text: str) -> list[tuple[str, str]]:
  """Returns each instruction's name and arguments, with continued lines joined."""
  instructions, continued = [], ''
  for line in text.splitlines():
    if line.lstrip().startswith('#') or (not continued and not line.strip()):
      continue
    if line.rstrip().endswith('\\'):
      continued += line.rstrip()[:-1] + ' '
      continue
    name, _, arguments = (continued + line).strip().partition(' ')
    if '<<' in arguments and name.upper() in ('RUN', 'COPY'):
      raise ValueError(
        'a Dockerfile with a here-document needs a container, so use the '
        f'sandbox docker or podman: {arguments}'
      )
    instructions.append((name.upper(), arguments.strip()))
    continued = ''
  if sum(name == 'FROM' for name, _ in instructions) > 1:
    raise ValueError(
      'a Dockerfile of several stages needs a container: use the sandbox '
      'docker or podman'
    )
  return instructions


def _expand_variables(text: str, staged: StagedDockerfile) -> str:
  return string.Template(text).safe_substitute(staged.environment)


def _variables(name: str, arguments: str, staged: StagedDockerfile) -> dict[str, str]:
  """Parses the arguments of ENV and ARG: `a=1 b=2`, or for ENV the old form `a 1`."""
  words = shlex.split(_expand_variables(arguments, staged))
  if words and '=' not in words[0]:
    return {} if name == 'ARG' else {words[0]: ' '.join(words[1:])}
  pairs = (word.partition('=') for word in words)
  return {key: value for key, equals_sign, value in pairs if equals_sign}


def _shell_form(arguments: str) -> str:
  """Returns RUN's command; one written as a JSON list is quoted."""
  if arguments.startswith('['):
    return shlex.join(json.loads(arguments))
  return arguments


def _copy(
  context: Path, scratch: Path, arguments: str, staged: StagedDockerfile
) -> None:
  """Carries out COPY and ADD for files of the context."""
  text = _expand_variables(arguments, staged)
  while text.startswith('--'):  # such as an owner; there is only one here
    flag, _, text = text.partition(' ')
    text = text.lstrip()
    if flag.startswith('--from'):
      raise ValueError(
        f'COPY {arguments} needs a container: use the sandbox docker or podman'
      )
  words = json.loads(text) if text.startswith('[') else shlex.split(text)
  if len(words) < 2:
    raise ValueError(f'COPY {arguments}: must name files and a destination')
  *sources, target = words
  destination = _host_path(scratch, str(PurePosixPath(staged.workdir) / target))
  is_folder = target.endswith(('/', '/.')) or target == '.' or len(sources) > 1
  for source in sources:
    if '://' in source:
      raise ValueError(
        f'ADD {source}: URLs are not downloaded here: use the sandbox docker or podman'
      )
    pattern = PurePosixPath(source.strip('/'))
    paths = sorted(context.glob(str(pattern))) if pattern.parts else [context]
    if not paths:
      raise ValueError(f'COPY {source}: there is no such file in {context}')
    for path in paths:
      if not path.resolve().is_relative_to(context.resolve()):
        raise ValueError(f'COPY {source} leads out of {context}')
      if path.is_dir():
        hide = _hidden_names if path.samefile(context) else None
        shutil.copytree(
          path, destination, symlinks=True, dirs_exist_ok=True, ignore=hide
        )
        continue
      target_path = (
        destination / path.name if is_folder or destination.is_dir() else destination
      )
      target_path.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(path, target_path)


def _hidden_names(folder: str, names: list[str]) -> list[str]:
  """Names what must not be copied of a whole task: its tests and solution."""
  if not (Path(folder) / 'task.yaml').is_file():
    return []
  hidden = ('task.yaml', 'tests', 'run-tests.sh')
  return [name for name in names if name in hidden or name.startswith('solution')]


def _host_path(scratch: Path, path: str) -> Path:
  """Returns where below `scratch` the path inside is stored."""
  parts = [part for part in PurePosixPath(path).parts if part != '/']
  if not parts or parts[0] in _SYSTEM_FOLDERS or '..' in parts:
    raise ValueError(
      f'{path} can only be written to in a container: use the sandbox docker or podman'
    )
  return scratch.joinpath(*parts)
