"""The launcher's own tuning."""

import inspect
import os
import subprocess
import sys
import warnings

import jax
import pytest
from jax._src import compilation_cache

from launch.runtime import process_env
from tests.processes import full_disk


@pytest.fixture
def env(tmp_path, monkeypatch):
  monkeypatch.setattr(process_env.platform, 'libc_ver', lambda: ('glibc', '2.36'))
  return {'XDG_CACHE_HOME': str(tmp_path), 'PATH': ''}


def test_it_adds_malloc_and_the_cache(env, tmp_path):
  added = process_env.missing_variables(env)
  assert process_env.MALLOC.items() <= added.items()
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
  clean = {k: v for k, v in os.environ.items() if k not in process_env.MALLOC}
  clean.pop(process_env.REEXEC_FLAG, None)
  ran = subprocess.run(
    [sys.executable, '-c', code, 'a b', '--config.x=1'],
    env={**clean, 'XDG_CACHE_HOME': env['XDG_CACHE_HOME']},
    capture_output=True,
    text=True,
  )
  lines = ran.stdout.splitlines()
  assert lines == ['start', 'start', "['a b', '--config.x=1'] 1"], ran.stderr


@pytest.fixture
def cached(tmp_path, monkeypatch):
  """JAX with a compilation cache of its own; its folder."""
  names = [
    'jax_enable_compilation_cache',
    'jax_compilation_cache_dir',
    *(name.lower() for name in process_env.CACHE),
  ]
  old = {name: getattr(jax.config, name) for name in names}
  for name in ('get_executable_and_time', 'put_executable_and_time'):
    function = inspect.unwrap(getattr(compilation_cache, name))
    monkeypatch.setattr(compilation_cache, name, function)
  for name, value in zip(names, (True, str(tmp_path), 0, 0), strict=True):
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield tmp_path
  for name, value in old.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.mark.parametrize('damage', [lambda data: data[: len(data) // 2], lambda _: b''])
def test_a_damaged_cache_entry_is_replaced_without_a_word(cached, damage):
  def compute():
    return float(jax.jit(lambda x: x * 3 + 1)(2.0))  # a new function each time

  assert compute() == 7
  entries = {path: path.read_bytes() for path in cached.glob('*-cache')}
  assert entries
  for path, data in entries.items():
    path.write_bytes(damage(data))
  with pytest.warns(UserWarning, match='compilation cache'):  # what JAX does by itself
    assert compute() == 7
  for _ in range(2):
    process_env.guard_compilation_cache()
  for _ in range(2):
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      assert compute() == 7
  # They differ in the seconds that compiling took, if at all.
  sizes = {path: path.stat().st_size for path in entries}
  assert all(abs(sizes[path] - len(data)) < 64 for path, data in entries.items())


def test_a_full_disk_is_told_once_and_leaves_no_entry(cached, caplog):
  process_env.guard_compilation_cache()
  with warnings.catch_warnings(), full_disk(100):
    warnings.simplefilter('error')
    outputs = [float(jax.jit(lambda x, n=n: x * 3 + n)(2.0)) for n in range(3)]
  assert outputs == [6, 7, 8] and not list(cached.glob('*-cache'))
  (line,) = caplog.messages
  assert line.startswith('compiled programs are not cached: ') and 'too large' in line
