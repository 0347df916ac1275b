"""Native kernels are compiled once, and what prevents it is said."""

import functools
import itertools
import os
import platform
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from kernels.native import compiler, kept_blocks, library, row_product
from tests.marks import NEEDS_COMPILER
from tests.processes import obeying_modes

pytestmark = NEEDS_COMPILER
SOURCES = (*library.SOURCES, kept_blocks.SOURCE)
# By the program that a name stands for: cc is one of the others.
COMPILERS = {
  os.path.realpath(path): name
  for name in ('cc', 'gcc', 'clang')
  if (path := shutil.which(name))
}


@pytest.mark.parametrize('name', COMPILERS.values())
def test_it_compiles_without_a_warning(name, tmp_path):
  options = [['-mcpu=native']]
  if platform.machine() == 'x86_64':
    options = [[f'-march={one}'] for one in ('native', 'x86-64-v3', 'x86-64-v4')]
    # Without AVX, how a function returns 32 bytes is said to vary; all are inlined.
    options.append(['-march=x86-64', '-Wno-psabi'])
  for source, option in itertools.product(SOURCES, options):
    flags = ['-std=gnu11', '-O3', '-Wall', '-Wextra', '-Werror', *option, '-fPIC', '-c']
    command = [name, *flags, f'-I{jax.ffi.include_dir()}', str(source)]
    done = subprocess.run(
      [*command, '-o', str(tmp_path / 'kernel.o')],
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
    )
    assert done.returncode == 0 and not done.stderr, (source, option, done.stderr)


def test_a_compiler_is_all_that_it_needs():
  assert library.obstacle() == ''


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
  """A process that has not built the kernel, of a user who never has."""
  unregistered = library._registered.__wrapped__
  monkeypatch.setattr(library, '_registered', unregistered)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return monkeypatch


def test_without_a_compiler_it_says_so(unbuilt, tmp_path):
  unbuilt.setenv('PATH', str(tmp_path))
  unbuilt.delenv('CC', raising=False)
  missing = 'needs a C compiler (cc, gcc, clang or $CC), and finds none'
  assert row_product.obstacle('cpu') == missing
  unbuilt.setenv('CC', 'some-compiler')
  assert row_product.obstacle('cpu') == missing
  with pytest.raises(OSError, match='needs a C compiler'):
    row_product.pack(jnp.zeros((2, 2)))
  assert not (tmp_path / 'cache').exists()


def test_a_compiler_that_fails_is_named(unbuilt, tmp_path):
  unbuilt.setenv('CC', 'false')
  assert row_product.obstacle('cpu').startswith(
    f'is not compiled by {shutil.which("false")}'
  )
  failing = tmp_path / 'failing'
  failing.write_text('#!/bin/sh\necho "no such processor" >&2\nexit 1\n')
  failing.chmod(0o700)
  unbuilt.setenv('CC', f'{failing} --some-option')
  assert (
    row_product.obstacle('cpu') == f'is not compiled by {failing}: no such processor'
  )
  assert list((tmp_path / 'cache' / 'jaxrl').iterdir()) == []


def test_a_compiler_that_fails_is_tried_once(unbuilt, tmp_path):
  tried = tmp_path / 'tried'
  failing = tmp_path / 'failing'
  failing.write_text(f'#!/bin/sh\necho >> {tried}\nprintf "\\377" >&2\nexit 1\n')
  failing.chmod(0o700)
  unbuilt.setenv('CC', str(failing))
  unbuilt.setattr(library, '_registered', functools.cache(library._registered))
  said = {row_product.obstacle('cpu') for _ in range(3)}
  assert said == {f'is not compiled by {failing}: \ufffd'}
  assert tried.read_text() == '\n'


def test_a_command_that_is_not_one_is_named(unbuilt):
  unbuilt.setenv('CC', "gcc 'open")
  assert row_product.obstacle('cpu').startswith(
    'needs a C compiler, and CC="gcc \'open"'
  )


def test_options_of_a_missing_compiler_are_not_for_another(unbuilt):
  unbuilt.delenv('CC', raising=False)
  expected = compiler._compiler()
  unbuilt.setenv('CC', 'some-compiler --some-option')
  assert compiler._compiler() == expected
  unbuilt.setenv('CC', f'{expected[0]} --some-option')
  assert compiler._compiler() == [*expected, '--some-option']


def test_a_compiler_that_hangs_is_ended(unbuilt, tmp_path):
  hanging = tmp_path / 'hanging'
  hanging.write_text('#!/bin/sh\nexec sleep 60\n')
  hanging.chmod(0o700)
  unbuilt.setenv('CC', str(hanging))
  unbuilt.setattr(compiler, 'COMPILE_TIMEOUT_S', 0.2)
  assert row_product.obstacle('cpu').startswith(f'took {hanging} over')


def test_a_cache_that_is_a_file_is_named(unbuilt, tmp_path):
  (tmp_path / 'cache').write_text('')
  assert str(tmp_path / 'cache') in row_product.obstacle('cpu')
  (tmp_path / 'cache').unlink()
  (tmp_path / 'cache').mkdir()
  (tmp_path / 'cache' / 'jaxrl').write_text('')
  assert str(tmp_path / 'cache' / 'jaxrl') in row_product.obstacle('cpu')


@pytest.mark.parametrize('folder', ['cache', 'cache/jaxrl'])
def test_a_cache_that_is_read_only_is_named(folder, tmp_path):
  closed = tmp_path / folder
  closed.mkdir(parents=True)
  closed.chmod(0o500)
  program = "from kernels.native import row_product; print(row_product.obstacle('cpu'))"
  said = subprocess.check_output(
    obeying_modes([sys.executable, '-c', program]),
    env=os.environ | {'XDG_CACHE_HOME': str(tmp_path / 'cache')},
    text=True,
    timeout=120,
  )
  assert 'Permission denied' in said and str(closed) in said


def test_it_is_compiled_once_for_a_user(unbuilt, tmp_path):
  built = library._built('native')
  assert built.parent == tmp_path / 'cache' / 'jaxrl'
  assert list(built.parent.iterdir()) == [built]

  def fail(*arguments):
    raise AssertionError(f'compiles again: {arguments}')

  unbuilt.setattr(compiler, '_compile', fail)
  assert library._built('native') == built
  with pytest.raises(AssertionError, match='compiles again'):  # for another compiler
    other = tmp_path / 'other'
    other.symlink_to(shutil.which(compiler._compiler()[0]))
    unbuilt.setenv('CC', str(other))
    library._built('native')


def test_the_cache_is_at_home_if_not_elsewhere(unbuilt, tmp_path):
  unbuilt.delenv('XDG_CACHE_HOME')
  unbuilt.setenv('HOME', str(tmp_path))
  unbuilt.setattr(compiler, '_compile', lambda command, to: to.write_text('built'))
  assert library._built('native').parent == tmp_path / '.cache' / 'jaxrl'
