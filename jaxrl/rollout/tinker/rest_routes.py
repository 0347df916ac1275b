"""REST routes of the Tinker API list, change and copy sessions, runs and checkpoints.

They are what `tinker.RestClient` calls. A call that this server cannot answer is
refused with its reason, in a status after which clients do not try again.
"""

import asyncio
import collections
import datetime
import hashlib
import hmac
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from jaxrl.options import JsonObject
from jaxrl.rollout.tinker import checkpoint_store, request_bodies
from jaxrl.rollout.tinker.checkpoint_store import CheckpointStore, time_text
from jaxrl.rollout.tinker.pending_results import RequestError
from jaxrl.rollout.tinker.sessions import SessionTable
from jaxrl.rollout.tinker.tinker_model import optimizer_config

API = '/api/v1'
OWNER = 'local'  # all clients have the same key
LINK_SECONDS = 3600
MAX_PAGE = 1000
_CHECKPOINT = 'training_runs/{run}/checkpoints/{kind}/{name}'
_TO_NOBODY = 'who has the key of this server sees all its checkpoints, and nobody else'
# Method and path of routes that the API has and this server lacks, with the reason.
REFUSED = {
  ('POST', f'{_CHECKPOINT}/publish'): f'nothing can be published: {_TO_NOBODY}',
  ('DELETE', f'{_CHECKPOINT}/publish'): f'nothing is published: {_TO_NOBODY}',
  ('GET', 'audit'): 'no audit log is kept; the log of the server has the requests '
  'that it refused',
  ('GET', 'billing/usage/events'): 'this server bills nothing',
  ('POST', 'retrieve_futures'): 'results are polled for one by one, retrieve_future',
  ('POST', 'auth/token'): 'this server takes its key itself, and gives no tokens',
  ('GET', 'auth/apikey/me'): 'the key belongs to nobody: whoever starts the server '
  'sets it',
  ('DELETE', 'auth/apikey/me'): 'the key cannot be revoked: restart the server with '
  'another',
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RestRoutes:
  """Answers what clients ask about what is on the disk."""

  def __init__(self, store: CheckpointStore, sessions: SessionTable):
    """Creates the routes.

    Args:
      store: Keeps sessions, runs and checkpoints.
      sessions: The clients.
    """
    self._store, self._sessions = store, sessions
    self._link_key = secrets.token_bytes(32)

  def routes(self) -> list[web.RouteDef]:
    """Returns the routes."""
    gets: dict[str, Handler] = {
      'sessions': self._list_sessions,
      'sessions/{session}': self._get_session,
      'sessions/{session}/trace_export': self._export_trace,
      'training_runs': self._list_runs,
      'training_runs/{run}': self._get_run,
      'training_runs/{run}/checkpoints': self._list_run_checkpoints,
      'checkpoints': self._list_checkpoints,
      f'{_CHECKPOINT}/external_weights_urls': self._file_links,
      'billing/usage/checkpoints/current': self._storage,
    }
    return [
      *(web.get(f'{API}/{path}', handler) for path, handler in gets.items()),
      web.post(f'{API}/weights_info', self._weights_info),
      web.post(f'{API}/copy_weights', self._copy),
      web.post(f'{API}/sessions/search', self._search),
      web.put(f'{API}/sessions/{{session}}/project', self._assign_project),
      web.delete(f'{API}/{_CHECKPOINT}', self._delete_checkpoint),
      web.put(f'{API}/{_CHECKPOINT}/ttl', self._set_ttl),
      *(web.route(*place, _refusal(reason)) for place, reason in _refused_places()),
      web.get('/files/{signature}/{expires}/{run}/{kind}/{name}/{file}', self._file),
    ]

  # ---- sessions

  def _session_facts(self, session_id: str) -> JsonObject:
    facts = self._store.find_session(session_id)
    if facts is None:
      raise RequestError(f'there is no session {session_id[:80]!r}')
    return facts

  async def _get_session(self, request: web.Request) -> web.Response:
    session_id = request.match_info['session']
    facts = self._session_facts(session_id)
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

  async def _export_trace(self, request: web.Request) -> web.Response:
    self._session_facts(request.match_info['session'])
    return web.json_response(
      {'status': 'failed', 'error': 'this server records no traces of sessions'}
    )

  async def _assign_project(self, request: web.Request) -> web.Response:
    body = request_bodies.parse_body(await request.read(), request_bodies.ProjectBody)
    project_id = request_bodies.check_project(body.project_id)
    session_id = request.match_info['session']
    session = self._sessions.find(session_id)
    facts = session.facts if session else self._session_facts(session_id)
    facts['project_id'] = project_id
    self._store.save_session(session_id, facts)
    return web.json_response({})

  def _status(self, facts: JsonObject) -> JsonObject | None:
    """Returns a session's status; None for one whose client vanished."""
    if facts['status'].startswith('finished: '):
      reason = {'type': facts['status'].removeprefix('finished: ')}
      return {'type': 'client_finished', 'reason': reason, 'detail': None}
    is_active = self._sessions.find(facts['session_id']) is not None
    return {'type': 'active'} if is_active else None

  async def _search(self, request: web.Request) -> web.Response:
    body = request_bodies.parse_body(await request.read(), request_bodies.SearchBody)
    found = [
      facts
      for facts in self._store.sessions()
      if _matches(facts, self._status(facts), body)
    ]
    found.sort(key=_search_key, reverse=True)
    if body.cursor is not None:
      last = body.cursor.last_created_at, body.cursor.last_session_id
      found = [facts for facts in found if _search_key(facts) < last]
    page, more = found[: body.limit], found[body.limit :]
    runs = self._runs_of_sessions()
    answer = [self._summary(facts, runs) for facts in page]
    cursor = None
    if more:
      created, session_id = _search_key(page[-1])
      cursor = {'last_created_at': created.isoformat(), 'last_session_id': session_id}
    return web.json_response({'sessions': answer, 'next_cursor': cursor})

  def _runs_of_sessions(self) -> dict[str | None, list[str]]:
    runs = collections.defaultdict(list)
    for facts in self._store.runs():
      runs[facts['session_id']].append(facts['run_id'])
    return runs

  def _summary(
    self, facts: JsonObject, runs: Mapping[str | None, Sequence[str]]
  ) -> JsonObject:
    own = runs.get(facts['session_id'], ())
    checkpoints = [x for run_id in own for x in self._store.checkpoints(run_id)]
    return {
      'session_id': facts['session_id'],
      'created_at': time_text(facts['created']),
      'owner': OWNER,
      'project_id': facts.get('project_id') or '',
      'status': self._status(facts),
      'checkpoints_count': len(checkpoints),
      'display_name': facts['display_name'],
      'user_metadata': facts['user_metadata'],
      'checkpoint_storage_bytes': sum(x['size_bytes'] for x in checkpoints),
    }

  # ---- runs

  def _project(self, run: JsonObject) -> str | None:
    """Returns a run's project: its session's, or that which a copy was made for."""
    if run['session_id'] is None:
      return run['project_id']
    session = self._store.find_session(run['session_id'])
    return session.get('project_id') if session else None

  def _run_facts(self, run_id: str) -> JsonObject:
    facts = self._store.find_run(run_id)
    if facts is None:
      raise RequestError(f'there is no run {run_id[:80]!r}')
    return facts

  def _describe_run(self, facts: JsonObject) -> JsonObject:
    checkpoints = self._store.checkpoints(facts['run_id'])

    def last(kind: str) -> JsonObject | None:
      return next((x for x in checkpoints if x['checkpoint_type'] == kind), None)

    return {
      'training_run_id': facts['run_id'],
      'base_model': facts['base_model'],
      'model_owner': OWNER,
      'is_lora': True,
      'corrupted': False,
      'lora_rank': facts['rank'],
      'last_request_time': time_text(facts['last_request']),
      'last_checkpoint': last('training'),
      'last_sampler_checkpoint': last('sampler'),
      'user_metadata': facts['user_metadata'],
    }

  async def _get_run(self, request: web.Request) -> web.Response:
    facts = self._run_facts(request.match_info['run'])
    return web.json_response(self._describe_run(facts))

  async def _list_runs(self, request: web.Request) -> web.Response:
    runs, project_id = self._store.runs(), request.query.get('project_id')
    if project_id is not None:
      runs = [facts for facts in runs if self._project(facts) == project_id]
    page, cursor = _page(request, runs, 20)
    described = [self._describe_run(facts) for facts in page]
    return web.json_response({'training_runs': described, 'cursor': cursor})

  # ---- checkpoints

  async def _list_run_checkpoints(self, request: web.Request) -> web.Response:
    run_id = self._run_facts(request.match_info['run'])['run_id']
    checkpoints = self._store.checkpoints(run_id)
    return web.json_response({'checkpoints': checkpoints, 'cursor': None})

  async def _list_checkpoints(self, request: web.Request) -> web.Response:
    page, cursor = _page(request, self._store.checkpoints(), 100)
    return web.json_response({'checkpoints': page, 'cursor': cursor})

  async def _delete_checkpoint(self, request: web.Request) -> web.Response:
    await asyncio.to_thread(self._store.delete, _path(request))
    return web.json_response({})

  async def _set_ttl(self, request: web.Request) -> web.Response:
    body = request_bodies.parse_body(await request.read(), request_bodies.TtlBody)
    seconds = checkpoint_store.check_ttl(body.ttl_seconds)
    expires = None if seconds is None else time.time() + seconds
    self._store.update(_path(request), expires=expires)
    return web.json_response({})

  async def _weights_info(self, request: web.Request) -> web.Response:
    body = request_bodies.parse_body(await request.read(), request_bodies.PathBody)
    record = self._store.find(body.tinker_path)
    names = 'base_model', 'train_unembed', 'train_mlp', 'train_attn'
    facts = {name: record[name] for name in names}
    lora = {'is_lora': True, 'lora_rank': record['rank']}
    facts['optimizer_config'] = optimizer_config(record)
    return web.json_response({**facts, **lora})

  async def _copy(self, request: web.Request) -> web.Response:
    body = request_bodies.parse_body(await request.read(), request_bodies.CopyBody)
    if body.weights_access_token or 'X-Tinker-Weights-Access-Token' in request.headers:
      raise RequestError('weights_access_token is not supported: there is one key')
    seconds = checkpoint_store.check_ttl(body.ttl_seconds)
    record = self._store.find(body.source_path)
    project_id = body.destination_project_id
    if body.session_id is not None and body.model_seq_id is not None:
      session = self._sessions.touch(body.session_id)
      project_id = session.facts.get('project_id')
      run_id = f'{body.session_id}:copy:{body.model_seq_id}'
    elif project_id is not None:
      project_id = request_bodies.check_project(project_id)
      # A request that is sent again makes no second copy.
      key = request.headers.get('X-Idempotency-Key') or uuid.uuid4().hex
      place = f'{key} {body.source_path} {project_id}'
      run_id = hashlib.sha256(place.encode()).hexdigest()[:32]
    else:
      raise RequestError(
        'destination_project_id, or session_id and model_seq_id are needed'
      )
    known = self._store.find_run(run_id)
    if known is not None and known.get('copied_from') != body.source_path:
      raise RequestError(f'run {run_id} exists and is not a copy of {body.source_path}')
    if not self._store.checkpoints(run_id):
      names = 'rank', 'train_attn', 'train_mlp', 'train_unembed', 'base_model'
      facts = {name: record[name] for name in names}
      facts |= {'session_id': body.session_id, 'project_id': project_id}
      facts |= {'created': time.time(), 'last_request': time.time()}
      facts |= {'user_metadata': None, 'copied_from': body.source_path}
      self._store.save_run(run_id, facts)
      self._store.copy(body.source_path, run_id, seconds)
    (copied,) = self._store.checkpoints(run_id)
    return web.json_response({'tinker_path': copied['tinker_path']})

  async def _storage(self, request: web.Request) -> web.Response:
    wanted = request.query.get('project_id')
    totals: dict[str | None, list[int]] = {}
    for facts in self._store.runs():
      project_id = self._project(facts)
      if wanted is None or project_id == wanted:
        sizes = [x['size_bytes'] for x in self._store.checkpoints(facts['run_id'])]
        totals.setdefault(project_id, []).extend(sizes)
    data = [
      {
        'project_id': project_id,
        'checkpoint_count': len(sizes),
        'size_bytes': sum(sizes),
        'size_gigabytes': sum(sizes) / 1e9,
      }
      for project_id, sizes in totals.items()
    ]
    return web.json_response({'data': data})

  # ---- files

  def _sign(self, place: str) -> str:
    return hmac.new(self._link_key, place.encode(), hashlib.sha256).hexdigest()

  async def _file_links(self, request: web.Request) -> web.Response:
    path, expires = _path(request), int(time.time()) + LINK_SECONDS
    place = path.removeprefix('tinker://')
    base = f'{request.scheme}://{request.host}'
    links = {
      name: f'{base}/files/{self._sign(f"{expires}/{place}/{name}")}/{expires}/{place}/'
      f'{name}'
      for name in self._store.files(path)
    }
    return web.json_response({'urls': links, 'expires': time_text(expires)})

  async def _file(self, request: web.Request) -> web.StreamResponse:
    info = request.match_info
    place = '/'.join(info[name] for name in ('run', 'kind', 'name', 'file'))
    signature = self._sign(f'{info["expires"]}/{place}')
    given = info['signature'].encode('utf-8', 'surrogateescape')
    is_right = hmac.compare_digest(given, signature.encode())
    if not is_right or int(info['expires']) < time.time():
      raise web.HTTPForbidden(reason='the link is wrong or has expired')
    files = self._store.files(_path(request))
    if info['file'] not in files:
      raise RequestError(f'there is no file {info["file"][:80]!r}')
    return web.FileResponse(files[info['file']])


def _refusal(reason: str) -> Handler:
  async def refuse(request: web.Request) -> web.Response:
    await request.read()
    raise RequestError(reason)

  return refuse


def _refused_places() -> Iterable[tuple[tuple[str, str], str]]:
  for (method, path), reason in REFUSED.items():
    yield (method, f'{API}/{path}'), reason


def _path(request: web.Request) -> str:
  parts = (request.match_info[name] for name in ('run', 'kind', 'name'))
  return f'tinker://{"/".join(parts)}'


def _search_key(facts: JsonObject) -> tuple[datetime.datetime, str]:
  created = datetime.datetime.fromtimestamp(facts['created'], datetime.UTC)
  return created, facts['session_id']


def _matches(
  facts: JsonObject,
  status: JsonObject | None,
  body: request_bodies.SearchBody,
) -> bool:
  """Returns whether a session is one that a search asks for."""
  name = (facts['display_name'] or '').lower()
  by_name = body.display_name is not None and all(
    word in name for word in body.display_name.lower().split()
  )
  by_id = body.session_id == facts['session_id']
  if (body.session_id, body.display_name) != (None, None) and not (by_id or by_name):
    return False
  if body.project_ids is not None and facts.get('project_id') not in body.project_ids:
    return False
  metadata = facts['user_metadata'] or {}
  if any(metadata.get(key) != value for key, value in body.user_metadata.items()):
    return False
  if body.owner.type == 'user' and OWNER not in body.owner.owner_urns:
    return False
  return body.statuses is None or any(query.matches(status) for query in body.statuses)


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
