"""Tools of MCP servers, which are started here and spoken with over stdio.

https://modelcontextprotocol.io, by its official Python client. All servers of a process
are served by one thread. A server runs as the user does, in no sandbox; it inherits no
environment variable but PATH, HOME and the like.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib.util
import os
import shlex
import shutil
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl.envs.tools.base import Schema, ToolError
from jaxrl.signature import ConfigError

# Has the kernel kill the server when whoever started it dies, however it does.
LEASH = (
  'import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); '
  'os.getppid() == int(sys.argv[1]) or sys.exit(1); '
  'os.execvp(sys.argv[2], sys.argv[2:])'
)
TAIL = 2000  # bytes of what a server says on stderr that are kept
CLOSING = 8.0  # seconds; the client gives a server 2 to end, and 2 more before SIGKILL


class McpError(RuntimeError):
  """A server did not start."""


class Mcp:
  """The tools of the server that `command` starts.

  timeout: seconds of a call. start_timeout: of starting the server. per: who has a
  server of its own: each 'episode', each 'environment', or the whole 'process'. env:
  variables it gets. cwd: the folder it starts in. only: names of the tools that the
  model is told of; all, when empty.
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
    if importlib.util.find_spec('mcp') is None:
      raise ConfigError("the tool 'mcp' needs its client: pip install 'jaxrl[tools]'")
    words = shlex.split(command)
    if not words:
      raise ConfigError("tool 'mcp': option 'command' has to say what starts it")
    if shutil.which(words[0], path=(env or {}).get('PATH')) is None:
      raise ConfigError(f"tool 'mcp': there is no command {words[0]!r}")
    self._words, self._env, self._cwd = words, dict(env or {}), cwd
    self._timeout, self._start_timeout, self._per = timeout, start_timeout, per
    self._only = tuple(only)
    self._server: Server | None = None

  def start(self) -> list[Schema]:
    if self._per == 'episode':
      self.close()
    if self._server is None or not self._server.alive:
      self.close()
      key = (tuple(self._words), tuple(sorted(self._env.items())), self._cwd)
      make = _shared if self._per == 'process' else Server
      self._server = make(*key, self._start_timeout)
    tools = self._server.tools
    names = [tool['function']['name'] for tool in tools]
    if missing := [name for name in self._only if name not in names]:
      raise ConfigError(
        f'mcp server {self._words[0]!r} has no tool {missing[0]!r}; there are '
        f'{", ".join(names)}'
      )
    return [
      tool
      for tool, name in zip(tools, names, strict=True)
      if not self._only or name in self._only
    ]

  def call(self, name: str, arguments: dict[str, Any], *, seconds: float) -> str:
    server = self._server
    if server is None:
      raise ToolError('failed', 'the server of this tool has ended')
    return server.call(name, arguments, min(seconds, self._timeout))

  def close(self) -> None:
    server, self._server = self._server, None
    if server is not None and self._per != 'process':
      server.close()


class Server:
  """A server process, and the connection to it; it is started at once.

  seconds: the most that may take. It ends with `close`, and with this process.
  Raises McpError.
  """

  def __init__(
    self,
    words: Sequence[str],
    env: Sequence[tuple[str, str]],
    cwd: str,
    seconds: float,
  ):
    self._link = link = Link(words, dict(env), cwd)
    asyncio.run_coroutine_threadsafe(link.serve(), _loop())
    self.close = weakref.finalize(self, _let_go, link)
    self.close.atexit = False  # the leash does it
    try:
      self.tools = link.ready.result(seconds)
    except Exception as error:
      self.close()
      late = isinstance(error, TimeoutError)
      why = f'no answer within {seconds:g} s' if late else f'{type(error).__name__}'
      raise McpError(
        f'the MCP server {" ".join(words)!r} did not start: {why}; {error} '
        f'{link.said()}'.rstrip()
      ) from error

  @property
  def alive(self) -> bool:
    return self.close.alive and not self._link.broken

  def call(self, name: str, arguments: dict[str, Any], seconds: float) -> str:
    """A tool's result as text. Raises ToolError."""
    ask = self._link.call(name, arguments, seconds)
    future = asyncio.run_coroutine_threadsafe(ask, _loop())
    try:
      return future.result(seconds + CLOSING)
    except (TimeoutError, concurrent.futures.CancelledError) as error:
      future.cancel()
      raise ToolError('timeout', f'{name} gave no answer in {seconds:g} s') from error


class Link:
  """The connection, within the thread that serves all of them."""

  def __init__(self, words: Sequence[str], env: dict[str, str], cwd: str):
    self._words, self._env, self._cwd = list(words), env, cwd
    self.ready: concurrent.futures.Future[list[Schema]] = concurrent.futures.Future()
    self.broken = False
    self._stopped = False
    self._scope: Any = None
    self._client: Any = None
    self._tail = b''

  async def serve(self) -> None:
    """Starts the server and holds it until `stop`."""
    import anyio
    from mcp import Client, StdioServerParameters, stdio_client

    words = self._words
    if sys.platform == 'linux':
      words = [sys.executable, '-I', '-S', '-c', LEASH, str(os.getpid()), *words]
    start = StdioServerParameters(
      command=words[0], args=words[1:], env=self._env, cwd=self._cwd or None
    )
    heard, say = os.pipe()
    loop = asyncio.get_running_loop()
    os.set_blocking(heard, False)
    loop.add_reader(heard, self._listen, heard)
    try:
      with open(say, 'w') as errors, anyio.CancelScope() as self._scope:
        if self._stopped:
          return
        async with Client(stdio_client(start, errlog=errors)) as client:
          errors.close()
          self._client = client
          self.ready.set_result(await self._list(client))
          await anyio.sleep_forever()
    except Exception as error:
      self._listen(heard)  # its last words, which may not have been read yet
      if not self.ready.done():
        self.ready.set_exception(_first(error))
    finally:
      self.broken, self._client = True, None
      loop.remove_reader(heard)
      os.close(heard)

  def stop(self) -> None:
    """Has the server end: it is asked to, then told to, then killed."""
    self._stopped = True
    if self._scope is not None:
      self._scope.cancel()

  async def _list(self, client: Any) -> list[Schema]:
    found: list[Schema] = []
    cursor = None
    while True:
      page = await client.list_tools(cursor=cursor)
      for tool in page.tools:
        about = tool.description or tool.title or ''
        own = {'name': tool.name, 'description': about, 'parameters': tool.input_schema}
        found.append({'type': 'function', 'function': own})
      cursor = page.next_cursor
      if not cursor:
        return found

  async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> str:
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
      told = f'{name} failed: {type(error).__name__}'
      raise ToolError('failed', told) from error
    text = '\n'.join(
      getattr(part, 'text', None) or f'({part.type})' for part in result.content
    )
    if result.is_error:
      raise ToolError('failed', text or f'{name} failed')
    return text

  def _listen(self, heard: int) -> None:
    with contextlib.suppress(BlockingIOError):
      piece = os.read(heard, 1 << 16)
      self._tail = (self._tail + piece)[-TAIL:]
      if not piece:
        asyncio.get_running_loop().remove_reader(heard)

  def said(self) -> str:
    """The end of what the server said on stderr."""
    return self._tail.decode('utf-8', 'replace').strip()


def _first(error: BaseException) -> BaseException:
  """The first of a group of errors: the others follow from it."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return error


def _let_go(link: Link) -> None:
  _loop().call_soon_threadsafe(link.stop)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, name='mcp', daemon=True).start()
  return loop


_SHARED: dict[Any, Server] = {}
_LOCK = threading.Lock()


def _shared(
  words: Sequence[str], env: Sequence[tuple[str, str]], cwd: str, seconds: float
) -> Server:
  """The one server of this process for a command; another if it has ended."""
  key = (words, env, cwd)
  with _LOCK:
    server = _SHARED.get(key)
    if server is None or not server.alive:
      if server is not None:
        server.close()
      server = _SHARED[key] = Server(words, env, cwd, seconds)
    return server
