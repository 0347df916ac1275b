"""A Python interpreter for the model, in the sandbox."""

import json
import secrets
from pathlib import Path
from typing import Any

from jaxrl.envs.sandbox.base import MIB, Limits, SandboxError
from jaxrl.envs.sandbox.local import PYTHON
from jaxrl.envs.sandbox.talk import Talk, TalkEnded, TalkSandbox
from jaxrl.envs.tools import python_player
from jaxrl.envs.tools.base import Schema, ToolError, check, schema

_ABOUT = (
  'Runs Python and returns what it prints, and the value of its last expression. '
  'There is no network.'
)
_KEPT = ' Variables and files in /tmp last from call to call.'
_FRESH = ' Every call starts anew: no variables or files are kept.'


class Python:
  """Runs `code` as an interactive session does, apart from this machine.

  keep: variables, and files in /tmp, last until the episode ends, or until a call
  breaks a limit. timeout: wall clock and CPU seconds of a call. memory_mb, processes:
  of all that it starts. output_mb: what it may say, of which the model sees
  `tool_use`'s max_chars. session: CPU seconds of an interpreter that is kept.
  unsafe: run also where the kernel allows no sandbox, as code does. SandboxError
  without it.
  """

  def __init__(
    self,
    *,
    timeout: float = 5.0,
    keep: bool = False,
    memory_mb: int = 256,
    processes: int = 16,
    output_mb: int = 1,
    session: float = 600.0,
    unsafe: bool = False,
    name: str = 'python',
  ):
    self._timeout, self._keep, self._session = timeout, keep, session
    self._most = output_mb * MIB
    limits = Limits(memory=memory_mb * MIB, processes=processes + 1, output=self._most)
    self._sandbox = TalkSandbox(limits=limits, unsafe=unsafe)
    self._talk: Talk | None = None
    self._started = False
    about = _ABOUT + (_KEPT if keep else _FRESH)
    code = {'code': {'type': 'string', 'description': 'the program'}}
    self._schema = schema(name, about, code, ['code'])
    source = Path(python_player.__file__).read_text()
    self._command = [PYTHON, '-I', '-c', source]

  def start(self) -> list[Schema]:
    self._hang_up()
    if not self._started:
      self._sandbox.start()
      self._started = True
    return [self._schema]

  def call(self, name: str, arguments: dict[str, Any], *, seconds: float) -> str:
    check(self._schema, arguments)
    limit = min(seconds, self._timeout)
    mark = secrets.token_hex(16)  # the code cannot know it, and so not end early
    ask = json.dumps({'code': arguments['code'], 'mark': mark}).encode() + b'\n'
    try:
      if self._keep and self._talk is None:
        self._talk = self._sandbox.talk(self._command, seconds=self._session)
      talk = self._talk or self._sandbox.talk(self._command, seconds=limit)
      try:
        said = talk.ask(ask, mark=mark.encode(), seconds=limit, most=self._most)
      finally:
        if not self._keep:
          talk.close()
    except TalkEnded as end:
      self._talk = None
      raise self._fault(end, limit) from end
    except SandboxError as error:
      self._talk = None
      raise ToolError('failed', f'the sandbox failed: {error}') from error
    return said.decode('utf-8', 'replace').rstrip() or '(it printed nothing)'

  def _fault(self, end: TalkEnded, limit: float) -> ToolError:
    """What is told of a call that broke a limit: what it had printed, and why."""
    why = {
      'time': f'it was stopped after {limit:g} s',
      'memory': 'it took too much memory and was stopped',
      'output': 'it printed too much and was stopped',
      '': 'the interpreter ended',
    }[end.limit]
    lost = '; all variables are lost' if self._keep else ''
    said = end.said.decode('utf-8', 'replace').rstrip()
    head = f'{said}\n' if said else ''
    return ToolError(
      'timeout' if end.limit == 'time' else 'failed', f'{head}[{why}{lost}]'
    )

  def _hang_up(self) -> None:
    talk, self._talk = self._talk, None
    if talk is not None:
      talk.close()

  def close(self) -> None:
    self._started = False
    self._sandbox.stop()  # ends a call under way, too
    self._hang_up()
