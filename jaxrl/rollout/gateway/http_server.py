"""GatewayServer serves a gateway over HTTP: OpenAI's and Anthropic's paths, /feedback.

Every request needs a key, `Authorization: Bearer KEY` or `x-api-key: KEY`. The
session's name is the header `x-session-id`; or what follows the key and a slash,
`KEY/NAME`, for agents that accept nothing but a key; or else the key itself names it.
Sessions of different keys are separate.
"""

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from jaxrl.envs.env_registry import MAX_REWARD
from jaxrl.rollout.gateway import (
  anthropic_requests,
  openai_requests,
  responses_requests,
)
from jaxrl.rollout.gateway.anthropic_formatter import AnthropicFormatter
from jaxrl.rollout.gateway.app_server import BROKEN_BODY, serve_app
from jaxrl.rollout.gateway.choice_runner import (
  ChoiceResult,
  ChoiceRunner,
  stream_chunks,
)
from jaxrl.rollout.gateway.connection_limits import (
  ConnectionLimits,
  request_in_progress,
)
from jaxrl.rollout.gateway.formatter_base import FormatterBase
from jaxrl.rollout.gateway.gateway import Gateway
from jaxrl.rollout.gateway.generation_request import (
  ApiError,
  GenerationRequest,
  invalid_field,
)
from jaxrl.rollout.gateway.request_cache import RequestCache
from jaxrl.rollout.gateway.response_formatter import ResponseFormatter
from jaxrl.rollout.gateway.responses_formatter import ResponsesFormatter

log = logging.getLogger(__name__)
_VERSION = 'anthropic-version'
_SESSION = web.RequestKey('session', str)
_SESSION_NAME = re.compile(r'[\w.:/@-]{1,128}', re.ASCII)
DEFAULT_CONNECTION_LIMITS = ConnectionLimits()
_FORMATTERS = {
  'chat': ResponseFormatter,
  'completions': ResponseFormatter,
  'responses': ResponsesFormatter,
  'messages': AnthropicFormatter,
}
_Parser = Callable[[bytes, RequestCache | None], GenerationRequest]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayServer:
  """Answers HTTP requests with a gateway.

  Attributes:
    app: The aiohttp application.
    connections: The limits on connections.
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
    heartbeat: float = 10.0,
    connections: ConnectionLimits = DEFAULT_CONNECTION_LIMITS,
  ):
    """Creates a server; `serve_gateway` runs it.

    Args:
      gateway: Generates the replies.
      keys: The valid keys; or a function from a key to its session's name, None for a
        key that is not valid.
      max_body: Bytes a request may have.
      max_requests: Requests served at the same time; further ones are refused.
      body_timeout: Seconds a client may take to send the body.
      interval: Seconds between the chunks of a stream.
      heartbeat: Seconds without anything new after which a stream says that it goes on,
        if its API has an event for that.
      connections: The limits on connections.

    Raises:
      ValueError: If there is no key, or one is empty.
    """
    self._gateway = gateway
    self._find_session = keys if callable(keys) else None
    self._keys = [] if callable(keys) else [key.encode() for key in keys]
    if self._find_session is None and not (self._keys and all(self._keys)):
      raise ValueError('the endpoint needs a key, and none may be empty')
    self._max_requests = max_requests
    self._num_running = 0
    self._body_timeout = body_timeout
    self._interval = interval
    self._heartbeat = heartbeat
    self.connections = connections
    self._created = int(time.time())
    self.app = web.Application(
      client_max_size=max_body, middlewares=[self._auth_middleware]
    )
    self.app.add_routes(
      [
        web.post('/v1/chat/completions', self._handle_chat),
        web.post('/v1/completions', self._handle_completion),
        web.post('/v1/responses', self._handle_responses),
        web.post('/v1/messages', self._handle_messages),
        web.get('/v1/models', self._list_models),
        web.get('/v1/models/{name}', self._get_model),
        web.post('/feedback', self._handle_feedback),
        web.post('/v1/feedback', self._handle_feedback),
      ]
    )

  # ---- admission

  async def answer(self, request: web.Request) -> web.StreamResponse:
    """Answers a request that another application has received.

    Args:
      request: The request; its path is one of this server's.
    """
    match = await self.app.router.resolve(request)
    return await self._auth_middleware(request, match.handler)

  @web.middleware
  async def _auth_middleware(
    self, request: web.Request, handler: _Handler
  ) -> web.StreamResponse:
    """Admits requests that have a key, up to a limit."""
    with request_in_progress(request):
      return await self.admit(request, functools.partial(self._run, handler))

  async def _run(self, handler: _Handler, request: web.Request) -> web.StreamResponse:
    if self._num_running >= self._max_requests:
      count = self._num_running
      raise ApiError(429, f'{count} requests are being served; try again later')
    self._num_running += 1
    try:
      return await handler(request)
    finally:
      self._num_running -= 1

  async def admit(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answers a request that has a key; answers errors as the request's API does.

    Args:
      request: The request.
      handler: Answers it.
    """
    headers = {}
    try:
      request[_SESSION] = self._session_name(request)
      return await handler(request)
    except ApiError as error:
      api_error = error
    except web.RequestPayloadError:
      api_error = ApiError(400, BROKEN_BODY, code='invalid_json')
    except web.HTTPException as error:
      api_error = ApiError(error.status, error.reason or error.text or 'refused')
      headers = {'Allow': error.headers['Allow']} if 'Allow' in error.headers else {}
    except Exception:
      log.exception('a request failed')
      api_error = ApiError(500, 'the endpoint failed; its log says how')
    if api_error.status == 429:
      headers['Retry-After'] = '1'
    log.info(
      '%s %s: %d, %.200r',
      request.method,
      request.path,
      api_error.status,
      str(api_error),
    )
    is_anthropic = request.path == '/v1/messages' or _VERSION in request.headers
    body = anthropic_requests.error_body(api_error) if is_anthropic else api_error.body
    return web.json_response(body, status=api_error.status, headers=headers)

  def _session_name(self, request: web.Request) -> str:
    """Returns the session's name, after the key's number; needs a valid key."""
    scheme, _, value = request.headers.get('Authorization', '').partition(' ')
    if not scheme and 'x-api-key' in request.headers:
      scheme, value = 'bearer', request.headers['x-api-key']
    if self._find_session is not None and scheme.lower() == 'bearer':
      if name := self._find_session(value.strip()):
        return name
      raise ApiError(401, 'no session has this key', code='invalid_api_key')
    credential = value.strip().encode('utf-8', 'surrogateescape')
    key_number, name_in_key = None, ''
    # Compares with every key, so that the time says nothing about them.
    for i, key in enumerate(self._keys):
      if hmac.compare_digest(credential, key):
        key_number = i
      elif hmac.compare_digest(credential[: len(key) + 1], key + b'/'):
        key_number = i
        name_in_key = credential[len(key) + 1 :].decode('ascii', 'replace')
    if key_number is None or scheme.lower() != 'bearer':
      raise ApiError(
        401, 'a key is needed: Authorization: Bearer KEY', code='invalid_api_key'
      )
    name = request.headers.get('x-session-id', name_in_key)
    if name and not _SESSION_NAME.fullmatch(name):
      raise ApiError(
        400,
        "a session's name is at most 128 letters, digits and ._:/@-",
        param='x-session-id',
      )
    return f'{key_number}/{name}'

  async def read_body(self, request: web.Request) -> bytes:
    """Reads a request's body.

    Args:
      request: The request.

    Raises:
      ApiError: If it takes too long.
    """
    try:
      async with asyncio.timeout(self._body_timeout):
        return await request.read()
    except TimeoutError as error:
      raise ApiError(408, f'no body within {self._body_timeout:g} s') from error

  # ---- handlers

  async def _handle_chat(self, request: web.Request) -> web.StreamResponse:
    return await self._handle(request, openai_requests.parse_cached_chat)

  async def _handle_responses(self, request: web.Request) -> web.StreamResponse:
    def parse(data: bytes, cache: RequestCache | None) -> GenerationRequest:
      find = functools.partial(self._gateway.find_conversation, request[_SESSION])
      return responses_requests.parse_responses(data, cache, find)

    return await self._handle(request, parse)

  async def _handle_messages(self, request: web.Request) -> web.StreamResponse:
    anthropic_requests.check_version(request.headers.get(_VERSION))
    return await self._handle(request, anthropic_requests.parse_messages)

  async def _handle(self, request: web.Request, parse: _Parser) -> web.StreamResponse:
    """Answers a request whose conversation may have been sent before."""
    data = await self.read_body(request)
    if openai_requests.may_hold_images(data):  # they take long to decode
      generation = await self._gateway.run_on_tokenizer_thread(parse, data, None)
      return await self._respond(request, generation)
    cache = self._gateway.request_cache(request[_SESSION])
    return await self._respond(request, parse(data, cache), cache)

  async def _handle_completion(self, request: web.Request) -> web.StreamResponse:
    body = openai_requests.parse_body(await self.read_body(request))
    return await self._respond(request, openai_requests.parse_completion(body))

  async def _respond(
    self,
    request: web.Request,
    generation: GenerationRequest,
    cache: RequestCache | None = None,
  ) -> web.StreamResponse:
    choices = await self._gateway.start_choices(request[_SESSION], generation, cache)
    formatter = _FORMATTERS[generation.api](
      generation, self._gateway.decode, self._gateway.model, int(time.time())
    )
    if generation.stream:
      return await self._stream(request, choices, formatter)
    results = {}
    async with contextlib.aclosing(stream_chunks(choices, None)) as chunks:
      async for index, chunk in chunks:
        if isinstance(chunk, ChoiceResult):
          results[index] = chunk
    ordered = [results[i] for i in range(generation.n)]
    return web.json_response(formatter.full_response(ordered))

  async def _stream(
    self, request: web.Request, choices: list[ChoiceRunner], formatter: FormatterBase
  ) -> web.StreamResponse:
    """Sends server-sent events; an error after the first event is itself an event."""
    response = web.StreamResponse()
    response.content_type = 'text/event-stream'
    response.headers['Cache-Control'] = 'no-cache'
    await response.prepare(request)

    async def send(events: Sequence[dict]) -> None:
      for event in events:
        name = f'event: {event["type"]}\n' if formatter.names_events else ''
        await response.write(f'{name}data: {json.dumps(event)}\n\n'.encode())

    results, sent_at = {}, time.monotonic()
    try:
      await send(formatter.opening_events(choices))
      stream = stream_chunks(choices, self._interval)
      async with contextlib.aclosing(stream) as chunks:
        async for index, chunk in chunks:
          if chunk is None:
            if time.monotonic() - sent_at < self._heartbeat:
              continue
            await send([formatter.heartbeat] if formatter.heartbeat else [])
          elif isinstance(chunk, ChoiceResult):
            results[index] = chunk
            await send(formatter.result_events(index, chunk))
          else:
            await send(formatter.delta_events(index, chunk))
          sent_at = time.monotonic()
      ordered = [results[i] for i in range(len(choices))]
      await send(formatter.closing_events(ordered))
      if formatter.last_line:
        await response.write(f'{formatter.last_line}\n\n'.encode())
    except ApiError as error:
      await send(formatter.error_events(error))
    except ConnectionError:
      log.info('a client left in the middle of a stream')
      return response
    await response.write_eof()
    return response

  async def _list_models(self, request: web.Request) -> web.Response:
    name = self._gateway.model
    pages = {'has_more': False, 'first_id': name, 'last_id': name}
    page = pages if _VERSION in request.headers else {'object': 'list'}
    return web.json_response({'data': [self._model_info(request)], **page})

  async def _get_model(self, request: web.Request) -> web.Response:
    # Not match_info, which is of another application if that has received the request.
    if request.path.partition('/models/')[2] != self._gateway.model:
      raise ApiError(404, f'there is one model, {self._gateway.model!r}', param='model')
    return web.json_response(self._model_info(request))

  def _model_info(self, request: web.Request) -> dict:
    """Describes the model in the form of OpenAI's API, or of Anthropic's."""
    name = self._gateway.model
    if _VERSION in request.headers:
      created = time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(self._created))
      more = {'display_name': name, 'created_at': created, 'lifecycle': 'active'}
      return {'id': name, 'type': 'model', **more}
    more = {'created': self._created, 'owned_by': 'jaxrl'}
    return {'id': name, 'object': 'model', **more}

  async def _handle_feedback(self, request: web.Request) -> web.Response:
    """Takes {'reward': number, 'completion_id': of one reply, 'done': bool = true}."""
    body = openai_requests.parse_body(await self.read_body(request))
    if unknown_fields := body.keys() - {'reward', 'completion_id', 'done'}:
      raise invalid_field(
        sorted(unknown_fields)[0], 'unknown; use reward, completion_id and done'
      )
    reward, reply_name = body.get('reward'), body.get('completion_id') or ''
    done = body.get('done', True)
    bounds = -MAX_REWARD, MAX_REWARD
    if reward is not None and not openai_requests.is_number(reward, float, *bounds):
      raise invalid_field('reward', f'a number of at most ±{MAX_REWARD:g} is needed')
    if not isinstance(reply_name, str) or not isinstance(done, bool):
      raise invalid_field(
        'completion_id', 'a text is needed, and done must be true or false'
      )
    rows = await self._gateway.feedback(
      request[_SESSION], reward, reply_name, done=done
    )
    return web.json_response({'done': done, 'trajectories': len(rows)})


def serve_gateway(
  server: GatewayServer, *, host: str = '127.0.0.1', port: int = 0
) -> contextlib.AbstractAsyncContextManager[str]:
  """Serves while the context lasts, which yields the base URL without /v1.

  Args:
    server: The server.
    host: The address to listen to; by default only this machine can connect.
    port: The port; 0 takes any that is free.
  """
  return serve_app(server.app, server.connections, host=host, port=port)
