"""A Postgres server of this machine's programs, with nothing of it left at its end."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import time
from importlib import util

PROGRAMS = ('initdb', 'postgres', 'createdb')
START_S = 60
NOBODY = 65534  # Postgres refuses to run as root


def unsupported_reason():
  """Why no server can be started here; '' if one can."""
  if missing := [name for name in PROGRAMS if _program(name) is None]:
    return f'{", ".join(missing)} of Postgres is not installed'
  if util.find_spec('psycopg') is None:
    return 'psycopg is not installed'
  return ''


def _program(name):
  folders = map(str, pathlib.Path('/usr/lib/postgresql').glob('*/bin'))
  return shutil.which(name, path=os.pathsep.join([*folders, os.environ['PATH']]))


@contextlib.contextmanager
def server(port, address='127.0.0.1', on=list):
  """Starts a server.

  Args:
    port: The port it listens on.
    address: The address it listens on.
    on: Makes the command that runs another one on the server's host.

  Yields:
    A function that creates a database of a name and returns its URL.
  """
  where = f'--host={address}', f'--port={port}', '--username=me'
  folder, prefix = f'/tmp/postgres-{os.getpid()}-{port}', []
  if os.geteuid() == 0:
    prefix = ['setpriv', f'--reuid={NOBODY}', f'--regid={NOBODY}', '--clear-groups']

  def run(*command):
    return subprocess.run(on([*command]), capture_output=True).returncode

  try:
    made = run(*prefix, _program('initdb'), '-D', folder, '-A', 'trust', '-U', 'me')
    assert not made
    rule = f'echo host all all {address}/24 trust >> {folder}/pg_hba.conf'
    assert not run('sh', '-c', rule)
    options = '-D', folder, '-k', folder, '-p', str(port), '-h', address
    process = subprocess.Popen(
      on([*prefix, _program('postgres'), *options]), stderr=subprocess.DEVNULL
    )

    def create(name):
      end = time.monotonic() + START_S
      while run(_program('createdb'), *where, name):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
      return f'postgresql+psycopg://me@{address}:{port}/{name}'

    try:
      yield create
    finally:
      process.send_signal(signal.SIGINT)  # without waiting for clients to leave
      try:
        process.wait(START_S)
      except subprocess.TimeoutExpired:  # its checkpoint may wait for a busy disk
        process.kill()
        process.wait()
  finally:
    run('rm', '-rf', '--', folder)
