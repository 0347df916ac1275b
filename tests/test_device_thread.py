"""Memory that was freed between blocks in use is given back to the system."""

import platform
import subprocess
import sys
import textwrap

import pytest

from jaxrl import device_thread


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='trims the heap of glibc')
def test_a_heap_with_holes_is_trimmed():
  program = """
    import ctypes
    from jaxrl.device_thread import trim_heap
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    def held():
      return int(open('/proc/self/statm').read().split()[1]) * 4096 >> 20
    blocks = [libc.malloc(60_000) for _ in range(4000)]
    for p in blocks:
      ctypes.memset(p, 1, 60_000)
    for i, p in enumerate(blocks):
      if i % 8:
        libc.free(p)
    before = held()
    trim_heap()
    assert before - held() > 150, (before, held())
  """
  subprocess.run([sys.executable, '-c', textwrap.dedent(program)], check=True)


def test_another_c_library_is_left_alone(monkeypatch):
  monkeypatch.setattr(device_thread.ctypes, 'CDLL', lambda _: object())
  device_thread.trim_heap()
