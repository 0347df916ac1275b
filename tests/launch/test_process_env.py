"""The launcher's own tuning."""

import os
import subprocess
import sys

import psutil
import pytest

from kernels.native.kept_blocks import IDLE_BYTES
from launch.runtime import process_env
from tests.marks import NEEDS_COMPILER


@pytest.fixture
def env(tmp_path, monkeypatch):
  monkeypatch.setattr(process_env.platform, 'libc_ver', lambda: ('glibc', '2.36'))
  return {'XDG_CACHE_HOME': str(tmp_path), 'PATH': ''}


@NEEDS_COMPILER
def test_it_adds_malloc_and_the_cache(env, tmp_path):
  added = process_env.missing_variables(env)
  assert process_env.MALLOC.items() <= added.items()
  assert int(added[process_env.THRESHOLD]) == 32 << 20
  share = process_env.IDLE_SHARE * psutil.virtual_memory().total
  assert 0 < int(added[IDLE_BYTES]) <= min(share, 4 << 30)
  assert os.path.exists(added[process_env.LIBRARY])
  assert added[process_env.CACHE_DIR].startswith(str(tmp_path / 'jaxrl' / 'xla-'))
  assert os.stat(added[process_env.CACHE_DIR]).st_mode & 0o077 == 0
  assert process_env.missing_variables({**env, **added}) == {}
  told = process_env.describe({**env, **added})
  assert 'large blocks of memory kept' in told and 'compiled programs cached' in told


def test_without_a_compiler_blocks_stay_in_the_heap_if_they_are_not_too_large(
  env, monkeypatch, tmp_path
):
  monkeypatch.setenv('PATH', str(tmp_path))
  added = process_env.missing_variables(env)
  assert process_env.LIBRARY not in added
  share = process_env.HEAP_SHARE * psutil.virtual_memory().total
  assert 32 << 20 <= int(added[process_env.THRESHOLD]) <= max(share, 32 << 20)
  assert process_env.PRELOAD not in process_env.tuned(env)
  told = process_env.describe({**env, **added})
  assert 'malloc keeps blocks (its library needs a C compiler' in told


@NEEDS_COMPILER
def test_a_library_that_is_gone_is_built_again(env):
  gone = {**env, process_env.LIBRARY: '/gone.so'}
  with process_env.preloading(gone):
    assert 'LD_PRELOAD' not in gone
  assert os.path.exists(process_env.missing_variables(gone)[process_env.LIBRARY])


@NEEDS_COMPILER
def test_what_a_user_loads_before_libc_stays(env):
  tuned = process_env.tuned({**env, 'LD_PRELOAD': 'libz.so.1'})
  library = tuned[process_env.LIBRARY]
  assert tuned['LD_PRELOAD'] == f'libz.so.1:{library}'
  with process_env.preloading(tuned):
    assert tuned['LD_PRELOAD'] == f'libz.so.1:{library}'
  off = {'JAXRL_TUNE': '0', process_env.LIBRARY: library}
  with process_env.preloading(off):
    assert 'LD_PRELOAD' not in off


def test_what_the_user_set_stays(env):
  added = process_env.missing_variables(
    {**env, 'MALLOC_ARENA_MAX': '8', process_env.CACHE_DIR: '/c'}
  )
  assert 'MALLOC_ARENA_MAX' not in added and process_env.CACHE_DIR not in added


def test_it_can_be_told_not_to(env):
  assert process_env.missing_variables({**env, 'JAXRL_TUNE': '0'}) == {}
  assert process_env.describe({'JAXRL_TUNE': '0'}) == 'off (JAXRL_TUNE=0)'


def test_no_malloc_settings_without_glibc_and_no_cache_without_a_place(
  env, monkeypatch
):
  monkeypatch.setattr(process_env.platform, 'libc_ver', lambda: ('', ''))
  monkeypatch.setattr(process_env, '_writable', lambda folder: False)
  assert process_env.missing_variables(env) == {}
  assert 'no compilation cache' in process_env.describe({})


LINUX = pytest.mark.skipif(not sys.platform.startswith('linux'), reason='glibc')


def run(code: str, *arguments: str, **variables: str) -> str:
  """What a program prints, of a user who has set these variables alone."""
  ours = ('MALLOC_', 'JAXRL_', 'LD_PRELOAD')
  clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
  done = subprocess.run(
    [sys.executable, '-c', code, *arguments],
    env=clean | variables,
    capture_output=True,
    text=True,
    check=True,
  )
  assert not done.stderr
  return done.stdout


@LINUX
def test_a_program_runs_anew_once_with_the_same_arguments(env):
  code = (
    'from launch.runtime import process_env\n'
    'print("start", flush=True); process_env.apply()\n'
    'import os, sys; print(sys.argv[1:], os.environ["MALLOC_ARENA_MAX"])'
  )
  cache = env['XDG_CACHE_HOME']
  lines = run(code, 'a b', '--config.x=1', XDG_CACHE_HOME=cache).splitlines()
  assert lines == ['start', 'start', "['a b', '--config.x=1'] 1"]


@LINUX
@NEEDS_COMPILER
@pytest.mark.parametrize('preload', ['', 'libz.so.1'])
def test_the_library_is_loaded_by_the_program_and_not_by_what_it_starts(env, preload):
  maps = 'print("blocks-" in open("/proc/self/maps").read(), flush=True)'
  code = (
    'from launch.runtime import process_env\n'
    'process_env.apply()\n'
    f'import os, subprocess, sys; {maps}\n'
    'print(os.environ.get("LD_PRELOAD", ""), flush=True)\n'
    f'subprocess.run([sys.executable, "-c", {maps!r}], check=True)\n'
    # Another program of this package does load it.
    f'if len(sys.argv) == 1: subprocess.run([*sys.orig_argv, "-"], check=True)'
  )
  given = {'LD_PRELOAD': preload} if preload else {}
  lines = run(code, XDG_CACHE_HOME=env['XDG_CACHE_HOME'], **given).splitlines()
  assert lines == 2 * ['True', preload, 'False']
