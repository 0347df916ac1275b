"""ShellSession runs the shell commands of an agent's replies in a sandbox."""

import json
import re
from collections.abc import Callable, Mapping

from jaxrl.component_table import Component, ComponentTable
from jaxrl.envs.env_registry import Info
from jaxrl.envs.reply_parsing import last_code_block
from jaxrl.envs.sandbox.sandbox_api import ExecResult, Sandbox

SUBMIT_REPLY = '```\nsubmit\n```'
SHELL_HELP = (
  'Write one shell command, or several lines of them, in a ``` block; each block runs '
  'in a new shell. When you are done, write a block that holds only: submit'
)
_CALL = re.compile(r'<tool_call>(.*?)</tool_call>', re.DOTALL)


class ShellSession:
  """Runs the commands that the replies of an episode ask for.

  Args:
    turns: The number of replies after which the episode is graded as it stands; give
      the environment's tag the same `max_steps`.
    seconds: The time limit of one command.
    output: The maximum number of characters shown of a command's output, from its
      beginning and end.
    program: The shell.

  Raises:
    ValueError: If an option is out of range.
  """

  def __init__(
    self,
    *,
    turns: int = 30,
    seconds: float = 30.0,
    output: int = 8000,
    program: str = 'bash',
  ):
    if turns < 1 or seconds <= 0 or output < 2:
      raise ValueError(
        f'turns={turns}, seconds={seconds}, output={output}: give at least one '
        'turn, some time and two characters'
      )
    self._turns = turns
    self._seconds = seconds
    self._max_chars = output
    self._program = program
    self._sandbox: Sandbox | None = None
    self._seconds_left = 0.0

  def start(self, sandbox: Sandbox, seconds: float) -> None:
    """Starts a new episode.

    Args:
      sandbox: A started sandbox.
      seconds: The time limit of all commands of the episode together.
    """
    self._sandbox = sandbox
    self._seconds_left = seconds
    self._num_replies = self._num_commands = self._num_invalid = 0
    self._submitted = False

  def go_on(self, seconds: float) -> None:
    """Goes on with another part of the episode, whose commands have their own time.

    Args:
      seconds: The time limit of all its commands together.
    """
    self._seconds_left, self._submitted = seconds, False

  @property
  def may_act(self) -> bool:
    """Returns whether the episode has turns left."""
    return self._num_replies < self._turns

  def act(self, reply: str) -> tuple[str, bool]:
    """Does what a reply says.

    Args:
      reply: The model's text.

    Returns:
      What the agent sees, and whether the episode is over.
    """
    if self._sandbox is None:
      raise RuntimeError('call reset before step')
    self._num_replies += 1
    command = extract_command(reply)
    if command.strip() == 'submit':
      self._submitted = True
      return '', True
    if command.strip():
      observation = self._run(command)
    else:
      self._num_invalid += 1
      observation = f'There is no command in this. {SHELL_HELP}'
    return observation, self._num_replies >= self._turns or self._seconds_left <= 0

  def _run(self, command: str) -> str:
    assert self._sandbox is not None
    self._num_commands += 1
    seconds = min(self._seconds, self._seconds_left)
    if '\0' in command:
      return 'A command holds no zero bytes.'
    argv = [self._program, '-c', command]
    if len(command) > 100_000:  # the kernel takes 131072 bytes of one argument
      return 'The command is too long; write files piece by piece.'
    result = self._sandbox.exec(argv, seconds=seconds)
    self._seconds_left -= result.seconds
    return format_result(result, self._max_chars, seconds)

  @property
  def metrics(self) -> dict[str, float]:
    """Returns counts of commands and invalid replies, and if the agent submitted."""
    return {
      'commands': float(self._num_commands),
      'invalid_actions': float(self._num_invalid),
      'submitted': float(self._submitted),
    }


SHELLS = ComponentTable('shell', 'env.<tag>.env_config.shell', {'shell': ShellSession})


def make_shell_session(call: Component) -> ShellSession:
  """Builds the shell session that the option `shell` describes.

  Args:
    call: A call of `shell`, with the options of `ShellSession`.

  Returns:
    The session.

  Raises:
    ValueError: If there is no such option, or it is out of range.
  """
  return SHELLS.build(call)


def extract_command(reply: str) -> str:
  """Returns the command in a reply.

  It is the last tool call with a `command`, `<tool_call>{"name": …, "arguments":
  {"command": …}}</tool_call>`; a call of the tool `submit` is that word. Without a tool
  call it is the last closed ``` block.

  Args:
    reply: The model's text.

  Returns:
    The command, or '' if there is none.
  """
  for text in reversed(_CALL.findall(reply)):
    try:
      call = json.loads(text)
      if call['name'] == 'submit':
        return 'submit'
      return str(call['arguments']['command'])
    except (ValueError, RecursionError, KeyError, TypeError):
      continue
  return last_code_block(reply)


def format_result(result: ExecResult, max_chars: int, seconds: float) -> str:
  """Formats the result of a command for the agent.

  Args:
    result: The result.
    max_chars: The maximum number of characters of the output.
    seconds: The time limit that the command had.

  Returns:
    The text.
  """
  return f'{describe_exit(result, seconds)}\n{truncate_middle(result.text, max_chars)}'


def describe_exit(result: ExecResult, seconds: float) -> str:
  """Describes in one line how a command ended.

  Args:
    result: The result.
    seconds: The time limit that the command had.

  Returns:
    The exit code, or the limit that ended it.
  """
  reasons: Mapping[str, str] = {
    'time': f'killed: it took more than {seconds:.0f} seconds',
    'memory': 'killed: it took too much memory',
    'output': 'killed: it wrote too much',
  }
  return reasons.get(result.limit, f'exit code {result.code}')


def truncate_middle(text: str, max_chars: int) -> str:
  """Shortens a text to its first and last characters.

  Args:
    text: The text.
    max_chars: The maximum number of characters.

  Returns:
    The text, with a note in place of what was left out.
  """
  if len(text) <= max_chars:
    return text
  head = max_chars // 2
  tail = max_chars - head
  left_out = len(text) - max_chars
  return f'{text[:head]}\n[{left_out} characters left out]\n{text[-tail:]}'


def shell_env_step(
  shell: ShellSession,
  action: str,
  grade: Callable[[], tuple[float, Info]],
  end: Callable[[], None],
  go_on: Callable[[], str] = str,
) -> tuple[str, float, bool, bool, Info]:
  """Implements an environment's step: runs a command, or grades when the agent is done.

  Args:
    shell: The session.
    action: The model's reply.
    grade: Returns the reward, and a mapping with `metrics` and `columns`.
    end: Called after the last grading, whatever happens.
    go_on: Called after grading, if there may be another part to do: begins it and
      returns what the agent sees; '' if there is none. A part that begins when the
      agent has no turns left is graded as it stands.

  Returns:
    A tuple (observation, reward, terminated, truncated, info).
  """
  observation, done = shell.act(action)
  if not done:
    return observation, 0.0, False, False, {'metrics': shell.metrics}
  is_over = True
  try:
    reward, outcome = grade()
    while observation := go_on():
      if shell.may_act:
        is_over = False
        return observation, 0.0, False, False, {'metrics': shell.metrics}
      reward, outcome = grade()
  finally:
    if is_over:
      end()
  solved = float(reward >= 1)
  metrics = {**shell.metrics, 'accuracy': solved, 'correct': solved}
  metrics |= dict(outcome['metrics'])
  return '', reward, True, False, {'metrics': metrics, 'columns': outcome['columns']}
