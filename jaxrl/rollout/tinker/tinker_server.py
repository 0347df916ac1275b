"""Tinker server: the Tinker API over HTTP, as the package `tinker` 0.38.0 speaks it.

Every request needs the key, `X-API-Key: KEY`; files are fetched by links that are
signed and expire. A request that is not valid gets a status and {"detail": …}, and one
that fails later a result with an error and whose fault it is.
"""

import asyncio
import contextlib
import functools
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from jaxrl.options import JsonObject
from jaxrl.rollout.gateway.app_server import BROKEN_BODY, serve_app
from jaxrl.rollout.gateway.connection_limits import (
  ConnectionLimits,
  request_in_progress,
)
from jaxrl.rollout.tinker import proto_codec, request_bodies
from jaxrl.rollout.tinker.checkpoint_store import CheckpointStore
from jaxrl.rollout.tinker.pending_results import (
  PendingResults,
  RequestError,
  TooManyRequestsError,
)
from jaxrl.rollout.tinker.proto_codec import ProtoError
from jaxrl.rollout.tinker.rest_routes import API, RestRoutes
from jaxrl.rollout.tinker.sampler_endpoint import SamplerEndpoint
from jaxrl.rollout.tinker.sampling_service import SamplingService
from jaxrl.rollout.tinker.sessions import SessionEndedError, SessionTable
from jaxrl.rollout.tinker.tinker_model import TinkerModel
from jaxrl.rollout.tinker.tinker_options import TinkerOptions
from jaxrl.rollout.tinker.training_service import TrainingService

log = logging.getLogger(__name__)
KNOWN = 'it answers the calls of the package tinker 0.38.0 that its docs list'
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
    store: CheckpointStore,
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
    }
    self.app.add_routes(
      [
        *(web.post(f'{API}/{path}', handler) for path, handler in posts.items()),
        web.get(f'{API}/healthz', json(None, lambda: {'status': 'ok'})),
        web.get(f'{API}/get_server_capabilities', json(None, self._capabilities)),
        web.get(f'{API}/samplers/{{sampler}}', self._get_sampler),
        web.post(f'{API}/sessions/{{session}}/finish', self._finish_session),
        *RestRoutes(self._store, self._sessions).routes(),
        web.route('*', '/v1/{rest:.*}', endpoint.answer),
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
        if not is_open and request.match_info.http_exception is None:
          await self._receive(request)
        return await handler(request)
      except (RequestError, ProtoError) as error:
        missing = 'there is no ' in str(error) or 'is not open' in str(error)
        status, text = (404 if missing else 400), str(error)
      except SessionEndedError as error:
        status, text = 410, str(error)
      except TooManyRequestsError as error:
        status, text, headers = 429, str(error), {'Retry-After': '1'}
      except web.RequestPayloadError:
        status, text = 400, BROKEN_BODY
      except web.HTTPException as error:
        status, text = error.status, error.reason or 'refused'
        if request.match_info.http_exception is not None:
          text = f'this server has no {request.method} {request.path}; {KNOWN}'
      except Exception:
        log.exception('%s %s failed', request.method, request.path)
      log.info('%s %s: %d, %.200r', request.method, request.path, status, text)
      return web.json_response({'detail': text}, status=status, headers=headers)

  async def _receive(self, request: web.Request) -> None:
    """Waits for the body, which handlers then read without waiting."""
    seconds = self._options.body_timeout
    try:
      async with asyncio.timeout(seconds):
        await request.read()
    except TimeoutError as error:
      raise web.HTTPRequestTimeout(reason=f'no body within {seconds:g} s') from error

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

  def _client_config(self) -> JsonObject:
    limits = self._options
    return {
      'parallel_fwdbwd_chunks': True,
      'fwdbwd_max_chunk_len': min(1024, limits.max_datums),
      'fwdbwd_max_chunk_bytes_count': min(5_000_000, limits.max_body // 2),
      'use_pyqwest_transport': False,
      'custom_loss_server_side': True,
      'sample_join_sampling_session': True,
    }

  def _dynamic_config(self) -> JsonObject:
    return {'sample_cancel_enabled': True}

  def _capabilities(self) -> JsonObject:
    entry = {
      'model_name': self._model.name,
      'max_context_length': self._options.max_length,
      'trainable': True,
      'sampleable': True,
    }
    return {'supported_models': [entry]}

  def _create_session(self, body: request_bodies.CreateSession) -> JsonObject:
    session = self._sessions.create(
      tags=body.tags[:100],
      user_metadata=request_bodies.check_metadata(body.user_metadata),
      display_name=(body.display_name or '')[:1000] or None,
      sdk_version=body.sdk_version[:100],
      project_id=request_bodies.check_project(body.project_id),
    )
    return {'type': 'create_session', 'session_id': session.session_id}

  def _heartbeat(self, body: request_bodies.SessionBody) -> JsonObject:
    self._sessions.touch(body.session_id)
    return {'type': 'session_heartbeat'}

  async def _finish_session(self, request: web.Request) -> web.Response:
    body = request_bodies.parse_body(await request.read(), request_bodies.FinishSession)
    session = self._sessions.touch(request.match_info['session'])
    reason = body.reason.type if body.reason else 'success'
    self.end_session(session.session_id, f'finished: {reason}')
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

  def _cancel(self, body: request_bodies.RetrieveFuture) -> JsonObject:
    self._sampling.cancel(body.request_id)
    return {}

  # ---- samplers

  def _add_sampler(self, body: request_bodies.CreateSamplingSession) -> JsonObject:
    session = self._sessions.touch(body.session_id)
    if body.model_path is None and body.base_model is None:
      raise RequestError('model_path or base_model is needed')
    self._model.check_name(body.base_model)
    self._sampling.check_path(body.model_path)
    number = body.sampling_session_seq_id
    sampler_id = self._training.add_sampler(session, number, body.model_path)
    return {'type': 'create_sampling_session', 'sampling_session_id': sampler_id}

  def _join_sampler(self, body: request_bodies.JoinSamplingSession) -> JsonObject:
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
