"""A stand-in for MaxCompute's tunnel: its HTTP protocol, as pyodps speaks it.

Upload sessions are begun, take blocks and are committed. Rows are seen once committed.
"""

import contextlib
import http.server
import io
import json
import threading
import urllib.parse


class Service:
  """columns: name → type, of the one table. break_commit: how often the answer to a
  commit is lost: 'after' it is done, or 'before'.
  """

  def __init__(self, columns):
    self.columns = dict(columns)
    self.sessions, self.committed, self.requests = {}, [], []
    self.break_commit = []

  def rows(self):
    """What was committed, as pyodps reads it."""
    from odps.models import TableSchema
    from odps.tunnel.io.reader import TunnelRecordReader

    schema = TableSchema.from_lists(list(self.columns), list(self.columns.values()))
    records = []
    for upload_id in self.committed:
      for data in self.sessions[upload_id]['blocks'].values():
        reader = TunnelRecordReader(
          schema, lambda *_, data=data, **__: io.BytesIO(data)
        )
        records += [dict(record) for record in reader]
    return records

  def answer(self, method, query, body):
    """(status, JSON) of a request."""
    upload_id = query.get('uploadid')
    if method == 'POST' and 'uploads' in query:
      upload_id = f'up{len(self.sessions)}'
      self.sessions[upload_id] = {
        'partition': query.get('partition'), 'status': 'normal', 'blocks': {},
      }  # fmt: skip
    if upload_id not in self.sessions:
      return 404, {'Code': 'NoSuchUpload', 'Message': 'there is no such upload'}
    session = self.sessions[upload_id]
    if method == 'PUT':
      session['blocks'][int(query['blockid'])] = body
    elif method == 'POST' and 'uploads' not in query:
      lost = self.break_commit.pop(0) if self.break_commit else ''
      if lost != 'before' and session['status'] == 'normal':
        session['status'] = 'closed'
        self.committed.append(upload_id)
      if lost:
        return 403, {'Code': 'Lost', 'Message': 'the answer was lost'}
    columns = [{'name': n, 'type': t} for n, t in self.columns.items()]
    return 200, {
      'UploadID': upload_id,
      'Status': session['status'],
      'Schema': {
        'columns': columns,
        'partitionKeys': [{'name': 'ds', 'type': 'string'}],
      },
      'UploadedBlockList': [{'BlockID': b} for b in session['blocks']],
    }


@contextlib.contextmanager
def serve(columns):
  """A service, and its address."""
  service = Service(columns)

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def _answer(self):
      url = urllib.parse.urlsplit(self.path)
      query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
      service.requests.append((self.command, url.path, query))
      status, data = 404, {'Code': 'NoSuchTable', 'Message': 'there is no such table'}
      body = self._body()
      if not self.headers.get('Authorization'):
        status, data = 401, {'Code': 'Unauthorized', 'Message': 'not signed'}
      elif url.path.endswith('/projects/lab/tables/played'):
        status, data = service.answer(self.command, query, body)
      text = json.dumps(data).encode()
      self.send_response(status)
      self.send_header('Content-Type', 'application/json')
      self.send_header('Content-Length', str(len(text)))
      self.end_headers()
      self.wfile.write(text)

    do_GET = do_POST = do_PUT = _answer

    def _body(self):
      if self.headers.get('Transfer-Encoding') != 'chunked':
        return self.rfile.read(int(self.headers.get('Content-Length') or 0))
      parts = []
      while size := int(self.rfile.readline(), 16):
        parts.append(self.rfile.read(size))
        self.rfile.readline()
      self.rfile.readline()
      return b''.join(parts)

    def log_message(self, *args):
      pass

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
  thread.start()
  try:
    yield service, f'http://127.0.0.1:{server.server_port}'
  finally:
    server.shutdown()
    server.server_close()
    thread.join()
