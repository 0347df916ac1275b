"""SweEnv: an agent repairs a repository, and hidden tests judge the result.

Tasks are rows of SWE-bench Verified (`swe_tasks`); repositories are clones on this
machine. The agent sees the files of the base commit as a repository with one commit, so
that neither the tests nor later history are there. Grading takes place in a second
sandbox, which the agent never saw.
"""

import ast
import contextlib
import os
import secrets
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from jaxrl.component_table import Component
from jaxrl.envs.env_registry import Info, ResetOptions
from jaxrl.envs.sandbox import workdirs
from jaxrl.envs.sandbox.sandbox_api import MIB, ExecResult, Sandbox, SandboxError
from jaxrl.envs.sandbox.sandbox_backends import sandbox_factory
from jaxrl.envs.terminal import (
  git_repository,
  shell_session,
  submission,
  swe_tasks,
  test_results,
)

PYTEST_COMMAND = (
  'pytest -q --rootdir=. -p no:cacheprovider -o junit_family=xunit1 '
  '--junitxml={report} {files}'
)


class SweEnv:
  """Plays one task at a time; the reward is 1 if all its tests pass, else 0.

  Args:
    repos: The folder of clones, each `owner/name` or `owner__name`, bare or not.
    sandbox: `local(…)`, `docker(…)` or `podman(…)`; see `sandbox_backends`. `{task}` in
      an image is the instance's id.
    shell: The options of the shell; see `shell_session.ShellSession`.
    workdir: Where the repository lies in the sandbox.
    setup: A command run there before the agent and again before the tests, such as an
      installation.
    test_command: The command that runs tests. `{files}` stands for the tests' files
      (those of the test patch if the ids name none), `{modules}` for the same as Django
      modules, `{tests}` for the ids, `{report}` for the JUnit XML file to write;
      without it the output is parsed by `test_results.parse_test_log`. The text
      of a dict, "{'owner/name': 'COMMAND', '': 'COMMAND'}", gives a command by `repo`,
      with '' for all others.
    protect: Names of files whose changes do not count.
    episode_seconds: The time limit of the agent's commands together.
    setup_seconds: The time limit of the setup.
    test_seconds: The time limit of the tests.
    tree_mb: The maximum size of what the agent may leave.

  Raises:
    ValueError: If an option cannot work.
  """

  columns: ClassVar = {'failed': 'string', 'test_output': 'string'}
  empty_reply: ClassVar = shell_session.SUBMIT_REPLY

  def __init__(
    self,
    *,
    repos: str = '',
    sandbox: Component = 'local',
    shell: Component = 'shell',
    workdir: str = '/testbed',
    setup: str = '',
    test_command: str = PYTEST_COMMAND,
    protect: Sequence[str] = submission.PROTECTED_FILES,
    episode_seconds: float = 1800.0,
    setup_seconds: float = 600.0,
    test_seconds: float = 600.0,
    tree_mb: int = 512,
  ):
    self.check(repos=repos, sandbox=sandbox, shell=shell)
    self._repos = repos
    self._make_sandbox = sandbox_factory(sandbox)
    self._shell = shell_session.make_shell_session(shell)
    self._workdir = workdir
    self._setup = setup
    self._test_commands = _commands_by_repo(test_command)
    self._protect = tuple(protect)
    self._max_tree_bytes = tree_mb * MIB
    self._episode_seconds = episode_seconds
    self._setup_seconds = setup_seconds
    self._test_seconds = test_seconds
    self._task: swe_tasks.SweTask | None = None
    self._sandboxes: list[Sandbox] = []  # those that have not been stopped yet

  @staticmethod
  def check(
    *,
    repos: str = '',
    sandbox: Component = 'local',
    shell: Component = 'shell',
    **other_options: object,
  ) -> None:
    """Checks the options.

    Raises:
      ValueError: If an option cannot work.
    """
    del other_options  # their types are checked already
    if not os.path.isdir(os.path.expanduser(repos)) or not repos:
      raise ValueError(f'option repos={repos!r} must name a folder of clones')
    if shutil.which('git') is None:
      raise ValueError("git is not on this machine's PATH: install it")
    sandbox_factory(sandbox)
    shell_session.make_shell_session(shell)

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str | None, Info]:
    """Prepares the task's repository in a new sandbox."""
    self.kill()
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError(
        'swe needs a data set of tasks in the format of SWE-bench Verified: '
        'set dataset.path'
      )
    self._task = instance = swe_tasks.read_swe_task(task.item)
    with workdirs.scratch_workdir() as scratch:
      tree = scratch / 'tree'
      tree.mkdir()
      clone = git_repository.find_clone(self._repos, instance.repo)
      git_repository.export_commit(clone, instance.base_commit, tree)
      git_repository.init_repository(tree)
      sandbox = self._open(tree)
    self._shell.start(sandbox, self._episode_seconds)
    return f'{instance.problem_statement}\n\n{shell_session.SHELL_HELP}', {}

  def _open(self, tree: Path, error_type: type[Exception] = SandboxError) -> Sandbox:
    """Returns a started sandbox with a copy of the tree; raises `fault` on failure."""
    assert self._task is not None
    sandbox = self._make_sandbox(
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
        raise error_type(f'setup ended with {result.code}: {result.text[-500:]}')
    return sandbox

  def apply_solution(self) -> str | None:
    """Applies the row's `patch`; returns the reply that submits it.

    The repository is patched on this machine, as the sandbox may have no git.

    Raises:
      ValueError: If the patch does not apply.
    """
    instance = self._task
    assert instance is not None, 'call reset before apply_solution'
    if not instance.patch.strip():
      return None
    with workdirs.scratch_workdir() as scratch:
      tree = scratch / 'tree'
      tree.mkdir()
      clone = git_repository.find_clone(self._repos, instance.repo)
      git_repository.export_commit(clone, instance.base_commit, tree)
      git_repository.apply_patch(instance.patch, tree)
      git_repository.init_repository(tree)
      self._sandboxes[0].put(self._workdir, str(tree))
    return shell_session.SUBMIT_REPLY

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Runs the reply's command, or grades the repository when the agent is done."""
    return shell_session.shell_env_step(self._shell, action, self._grade, self.kill)

  def _grade(self) -> tuple[float, Info]:
    instance = self._task
    assert instance is not None
    with workdirs.scratch_workdir() as scratch:
      tree = scratch / 'tree'
      try:
        patched = self._collect(scratch, tree)
        passed, result = self._run_tests(tree, instance.files or patched)
        timed_out = result.limit == 'time'
        output = test_results.describe_run(result, self._test_seconds)
      except submission.SubmissionError as error:
        passed, timed_out, output = {}, False, str(error)
    failed = [test for test in instance.tests if not passed.get(test)]
    shares = {
      'fail_to_pass': _share(instance.fail_to_pass, failed),
      'pass_to_pass': _share(instance.pass_to_pass, failed),
      'passed': _share(instance.tests, failed),
      'test_timeout': float(timed_out),
    }
    columns = {'failed': '\n'.join(failed), 'test_output': output}
    return float(not failed), {'metrics': shares, 'columns': columns}

  def _collect(self, scratch: Path, tree: Path) -> tuple[str, ...]:
    """Builds the tree to test: the agent's, except the tests and what controls them.

    Returns the files that the test patch changes.
    """
    instance = self._task
    assert instance is not None
    archive = self._archive()
    pristine = scratch / 'pristine'
    pristine.mkdir()
    tree.mkdir()
    clone = git_repository.find_clone(self._repos, instance.repo)
    git_repository.export_commit(clone, instance.base_commit, pristine)
    tests = git_repository.apply_patch(instance.test_patch, pristine)
    is_protected = submission.protected_path_filter(
      self._protect, tests | set(instance.files)
    )
    submission.unpack_submission(archive, tree, is_protected, self._max_tree_bytes)
    submission.restore_protected(pristine, tree, is_protected)
    return tuple(sorted(path for path in tests if (pristine / path).exists()))

  def _archive(self) -> bytes:
    """Returns all files that the agent left, as a tar archive."""
    script = 'chmod -R u+rwX . 2>/dev/null; exec tar -cf - --exclude=./.git .'
    result = self._sandboxes[0].exec(
      ['sh', '-c', script], seconds=self._setup_seconds, output=self._max_tree_bytes
    )
    self._sandboxes.pop(0).stop()
    if result.limit:
      raise submission.SubmissionError(f'the tree is too large: {result.limit}')
    if result.code == 127:
      raise SandboxError(f'swe needs tar in the sandbox: {result.text[-200:]}')
    return result.stdout

  def _run_tests(
    self, tree: Path, files: Sequence[str]
  ) -> tuple[dict[str, bool], ExecResult]:
    """Returns which tests passed, and the result of the command that ran them."""
    instance = self._task
    assert instance is not None
    # The setup worked before the agent began, so a failure now is the agent's fault.
    sandbox = self._open(tree, submission.SubmissionError)
    report = f'.report-{secrets.token_hex(8)}.xml'
    command = self._test_commands.get(instance.repo, self._test_commands[''])
    writes_report = '{report}' in command
    for name, words in (
      ('files', files),
      ('modules', [_django_module(file) for file in files]),
      ('tests', instance.tests),
      ('report', (report,)),
    ):
      command = command.replace(f'{{{name}}}', shlex.join(words))
    _require_program(sandbox, command)
    # By stdin, because ids may exceed the 131072 bytes that one argument may have.
    argv = ['env', 'PYTHONDONTWRITEBYTECODE=1', 'sh', '-c', 'eval "$(cat)"']
    script, seconds = command.encode(), self._test_seconds
    result = sandbox.exec(argv, stdin=script, seconds=seconds)
    if not writes_report:
      return test_results.parse_test_log(result.text), result
    report_result = sandbox.exec(['cat', '--', report], output=16 * MIB)
    if report_result.limit:
      return {}, result
    passed = test_results.parse_junit_report(report_result.stdout, instance.tests)
    return passed, result

  def kill(self) -> None:
    """Ends everything that runs and removes its files, from any thread."""
    while self._sandboxes:
      self._sandboxes.pop().stop()

  close = kill


def _require_program(sandbox: Sandbox, command: str) -> None:
  """Raises SandboxError if the program that runs the tests does not exist."""
  words = (word for word in shlex.split(command) if '=' not in word)
  program = next(words, '')
  if '/' in program:
    # It belongs to the repository, where the agent may have removed it.
    return
  if sandbox.exec(['sh', '-c', 'command -v "$0"', program]).code:
    raise SandboxError(
      f'the sandbox has no {program!r} to run the tests with: name a folder that has '
      "it in its bin by sandbox='local(readonly=(…))', or use another image"
    )


def _django_module(file: str) -> str:
  """Returns tests/a/test_b.py as a.test_b, the form of Django's test runner."""
  return file.removeprefix('tests/').removesuffix('.py').replace('/', '.')


def _share(tests: Sequence[str], failed: Sequence[str]) -> float:
  """Returns the share of tests that did not fail; 1 if there are none."""
  return 1 - len(set(tests) & set(failed)) / max(len(set(tests)), 1)


def _commands_by_repo(text: str) -> dict[str, str]:
  """Returns test commands by repository; '' stands for all that are not named."""
  commands = {'': text}
  if text.lstrip().startswith('{'):
    # A command of the shell may begin with a brace too.
    with contextlib.suppress(SyntaxError, ValueError):
      commands = ast.literal_eval(text.strip())
  if not isinstance(commands, dict) or not all(
    isinstance(part, str) for item in commands.items() for part in item
  ):
    raise ValueError(
      f"test_command={text}: write one command, or {{'owner/name': 'COMMAND', …}}"
    )
  return {'': PYTEST_COMMAND} | commands
