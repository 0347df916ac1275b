"""A stand-in for the Hugging Face Hub on loopback, for the real client to ask."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

TOKEN = 'hf_right'
ROOT = Path(__file__).parents[1]
_INFO = re.compile(
  r'/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/(.+?))?/?(?:\?.*)?'
)
_FILE = re.compile(r'/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+?)(?:\?.*)?')


@dataclasses.dataclass
class HubRepository:
  """What the stub holds under one name: files by revision, and who may read them."""

  files: dict[str, bytes]
  tags: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
  is_gated: bool = False
  is_private: bool = False

  def revisions(self) -> dict[str, dict[str, bytes]]:
    named = {'main': self.files, **self.tags}
    return named | {commit_of(files): files for files in named.values()}


def commit_of(files: dict[str, bytes]) -> str:
  return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class HubStub:
  """Serves repositories; `downloads` lists the files that were sent."""

  def __init__(self, cache: Path):
    self.models: dict[str, HubRepository] = {}
    self.datasets: dict[str, HubRepository] = {}
    self.downloads: list[str] = []
    self.status = 0  # that answers everything, if it is set
    self.url, self.cache = '', cache

  def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own, whose Hub is this one."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith('HF_')}
    settings = {'HF_ENDPOINT': self.url, 'HF_HOME': str(self.cache)}
    return subprocess.run(
      [sys.executable, *argv],
      env={**inherited, **settings, 'HF_HUB_DISABLE_XET': '1', **env},
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=240,
      check=False,
    )


@contextlib.contextmanager
def serve_hub(cache: Path) -> Iterator[HubStub]:
  """Serves a stub while the block runs.

  Args:
    cache: folder for what clients download.
  """
  stub = HubStub(cache)

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
      pass

    def do_HEAD(self):
      self.do_GET()

    def do_GET(self):
      status, headers, body = _answer(stub, self.path, self.headers, self.command)
      self.send_response(status)
      for name, value in {'Content-Length': str(len(body)), **headers}.items():
        self.send_header(name, value)
      self.end_headers()
      if self.command == 'GET':
        self.wfile.write(body)

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  stub.url = f'http://127.0.0.1:{server.server_port}'
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield stub
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


def _refusal(status: int, code: str = '') -> tuple[int, dict[str, str], bytes]:
  return status, {'X-Error-Code': code, 'X-Error-Message': code or 'refused'}, b'{}'


def _answer(stub, path, headers, command) -> tuple[int, dict[str, str], bytes]:
  """Answers as the Hub does: status, headers and body."""
  if stub.status:
    return _refusal(stub.status)
  info, file = _INFO.fullmatch(path), _FILE.fullmatch(path)
  if info:
    is_dataset, name, revision = info[1] == 'datasets', info[2], info[3] or 'main'
    path_inside = ''
  elif file:
    is_dataset, name, revision, path_inside = bool(file[1]), *file.groups()[1:]
  else:
    return _refusal(404)
  is_known = headers.get('Authorization') == f'Bearer {TOKEN}'
  repo = (stub.datasets if is_dataset else stub.models).get(name)
  if repo is None or (repo.is_private and not is_known):
    return _refusal(404 if is_known else 401, 'RepoNotFound')
  revision = revision.replace('%2F', '/')
  if revision not in repo.revisions():
    return _refusal(404, 'RevisionNotFound')
  files = repo.revisions()[revision]
  if info:
    siblings = [{'rfilename': name} for name in files]
    data = {'id': name, 'sha': commit_of(files), 'siblings': siblings}
    return 200, {'Content-Type': 'application/json'}, json.dumps(data).encode()
  if repo.is_gated and not is_known:
    return _refusal(403, 'GatedRepo')
  if path_inside not in files:
    return _refusal(404, 'EntryNotFound')
  content = files[path_inside]
  if command == 'GET':
    stub.downloads.append(path_inside)
  etag = hashlib.sha1(content).hexdigest()
  return 200, {'ETag': f'"{etag}"', 'X-Repo-Commit': commit_of(files)}, content
