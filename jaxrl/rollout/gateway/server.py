"""The endpoint over HTTP: OpenAI's paths before a Gateway, and /feedback.

Every request needs a key, `Authorization: Bearer KEY`. The session is what the header
`x-session-id` says; or what follows the key and a slash, `KEY/NAME`, for agents that
can be given nothing but a key; or else the key's own. Keys do not see each other's.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from aiohttp import web

from jaxrl.rollout.gateway import requests
from jaxrl.rollout.gateway.choice import Answer, Choice, pieces
from jaxrl.rollout.gateway.errors import ApiError, wrong
from jaxrl.rollout.gateway.gateway import Gateway
from jaxrl.rollout.gateway.replies import Replies
from jaxrl.rollout.gateway.seen import Seen

log = logging.getLogger(__name__)
_SESSION = web.RequestKey('session', str)
_NAME = re.compile(r'[\w.:/@-]{1,128}', re.ASCII)
LOOPBACK = ('127.0.0.1', '::1', 'localhost')
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
  """Answers requests.

  keys: those that are let in; or a function that is given what a client has for a key
  and returns its session's name, None where it is to be refused. max_body: bytes.
  max_requests: at once; the others are told to come again. body_timeout: seconds to
  send a body in. interval: seconds between a stream's pieces.
  """

  def __init__(
    self,
    gateway: Gateway,
    keys: Sequence[str] | Callable[[str], str | None],
    *,
    max_body: int = 4 << 20,
    max_requests: int = 256,
    body_timeout: float = 30.0,
    interval: float = 0.02,
  ):
    self._gateway, self._find = gateway, keys if callable(keys) else None
    self._keys = [] if callable(keys) else [key.encode() for key in keys]
    if self._find is None and not (self._keys and all(self._keys)):
      raise ValueError('the endpoint needs a key, and none may be empty')
    self._max_requests, self._busy = max_requests, 0
    self._body_timeout, self._interval = body_timeout, interval
    self._created = int(time.time())
    self.app = web.Application(client_max_size=max_body, middlewares=[self._door])
    self.app.add_routes(
      [
        web.post('/v1/chat/completions', self._chat),
        web.post('/v1/completions', self._completion),
        web.get('/v1/models', self._models),
        web.get('/v1/models/{name}', self._model),
        web.post('/feedback', self._feedback),
        web.post('/v1/feedback', self._feedback),
      ]
    )

  # ---- the door

  @web.middleware
  async def _door(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Lets those in who have a key, not too many at once; errors leave as JSON."""
    headers = {}
    try:
      request[_SESSION] = self._session(request)
      if self._busy >= self._max_requests:
        raise ApiError(429, f'{self._busy} requests are being served; ask again later')
      self._busy += 1
      try:
        return await handler(request)
      finally:
        self._busy -= 1
    except ApiError as error:
      told = error
    except web.HTTPException as error:
      told = ApiError(error.status, error.reason or error.text or 'refused')
      headers = {'Allow': error.headers['Allow']} if 'Allow' in error.headers else {}
    except Exception:
      log.exception('a request failed')
      told = ApiError(500, 'the endpoint failed; its log says how')
    if told.status == 429:
      headers['Retry-After'] = '1'
    return web.json_response(told.body, status=told.status, headers=headers)

  def _session(self, request: web.Request) -> str:
    """The session's name, the key's number first. Raises ApiError without a key."""
    scheme, _, given = request.headers.get('Authorization', '').partition(' ')
    if self._find is not None and scheme.lower() == 'bearer':
      if name := self._find(given.strip()):
        return name
      raise ApiError(401, 'this key opens no session', code='invalid_api_key')
    said = given.strip().encode('utf-8', 'surrogateescape')
    found, own = None, ''
    for i, key in enumerate(self._keys):  # all of them: the time tells nothing
      if hmac.compare_digest(said, key):
        found = i
      elif hmac.compare_digest(said[: len(key) + 1], key + b'/'):
        found, own = i, said[len(key) + 1 :].decode('ascii', 'replace')
    if found is None or scheme.lower() != 'bearer':
      raise ApiError(
        401, 'a key is needed: Authorization: Bearer KEY', code='invalid_api_key'
      )
    name = request.headers.get('x-session-id', own)
    if name and not _NAME.fullmatch(name):
      raise ApiError(
        400,
        "a session's name is at most 128 letters, digits and ._:/@-",
        param='x-session-id',
      )
    return f'{found}/{name}'

  async def _data(self, request: web.Request) -> bytes:
    try:
      return await asyncio.wait_for(request.read(), self._body_timeout)
    except TimeoutError as error:
      raise ApiError(408, f'no body within {self._body_timeout:g} s') from error

  async def _body(self, request: web.Request) -> dict:
    return requests.parse(await self._data(request))

  # ---- what it serves

  async def _chat(self, request: web.Request) -> web.StreamResponse:
    data = await self._data(request)
    seen = self._gateway.seen(request[_SESSION])
    return await self._reply(request, requests.read_chat(data, seen), seen)

  async def _completion(self, request: web.Request) -> web.StreamResponse:
    return await self._reply(request, requests.completion(await self._body(request)))

  async def _reply(
    self, request: web.Request, ask: requests.Ask, seen: Seen | None = None
  ) -> web.StreamResponse:
    choices = await self._gateway.begin(request[_SESSION], ask, seen)
    replies = Replies(ask, self._gateway.text, self._gateway.model, int(time.time()))
    if ask.stream:
      return await self._stream(request, ask, choices, replies)
    found = {}
    async with contextlib.aclosing(pieces(choices, None)) as work:
      async for index, piece in work:
        if isinstance(piece, Answer):
          found[index] = piece
    return web.json_response(replies.whole([found[i] for i in range(ask.n)]))

  async def _stream(
    self,
    request: web.Request,
    ask: requests.Ask,
    choices: list[Choice],
    replies: Replies,
  ) -> web.StreamResponse:
    """Server-sent events; an error after the first of them is one of them."""
    response = web.StreamResponse()
    response.content_type = 'text/event-stream'
    response.headers['Cache-Control'] = 'no-cache'
    await response.prepare(request)

    async def send(chunk: dict | None) -> None:
      if chunk is not None:
        await response.write(b'data: ' + json.dumps(chunk).encode() + b'\n\n')

    found = {}
    try:
      for i, choice in enumerate(choices):
        await send(replies.first(choice.name, i))
      async with contextlib.aclosing(pieces(choices, self._interval)) as work:
        async for index, piece in work:
          if isinstance(piece, Answer):
            found[index] = piece
            await send(replies.last(piece, index))
          else:
            await send(replies.piece(choices[index].name, index, piece))
      if ask.usage:
        await send(replies.count([found[i] for i in range(ask.n)]))
      await response.write(b'data: [DONE]\n\n')
    except ApiError as error:
      await send(error.body)
    except ConnectionError:
      log.info('a client left in the middle of a stream')
      return response
    await response.write_eof()
    return response

  async def _models(self, request: web.Request) -> web.Response:
    return web.json_response({'object': 'list', 'data': [self._card()]})

  async def _model(self, request: web.Request) -> web.Response:
    if request.match_info['name'] != self._gateway.model:
      raise ApiError(404, f'there is one model, {self._gateway.model!r}', param='model')
    return web.json_response(self._card())

  def _card(self) -> dict:
    return {
      'id': self._gateway.model,
      'object': 'model',
      'created': self._created,
      'owned_by': 'jaxrl',
    }

  async def _feedback(self, request: web.Request) -> web.Response:
    """{'reward': number, 'completion_id': of one reply, 'done': true by default}."""
    body = await self._body(request)
    if strange := body.keys() - {'reward', 'completion_id', 'done'}:
      raise wrong(sorted(strange)[0], 'not known; reward, completion_id and done are')
    reward, name = body.get('reward'), body.get('completion_id') or ''
    done = body.get('done', True)
    if reward is not None and not requests.number(reward, float, -1e30, 1e30):
      raise wrong('reward', 'a number is needed')
    if not isinstance(name, str) or not isinstance(done, bool):
      raise wrong('completion_id', 'a text is needed, and for done true or false')
    rows = await self._gateway.feedback(request[_SESSION], reward, name, done=done)
    return web.json_response({'done': done, 'trajectories': len(rows)})


@contextlib.asynccontextmanager
async def serving(
  server: Server, *, host: str = '127.0.0.1', port: int = 0
) -> AsyncIterator[str]:
  """Serves while the context lasts; gives the base URL, without /v1.

  host: this machine alone unless told. port: 0 is any that is free.
  """
  # A client that leaves takes its request along.
  runner = web.AppRunner(
    server.app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0
  )
  await runner.setup()
  try:
    await web.TCPSite(runner, host, port).start()
    bound = runner.addresses[0][1]
    yield f'http://{f"[{host}]" if ":" in host else host}:{bound}'
  finally:
    await runner.cleanup()
