"""The pool of environment threads: bounded, and not to be stopped by a hung call."""

import asyncio
import io
import subprocess
import sys
import threading
import time

import pytest

from jaxrl.rollout.thread_pool import CallTimeoutError, ThreadPool


@pytest.fixture
def pool():
  pool = ThreadPool(2)
  yield pool
  pool.close()


async def test_runs_off_the_event_loop_and_returns_results(pool):
  ident = await pool.run(threading.get_ident)
  assert ident != threading.get_ident()
  assert await pool.run(lambda a, b: a * b, 6, 7) == 42


@pytest.mark.parametrize('error', [KeyError('x'), SystemExit(1), StopIteration()])
async def test_whatever_is_raised_costs_one_call(pool, error):
  def broken():
    raise error

  with pytest.raises((KeyError, RuntimeError)):
    await pool.run(broken)
  assert await pool.run(lambda: 1) == 1


async def test_never_more_threads_than_asked_for(pool):
  running, most, lock = 0, 0, threading.Lock()

  def work():
    nonlocal running, most
    with lock:
      running += 1
      most = max(most, running)
    time.sleep(0.002)
    with lock:
      running -= 1

  await asyncio.gather(*(pool.run(work) for _ in range(50)))
  assert most == 2


async def test_hung_calls_are_given_up_and_their_threads_replaced(pool):
  release = threading.Event()
  hung = [asyncio.create_task(pool.run(release.wait, timeout=0.05)) for _ in range(2)]
  assert await asyncio.wait_for(pool.run(lambda: 'served'), 5) == 'served'
  for task in hung:
    with pytest.raises(CallTimeoutError, match=r'0\.05 s'):
      await task
  assert pool.num_replaced == 2
  release.set()
  await asyncio.sleep(0.02)
  results = await asyncio.gather(*(pool.run(lambda i=i: i) for i in range(20)))
  assert results == list(range(20))


async def test_time_in_the_line_does_not_count(pool):
  calls = (pool.run(time.sleep, 0.04, timeout=0.15) for _ in range(10))
  await asyncio.gather(*calls)  # 0.2 s in all, none longer than 0.15 s
  assert pool.num_replaced == 0


async def test_a_cancelled_call_that_hangs_is_replaced_too(pool):
  release = threading.Event()
  hung = [asyncio.create_task(pool.run(release.wait, timeout=0.05)) for _ in range(2)]
  await asyncio.sleep(0.02)
  for task in hung:
    task.cancel()
  assert await asyncio.wait_for(pool.run(lambda: 'served'), 5) == 'served'
  release.set()


async def test_a_closed_pool_says_so(pool):
  pool.close()
  with pytest.raises(RuntimeError, match='closed'):
    await pool.run(int)


def test_needs_a_thread():
  with pytest.raises(ValueError, match='at least one'):
    ThreadPool(0)


STREAMS = """
import asyncio, contextlib, io, logging, os, sys, threading
from jaxrl.rollout.thread_pool import ThreadPool

def close_descriptors():
  os.close(1)
  os.close(2)

def close_files():
  os.closerange(0, 3)

def close_streams():
  sys.stdout.close()
  sys.stderr.close()

def close_buffers():
  sys.stdout.buffer.close()
  sys.stderr.buffer.close()

def replace(stdout, stderr):
  sys.stdout, sys.stderr = stdout, stderr

async def main():
  pool = ThreadPool(2)
  logging.basicConfig(format='%(message)s')  # its handler holds this stream
  for number, (call, *arguments) in enumerate([
    (close_descriptors,), (close_streams,), (replace, None, None),
    (replace, io.StringIO(), io.StringIO()), (close_streams,), (close_files,),
    (close_buffers,),
  ]):
    await pool.run(call, *arguments)
    if call is not close_buffers:
      logging.warning('log %d', number)
    print(f'out {number}', flush=True)
    print(f'err {number}', file=sys.stderr, flush=True)
    os.write(1, b'1\\n')
    os.write(2, b'2\\n')
  # What a call prints is its own as long as it runs, whatever ends meanwhile.
  is_redirected, others_ended = threading.Event(), threading.Event()
  def capture():
    with contextlib.redirect_stdout(io.StringIO()) as text:
      is_redirected.set()
      others_ended.wait()
      print('caught')
    return text.getvalue()
  captured = asyncio.ensure_future(pool.run(capture))
  await asyncio.to_thread(is_redirected.wait)
  await pool.run(lambda: None)
  others_ended.set()
  print((await captured).strip(), sys.stdout is sys.__stdout__)

asyncio.run(main())
"""


def test_the_process_keeps_its_streams():
  done = subprocess.run(
    [sys.executable, '-c', STREAMS], capture_output=True, text=True, check=False
  )
  lines = done.stdout.splitlines()
  assert lines[:-1] == [x for n in range(7) for x in (f'out {n}', '1')], done.stderr
  errors = [x for n in range(7) for x in (f'log {n}', f'err {n}', '2')]
  errors.remove('log 6')  # the logger's stream has lost its buffer
  assert done.stderr.splitlines() == errors
  # The stream is a new one, in place of the one whose buffer was closed.
  assert lines[-1:] == ['caught False']


async def test_a_call_that_outlives_its_pool_leaves_new_streams_alone(monkeypatch):
  """A refused run may leave such a call behind for the next run in the process."""
  pool, running, release = ThreadPool(1), threading.Event(), threading.Event()
  first, second = io.StringIO(), io.StringIO()

  def call():
    running.set()
    release.wait()
    return threading.current_thread()

  monkeypatch.setattr(sys, 'stderr', first)
  thread = asyncio.ensure_future(pool.run(call))
  await asyncio.to_thread(running.wait)
  pool.close()
  first.close()
  monkeypatch.setattr(sys, 'stderr', second)
  release.set()
  await asyncio.to_thread((await thread).join)
  assert sys.stderr is second
