"""Hostile programs: none gets out of the sandbox, whatever creates it."""

import ctypes
import platform
import re
import subprocess
import sys

import pytest

from jaxrl.envs.sandbox import seccomp_filter
from jaxrl.envs.sandbox.local_sandbox import PYTHON_PATH, LocalSandbox
from tests.chaos import sandbox
from tests.envs.sandbox.test_local_sandbox import isolations

# Those that end by themselves, and at once.
QUICK = [
  name for name in sandbox.PROGRAMS if re.search('key|vsock|socket|io_uring', name)
]


@pytest.fixture(params=isolations())
def isolation(request):
  return request.param


@pytest.fixture(autouse=True)
def planted(monkeypatch):
  monkeypatch.setenv(sandbox.SECRET, '')  # removed at the end
  sandbox.plant_secrets()


def outside(code):
  command = [sys.executable, '-I', '-c', code]
  return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_what_leads_out_is_refused(isolation):
  """In one sandbox, as each takes its time to start."""
  programs = {name: sandbox.PROGRAMS[name] for name in QUICK}
  code = f"""
import os, sys
for name, code in {programs!r}.items():
  print(name, flush=True)
  if os.fork() == 0:
    try:
      exec(code, {{}})
    finally:
      sys.stdout.flush()
      os._exit(0)
  os.wait()
print('all ran')
"""
  box = LocalSandbox(isolation=isolation)
  box.start()
  output = box.exec([PYTHON_PATH, '-I', '-c', code]).text
  box.stop()
  assert len(QUICK) == 10 and output.endswith('all ran\n')
  assert sandbox.ESCAPED not in output


@pytest.mark.parametrize(
  'name', ['asks for a key of the user', 'reads every key', 'lists the names of keys']
)
def test_outside_the_caller_can_read_its_keys(name):
  if ctypes.CDLL(None).syscall(sandbox.KEYCTL, 0, -3, 0) < 0:
    pytest.skip('the kernel has no keyrings, or refuses them')
  assert sandbox.ESCAPED in outside(sandbox.PROGRAMS[name])


def test_the_session_keyring_is_new_even_without_the_filter(
  isolation, tmp_path, monkeypatch
):
  allow_all = (0x7FFF0000).to_bytes(4, 'little')
  monkeypatch.setattr(
    seccomp_filter, 'seccomp_program', lambda: b'\x06\0\0\0' + allow_all
  )
  (tmp_path / 'mark').write_text('whole')
  program = sandbox.PROGRAMS['asks for a key of the user']
  assert not sandbox.attempt(program, tmp_path / 'mark', isolation)
  # The filter is indeed off.
  io_uring = sandbox.PROGRAMS['sets up an io_uring']
  if sandbox.ESCAPED in outside(io_uring):
    assert sandbox.attempt(io_uring, tmp_path / 'mark', isolation)


def test_the_machine_code_of_i386_works():
  """Else the programs that use it would show nothing."""
  if platform.machine() != 'x86_64':
    pytest.skip('only x86-64 runs calls of i386')
  output = outside(f'{sandbox.I386}\nprint(call(359, 1, 1, 0), call(20, 0, 0, 0))')
  assert not output or int(output.split()[0]) >= 0  # else the kernel has no such calls


@pytest.mark.slow
@pytest.mark.parametrize('name', sandbox.PROGRAMS)
def test_no_program_gets_out(name, isolation, tmp_path):
  (tmp_path / 'mark').write_text('whole')
  program = sandbox.PROGRAMS[name]
  assert not sandbox.attempt(program, tmp_path / 'mark', isolation, seconds=2)


@pytest.mark.parametrize('machine', ['x86_64', 'aarch64'])
def test_the_filter_by_hand(machine):
  """Interprets the filter for every call and family that matters, on any machine."""
  program = seccomp_filter.seccomp_program(machine)
  assert len(program) % 8 == 0
  first, second = seccomp_filter._CALLS[machine]
  for architecture, socket_call, refused in (first, second):
    for number in refused:
      assert _run(program, architecture, number, 2) == 0x50000 | 38  # ENOSYS
    for family in (1, 2, 10, 16):
      assert _run(program, architecture, socket_call, family) == 0x7FFF0000
    for family in (0, 3, 9, 11, 15, 17, 38, 40, 45):
      assert _run(program, architecture, socket_call, family) == 0x50000 | 97
    for number in (0, 1, 60, 231, 435):
      assert _run(program, architecture, number, 40) == 0x7FFF0000
  assert _run(program, 0xC0000015, 1, 2) == 0x50000 | 38  # of no architecture here
  if machine == 'x86_64':
    assert _run(program, first[0], 0x40000000 | 41, 40) == 0x50000 | 38  # x32
  assert seccomp_filter.seccomp_program('sparc') == b''


def _run(program, architecture, number, argument):
  words = {0: number, 4: architecture, 16: argument}
  place = word = 0
  while True:
    code = int.from_bytes(program[place : place + 2], 'little')
    if_true, if_false = program[place + 2 : place + 4]
    value = int.from_bytes(program[place + 4 : place + 8], 'little')
    place += 8
    if code == 0x06:
      return value
    if code == 0x20:
      word = words[value]
    else:
      holds = word == value if code == 0x15 else word >= value
      place += 8 * (if_true if holds else if_false)
