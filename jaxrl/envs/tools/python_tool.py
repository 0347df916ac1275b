"""PythonTool gives the model a Python interpreter in the sandbox."""

import json
import secrets
from pathlib import Path

from jaxrl.envs.sandbox.interactive_process import (
  InteractiveProcess,
  InteractiveProcessEnded,
  InteractiveSandbox,
)
from jaxrl.envs.sandbox.local_sandbox import PYTHON_PATH
from jaxrl.envs.sandbox.sandbox_api import MIB, SandboxError, SandboxLimits
from jaxrl.envs.tools import python_repl
from jaxrl.envs.tools.tool_api import (
  ToolArguments,
  ToolError,
  ToolSchema,
  check_arguments,
  tool_schema,
)

_DESCRIPTION = (
  'Runs Python and returns what it prints, and the value of its last expression. '
  'There is no network.'
)
_KEEPS_STATE = ' Variables and files in /tmp last from call to call.'
_FRESH_STATE = ' Every call starts anew: no variables or files are kept.'


class PythonTool:
  """Runs `code` as an interactive session does, isolated from this machine.

  Args:
    timeout: Wall-clock and CPU seconds of a call.
    keep: Whether variables, and files in /tmp, last until the episode ends or a call
      exceeds a limit.
    memory_mb: The memory of everything that it starts.
    processes: The number of processes that it may start.
    output_mb: The maximum output, of which the model sees `tool_use`'s max_chars.
    session: CPU seconds of an interpreter that is kept.
    unsafe: Also run where the kernel allows no sandbox, as the code environment does.
    name: The name of the tool.
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
    self._timeout = timeout
    self._keep = keep
    self._session = session
    self._max_output_bytes = output_mb * MIB
    limits = SandboxLimits(
      memory=memory_mb * MIB, processes=processes + 1, output=self._max_output_bytes
    )
    self._sandbox = InteractiveSandbox(limits=limits, unsafe=unsafe)
    self._process: InteractiveProcess | None = None
    self._started = False
    description = _DESCRIPTION + (_KEEPS_STATE if keep else _FRESH_STATE)
    code = {'code': {'type': 'string', 'description': 'the program'}}
    self._schema = tool_schema(name, description, code, ['code'])
    source = Path(python_repl.__file__).read_text()
    self._command = [PYTHON_PATH, '-I', '-c', source]

  def start(self) -> list[ToolSchema]:
    """Starts the sandbox if needed and returns the schema.

    Raises:
      SandboxError: If there is no sandbox and `unsafe` is not set.
    """
    self._end_process()
    if not self._started:
      self._sandbox.start()
      self._started = True
    return [self._schema]

  def call(self, name: str, arguments: ToolArguments, *, seconds: float) -> str:
    """Runs the code."""
    check_arguments(self._schema, arguments)
    limit = min(seconds, self._timeout)
    end_mark = secrets.token_hex(16)  # the code cannot know it, so cannot fake it
    request = json.dumps({'code': arguments['code'], 'mark': end_mark}).encode() + b'\n'
    try:
      if self._keep and self._process is None:
        self._process = self._sandbox.start_process(
          self._command, seconds=self._session
        )
      process = self._process or self._sandbox.start_process(
        self._command, seconds=limit
      )
      try:
        output = process.ask(
          request,
          end_mark=end_mark.encode(),
          seconds=limit,
          max_bytes=self._max_output_bytes,
        )
      finally:
        if not self._keep:
          process.close()
    except InteractiveProcessEnded as end:
      self._process = None
      raise self._limit_error(end, limit) from end
    except SandboxError as error:
      self._process = None
      raise ToolError('failed', f'the sandbox failed: {error}') from error
    return output.decode('utf-8', 'replace').rstrip() or '(it printed nothing)'

  def _limit_error(self, end: InteractiveProcessEnded, limit: float) -> ToolError:
    """Returns the error of a call that exceeded a limit, with what it printed."""
    reason = {
      'time': f'it was stopped after {limit:g} s',
      'memory': 'it took too much memory and was stopped',
      'output': 'it printed too much and was stopped',
      '': 'the interpreter ended',
    }[end.limit]
    lost = '; all variables are lost' if self._keep else ''
    output = end.output.decode('utf-8', 'replace').rstrip()
    head = f'{output}\n' if output else ''
    return ToolError(
      'timeout' if end.limit == 'time' else 'failed', f'{head}[{reason}{lost}]'
    )

  def _end_process(self) -> None:
    process, self._process = self._process, None
    if process is not None:
      process.close()

  def close(self) -> None:
    """Ends the interpreter and the sandbox."""
    self._started = False
    self._sandbox.stop()  # ends a call under way, too
    self._end_process()
