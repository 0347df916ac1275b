"""Tinker server: the Tinker API over HTTP, as the package `tinker` 0.38.0 speaks it.

Every request needs the key, `X-API-Key: KEY`; files are fetched by links that are
signed and expire. A request that is not valid gets a status and {"detail": …}, and one
that fails later a result with an error and whose fault it is.
"""

import asyncio
import contextlib
import functools
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from jaxrl.rollout.gateway.app_server import serve_app
from jaxrl.rollout.gateway.connection_limits import (
  ConnectionLimits,
  request_in_progress,
)
from jaxrl.rollout.tinker import checkpoint_store, proto_codec, request_bodies
from jaxrl.rollout.tinker.pending_results import (
  PendingResults,
  RequestError,
  TooManyRequestsError,
)
from jaxrl.rollout.tinker.proto_codec import ProtoError
from jaxrl.rollout.tinker.sampler_endpoint import SamplerEndpoint
from jaxrl.rollout.tinker.sampling_service import SamplingService
from jaxrl.rollout.tinker.sessions import SessionEndedError, SessionTable
from jaxrl.rollout.tinker.tinker_model import TinkerModel
from jaxrl.rollout.tinker.tinker_options import TinkerOptions
from jaxrl.rollout.tinker.training_service import ADAMW, TrainingService

log = logging.getLogger(__name__)
API = '/api/v1'
LINK_SECONDS = 3600
MAX_PAGE = 1000
PROTOBUF = 'application/x-protobuf'
SWEEP_SECONDS = 1.0
_LIMITS = ConnectionLimits(
  idle_timeout=300.0, max_connections=4096, max_per_client=4096
)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TinkerServer:
  """Answers HTTP requests with the services of training and of sampling.

  Attributes:
    app: The aiohttp application.
  """

  def __init__(
    self,
    key: str,
    model: TinkerModel,
    training: TrainingService,
    sampling: SamplingService,
    store: checkpoint_store.CheckpointStore,
    sessions: SessionTable,
    pending: PendingResults,
    options: TinkerOptions,
    endpoint: SamplerEndpoint,
  ):
    """Creates a server; `serve` runs it.

    Args:
      key: The key that clients send.
      model: The model.
      training: Answers training clients.
      sampling: Answers sampling clients.
      store: Keeps the checkpoints.
      sessions: The clients.
      pending: Their requests.
      options: The limits.
      endpoint: Answers in OpenAI's API, below /v1/.

    Raises:
      ValueError: If the key is empty.
    """
    if not key:
      raise ValueError('the server needs a key, and it may not be empty')
    self._key, self._model = key.encode(), model
    self._training, self._sampling = training, sampling
    self._store, self._sessions = store, sessions
    self._pending, self._options = pending, options
    self._endpoint = endpoint
    self._link_key = secrets.token_bytes(32)
    self.app = web.Application(
      client_max_size=options.max_body, middlewares=[self._admit]
    )
    self._add_routes()

  def _add_routes(self) -> None:
    json, bodies = self._json, request_bodies
    training, sampling, endpoint = self._training, self._sampling, self._endpoint
    posts = {
      'client/config': json(None, self._client_config),
      'client/dynamic_config': json(None, self._dynamic_config),
      'telemetry': json(None, lambda: {'status': 'accepted'}),
      'create_session': json(bodies.CreateSession, self._create_session),
      'session_heartbeat': json(bodies.SessionBody, self._heartbeat),
      'create_model': json(bodies.CreateModel, training.create_model),
      'unload_model': json(bodies.ModelBody, training.unload_model),
      'get_info': json(bodies.ModelBody, training.get_info),
      'forward_backward': self._forward_backward,
      'optim_step': json(bodies.OptimStep, training.optim_step),
      'save_weights': json(bodies.SaveWeights, training.save_weights),
      'save_weights_for_sampler': json(
        bodies.SaveForSampler, training.save_for_sampler
      ),
      'save_weights_external': json(bodies.SaveWeights, training.save_external),
      'load_weights': json(bodies.LoadWeights, training.load_weights),
      'create_custom_loss': json(bodies.CreateCustomLoss, training.create_custom_loss),
      'create_sampling_session': json(bodies.CreateSamplingSession, self._add_sampler),
      'join_sampling_session': json(bodies.JoinSamplingSession, self._join_sampler),
      'asample': json(bodies.SampleBody, sampling.sample),
      'retrieve_future': self._retrieve,
      'cancel_future': json(bodies.RetrieveFuture, self._cancel),
      'weights_info': json(bodies.PathBody, self._weights_info),
    }
    checkpoint = 'training_runs/{run}/checkpoints/{kind}/{name}'
    self.app.add_routes(
      [
        *(web.post(f'{API}/{path}', handler) for path, handler in posts.items()),
        web.get(f'{API}/healthz', json(None, lambda: {'status': 'ok'})),
        web.get(f'{API}/get_server_capabilities', json(None, self._capabilities)),
        web.get(f'{API}/samplers/{{sampler}}', self._get_sampler),
        web.get(f'{API}/sessions', self._list_sessions),
        web.get(f'{API}/sessions/{{session}}', self._get_session),
        web.post(f'{API}/sessions/{{session}}/finish', self._finish_session),
        web.get(f'{API}/training_runs', self._list_runs),
        web.get(f'{API}/training_runs/{{run}}', self._get_run),
        web.get(f'{API}/training_runs/{{run}}/checkpoints', self._list_run_checkpoints),
        web.get(f'{API}/checkpoints', self._list_checkpoints),
        web.delete(f'{API}/{checkpoint}', self._delete_checkpoint),
        web.put(f'{API}/{checkpoint}/ttl', self._set_ttl),
        web.get(f'{API}/{checkpoint}/external_weights_urls', self._file_links),
        web.route('*', '/v1/{rest:.*}', endpoint.answer),
        web.get('/files/{signature}/{expires}/{run}/{kind}/{name}/{file}', self._file),
      ]
    )

  # ---- admission

  @web.middleware
  async def _admit(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Admits requests that have the key; returns errors as JSON."""
    with request_in_progress(request):
      status, text, headers = 500, 'the server failed; its log says how', {}
      try:
        given = request.headers.get('X-API-Key', '').encode('utf-8', 'surrogateescape')
        # Links are signed, and the other API takes the key in another header.
        is_open = request.path.startswith(('/files/', '/v1/'))
        if not hmac.compare_digest(given, self._key) and not is_open:
          raise web.HTTPUnauthorized(reason='X-API-Key is missing or wrong')
        return await handler(request)
      except (RequestError, ProtoError) as error:
        missing = 'there is no ' in str(error) or 'is not open' in str(error)
        status, text = (404 if missing else 400), str(error)
      except SessionEndedError as error:
        status, text = 410, str(error)
      except TooManyRequestsError as error:
        status, text, headers = 429, str(error), {'Retry-After': '1'}
      except web.HTTPException as error:
        status, text = error.status, error.reason or 'refused'
      except Exception:
        log.exception('%s %s failed', request.method, request.path)
      log.info('%s %s: %d, %.200r', request.method, request.path, status, text)
      return web.json_response({'detail': text}, status=status, headers=headers)

  def _json(self, kind: Any, call: Callable[..., Any]) -> _Handler:
    """Returns a handler that parses a body and answers with the call's result."""

    async def handle(request: web.Request) -> web.Response:
      if kind is None:
        await request.read()
        return web.json_response(call())
      answer = call(request_bodies.parse_body(await request.read(), kind))
      return web.json_response(answer)

    return handle

  # ---- clients

  def _client_config(self) -> dict[str, Any]:
    limits = self._options
    return {
      'parallel_fwdbwd_chunks': True,
      'fwdbwd_max_chunk_len': min(1024, limits.max_datums),
      'fwdbwd_max_chunk_bytes_count': min(5_000_000, limits.max_body // 2),
      'use_pyqwest_transport': False,
      'custom_loss_server_side': True,
      'sample_join_sampling_session': True,
    }

  def _dynamic_config(self) -> dict[str, Any]:
    return {'sample_cancel_enabled': True}

  def _capabilities(self) -> dict[str, Any]:
    entry = {
      'model_name': self._model.name,
      'max_context_length': self._options.max_length,
      'trainable': True,
      'sampleable': True,
    }
    return {'supported_models': [entry]}

  def _create_session(self, body: request_bodies.CreateSession) -> dict[str, Any]:
    session = self._sessions.create(
      tags=body.tags[:100],
      user_metadata=request_bodies.check_metadata(body.user_metadata),
      display_name=(body.display_name or '')[:1000] or None,
      sdk_version=body.sdk_version[:100],
    )
    return {'type': 'create_session', 'session_id': session.session_id}

  def _heartbeat(self, body: request_bodies.SessionBody) -> dict[str, Any]:
    self._sessions.touch(body.session_id)
    return {'type': 'session_heartbeat'}

  async def _finish_session(self, request: web.Request) -> web.Response:
    body = request_bodies.parse_body(await request.read(), request_bodies.FinishSession)
    session = self._sessions.touch(request.match_info['session'])
    reason = body.reason.type if body.reason else 'success'
    self.end_session(session.session_id, f'finished: {reason[:100]}')
    return web.json_response({})

  def end_session(self, session_id: str, status: str) -> None:
    """Ends a session, gives up its requests and frees its places.

    Args:
      session_id: The session.
      status: Why it ends.
    """
    session = self._sessions.find(session_id)
    if session is None:
      return
    self._sessions.end(session, status)
    self._sampling.cancel_owner(session_id)
    self._pending.fail_owner(
      session_id, RequestError(f'the session has ended: {status}')
    )
    for run_id in session.run_ids:
      self._training.close_run(run_id)

  async def _sweep(self) -> None:
    """Ends the sessions of clients that have vanished, as long as the server runs."""
    while True:
      await asyncio.sleep(SWEEP_SECONDS)
      for session in self._sessions.vanished():
        log.warning('the client of session %s has vanished', session.session_id)
        self.end_session(session.session_id, 'its client vanished')

  async def _get_session(self, request: web.Request) -> web.Response:
    session_id = request.match_info['session']
    facts = self._store.find_session(session_id)
    if facts is None:
      raise RequestError(f'there is no session {session_id[:80]!r}')
    session = self._sessions.find(session_id)
    return web.json_response(
      {
        'training_run_ids': session.run_ids if session else [],
        'sampler_ids': list(facts['samplers']),
        'user_metadata': facts['user_metadata'],
        'display_name': facts['display_name'],
      }
    )

  async def _list_sessions(self, request: web.Request) -> web.Response:
    page, _ = _page(request, [x['session_id'] for x in self._store.sessions()], 20)
    return web.json_response({'sessions': page})

  # ---- requests and their results

  async def _forward_backward(self, request: web.Request) -> web.Response:
    data = await request.read()
    cells = self._options.max_length * self._options.max_targets
    read = functools.partial(proto_codec.read_forward_backward, data, cells)
    # Large bodies take a while to read.
    body = await asyncio.to_thread(read) if len(data) > 1 << 18 else read()
    return web.json_response(self._training.forward_backward(body))

  async def _retrieve(self, request: web.Request) -> web.Response:
    """Answers with a request's result, waiting a while for it."""
    body = request_bodies.parse_body(
      await request.read(), request_bodies.RetrieveFuture
    )
    result = self._pending.find(body.request_id)
    if result is None:
      if body.request_id.startswith('sample:'):  # the client then asks anew
        raise web.HTTPGone(reason='the result is not known; sample again')
      lost = {'error': self._pending.lost_message(), 'category': 'server'}
      return web.json_response(lost)
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(self._options.poll_seconds):
        await result.done.wait()
    if not result.done.is_set():
      again = {
        'type': 'try_again',
        'request_id': result.request_id,
        'queue_state': 'active',
      }
      return web.json_response(again, status=408)
    kind = PROTOBUF if result.is_proto else 'application/json'
    return web.Response(body=result.body, content_type=kind)

  def _cancel(self, body: request_bodies.RetrieveFuture) -> dict[str, Any]:
    self._sampling.cancel(body.request_id)
    return {}

  # ---- samplers

  def _add_sampler(self, body: request_bodies.CreateSamplingSession) -> dict[str, Any]:
    session = self._sessions.touch(body.session_id)
    if body.model_path is None and body.base_model is None:
      raise RequestError('model_path or base_model is needed')
    self._model.check_name(body.base_model)
    self._sampling.check_path(body.model_path)
    number = body.sampling_session_seq_id
    sampler_id = self._training.add_sampler(session, number, body.model_path)
    return {'type': 'create_sampling_session', 'sampling_session_id': sampler_id}

  def _join_sampler(self, body: request_bodies.JoinSamplingSession) -> dict[str, Any]:
    self._sampling.find_sampler(body.sampling_session_id)
    session = self._sessions.touch(body.sampling_session_id.partition(':')[0])
    clients = session.facts.setdefault('clients', {})
    number = clients[body.sampling_session_id] = (
      clients.get(body.sampling_session_id, 0) + 1
    )
    self._sessions.save(session)
    return {'type': 'join_sampling_session', 'client_counter': number}

  async def _get_sampler(self, request: web.Request) -> web.Response:
    return web.json_response(self._sampling.get_sampler(request.match_info['sampler']))

  # ---- runs and checkpoints

  def _describe_run(self, facts: dict[str, Any]) -> dict[str, Any]:
    checkpoints = self._store.checkpoints(facts['run_id'])

    def last(kind: str) -> dict[str, Any] | None:
      return next((x for x in checkpoints if x['checkpoint_type'] == kind), None)

    return {
      'training_run_id': facts['run_id'],
      'base_model': facts['base_model'],
      'model_owner': 'local',
      'is_lora': True,
      'corrupted': False,
      'lora_rank': facts['rank'],
      'last_request_time': checkpoint_store.time_text(facts['last_request']),
      'last_checkpoint': last('training'),
      'last_sampler_checkpoint': last('sampler'),
      'user_metadata': facts['user_metadata'],
    }

  async def _get_run(self, request: web.Request) -> web.Response:
    run_id = request.match_info['run']
    facts = self._store.find_run(run_id)
    if facts is None:
      raise RequestError(f'there is no run {run_id[:80]!r}')
    return web.json_response(self._describe_run(facts))

  async def _list_runs(self, request: web.Request) -> web.Response:
    page, cursor = _page(request, self._store.runs(), 20)
    runs = [self._describe_run(facts) for facts in page]
    return web.json_response({'training_runs': runs, 'cursor': cursor})

  async def _list_run_checkpoints(self, request: web.Request) -> web.Response:
    checkpoints = self._store.checkpoints(request.match_info['run'])
    return web.json_response({'checkpoints': checkpoints, 'cursor': None})

  async def _list_checkpoints(self, request: web.Request) -> web.Response:
    page, cursor = _page(request, self._store.checkpoints(), 100)
    return web.json_response({'checkpoints': page, 'cursor': cursor})

  def _path(self, request: web.Request) -> str:
    parts = (request.match_info[name] for name in ('run', 'kind', 'name'))
    return f'tinker://{"/".join(parts)}'

  async def _delete_checkpoint(self, request: web.Request) -> web.Response:
    await asyncio.to_thread(self._store.delete, self._path(request))
    return web.json_response({})

  async def _set_ttl(self, request: web.Request) -> web.Response:
    body = request_bodies.parse_body(await request.read(), request_bodies.TtlBody)
    seconds = body.ttl_seconds
    if seconds is not None and seconds < 1:
      raise RequestError(f'ttl_seconds={seconds} must be 1 or more')
    expires = None if seconds is None else time.time() + seconds
    self._store.update(self._path(request), expires=expires)
    return web.json_response({})

  def _weights_info(self, body: request_bodies.PathBody) -> dict[str, Any]:
    record = self._store.find(body.tinker_path)
    names = 'base_model', 'train_unembed', 'train_mlp', 'train_attn'
    return {
      **{name: record[name] for name in names},
      'optimizer_config': ADAMW,
      'is_lora': True,
      'lora_rank': record['rank'],
    }

  def _sign(self, place: str) -> str:
    return hmac.new(self._link_key, place.encode(), hashlib.sha256).hexdigest()

  async def _file_links(self, request: web.Request) -> web.Response:
    path, expires = self._path(request), int(time.time()) + LINK_SECONDS
    place = path.removeprefix('tinker://')
    base = f'{request.scheme}://{request.host}'
    links = {
      name: f'{base}/files/{self._sign(f"{expires}/{place}/{name}")}/{expires}/{place}/'
      f'{name}'
      for name in self._store.files(path)
    }
    text = checkpoint_store.time_text(expires)
    return web.json_response({'urls': links, 'expires': text})

  async def _file(self, request: web.Request) -> web.StreamResponse:
    info = request.match_info
    place = '/'.join(info[name] for name in ('run', 'kind', 'name', 'file'))
    is_right = hmac.compare_digest(
      info['signature'].encode(), self._sign(f'{info["expires"]}/{place}').encode()
    )
    if not is_right or int(info['expires']) < time.time():
      raise web.HTTPForbidden(reason='the link is wrong or has expired')
    files = self._store.files(self._path(request))
    if info['file'] not in files:
      raise RequestError(f'there is no file {info["file"][:80]!r}')
    return web.FileResponse(files[info['file']])

  # ---- running

  @contextlib.asynccontextmanager
  async def serve(self, host: str = '127.0.0.1', port: int = 0) -> AsyncIterator[str]:
    """Serves while the context lasts.

    Args:
      host: The address to listen to; by default only this machine can connect.
      port: The port; 0 takes any that is free.

    Yields:
      The base URL.
    """
    sweep = asyncio.get_running_loop().create_task(self._sweep())
    try:
      async with serve_app(self.app, _LIMITS, host=host, port=port) as url:
        yield url
    finally:
      sweep.cancel()
      await asyncio.gather(sweep, return_exceptions=True)
      await self._sampling.stop()
      await self._training.stop()


def _page(
  request: web.Request, entries: list[Any], default: int
) -> tuple[list[Any], dict[str, int]]:
  """Returns the entries that a request asks for, and where they are in the whole."""
  try:
    limit = int(request.query.get('limit', default))
    offset = int(request.query.get('offset', 0))
  except ValueError as error:
    raise RequestError('limit and offset must be whole numbers') from error
  if not 1 <= limit <= MAX_PAGE or offset < 0:
    raise RequestError(f'limit must be from 1 to {MAX_PAGE}, and offset 0 or more')
  cursor = {'offset': offset, 'limit': limit, 'total_count': len(entries)}
  return entries[offset : offset + limit], cursor
