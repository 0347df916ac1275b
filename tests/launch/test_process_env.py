"""The launcher's own tuning."""

import os
import subprocess
import sys

import psutil
import pytest

from launch.runtime import process_env


@pytest.fixture
def env(tmp_path, monkeypatch):
  monkeypatch.setattr(process_env.platform, 'libc_ver', lambda: ('glibc', '2.36'))
  return {'XDG_CACHE_HOME': str(tmp_path), 'PATH': ''}


def test_it_adds_malloc_and_the_cache(env, tmp_path):
  added = process_env.missing_variables(env)
  assert process_env.MALLOC.items() <= added.items()
  share = process_env.MEMORY_SHARE * psutil.virtual_memory().total
  assert 0 < int(added[process_env.THRESHOLD]) <= min(share, 4 << 30)
  assert added[process_env.CACHE_DIR].startswith(str(tmp_path / 'jaxrl' / 'xla-'))
  assert os.stat(added[process_env.CACHE_DIR]).st_mode & 0o077 == 0
  assert process_env.missing_variables({**env, **added}) == {}
  assert 'compiled programs cached' in process_env.describe({**env, **added})


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


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='glibc')
def test_a_program_runs_anew_once_with_the_same_arguments(env):
  code = (
    'from launch.runtime import process_env\n'
    'print("start", flush=True); process_env.apply()\n'
    'import os, sys; print(sys.argv[1:], os.environ["MALLOC_ARENA_MAX"])'
  )
  clean = {k: v for k, v in os.environ.items() if not k.startswith('MALLOC_')}
  clean.pop(process_env.REEXEC_FLAG, None)
  ran = subprocess.run(
    [sys.executable, '-c', code, 'a b', '--config.x=1'],
    env={**clean, 'XDG_CACHE_HOME': env['XDG_CACHE_HOME']},
    capture_output=True,
    text=True,
  )
  lines = ran.stdout.splitlines()
  assert lines == ['start', 'start', "['a b', '--config.x=1'] 1"], ran.stderr
