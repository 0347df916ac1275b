"""Where sandboxes run, by call string: local, docker or podman, and their limits."""

import functools
import os
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl import signature
from jaxrl.envs.sandbox import local as local_module
from jaxrl.envs.sandbox.base import MIB, Limits, Sandbox
from jaxrl.envs.sandbox.container import ContainerSandbox
from jaxrl.envs.sandbox.local import LocalSandbox

Make = Callable[..., Sandbox]
"""make(folders=…, workdir=…, task=…, environment=…) -> a sandbox, not yet started."""


def local(
  *,
  memory_mb: int = 2048,
  processes: int = 128,
  file_mb: int = 256,
  tmp_mb: int = 256,
  open_files: int = 1024,
  output_mb: int = 4,
  readonly: Sequence[str] = (sys.prefix,),
  environment: Mapping[str, str] | None = None,
  unsafe: bool = False,
) -> Make:
  """On this machine, in namespaces; see `LocalSandbox`.

  readonly: folders of this machine that may be read, by default this Python's own.
  The `bin` of each comes first on the PATH. memory_mb, processes: of all that runs
  at a time. tmp_mb: of /tmp, empty at each command. output_mb: of a command.
  """
  for path in readonly:
    if not os.path.isabs(path) or not os.path.exists(path):
      raise signature.ConfigError(
        f"sandbox 'local': readonly={path!r} has to be a folder of this machine, from /"
      )
  paths = [os.path.join(path, 'bin') for path in readonly]
  variables = {'PATH': ':'.join([*paths, local_module.PATH]), **(environment or {})}
  limits = Limits(
    memory=memory_mb * MIB,
    processes=processes,
    file_size=file_mb * MIB,
    tmp=tmp_mb * MIB,
    open_files=open_files,
    output=output_mb * MIB,
  )

  def make(
    *,
    folders: Mapping[str, str | None],
    workdir: str,
    task: str,
    environment: Mapping[str, str],
  ) -> LocalSandbox:
    del task  # the same programs for every task: this machine's
    given = dict(environment)
    if 'PATH' in given:  # a task adds to it: '/opt/bin:$PATH'
      path = string.Template(given['PATH'])
      given['PATH'] = path.safe_substitute(PATH=variables['PATH'])
    return LocalSandbox(
      folders=folders,
      workdir=workdir,
      readonly=readonly,
      environment=variables | given,
      limits=limits,
      unsafe=unsafe,
    )

  return make


def _container(
  program: str,
  /,
  *,
  image: str = '{task}',
  memory_mb: int = 4096,
  processes: int = 256,
  open_files: int = 1024,
  output_mb: int = 4,
  cpus: float = 2.0,
  lifetime: int = 4 * 3600,
  environment: Mapping[str, str] | None = None,
) -> Make:
  """In a container; see `ContainerSandbox`.

  image: `{task}` in it stands for the task's name, in small letters.
  """
  limits = Limits(
    memory=memory_mb * MIB,
    processes=processes,
    open_files=open_files,
    output=output_mb * MIB,
  )
  variables = dict(environment or {})

  def make(
    *,
    folders: Mapping[str, str | None],
    workdir: str,
    task: str,
    environment: Mapping[str, str],
  ) -> ContainerSandbox:
    return ContainerSandbox(
      program=program,
      image=image.replace('{task}', task.lower()),
      folders=folders,
      workdir=workdir,
      environment=variables | dict(environment),
      limits=limits,
      cpus=cpus,
      lifetime=lifetime,
    )

  return make


BACKENDS: dict[str, Callable[..., Any]] = {
  'local': local,
  'docker': functools.partial(_container, 'docker'),
  'podman': functools.partial(_container, 'podman'),
}


def backend(text: str) -> Make:
  """What the call string of option `sandbox` names. ConfigError for a wrong one."""
  return signature.call(text, BACKENDS, 'sandbox', 'env.<tag>.env_config.sandbox')
