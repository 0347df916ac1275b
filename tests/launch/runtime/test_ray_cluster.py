"""Ray, where a run starts its own."""

import os
import pathlib
import stat
import subprocess
import sys

import pytest

from launch.runtime import ray_runtime

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray')]
PROGRAM = """
from launch.runtime.ray_runtime import RayRuntime

host = RayRuntime()
print('nodes', len(host._ray.nodes()))
host._ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.extended
def test_another_cluster_is_neither_joined_nor_waited_for():
  """Not even one that Ray's own variable names, and that died."""
  env = {**os.environ, 'RAY_ADDRESS': '127.0.0.1:1', 'JAX_PLATFORMS': 'cpu'}
  result = subprocess.run(
    [sys.executable, '-c', PROGRAM], env=env, stdout=subprocess.PIPE, timeout=120
  )
  assert result.returncode == 0 and b'nodes 1' in result.stdout


NOBODY = 65534
# What another user can do, without the token and then with it.
INTRUDER = """
import os, sys

folder, address, user = sys.argv[1:]
from ray import _raylet  # before it changes: others may not reach this interpreter

os.setgroups([])
os.setgid(int(user))
os.setuid(int(user))
try:
  print('folder', os.listdir(folder))
except PermissionError:
  print('folder refused')

def keys():
  client = _raylet.GcsClient(address=address)
  return client.internal_kv_keys(b'', namespace=None, timeout=20)

try:
  print('keys', keys())
except Exception as error:
  print('keys refused:', type(error).__name__)
os.environ.update(RAY_AUTH_MODE='token', RAY_AUTH_TOKEN=input())
_raylet.Config.initialize('')
_raylet.AuthenticationTokenLoader.instance().reset_cache()
print('with token', b'session_name' in keys())
"""


@pytest.mark.skipif(os.getuid() != 0, reason='only root can become another user')
def test_other_users_neither_reach_it_nor_read_its_files(ray):
  from ray._private import worker

  env = {k: v for k, v in os.environ.items() if not k.startswith(('RAY_', 'HOME'))}
  folder = worker._global_node.get_session_dir_path()
  address = ray.get_runtime_context().gcs_address
  result = subprocess.run(
    [sys.executable, '-c', INTRUDER, folder, address, str(NOBODY)],
    env={**env, 'HOME': '/nonexistent'},
    input=os.environ['RAY_AUTH_TOKEN'],
    stdout=subprocess.PIPE,
    text=True,
    timeout=120,
  )
  assert result.stdout.splitlines() == [
    'folder refused',
    'keys refused: AuthenticationError',
    'with token True',
  ]


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, monkeypatch):
  monkeypatch.setenv('RAY_TMPDIR', str(tmp_path))
  session_root = ray_runtime._session_root()
  assert (
    session_root.parent == tmp_path
    and stat.S_IMODE(session_root.stat().st_mode) == 0o700
  )
  assert ray_runtime._session_root() == session_root
  session_root.chmod(0o755)
  with pytest.raises(PermissionError, match='RAY_TMPDIR'):
    ray_runtime._session_root()
  session_root.rmdir()
  session_root.symlink_to(pathlib.Path.home())
  with pytest.raises(PermissionError, match='RAY_TMPDIR'):
    ray_runtime._session_root()
