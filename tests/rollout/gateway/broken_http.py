"""Requests that are no HTTP, or whose headers promise another body, as raw bytes."""

import asyncio
import gzip
from urllib.parse import urlsplit

BODY = b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'


def requests(method, path, *headers):
  """The cases of a path: a name, the bytes, and the statuses that are right.

  Args:
    method: What the path answers.
    path: The path.
    *headers: What a request needs to be let in.
  """
  start = f'{method} {path} HTTP/1.1\r\n'
  own = ''.join(f'{header}\r\n' for header in headers)

  def whole(*more, body=BODY, length=True, host='127.0.0.1'):
    lines = [f'Host: {host}', *more]
    lines += [f'Content-Length: {len(body)}'] if length else []
    text = start + own + ''.join(f'{line}\r\n' for line in lines) + '\r\n'
    return text.encode('utf-8', 'surrogateescape') + body

  packed = gzip.compress(BODY)
  chunked = {'length': False}
  yield 'tls', b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n', (400,)
  yield 'words', b'hello\r\n\r\n', (400,)
  yield 'version', whole().replace(b'HTTP/1.1', b'HTTP/9.9'), (400,)
  yield 'no colon', whole('bad header'), (400,)
  yield 'nul', whole('X-A: a\0b'), (400,)
  yield 'long header', whole(f'X-A: {"a" * 20_000}'), (400,)
  yield 'many headers', whole(*(f'X-{i}: {"a" * 100}' for i in range(2000))), (400, 431)
  yield 'no number', whole('Content-Length: x', length=False), (400,)
  yield 'negative', whole('Content-Length: -1', length=False), (400,)
  yield 'two lengths', whole('Content-Length: 3'), (400,)
  yield 'chunks and length', whole('Transfer-Encoding: chunked'), (400,)
  yield 'chunk', whole('Transfer-Encoding: chunked', body=b'zz\r\nx', **chunked), (400,)
  yield 'expectation', whole('Expect: a pony'), (417,)
  for kind in ('gzip', 'deflate'):
    yield kind, whole(f'Content-Encoding: {kind}'), (400,)
  yield 'half of gzip', whole('Content-Encoding: gzip', body=packed[:-12]), (400,)
  yield 'path', whole().replace(path.encode(), b'*', 1), (400, 403, 404)
  yield 'method', whole().replace(method.encode(), b'BREW', 1), (400, 405)
  yield 'host', whole(host='['), (200, 400, 403, 404)


async def send(url, data):
  """Sends bytes on a connection of their own; returns the status and the rest."""
  parts = urlsplit(url)
  reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
  try:
    writer.write(data)
    async with asyncio.timeout(20):
      head = await reader.readuntil(b'\r\n\r\n')
    return int(head.split()[1]), head.decode('latin-1')
  finally:
    writer.close()


def check_log(records):
  """Fails for a traceback or an error."""
  for record in records:
    assert not record.exc_info and record.levelname != 'ERROR', record.getMessage()
