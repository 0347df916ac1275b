"""Serves an aiohttp application whose connections are limited."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from jaxrl.rollout.gateway.connection_limits import ConnectionLimits, limit_connections

if TYPE_CHECKING:
  from aiohttp import web


log = logging.getLogger(__name__)
BROKEN_BODY = 'the body cannot be read: it is not encoded as its headers say'


class _ServerLogger(logging.LoggerAdapter):
  """Reports what is no HTTP in one line; aiohttp would add its own traceback."""

  def exception(self, msg: object, *args: Any, **options: Any) -> None:
    if not self._says_in_a_line(msg, args, options.get('exc_info')):
      super().exception(msg, *args, **options)

  def debug(self, msg: object, *args: Any, **options: Any) -> None:
    if not self._says_in_a_line(msg, args, options.get('exc_info')):
      super().debug(msg, *args, **options)

  def _says_in_a_line(self, msg: object, args: Any, error: object) -> bool:
    from aiohttp.http_exceptions import HttpProcessingError
    from aiohttp.web import RequestPayloadError

    if isinstance(error, RequestPayloadError):
      text = BROKEN_BODY
    elif isinstance(error, HttpProcessingError):
      text = error.message.partition(':')[0]  # the rest quotes what may be a key
    else:
      return False
    self.info(f'{msg}: %.200s', *args, text)
    return True


@contextlib.asynccontextmanager
async def serve_app(
  app: 'web.Application',
  limits: ConnectionLimits,
  *,
  host: str = '127.0.0.1',
  port: int = 0,
) -> AsyncIterator[str]:
  """Serves an application while the context lasts.

  Args:
    app: The application, whose middleware enters `request_in_progress`.
    limits: The limits on connections.
    host: The address to listen to; by default only this machine can connect.
    port: The port; 0 takes any that is free.

  Yields:
    The base URL.
  """
  from aiohttp import web

  # A request is cancelled when its client leaves.
  logger: Any = _ServerLogger(log)
  runner = web.AppRunner(
    app,
    handler_cancellation=True,
    access_log=None,
    logger=logger,
    shutdown_timeout=5.0,
  )
  await runner.setup()
  assert runner.server is not None
  make_connection = limit_connections(runner.server, limits)
  try:
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(make_connection, host, port)
    try:
      bound_port = listener.sockets[0].getsockname()[1]
      yield f'http://{f"[{host}]" if ":" in host else host}:{bound_port}'
    finally:
      listener.close()
  finally:
    await runner.cleanup()
