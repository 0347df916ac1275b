"""OpenEnvEnv plays an environment of OpenEnv, which a server offers over a WebSocket.

See https://github.com/meta-pytorch/OpenEnv. The package itself is not needed here: only
the server needs it, which may have any pins.
"""

import asyncio
import contextlib
import functools
import json
import math
import os
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from jaxrl.envs import reply_parsing
from jaxrl.envs.adapters.openenv_server import OpenEnvServer, split_command
from jaxrl.envs.env_registry import Info, ResetOptions
from jaxrl.options import JsonObject, OptionValues, require_package

MAX_MESSAGE_BYTES = 16 << 20  # of what a server sends
_SCALARS = ('string', 'integer', 'number', 'boolean')
_END_TIMEOUT_S = 2.0  # within which a server ends that refuses connections
_servers: dict[str, OpenEnvServer] = {}  # those that a process shares
_servers_lock = threading.Lock()
T = TypeVar('T')


class OpenEnvError(RuntimeError):
  """Reports what a server of OpenEnv answered, or that it is gone."""


class OpenEnvEnv:
  """Plays one environment, with a session of its own for each episode.

  The server's reset gets the episode's seed. An action has the form that the server's
  schema asks for: if that has one required field with a plain value, it is the reply's
  answer (what `<answer>` tags hold, or its last line); otherwise that is read as a JSON
  object. The reward is the server's.

  Args:
    url: The server, as http:// or ws://; instead of `command`.
    command: Starts a server on this machine, such as 'python -m my_env.server --port
      {port}', without a shell.
    per: Whether each 'environment' has its own server, or the whole 'process' shares
      one, whose max_concurrent_envs must be as large as the number of environments.
    action_field: The field of the action that takes the answer; '' means that the
      schema decides.
    observation_field: The field of the observation that the model sees; '' means its
      only text, or else the whole of it as JSON.
    arguments: What else the server's reset gets.
    key_variable: The environment variable with the server's key, sent as a bearer
      token; '' means none.
    timeout: Seconds that a call may take.
    start_timeout: Seconds that starting the server may take.
    invalid_reward: The reward of a reply that is not an action; it costs its turn.
    max_chars: The maximum number of characters of an answer.

  Raises:
    ValueError: If an option is wrong.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    url: str = '',
    command: str = '',
    per: Literal['environment', 'process'] = 'environment',
    action_field: str = '',
    observation_field: str = '',
    arguments: OptionValues | None = None,
    key_variable: str = '',
    timeout: float = 60.0,
    start_timeout: float = 60.0,
    invalid_reward: float = 0.0,
    max_chars: int = 20_000,
  ):
    require_package('aiohttp', "the environment 'openenv'", 'serve')
    if bool(url) == bool(command):
      raise ValueError("set either url='http://…' or command='… --port {port}'")
    if url and urlsplit(url).scheme not in ('http', 'https', 'ws', 'wss'):
      raise ValueError(f'url={url!r}: must begin with http:// or ws://')
    if timeout <= 0 or start_timeout <= 0:
      raise ValueError('timeout and start_timeout must be positive')
    if key_variable and not os.environ.get(key_variable):
      raise ValueError(f'key_variable: ${key_variable} is not set')
    self._parts = split_command(command) if command else []
    self._url = url.rstrip('/')
    self._per = per
    self._action_field = action_field
    self._observation_field = observation_field
    self._arguments = dict(arguments or {})
    self._key_variable = key_variable
    self._timeout = timeout
    self._start_timeout = start_timeout
    self._invalid_reward = invalid_reward
    self._max_chars = max_chars
    self._server: OpenEnvServer | None = None
    self._session: _Session | None = None
    self._action_type = ''  # of the field that takes the answer
    self._num_invalid = 0
    self._score = 0.0

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str, Info]:
    """Opens a new session and resets its environment."""
    self._end_session()
    self._num_invalid, self._score = 0, 0.0
    key = os.environ.get(self._key_variable, '') if self._key_variable else ''
    session = self._session = self._open_session(key)
    if not self._action_type:
      self._read_schema(session.schema())
    result = session.call('reset', {**self._arguments, 'seed': seed})
    return self._observe(result), {}

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Sends the reply's answer as an action."""
    if self._session is None:
      raise RuntimeError('call reset before step')
    payload, problem = self._read_action(action)
    if problem:
      self._num_invalid += 1
      return problem, self._invalid_reward, False, False, self._info(False)
    result = self._session.call('step', payload)
    reward = result.get('reward')
    number = 0.0 if reward is None else float(reward)
    if not math.isfinite(number):
      raise OpenEnvError(f'the server sent the reward {number}')
    self._score += number
    done = result.get('done') is True
    observation = self._observe(result)
    if done:
      self._end_session()
    return observation, number, done, False, self._info(done)

  def kill(self) -> None:
    """Ends the session, and the server if it is this environment's own."""
    self._end_session()
    server, self._server = self._server, None
    if server is not None and self._per == 'environment':
      server.kill()

  close = kill

  def _end_session(self) -> None:
    session, self._session = self._session, None
    if session is not None:
      session.close()

  def _open_session(self, key: str) -> '_Session':
    """Opens a session; a server of our own that has just crashed is started again."""
    session = _Session(self._find_server(), key, self._timeout)
    try:
      session.open()
    except OpenEnvError:
      session.close()
      if self._server is None or not self._server.has_ended(_END_TIMEOUT_S):
        raise
      session = _Session(self._find_server(), key, self._timeout)
      session.open()
    return session

  def _find_server(self) -> str:
    """Returns the URL of the server, which is started if it does not run."""
    if self._url:
      return self._url
    if self._per == 'process':
      key = json.dumps(self._parts)
      with _servers_lock:
        server = _servers.get(key)
        if server is None or not server.alive:
          server = _servers[key] = OpenEnvServer(self._parts, self._start_timeout)
    else:
      server = self._server
      if server is None or not server.alive:
        server = OpenEnvServer(self._parts, self._start_timeout)
    self._server = server
    return server.url

  def _read_schema(self, schema: Mapping[str, object]) -> None:
    """Decides what an action is. Raises OpenEnvError if there is no `action_field`."""
    fields = schema.get('properties')
    fields = fields if isinstance(fields, Mapping) else {}
    if self._action_field:
      if fields and self._action_field not in fields:
        names = ', '.join(map(str, fields))
        raise OpenEnvError(
          f"option 'action_field': actions have no {self._action_field!r}, but {names}"
        )
      self._action_type = _type_of(fields.get(self._action_field)) or 'string'
      return
    required = schema.get('required')
    required = required if isinstance(required, list) else []
    if len(required) == 1 and (kind := _type_of(fields.get(required[0]))):
      self._action_field, self._action_type = str(required[0]), kind
    else:
      self._action_type = 'object'

  def _read_action(self, reply: str) -> tuple[JsonObject, str]:
    """Returns the action of a reply, or what is wrong with it."""
    text = reply_parsing.tagged_answer(reply)
    if len(text) > self._max_chars:
      return {}, f'An answer has at most {self._max_chars} characters.'
    if self._action_type == 'string':
      return {self._action_field: text}, ''
    try:
      value = json.loads(text)
    except (ValueError, RecursionError):
      value = None
    kind = _type_of({'type': _json_type(value)}) or _json_type(value)
    if kind == 'integer' and self._action_type == 'number':
      kind = 'number'
    if kind != self._action_type:
      what = 'a JSON object' if self._action_type == 'object' else self._action_type
      return {}, f'The answer must be {what}.'
    if isinstance(value, dict):
      return value, ''
    return {self._action_field: value}, ''

  def _observe(self, result: Mapping[str, object]) -> str:
    """Returns the text of an observation. Raises OpenEnvError if it has none."""
    observation = result.get('observation')
    if not isinstance(observation, Mapping):
      raise OpenEnvError("the server's answer has no observation")
    fields = {k: v for k, v in observation.items() if k != 'metadata'}
    name = self._observation_field
    if name and name not in fields:
      raise OpenEnvError(
        f"option 'observation_field': the observation has no {name!r}, but "
        f'{", ".join(map(str, fields))}'
      )
    texts = [value for value in fields.values() if isinstance(value, str)]
    value = fields[name] if name else fields
    if not name and len(texts) == len(fields) == 1:
      value = texts[0]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

  def _info(self, done: bool) -> Info:
    success = float(done and self._score >= 1)
    metrics = {'score': self._score, 'success': success, 'accuracy': success}
    return {'metrics': {**metrics, 'invalid_actions': float(self._num_invalid)}}


def _type_of(field: object) -> str:
  """Returns the plain type of a field's schema, '' for any other."""
  kind = field.get('type') if isinstance(field, Mapping) else None
  return kind if kind in _SCALARS else ''


def _json_type(value: object) -> str:
  if isinstance(value, bool):
    return 'boolean'
  kinds = {int: 'integer', float: 'number', str: 'string', dict: 'object'}
  return kinds.get(type(value), 'nothing')


class _Session:
  """A WebSocket to the server; its methods block, and `close` may come any time.

  Args:
    url: The server's URL.
    key: The bearer token; '' means none.
    timeout: Seconds that a call may take.
  """

  def __init__(self, url: str, key: str, timeout: float):
    parts = urlsplit(url)
    secure = parts.scheme in ('https', 'wss')
    place = f'{parts.netloc}{parts.path.rstrip("/")}'
    self._http = f'http{"s" * secure}://{place}'
    self._socket_url = f'ws{"s" * secure}://{place}/ws'
    self._headers = {'Authorization': f'Bearer {key}'} if key else {}
    self._timeout = timeout
    self._client: Any = None
    self._socket: Any = None

  def open(self) -> None:
    """Connects. Raises OpenEnvError."""
    _run(self._within(self._open()))

  def schema(self) -> Mapping[str, Any]:
    """Returns the schema of actions, {} if the server tells none."""
    return _run(self._within(self._schema()))

  def call(self, kind: str, data: Mapping[str, object]) -> Mapping[str, Any]:
    """Sends a message and returns what the answer holds. Raises OpenEnvError."""
    return _run(self._within(self._call(kind, data)))

  def close(self) -> None:
    """Closes the connection without waiting for the server."""
    asyncio.run_coroutine_threadsafe(self._close(), _loop())

  async def _within(self, pending: Coroutine[Any, Any, T]) -> T:
    import aiohttp

    try:
      async with asyncio.timeout(self._timeout):
        return await pending
    except TimeoutError as error:
      raise OpenEnvError(
        f'the server did not answer within timeout={self._timeout:g} seconds'
      ) from error
    except (aiohttp.ClientError, OSError) as error:
      raise OpenEnvError(f'the server at {self._http}: {error}') from error

  async def _open(self) -> None:
    import aiohttp

    # What it starts itself it reaches without a proxy.
    self._client = aiohttp.ClientSession(headers=self._headers, trust_env=False)
    self._socket = await self._client.ws_connect(
      self._socket_url, max_msg_size=MAX_MESSAGE_BYTES
    )

  async def _schema(self) -> Mapping[str, Any]:
    async with self._client.get(f'{self._http}/schema') as response:
      if response.status != 200:
        return {}
      text = await response.content.read(MAX_MESSAGE_BYTES)
    schema = _read_object(text).get('action')
    return schema if isinstance(schema, Mapping) else {}

  async def _call(self, kind: str, data: Mapping[str, object]) -> Mapping[str, Any]:
    import aiohttp

    await self._socket.send_str(json.dumps({'type': kind, 'data': dict(data)}))
    message = await self._socket.receive()
    if message.type != aiohttp.WSMsgType.TEXT:
      reason = f'{message.type.name.lower()} {message.data or ""} {message.extra or ""}'
      raise OpenEnvError(f'{kind}: the connection ended: {reason.strip()[:200]}')
    answer = _read_object(message.data)
    result = answer.get('data')
    if not isinstance(result, Mapping):
      raise OpenEnvError(f"{kind}: the server's answer has no data")
    if answer.get('type') == 'error':
      code, text = result.get('code', ''), result.get('message', '')
      hint = ''
      if code == 'CAPACITY_REACHED':
        hint = " (raise the server's max_concurrent_envs, or set per='environment')"
      detail = f' {json.dumps(result["errors"])}' if 'errors' in result else ''
      raise OpenEnvError(f'{kind}: {code}: {text}{detail}'[:500] + hint)
    return result

  async def _close(self) -> None:
    with contextlib.suppress(Exception):
      if self._socket is not None:
        async with asyncio.timeout(self._timeout):
          await self._socket.close()
    if self._client is not None:
      await self._client.close()


def _read_object(text: str | bytes) -> JsonObject:
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise OpenEnvError(f"the server's answer is no JSON: {error}") from error
  if not isinstance(value, dict):
    raise OpenEnvError("the server's answer is no JSON object")
  return value


def _run(pending: Coroutine[Any, Any, T]) -> T:
  return asyncio.run_coroutine_threadsafe(pending, _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
  """Returns the loop of a thread of its own, which answers pings at any time."""
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, name='openenv', daemon=True).start()
  return loop
