"""An agent mends a repository in a sandbox; hidden tests judge what it leaves.

Tasks are rows of SWE-bench Verified (`swe_tasks`), repositories clones on this
machine. The agent sees the files of the base commit as a repository of one commit,
so that neither the tests nor the history after it are there. Grading takes place in a
second sandbox, of which the agent never saw anything.
"""

import os
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxrl.envs import outcomes, repository, submission, swe_tasks
from jaxrl.envs import shell as shells
from jaxrl.envs.sandbox import places
from jaxrl.envs.sandbox.backends import backend
from jaxrl.envs.sandbox.base import MIB, Sandbox, SandboxError
from jaxrl.signature import ConfigError

_PYTEST = 'pytest -q --rootdir=. -p no:cacheprovider -o junit_family=xunit1'


class SweEnv:
  """One task of a data set a time; the reward is 1 when all its tests pass, else 0.

  repos: the folder of clones, `owner/name` or `owner__name` each, bare or not.
  sandbox: `local(…)`, `docker(…)` or `podman(…)`; see `sandbox.backends`; an image's
  `{task}` is the instance's id. shell: see `shell.Shell`. workdir: where the
  repository lies. setup: a command run there before the agent and again before the
  tests, such as an installation. test_command: how tests are run, test_commands: the
  same by `repo`. In it `{files}` stands for the tests' files, those of the test patch
  where the ids name none, `{modules}` for the same as Django's modules, `{tests}` for
  the ids, `{report}` for the JUnit XML file to write; without that the output is read,
  see `outcomes.from_log`. protect: names of files whose changes do not count.
  episode_seconds: of the agent's commands together; test_seconds: of the tests;
  tree_mb: of what the agent may leave.
  """

  columns: ClassVar = {'failed': 'string'}

  def __init__(
    self,
    *,
    repos: str = '',
    sandbox: str = 'local',
    shell: str = 'shell',
    workdir: str = '/testbed',
    setup: str = '',
    test_command: str = f'{_PYTEST} --junitxml={{report}} {{files}}',
    test_commands: Mapping[str, str] | None = None,
    protect: Sequence[str] = submission.PROTECTED,
    episode_seconds: float = 1800.0,
    setup_seconds: float = 600.0,
    test_seconds: float = 600.0,
    tree_mb: int = 512,
  ):
    self.check(repos=repos, sandbox=sandbox, shell=shell)
    self._repos, self._make = repos, backend(sandbox)
    self._shell = shells.make(shell)
    self._workdir, self._setup = workdir, setup
    self._test_command = test_command
    self._test_commands = dict(test_commands or {})
    self._protect, self._most = tuple(protect), tree_mb * MIB
    self._episode_seconds, self._setup_seconds = episode_seconds, setup_seconds
    self._test_seconds = test_seconds
    self._task: swe_tasks.Instance | None = None
    self._sandboxes: list[Sandbox] = []  # that are not stopped yet

  @staticmethod
  def check(
    *, repos: str = '', sandbox: str = 'local', shell: str = 'shell', **others: Any
  ) -> None:
    """Raises ConfigError for what cannot work."""
    del others  # their types tell
    if not os.path.isdir(os.path.expanduser(repos)) or not repos:
      raise ConfigError(f'swe: option repos={repos!r} has to name a folder of clones')
    if shutil.which('git') is None:
      raise ConfigError("swe: git is not on this machine's PATH: install it")
    backend(sandbox)
    shells.make(shell)

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str | None, dict[str, Any]]:
    self.kill()
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError('swe needs a dataset: rows as SWE-bench Verified has them')
    self._task = instance = swe_tasks.read_instance(task.item)
    with places.scratch() as scratch:
      tree = scratch / 'tree'
      tree.mkdir()
      clone = repository.find(self._repos, instance.repo)
      repository.export(clone, instance.base_commit, tree)
      repository.begin(tree)
      sandbox = self._open(tree)
    self._shell.start(sandbox, self._episode_seconds)
    return f'{instance.problem_statement}\n\n{shells.HELP}', {}

  def _open(self, tree: Path, fault: type[Exception] = SandboxError) -> Sandbox:
    """A sandbox with a copy of the tree, set up. Raises `fault` where that fails."""
    assert self._task is not None
    sandbox = self._make(
      folders={self._workdir: str(tree)},
      workdir=self._workdir,
      task=self._task.instance_id,
      environment={},
    )
    self._sandboxes.append(sandbox)
    sandbox.start()
    if self._setup:
      result = sandbox.exec(['sh', '-c', self._setup], seconds=self._setup_seconds)
      if result.code:
        raise fault(f'setup ended with {result.code}: {result.text[-500:]}')
    return sandbox

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    return shells.step(self._shell, action, self._grade, self.kill)

  def _grade(self) -> tuple[float, dict[str, Any]]:
    instance = self._task
    assert instance is not None
    with places.scratch() as scratch:
      tree = scratch / 'tree'
      try:
        patched = self._collect(scratch, tree)
        passed, late = self._run_tests(tree, instance.files or patched)
      except submission.SubmissionError:
        passed, late = {}, False
    failed = [test for test in instance.tests if not passed.get(test)]
    shares = {
      'fail_to_pass': _share(instance.fail_to_pass, failed),
      'pass_to_pass': _share(instance.pass_to_pass, failed),
      'passed': _share(instance.tests, failed),
      'test_timeout': float(late),
    }
    columns = {'failed': '\n'.join(failed)}
    return float(not failed), {'metrics': shares, 'columns': columns}

  def _collect(self, scratch: Path, tree: Path) -> tuple[str, ...]:
    """Makes the tree to test: the agent's, but for the tests and what steers them.

    Returns the files that the test patch changes.
    """
    instance = self._task
    assert instance is not None
    archive = self._archive()
    pristine = scratch / 'pristine'
    pristine.mkdir()
    tree.mkdir()
    clone = repository.find(self._repos, instance.repo)
    repository.export(clone, instance.base_commit, pristine)
    tests = repository.apply(instance.test_patch, pristine)
    guarded = submission.guard(self._protect, tests | set(instance.files))
    submission.unpack(archive, tree, guarded, self._most)
    submission.restore(pristine, tree, guarded)
    return tuple(sorted(path for path in tests if (pristine / path).exists()))

  def _archive(self) -> bytes:
    """All files that the agent leaves, as a tar archive."""
    script = 'chmod -R u+rwX . 2>/dev/null; exec tar -cf - --exclude=./.git .'
    result = self._sandboxes[0].exec(
      ['sh', '-c', script], seconds=self._setup_seconds, output=self._most
    )
    self._sandboxes.pop(0).stop()
    if result.limit:
      raise submission.SubmissionError(f'the tree is too large: {result.limit}')
    if result.code == 127:
      raise SandboxError(f'swe needs tar in the sandbox: {result.text[-200:]}')
    return result.stdout

  def _run_tests(
    self, tree: Path, files: Sequence[str]
  ) -> tuple[dict[str, bool], bool]:
    """Which tests passed, and whether their time ran out."""
    instance = self._task
    assert instance is not None
    # It went well before the agent began.
    sandbox = self._open(tree, submission.SubmissionError)
    report = f'.report-{secrets.token_hex(8)}.xml'
    command = self._test_commands.get(instance.repo, self._test_command)
    reported = '{report}' in command
    for name, words in (
      ('files', files),
      ('modules', [_module(file) for file in files]),
      ('tests', instance.tests),
      ('report', (report,)),
    ):
      command = command.replace(f'{{{name}}}', shlex.join(words))
    _need(sandbox, command)
    # By stdin, for ids may be more than the 131072 bytes that one argument may have.
    argv = ['env', 'PYTHONDONTWRITEBYTECODE=1', 'sh', '-c', 'eval "$(cat)"']
    script, seconds = command.encode(), self._test_seconds
    result = sandbox.exec(argv, stdin=script, seconds=seconds)
    late = result.limit == 'time'
    if not reported:
      return outcomes.from_log(result.text), late
    written = sandbox.exec(['cat', '--', report], output=16 * MIB)
    if written.limit:
      return {}, late
    return outcomes.from_report(written.stdout, instance.tests), late

  def kill(self) -> None:
    """Ends what runs and removes what lies there; from any thread."""
    while self._sandboxes:
      self._sandboxes.pop().stop()

  close = kill


def _need(sandbox: Sandbox, command: str) -> None:
  """SandboxError where the program that runs the tests is not there at all."""
  words = (word for word in shlex.split(command) if '=' not in word)
  program = next(words, '')
  if '/' in program:  # of the repository, where the agent may have removed it
    return
  if sandbox.exec(['sh', '-c', 'command -v "$0"', program]).code:
    raise SandboxError(
      f'the sandbox has no {program!r} to run the tests with: name a folder that has '
      "it in its bin by sandbox='local(readonly=(…))', or take another image"
    )


def _module(file: str) -> str:
  """tests/a/test_b.py as a.test_b, which is what Django's runner takes."""
  return file.removeprefix('tests/').removesuffix('.py').replace('/', '.')


def _share(tests: Sequence[str], failed: Sequence[str]) -> float:
  """The share of tests that did not fail; 1 of none."""
  return 1 - len(set(tests) & set(failed)) / max(len(set(tests)), 1)
