"""Serves the live view of runs: its pages, and what they show as JSON.

Every path begins with a token, so whoever does not know the URL gets nothing. Only this
machine can connect, nothing is written but the index of trajectories, and the pages may
load nothing from anywhere else.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import hmac
import logging
import mimetypes
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from jaxrl.rollout.gateway.app_server import serve_app
from jaxrl.rollout.gateway.connection_limits import (
  LOOPBACK_HOSTS,
  ConnectionLimits,
  request_in_progress,
)
from launch.logging.workdir import read_json
from launch.report import assets, trajectory_view
from launch.report.dump_rows import dump_patterns
from launch.report.page import FIRST, label_snapshots, summarize_run
from launch.report.run_folders import RunCatalogue, RunFolder, diff_configs
from launch.report.trajectory_index import TrajectoryIndex, TrajectoryQuery

log = logging.getLogger(__name__)
HEADERS = {
  'Content-Security-Policy': "default-src 'none'; script-src 'self'; style-src 'self'; "
  "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
  "frame-ancestors 'none'",
  'X-Content-Type-Options': 'nosniff',
  'Referrer-Policy': 'no-referrer',
  'Cross-Origin-Opener-Policy': 'same-origin',
  'Cross-Origin-Resource-Policy': 'same-origin',
  'Cache-Control': 'no-store',
}
LIMITS = ConnectionLimits(max_connections=256)
FIRST_ANSWER_S = 1.0  # seconds that a query waits for an index that is being built
MAX_ERROR = 20_000  # characters of error.txt
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RunTrajectories:
  """Holds the index of one run, and brings it up to date in the background."""

  def __init__(self, run: RunFolder, pool: concurrent.futures.Executor):
    record = run.record()
    self.index = TrajectoryIndex(run.folder, dump_patterns(record, run.folder))
    self.decode = functools.cache(
      lambda: trajectory_view.load_decoder(run.folder, record)
    )
    self._pool = pool
    self._job: concurrent.futures.Future | None = None

  async def refresh(self) -> bool:
    """Looks at the dump again if it is time; returns whether that still goes on."""
    if self._job is not None and self._job.done():
      done, self._job = self._job, None
      done.result()
    if self._job is None and self.index.is_stale:
      self._job = self._pool.submit(self.index.refresh)
    job = self._job  # other requests may put another one in its place meanwhile
    if job is None:
      return False
    await asyncio.wait([asyncio.wrap_future(job)], timeout=FIRST_ANSWER_S)
    return not job.done()


class ViewServer:
  """Answers the requests of the view.

  Attributes:
    app: The aiohttp application.
  """

  def __init__(self, root: pathlib.Path, token: str):
    """Creates a server; `serve_view` runs it.

    Args:
      root: Folder of the runs.
      token: The first part of every path.
    """
    self._token = token.encode()
    self._catalogue = RunCatalogue(root)
    self._trajectories: dict[str, RunTrajectories] = {}
    self._opening = asyncio.Lock()
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='index')
    self.app = web.Application(
      client_max_size=1 << 16, middlewares=[self._auth_middleware]
    )
    answers = {
      'runs': _json(self._list_runs),
      'run': _json(self._show_run),
      'metrics': _json(self._show_metrics),
      'samples': _json(self._show_samples),
      'diff': _json(self._show_diff),
      'trajectories': self._of_run(self._list_trajectories),
      'trajectory': self._of_run(self._show_trajectory),
      'group': self._of_run(self._show_group),
    }
    self.app.add_routes(
      [
        web.get('/{token}/', self._show_page),
        web.get('/{token}/static/{name}', self._send_asset),
        *(web.get(f'/{{token}}/api/{name}', answers[name]) for name in answers),
      ]
    )

  def close(self) -> None:
    """Ends the indexing, and closes the indexes."""
    self._pool.shutdown(wait=True, cancel_futures=True)
    for trajectories in self._trajectories.values():
      trajectories.index.close()

  # ---- admission

  @web.middleware
  async def _auth_middleware(
    self, request: web.Request, handler: _Handler
  ) -> web.StreamResponse:
    """Admits requests of this machine that know the token; answers errors as JSON."""
    with request_in_progress(request):
      response = await self._admit(request, handler)
    if response.status >= 400 and isinstance(response, web.Response):
      path = request.path.partition('/')[2].partition('/')[2]  # without the token
      refusal = response.status, response.text
      log.info('%s %.200r: %d, %.200s', request.method, path, *refusal)
    response.headers.update(HEADERS)
    return response

  async def _admit(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
    # A page of another site may make a name of its own point to this machine.
    if _host_name(request) not in LOOPBACK_HOSTS:
      return _error(403, 'only 127.0.0.1 and localhost are served')
    token = request.path.partition('/')[2].partition('/')[0]
    token = token.encode('utf-8', 'surrogateescape')
    if not hmac.compare_digest(token, self._token):
      return _error(403, 'open the URL that launch.view printed: it has the token')
    try:
      return await handler(request)
    except web.HTTPException as error:
      return _error(error.status, error.reason)
    except KeyError as error:
      return _error(404, f'there is no {error.args[0]!r}')
    except ValueError as error:
      return _error(400, str(error))
    except Exception as error:
      log.exception('a request failed')
      return _error(500, f'{type(error).__name__}: {error}')

  # ---- files

  async def _show_page(self, request: web.Request) -> web.Response:
    return web.Response(text=assets.read_asset('view.html'), content_type='text/html')

  async def _send_asset(self, request: web.Request) -> web.Response:
    name = request.match_info['name']
    if name not in assets.asset_names():
      raise KeyError(name)
    kind = 'text/javascript' if name.endswith('.js') else mimetypes.guess_type(name)[0]
    return web.Response(text=assets.read_asset(name), content_type=kind or 'text/plain')

  # ---- runs, on other threads

  def _run(self, request: web.Request, name: str = 'run') -> RunFolder:
    return self._catalogue.run(request.query.get(name, ''))

  def _list_runs(self, request: web.Request) -> Any:
    return {
      'root': str(self._catalogue.root.resolve()),
      'runs': [run.overview() for run in self._catalogue.runs()],
      'first': ['reward/mean', *FIRST],
    }

  def _show_run(self, request: web.Request) -> Any:
    run = self._run(request)
    return {
      **summarize_run(run.report()),
      'id': run.name,
      'launches': run.record().get('launches') or [],
      'error': _read_error(run.folder),
      'samples': _version(run.folder / 'samples.json'),
    }

  def _show_metrics(self, request: web.Request) -> Any:
    since = _integer(request, 'since') or 0
    return self._run(request).metrics(since, request.query.get('file', ''))

  def _show_samples(self, request: web.Request) -> Any:
    snapshots = read_json(self._run(request).folder / 'samples.json')
    return label_snapshots(snapshots or [])

  def _show_diff(self, request: web.Request) -> Any:
    first, second = (self._run(request, name) for name in ('a', 'b'))
    configs = [run.record().get('config') or {} for run in (first, second)]
    return {'names': [first.name, second.name], 'keys': diff_configs(*configs)}

  # ---- trajectories, on other threads

  def _of_run(self, answer: Callable[..., Any]) -> _Handler:
    """Returns what answers with the trajectories of the run that is asked for."""

    async def handle(request: web.Request) -> web.Response:
      run = await asyncio.to_thread(self._run, request)
      async with self._opening:  # requests of one page come together
        if run.name not in self._trajectories:
          opened = await asyncio.to_thread(RunTrajectories, run, self._pool)
          self._trajectories[run.name] = opened
      trajectories = self._trajectories[run.name]
      is_indexing = await trajectories.refresh()
      data = await asyncio.to_thread(answer, request, trajectories, is_indexing)
      return web.json_response(data)

    return handle

  def _list_trajectories(
    self, request: web.Request, trajectories: RunTrajectories, is_indexing: bool
  ) -> Any:
    index, query = trajectories.index, _read_query(request)
    offset, limit = (_integer(request, n) or 0 for n in ('offset', 'limit'))
    return {
      **index.select(query, max(offset, 0), limit or 50),
      'facets': index.facets(),
      'indexing': is_indexing,
      'pending': index.pending,
      'problems': sorted(index.problems.items()),
    }

  def _show_trajectory(
    self, request: web.Request, trajectories: RunTrajectories, is_indexing: bool
  ) -> Any:
    index, name = trajectories.index, request.query.get('id', '')
    start, query = _integer(request, 'start') or 0, _read_query(request)
    shown = trajectory_view.show_trajectory(
      index, name, trajectories.decode(), start=max(start, 0)
    )
    position, before, after = index.neighbours(query, name)
    return {**shown, 'position': position, 'before': before, 'after': after}

  def _show_group(
    self, request: web.Request, trajectories: RunTrajectories, is_indexing: bool
  ) -> Any:
    name = request.query.get('group', '')
    members = trajectory_view.show_group(trajectories.index, name)
    if not members:
      raise KeyError(name)
    return {'group': name, 'members': members}


def _host_name(request: web.Request) -> str | None:
  try:
    return urlsplit(f'//{request.host}').hostname
  except ValueError:  # half an address
    return None


def _json(answer: Callable[[web.Request], Any]) -> _Handler:
  async def handle(request: web.Request) -> web.Response:
    return web.json_response(await asyncio.to_thread(answer, request))

  return handle


def _error(status: int, text: str) -> web.Response:
  return web.json_response({'error': text}, status=status)


def _version(path: pathlib.Path) -> str:
  """Returns a text that changes when a file does; '' if there is none."""
  try:
    return str(path.stat().st_mtime_ns)
  except OSError:
    return ''


def _read_error(folder: pathlib.Path) -> str:
  try:
    return (folder / 'error.txt').read_text(errors='replace')[-MAX_ERROR:]
  except OSError:
    return ''


def _integer(request: web.Request, name: str) -> int | None:
  number = _number(request, name)
  return None if number is None else int(number)


def _number(request: web.Request, name: str) -> float | None:
  text = request.query.get(name, '')
  if not text:
    return None
  try:
    number = float(text)
    if abs(number) < 2**53:  # not for NaN either
      return number
  except ValueError:
    pass
  raise ValueError(f'{name}: {text!r} is not a number')


def _read_query(request: web.Request) -> TrajectoryQuery:
  """Reads which trajectories are asked for."""
  query: Any = request.query
  words = ('mode', 'tag', 'stop', 'group', 'text', 'sort')
  bounds: dict[str, Any] = {
    name: (_number(request, f'{name}_min'), _number(request, f'{name}_max'))
    for name in ('step', 'score', 'length')
  }
  return TrajectoryQuery(
    **{name: query[name] for name in words if name in query},
    **bounds,
    descending=query.get('order') == 'desc',
  )


@contextlib.asynccontextmanager
async def serve_view(
  root: pathlib.Path, token: str, *, port: int = 0
) -> AsyncIterator[str]:
  """Serves the view on this machine while the context lasts.

  Args:
    root: Folder of the runs.
    token: The token.
    port: The port; 0 takes any that is free.

  Yields:
    The URL, which has the token.
  """
  server = ViewServer(root, token)
  try:
    async with serve_app(server.app, LIMITS, port=port) as url:
      yield f'{url}/{token}/'
  finally:
    server.close()
