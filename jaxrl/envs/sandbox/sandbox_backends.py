"""Sandbox backends by name: local, docker and podman, with their limits."""

import functools
import os
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.component_table import Component, ComponentTable
from jaxrl.envs.sandbox import local_sandbox as local_module
from jaxrl.envs.sandbox.container_sandbox import ContainerSandbox
from jaxrl.envs.sandbox.local_sandbox import Isolation, LocalSandbox
from jaxrl.envs.sandbox.sandbox_api import MIB, Sandbox, SandboxLimits

MakeSandbox = Callable[..., Sandbox]
"""make(folders=…, workdir=…, task=…, environment=…) returns a sandbox to start."""


def local_factory(
  *,
  memory_mb: int = 2048,
  processes: int = 128,
  file_mb: int = 256,
  tmp_mb: int = 256,
  open_files: int = 1024,
  output_mb: int = 4,
  readonly: Sequence[str] = (sys.prefix,),
  environment: Mapping[str, str] | None = None,
  isolation: Isolation = 'auto',
  unsafe: bool = False,
) -> MakeSandbox:
  """Builds sandboxes on this machine, in namespaces; see `LocalSandbox`.

  Args:
    memory_mb: The memory of everything that runs at a time.
    processes: The number of processes that run at a time.
    file_mb: The size of a file.
    tmp_mb: The size of /tmp, which is empty at each command.
    open_files: The number of open files of a process.
    output_mb: The output of a command.
    readonly: Folders of this machine that may be read, by default this Python's own.
      The `bin` of each comes first on the PATH.
    environment: Additional environment variables.
    isolation: What creates the namespaces; see `LocalSandbox`.
    unsafe: Also run where the kernel allows no sandbox.

  Returns:
    A function that builds a sandbox.

  Raises:
    ValueError: If a read-only folder does not exist.
  """
  for path in readonly:
    if not os.path.isabs(path) or not os.path.exists(path):
      raise ValueError(f'readonly={path!r} must be an absolute path on this machine')
  paths = [os.path.join(path, 'bin') for path in readonly]
  variables = {
    'PATH': ':'.join([*paths, local_module.DEFAULT_PATH]),
    **(environment or {}),
  }
  limits = SandboxLimits(
    memory=memory_mb * MIB,
    processes=processes,
    file_size=file_mb * MIB,
    tmp=tmp_mb * MIB,
    open_files=open_files,
    output=output_mb * MIB,
  )

  def make(
    *, folders: Mapping, workdir: str, task: str, environment: Mapping
  ) -> LocalSandbox:
    del task  # every task uses this machine's programs
    merged = _add_task_variables(variables, environment)
    return LocalSandbox(
      folders=folders,
      workdir=workdir,
      readonly=readonly,
      environment=merged,
      limits=limits,
      isolation=isolation,
      unsafe=unsafe,
    )

  return make


def _add_task_variables(
  variables: dict[str, str], task_variables: Mapping[str, str]
) -> dict[str, str]:
  """Adds a task's environment variables; its PATH may extend ours: '/opt/bin:$PATH'."""
  added = dict(task_variables)
  if 'PATH' in added:
    path = string.Template(added['PATH'])
    added['PATH'] = path.safe_substitute(PATH=variables['PATH'])
  return variables | added


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
) -> MakeSandbox:
  """Builds sandboxes in containers; see `ContainerSandbox`.

  Args:
    program: 'docker' or 'podman'.
    image: The image; `{task}` stands for the task's name in lower case.
    memory_mb: The memory of everything in the container.
    processes: The number of processes that may run at the same time.
    open_files: The number of files that a process may have open.
    output_mb: The maximum output of a command.
    cpus: The processors that it may use.
    lifetime: Seconds after which the container ends by itself.
    environment: Environment variables.

  Returns:
    The function that makes one.
  """
  limits = SandboxLimits(
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


SANDBOX_BACKENDS: ComponentTable[Callable[..., Any]] = ComponentTable(
  'sandbox',
  'env.<tag>.env_config.sandbox',
  {
    'local': local_factory,
    'docker': functools.partial(_container, 'docker'),
    'podman': functools.partial(_container, 'podman'),
  },
)


def sandbox_factory(call: Component) -> MakeSandbox:
  """Returns the function that builds the sandboxes of the option `sandbox`.

  Args:
    call: A call of one of SANDBOX_BACKENDS, or its name.

  Returns:
    A function make(folders=…, workdir=…, task=…, environment=…) that builds a sandbox,
    which is not started yet.

  Raises:
    ValueError: If there is no such sandbox or option.
  """
  return SANDBOX_BACKENDS.build(call)
