"""The pool of environment threads: bounded, and not to be stopped by a hung call."""

import asyncio
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
