"""One data set as an actor, asked by 64 environments of two other processes."""

import asyncio
import os
import pickle
import time

import pytest

from jaxrl.data.dataset import GlobalDataset

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray')]
ITEMS, READERS, ENVS, DRAWS = 100_000, 2, 32, 20


class Reader:
  """What a worker is to a data set: so many environments with a handle each."""

  async def draw(self, handles, first):
    before, start = private(), time.perf_counter()

    async def play(env, data):
      rows = {}
      for draw in range(DRAWS):
        seed = first + draw * READERS * ENVS + env
        task = await data.get_task(seed)
        assert task.item['question'].startswith(f'{task.index}: ')
        rows[seed] = task.index
      return rows

    results = await asyncio.gather(*(play(i, data) for i, data in enumerate(handles)))
    seconds = time.perf_counter() - start
    rows = {seed: row for one in results for seed, row in one.items()}
    return rows, private() - before, seconds


def private():
  """Bytes of this process that it shares with none."""
  with open('/proc/self/statm') as file:
    _, resident, shared, *_ = map(int, file.read().split())
  return (resident - shared) * os.sysconf('SC_PAGE_SIZE')


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='needs /proc')
@pytest.mark.slow
@pytest.mark.extended
def test_64_environments_share_100_000_items_without_a_copy_each(ray):
  from launch.runtime.ray_runtime import RayRuntime

  rows = [{'question': f'{i}: ' + 'x' * 400, 'answer': '-'} for i in range(ITEMS)]
  alone = GlobalDataset(rows)
  host = RayRuntime()  # of the cluster that is there
  data = host.spawn(GlobalDataset, rows)
  readers = [host.spawn(Reader) for _ in range(READERS)]
  assert len(pickle.dumps(data)) < 2000

  async def play():
    assert await data.get_size() == ITEMS
    handles = [data] * ENVS
    return await asyncio.gather(
      *(reader.draw(handles, i * ENVS) for i, reader in enumerate(readers))
    )

  try:
    asyncio.run(play())  # what is loaded at first use is loaded
    results = asyncio.run(play())
  finally:
    asyncio.run(host.close())
  drawn = {seed: row for rows, _, _ in results for seed, row in rows.items()}
  count = READERS * ENVS * DRAWS
  assert drawn == {seed: alone.get_task(seed).index for seed in range(count)}
  grown = max(size for _, size, _ in results)
  seconds = max(seconds for *_, seconds in results)
  print(f'{count / seconds:,.0f} tasks a second; {grown / 2**20:.1f} MiB a reader')
  assert grown < 16 << 20  # the rows are 60 MB
