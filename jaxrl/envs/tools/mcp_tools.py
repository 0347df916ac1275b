"""McpTools offers the tools of MCP servers, which are started here and use stdio.

See https://modelcontextprotocol.io; this uses its official Python client. One thread
serves all servers of a process. A server runs as the user does, in no sandbox; it
inherits no environment variables except PATH, HOME and the like.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import shlex
import shutil
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl.envs.tools.tool_api import ToolArguments, ToolError, ToolSchema
from jaxrl.options import require_package

# Makes the kernel kill the server when its starter dies for whatever reason.
DEATH_SIGNAL_WRAPPER = (
  'import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); '
  'os.getppid() == int(sys.argv[1]) or sys.exit(1); '
  'os.execvp(sys.argv[2], sys.argv[2:])'
)
STDERR_TAIL_BYTES = 2000  # bytes kept from the end of a server's stderr
# The client gives a server 2 seconds to end, and 2 more before SIGKILL.
SERVER_CLOSE_TIMEOUT_S = 8.0


class McpStartError(RuntimeError):
  """Reports that a server did not start."""


class McpTools:
  """Offers the tools of the server that `command` starts.

  Args:
    command: The command that starts the server.
    timeout: Seconds that a call may take.
    start_timeout: Seconds that starting the server may take.
    per: Who has its own server: each 'episode', each 'environment', or the whole
      'process'.
    env: Environment variables of the server.
    cwd: The folder that the server starts in.
    only: Names of the tools that the model may use; empty means all.

  Raises:
    ValueError: If the client is not installed or the command does not exist.
  """

  def __init__(
    self,
    *,
    command: str = '',
    timeout: float = 10.0,
    start_timeout: float = 30.0,
    per: Literal['episode', 'environment', 'process'] = 'environment',
    env: Mapping[str, str] | None = None,
    cwd: str = '',
    only: tuple[str, ...] = (),
  ):
    require_package('mcp', "the tool 'mcp'", 'tools')
    words = shlex.split(command)
    if not words:
      raise ValueError("option 'command' must name the server's program")
    if shutil.which(words[0], path=(env or {}).get('PATH')) is None:
      raise ValueError(f'there is no command {words[0]!r}')
    self._command = words
    self._env = dict(env or {})
    self._cwd = cwd
    self._timeout = timeout
    self._start_timeout = start_timeout
    self._per = per
    self._only = tuple(only)
    self._server: McpServer | None = None

  def start(self) -> list[ToolSchema]:
    """Starts the server if needed and returns the tools' schemas."""
    if self._per == 'episode':
      self.close()
    if self._server is None or not self._server.alive:
      self.close()
      key = (tuple(self._command), tuple(sorted(self._env.items())), self._cwd)
      make = _shared_server if self._per == 'process' else McpServer
      self._server = make(*key, self._start_timeout)
    tools = self._server.tools
    names = [tool['function']['name'] for tool in tools]
    if missing := [name for name in self._only if name not in names]:
      raise ValueError(
        f'mcp server {self._command[0]!r} has no tool {missing[0]!r}; there are '
        f'{", ".join(names)}'
      )
    return [
      tool
      for tool, name in zip(tools, names, strict=True)
      if not self._only or name in self._only
    ]

  def call(self, name: str, arguments: ToolArguments, *, seconds: float) -> str:
    """Calls a tool of the server."""
    server = self._server
    if server is None:
      raise ToolError('failed', 'the server of this tool has ended')
    return server.call(name, arguments, min(seconds, self._timeout))

  def close(self) -> None:
    """Ends the server, unless the whole process shares it."""
    server, self._server = self._server, None
    if server is not None and self._per != 'process':
      server.close()


class McpServer:
  """A server process and its connection; it ends with `close` or this process.

  Args:
    words: The command.
    env: Environment variables as pairs.
    cwd: The folder to start in.
    seconds: The time limit of starting.

  Attributes:
    tools: The schemas of the server's tools.

  Raises:
    McpStartError: If the server does not start.
  """

  def __init__(
    self,
    words: Sequence[str],
    env: Sequence[tuple[str, str]],
    cwd: str,
    seconds: float,
  ):
    self._connection = connection = McpConnection(words, dict(env), cwd)
    asyncio.run_coroutine_threadsafe(connection.serve(), _loop())
    self.close = weakref.finalize(self, _stop_connection, connection)
    self.close.atexit = False  # the kernel kills the server then
    try:
      self.tools = connection.ready.result(seconds)
    except Exception as error:
      self.close()
      timed_out = isinstance(error, TimeoutError)
      reason = (
        f'no answer within {seconds:g} s' if timed_out else f'{type(error).__name__}'
      )
      raise McpStartError(
        f'the MCP server {" ".join(words)!r} did not start: {reason}; {error} '
        f'{connection.stderr_tail()}'.rstrip()
      ) from error

  @property
  def alive(self) -> bool:
    """Returns whether the server can still be called."""
    return self.close.alive and not self._connection.broken

  def call(self, name: str, arguments: ToolArguments, seconds: float) -> str:
    """Calls a tool.

    Args:
      name: The name of the tool.
      arguments: The arguments by name.
      seconds: The time limit.

    Returns:
      The result as text.

    Raises:
      ToolError: If there is no result.
    """
    pending_call = self._connection.call(name, arguments, seconds)
    future = asyncio.run_coroutine_threadsafe(pending_call, _loop())
    try:
      return future.result(seconds + SERVER_CLOSE_TIMEOUT_S)
    except (TimeoutError, concurrent.futures.CancelledError) as error:
      future.cancel()
      raise ToolError('timeout', f'{name} gave no answer in {seconds:g} s') from error


class McpConnection:
  """The connection to a server, used only within the thread that serves all of them.

  Args:
    words: The command.
    env: Environment variables.
    cwd: The folder to start in.

  Attributes:
    ready: Resolves to the tools' schemas.
    broken: Whether the connection has ended.
  """

  def __init__(self, words: Sequence[str], env: dict[str, str], cwd: str):
    self._command = list(words)
    self._env = env
    self._cwd = cwd
    self.ready: concurrent.futures.Future[list[ToolSchema]] = (
      concurrent.futures.Future()
    )
    self.broken = False
    self._stopped = False
    self._scope: Any = None
    self._client: Any = None
    self._tail = b''

  async def serve(self) -> None:
    """Starts the server and keeps it running until `stop`."""
    import anyio
    from mcp import Client, StdioServerParameters, stdio_client

    words = self._command
    if sys.platform == 'linux':
      words = [
        sys.executable,
        '-I',
        '-S',
        '-c',
        DEATH_SIGNAL_WRAPPER,
        str(os.getpid()),
        *words,
      ]
    parameters = StdioServerParameters(
      command=words[0], args=words[1:], env=self._env, cwd=self._cwd or None
    )
    stderr_read, stderr_write = os.pipe()
    loop = asyncio.get_running_loop()
    os.set_blocking(stderr_read, False)
    loop.add_reader(stderr_read, self._read_stderr, stderr_read)
    try:
      with open(stderr_write, 'w') as errors, anyio.CancelScope() as self._scope:
        if self._stopped:
          return
        async with Client(stdio_client(parameters, errlog=errors)) as client:
          errors.close()
          self._client = client
          self.ready.set_result(await self._list_tools(client))
          await anyio.sleep_forever()
    except Exception as error:
      self._read_stderr(stderr_read)  # its last output may not have been read yet
      if not self.ready.done():
        self.ready.set_exception(_first_error(error))
    finally:
      self.broken = True
      self._client = None
      loop.remove_reader(stderr_read)
      os.close(stderr_read)

  def stop(self) -> None:
    """Ends the server: it is asked to end, then terminated, then killed."""
    self._stopped = True
    if self._scope is not None:
      self._scope.cancel()

  async def _list_tools(self, client: Any) -> list[ToolSchema]:
    schemas: list[ToolSchema] = []
    cursor = None
    while True:
      page = await client.list_tools(cursor=cursor)
      for tool in page.tools:
        description = tool.description or tool.title or ''
        function = {
          'name': tool.name,
          'description': description,
          'parameters': tool.input_schema,
        }
        schemas.append({'type': 'function', 'function': function})
      cursor = page.next_cursor
      if not cursor:
        return schemas

  async def call(self, name: str, arguments: ToolArguments, seconds: float) -> str:
    """Calls a tool.

    Args:
      name: The name of the tool.
      arguments: The arguments by name.
      seconds: The time limit.

    Returns:
      The result as text.

    Raises:
      ToolError: If the tool or the server failed.
      TimeoutError: If it took too long.
    """
    from mcp import MCPError

    if self._client is None:
      raise ToolError('failed', 'the server of this tool has ended')
    try:
      async with asyncio.timeout(seconds):
        result = await self._client.call_tool(name, arguments)
    except MCPError as error:
      self.broken = self.broken or 'closed' in str(error).lower()
      raise ToolError('failed', f'{name} failed: {error}') from error
    except TimeoutError:
      raise
    except Exception as error:
      self.broken = True
      message = f'{name} failed: {type(error).__name__}'
      raise ToolError('failed', message) from error
    text = '\n'.join(
      getattr(part, 'text', None) or f'({part.type})' for part in result.content
    )
    if result.is_error:
      raise ToolError('failed', text or f'{name} failed')
    return text

  def _read_stderr(self, stderr_read: int) -> None:
    with contextlib.suppress(BlockingIOError):
      chunk = os.read(stderr_read, 1 << 16)
      self._tail = (self._tail + chunk)[-STDERR_TAIL_BYTES:]
      if not chunk:
        asyncio.get_running_loop().remove_reader(stderr_read)

  def stderr_tail(self) -> str:
    """Returns the end of what the server wrote to stderr.

    Returns:
      The text.
    """
    return self._tail.decode('utf-8', 'replace').strip()


def _first_error(error: BaseException) -> BaseException:
  """Returns the first of a group of errors, from which the others follow."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return error


def _stop_connection(connection: McpConnection) -> None:
  _loop().call_soon_threadsafe(connection.stop)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, name='mcp', daemon=True).start()
  return loop


_SHARED: dict[Any, McpServer] = {}
_LOCK = threading.Lock()


def _shared_server(
  words: Sequence[str], env: Sequence[tuple[str, str]], cwd: str, seconds: float
) -> McpServer:
  """Returns this process's only server for a command, or a new one if it has ended."""
  key = (words, env, cwd)
  with _LOCK:
    server = _SHARED.get(key)
    if server is None or not server.alive:
      if server is not None:
        server.close()
      server = _SHARED[key] = McpServer(words, env, cwd, seconds)
    return server
