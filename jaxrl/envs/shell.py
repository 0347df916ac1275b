"""The agent's side of an episode in a sandbox: commands, their output, their limits."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl import signature
from jaxrl.envs.code import last_block
from jaxrl.envs.sandbox.base import Result, Sandbox

HELP = (
  'Write one shell command, or several lines of them, in a ``` block; each block runs '
  'in a new shell. When you are done, write a block that holds only: submit'
)
_CALL = re.compile(r'<tool_call>(.*?)</tool_call>', re.DOTALL)


class Shell:
  """Runs what the replies of an episode ask for.

  turns: replies after which the episode is graded as it stands; give the environment's
  tag `max_steps` of as many. seconds: of one command. output: characters of what a
  command said that are shown, the first and the last of them. program: the shell.
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
      raise signature.ConfigError(
        f'shell: turns={turns}, seconds={seconds}, output={output}: give at least one '
        'turn, some time and two characters'
      )
    self._turns, self._seconds = turns, seconds
    self._output, self._program = output, program
    self._sandbox: Sandbox | None = None
    self._left = 0.0

  def start(self, sandbox: Sandbox, seconds: float) -> None:
    """A new episode, in a sandbox that is started; seconds: of all its commands."""
    self._sandbox, self._left = sandbox, seconds
    self._played = self._commands = self._invalid = 0
    self._submitted = False

  def act(self, reply: str) -> tuple[str, bool]:
    """Does what a reply says. What there is to see, and whether that was the last."""
    if self._sandbox is None:
      raise RuntimeError('call reset before step')
    self._played += 1
    command = command_of(reply)
    if command.strip() == 'submit':
      self._submitted = True
      return '', True
    if command.strip():
      shown = self._run(command)
    else:
      self._invalid += 1
      shown = f'There is no command in this. {HELP}'
    return shown, self._played >= self._turns or self._left <= 0

  def _run(self, command: str) -> str:
    assert self._sandbox is not None
    self._commands += 1
    seconds = min(self._seconds, self._left)
    if '\0' in command:
      return 'A command holds no zero bytes.'
    argv = [self._program, '-c', command]
    if len(command) > 100_000:  # the kernel takes 131072 bytes of one argument
      return 'The command is too long; write files piece by piece.'
    result = self._sandbox.exec(argv, seconds=seconds)
    self._left -= result.seconds
    return show(result, self._output, seconds)

  @property
  def metrics(self) -> dict[str, float]:
    return {
      'commands': float(self._commands),
      'invalid_actions': float(self._invalid),
      'submitted': float(self._submitted),
    }


def make(text: str) -> Shell:
  """What the call string of option `shell` names. ConfigError for a wrong one."""
  return signature.call(text, {'shell': Shell}, 'shell', 'env.<tag>.env_config.shell')


def command_of(reply: str) -> str:
  """The command in a reply; '' when there is none.

  The last tool call with a `command`, `<tool_call>{"name": …, "arguments":
  {"command": …}}</tool_call>`, one to the tool `submit` being that word; else the
  last closed ``` block.
  """
  for text in reversed(_CALL.findall(reply)):
    try:
      called = json.loads(text)
      if called['name'] == 'submit':
        return 'submit'
      return str(called['arguments']['command'])
    except (ValueError, RecursionError, KeyError, TypeError):
      continue
  return last_block(reply)


def show(result: Result, most: int, seconds: float) -> str:
  """What the agent sees of a command that has ended."""
  why: Mapping[str, str] = {
    'time': f'killed: it took more than {seconds:.0f} seconds',
    'memory': 'killed: it took too much memory',
    'output': 'killed: it wrote too much',
  }
  head = why.get(result.limit, f'exit code {result.code}')
  return f'{head}\n{shorten(result.text, most)}'


def shorten(text: str, most: int) -> str:
  """The first and last characters of a text that has more than `most` of them."""
  if len(text) <= most:
    return text
  head = most // 2
  tail = most - head
  left_out = len(text) - most
  return f'{text[:head]}\n[{left_out} characters left out]\n{text[-tail:]}'


def step(
  shell: Shell,
  action: str,
  grade: Callable[[], tuple[float, Mapping[str, Any]]],
  end: Callable[[], None],
) -> tuple[str, float, bool, bool, dict[str, Any]]:
  """An environment's step: a command, or the grading when the agent is done.

  grade: gives the reward, and `metrics` and `columns`. end: is called after it, come
  what may.
  """
  shown, over = shell.act(action)
  if not over:
    return shown, 0.0, False, False, {'metrics': shell.metrics}
  try:
    reward, told = grade()
  finally:
    end()
  solved = float(reward >= 1)
  metrics = {**shell.metrics, 'accuracy': solved, 'correct': solved}
  metrics |= dict(told['metrics'])
  return '', reward, True, False, {'metrics': metrics, 'columns': told['columns']}
