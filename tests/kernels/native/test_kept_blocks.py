"""Freed blocks are kept for the next program, and no more of them than were in use."""

import functools
import os
import platform
import subprocess
import sys
import textwrap

import pytest

from kernels.native import kept_blocks
from tests.marks import NEEDS_COMPILER

pytestmark = [
  NEEDS_COMPILER,
  pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='replaces glibc malloc'),
]
BEGIN = """
  import ctypes, errno, os, resource, threading
  libc = ctypes.CDLL(None)
  P, Z = ctypes.c_void_p, ctypes.c_size_t
  libc.malloc.restype, libc.malloc.argtypes = P, [Z]
  libc.aligned_alloc.restype, libc.aligned_alloc.argtypes = P, [Z, Z]
  libc.realloc.restype, libc.realloc.argtypes = P, [P, Z]
  libc.reallocarray.restype, libc.reallocarray.argtypes = P, [P, Z, Z]
  libc.free.restype, libc.free.argtypes = None, [P]
  libc.malloc_usable_size.restype, libc.malloc_usable_size.argtypes = Z, [P]
  libc.posix_memalign.argtypes = [ctypes.POINTER(P), Z, Z]
  MIB = 1 << 20
  def aligned(mib, alignment=64):
    p = P()
    assert libc.posix_memalign(ctypes.byref(p), alignment, mib * MIB) == 0
    assert p.value % alignment == 0
    return p.value
  def touch(p, mib, byte=1):
    ctypes.memset(p, byte, mib * MIB)
    return p
  def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  def held():
    return int(open('/proc/self/statm').read().split()[1]) * 4096 // MIB
"""


def run(program: str, **variables: str) -> str:
  """What a program prints that has loaded the library."""
  program = textwrap.dedent(BEGIN) + textwrap.dedent(program)
  env = os.environ | {'LD_PRELOAD': str(_library())} | variables
  done = subprocess.run(
    [sys.executable, '-c', program],
    env=env,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@functools.cache
def _library() -> str:
  return str(kept_blocks.build())


@pytest.mark.parametrize(
  'take',
  ['aligned(64)', 'libc.malloc(64 * MIB)', 'libc.aligned_alloc(4096, 64 * MIB)'],
)
def test_a_freed_block_serves_the_next_request_of_its_size(take):
  run(f"""
    first = touch({take}, 64)
    libc.free(first)
    before = faults()
    for _ in range(10):
      again = touch({take}, 64)
      assert again == first
      libc.free(again)
    assert faults() - before < 50, faults() - before
    a_bit_less = aligned(60)
    assert a_bit_less == first
    other = aligned(60)  # the block is in use
    assert other != first
    libc.free(a_bit_less)
    assert aligned(32) != first  # would waste half of it
  """)


def test_blocks_never_hold_more_than_was_in_use_once():
  run("""
    start = held()
    libc.free(touch(aligned(400), 400))
    assert 390 < held() - start < 410
    for size in (50, 100, 150, 200, 250, 300, 350, 120, 80):
      p = touch(aligned(size), size)
      assert held() - start < 410, (size, held() - start)
      libc.free(p)
    first, second = aligned(300), aligned(300)
    touch(first, 300), touch(second, 300)
    libc.free(first), libc.free(second)
    assert 590 < held() - start < 610
    before = faults()
    a = touch(aligned(40), 40)  # only the excess of the oldest is given back
    first, second = touch(aligned(270), 270), touch(aligned(270), 270)
    assert faults() - before < 256 * 120, faults() - before
  """)


@pytest.mark.parametrize(
  'take',
  ['aligned(4)', 'libc.malloc(4 * MIB)', 'libc.aligned_alloc(4096, 4 * MIB)'],
)
def test_a_medium_block_that_was_freed_last_is_taken_first(take):
  run(f"""
    lower, upper = sorted({take} for _ in range(2))
    libc.free(lower), libc.free(upper)
    assert {take} == upper
    assert {take} == lower
    libc.free(lower), libc.free(upper)
    assert libc.malloc(2 * MIB) not in (lower, upper)  # would waste half of it
    assert libc.malloc(4 * MIB - MIB // 4) == upper
  """)


def test_a_medium_block_has_the_alignment_that_was_asked_for():
  run("""
    blocks = [libc.malloc(MIB + i) for i in range(16)]
    assert any(p % 4096 for p in blocks)
    for p in blocks:
      libc.free(p)
    for _ in range(16):
      aligned(1, 4096)  # asserts it
    blocks = [aligned(1) for _ in range(16)]
    assert len(set(blocks)) == 16
  """)


@pytest.mark.parametrize(('count', 'kib', 'most_mib'), [(100, 1024, 16), (300, 64, 5)])
def test_few_medium_blocks_are_kept_from_glibc(count, kib, most_mib):
  run(
    f"""
    class Heap(ctypes.Structure):
      _fields_ = [(name, Z) for name in 'arena ordblks smblks hblks hblkhd usmblks '
                  'fsmblks uordblks fordblks keepcost'.split()]
    libc.mallinfo2.restype = Heap
    before = libc.mallinfo2().uordblks
    blocks = [libc.malloc({kib} * 1024) for _ in range({count})]
    for p in blocks:
      libc.free(p)
    kept = libc.mallinfo2().uordblks - before
    assert {most_mib} * MIB // 2 < kept <= {most_mib} * MIB, kept
    assert [libc.malloc({kib} * 1024) for _ in range(10)] == blocks[:-11:-1]
    """,
    MALLOC_MMAP_THRESHOLD_=str(32 << 20),
  )


def test_a_medium_block_that_is_freed_twice_ends_the_process():
  run("""
    import signal
    p = libc.malloc(MIB)
    if not (child := os.fork()):
      resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
      libc.free(p), libc.free(p)
      os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGABRT
  """)


def test_only_so_many_idle_bytes_stay():
  run(
    """
    start = held()
    blocks = [touch(aligned(100), 100) for _ in range(5)]
    for p in blocks:
      libc.free(p)
    assert 120 < held() - start < 160, held() - start
    """,
    JAXRL_IDLE_BYTES=str(150 << 20),
  )


def test_blocks_are_moved_shrunk_and_measured():
  run("""
    p = libc.malloc(64 * MIB)
    ctypes.memset(p, 7, 64 * MIB)
    assert libc.malloc_usable_size(p) == 64 * MIB
    assert libc.realloc(p, 60 * MIB) == p
    q = libc.realloc(p, 128 * MIB)
    assert q != p and ctypes.string_at(q + 60 * MIB - 4, 4) == bytes([7] * 4)
    q = libc.reallocarray(q, 3, MIB // 1024)  # becomes a small one
    assert ctypes.string_at(q, 4) == bytes([7] * 4)
    assert libc.malloc_usable_size(q) < MIB
    q = libc.reallocarray(q, 40, MIB)  # and a large one again
    assert ctypes.string_at(q, 4) == bytes([7] * 4)
    libc.free(q)
    small = libc.malloc(100)
    assert 100 <= libc.malloc_usable_size(small) < 1000
    libc.free(small), libc.free(None)
    assert libc.posix_memalign(ctypes.byref(P()), 24, 64 * MIB) == errno.EINVAL
    page = aligned(1, 4 * MIB)  # begins where a block could, but is none
    libc.free(page)
    assert aligned(64, 16 * MIB)
  """)


def test_a_block_that_grows_in_small_steps_is_seldom_copied():
  run("""
    p, moves = libc.malloc(40 * MIB), 0
    ctypes.memset(p, 7, 40 * MIB)
    for size in range(41, 400):
      q = libc.realloc(p, size * MIB)
      p, moves = q, moves + (q != p)
    assert moves < 25, moves
    assert ctypes.string_at(p + 40 * MIB - 4, 4) == bytes([7] * 4)
    assert libc.realloc(p, (1 << 64) - 1) is None  # and keeps the block
    assert ctypes.string_at(p, 4) == bytes([7] * 4)
  """)


def test_what_does_not_fit_into_memory_is_refused():
  run("""
    idle = touch(aligned(256), 256)
    libc.free(idle)
    size = int(open('/proc/self/statm').read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (size + 100 * MIB, -1))
    p = aligned(300)  # there is room once the idle block is given back
    touch(p, 300)
    assert libc.malloc(1 << 40) is None and libc.malloc((1 << 64) - 1) is None
    assert libc.posix_memalign(ctypes.byref(P()), 64, 1 << 40) == errno.ENOMEM
  """)


def test_threads_and_forked_children_get_blocks_of_their_own():
  run("""
    import random
    def work(seed):
      draw = random.Random(seed)
      for _ in range(60):
        size = draw.choice([draw.randint(1, 8), draw.randint(32, 48)])
        p = aligned(size)
        ctypes.memset(p, seed, MIB)
        ctypes.memset(p + size * MIB - 8, seed, 8)
        assert ctypes.string_at(p, 8) == ctypes.string_at(p + size * MIB - 8, 8)
        assert ctypes.string_at(p, 1) == bytes([seed])
        libc.free(p)
    failed = []
    threading.excepthook = lambda arguments: failed.append(arguments.exc_value)
    threads = [threading.Thread(target=work, args=[seed]) for seed in range(1, 9)]
    for thread in threads: thread.start()
    for _ in range(5):
      if not (child := os.fork()):
        libc.free(aligned(64))
        os._exit(0)
      assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for thread in threads: thread.join()
    assert not failed, failed
  """)


def test_numpy_and_programs_compute_what_they_compute_without_it():
  program = """
    import hashlib, jax, jax.numpy as jnp, numpy as np
    x = np.random.default_rng(0).standard_normal((3000, 4000), np.float32)
    y = jax.jit(lambda x: jnp.sin(x @ x.T).cumsum(0))(x)
    for size in (9_000_000, 30_000_000, 12_000_000):
      x = np.resize(x, size).copy()
      x.resize(size * 2, refcheck=False)
    print(hashlib.sha256(np.asarray(y)).hexdigest(), hashlib.sha256(x).hexdigest())
  """
  assert run(program) == run(program, LD_PRELOAD='')
