"""Crowds of episodes under faults: the real queue, managers and workers on a clock that
jumps; what environments and engines do, and how long it takes, is drawn. Seconds are
virtual.
"""

import asyncio
import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl.rollout.env_manager import EnvContext
from jaxrl.rollout.env_worker import EnvWorker, partition_envs
from jaxrl.rollout.queue.group_queue import GroupQueue
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.rollout.thread_pool import CallTimeoutError, Timeouts
from jaxrl.types import Group
from tests.rollout.fakes import END, FakeChat, completion

FOREVER = 1e9  # seconds that a hung call takes
TURNS = 3


class Draws:
  """What happens next, and how long it takes. shares: of all calls, by kind."""

  def __init__(self, seed: int, shares: Mapping[str, float]):
    self._rng = np.random.default_rng(seed)
    self._kinds, self._edges = [*shares, 'fine'], np.cumsum([*shares.values()]).tolist()
    self.seen: collections.Counter[str] = collections.Counter()

  def kind(self) -> str:
    kind = self._kinds[bisect.bisect(self._edges, self._rng.random())]
    self.seen[kind] += 1
    return kind

  def seconds(self, median: float) -> float:
    """Lognormal, the 99th percentile at ten medians."""
    return median * math.exp(math.log(10) / 2.326 * self._rng.standard_normal())


class Pool:
  """A ThreadPool of `width` threads whose calls take the time that they draw."""

  def __init__(self, draws: Draws, width: int = 256, median: float = 0.1):
    self._draws, self._median = draws, median
    self._threads = asyncio.Semaphore(width)

  async def run(self, fn: Any, *args: Any, timeout: float | None = None) -> Any:
    async with self._threads:
      seconds, answer, error = self._draws.seconds(self._median), None, None
      try:
        answer = fn(*args)
      except Hang:
        seconds = FOREVER
      except Exception as raised:
        error = raised
      if timeout is not None and seconds > timeout:
        await asyncio.sleep(timeout)
        raise CallTimeoutError(f'no answer within {timeout:g} s')
      await asyncio.sleep(seconds)
    if error is not None:
      raise error
    return answer


class Hang(BaseException):
  """Stands for a call that does not return."""


class Chaos:
  """Breaks as is drawn for each call; an episode that goes well scores its turns."""

  def __init__(self, draws: Draws):
    self._draws, self._turn = draws, 0
    self._kept: list[bytes] = []

  def _fault(self) -> str:
    kind = self._draws.kind()
    if kind == 'hang':
      raise Hang
    if kind == 'crash':
      raise OSError('the game has crashed')
    if kind == 'leak':
      raise MemoryError
    return kind

  def reset(self, *, seed, options=None):
    self._turn = 0
    if self._fault() == 'garbage':
      return seed
    return f'seed {seed}', {}

  def step(self, action):
    kind, self._turn = self._fault(), self._turn + 1
    if kind == 'garbage':
      return None
    if kind == 'nan':
      return '', math.nan, False, False, {}
    return 'go on', 1.0, self._turn == TURNS, False, {}


class Engine:
  """Replies after a drawn time, or fails; serves no id twice at once."""

  def __init__(self, draws: Draws, median: float = 1.0):
    self._draws, self._median, self.version = draws, median, 0
    self.serving: set[str] = set()

  async def generate(self, request_id, token_ids, sampling):
    assert request_id not in self.serving
    self.serving.add(request_id)
    try:
      kind = self._draws.kind()
      seconds = FOREVER if kind == 'hang' else self._draws.seconds(self._median)
      await asyncio.sleep(seconds)
    finally:
      self.serving.discard(request_id)
    if kind == 'crash':
      raise ConnectionError('the engine is gone')
    return completion([] if kind == 'empty' else [65, END], version=self.version)

  async def abort(self, request_id):
    self.serving.discard(request_id)


class Book(GroupQueue):
  """A queue that notes of each lease who took it and what became of it."""

  def __init__(self, *args: Any, **options: Any):
    super().__init__(*args, **options)
    self.begun: list[EpisodeLease] = []
    self.ends: dict[EpisodeLease, list[str]] = collections.defaultdict(list)
    self._holders: dict[tuple[int, int], EpisodeLease] = {}
    self.most = 0  # leases held at once

  async def get_episode_id(self, group_id, env_id):
    lease = await super().get_episode_id(group_id, env_id)
    if lease is not None:
      self.begun.append(lease)
      self._holders[group_id, env_id] = lease
      self.most = max(self.most, len(self._holders))
    return lease

  async def put(self, group_id, episode_id, start_step, rollout, env_id):
    lease = self._holders.pop((group_id, env_id))
    taken = await super().put(group_id, episode_id, start_step, rollout, env_id)
    failed = rollout is not None and any(row.failed for row in rollout)
    self.ends[lease].append('failed' if failed else 'put') if taken else None
    return taken

  async def listen(self) -> None:
    after = 0
    while True:
      after, items = await self.wait_cancelled(after)
      for _, _, lease in items:
        self.ends[lease].append('given up')


@dataclasses.dataclass
class Run:
  """What came of it. puts: as the workers count them."""

  queue: Book
  engine: Engine
  batches: list[list[Group]]
  puts: int
  seconds: float
  error: Exception | None = None

  def check(self, group_size: int, fewest: int = 0) -> None:
    """Every lease and every group is accounted for, and none twice."""
    queue, counts = self.queue, self.queue.counts
    assert not queue._leases and not self.engine.serving
    assert len(set(queue.begun)) == len(queue.begun) == counts['leased'] == self.puts
    assert {lease: len(queue.ends[lease]) for lease in queue.begun} == dict.fromkeys(
      queue.begun, 1
    )
    ends = collections.Counter(end for (end,) in queue.ends.values())
    assert ends['failed'] + ends['put'] == self.puts - counts['ignored']
    lost = counts['timed_out'] + counts['abandoned']
    assert ends['given up'] == lost + counts['surplus']
    assert ends['failed'] + lost == counts['retried'] + counts['failed']
    assert counts['leased'] == counts['surplus'] + sum(
      counts[name] for name in ('played', 'retried', 'failed', 'ended')
    )
    self._check_groups(group_size, fewest or group_size)

  def _check_groups(self, group_size: int, fewest: int) -> None:
    queue, counts = self.queue, self.queue.counts
    groups = [group for batch in self.batches for group in batch]
    rows = [row for group in groups for row in group]
    names = [row.trajectory_id for row in rows]
    assert len(set(names)) == len(names)
    assert all(fewest <= len(group) <= group_size for group in groups)
    assert all(len({row.group_name for row in group}) == 1 for group in groups)
    assert not any(row.failed for row in rows)
    assert all(row.score == TURNS for row in rows)
    numbers = {lease.env_group + lease.episode_id for lease in queue.begun}
    left = len(queue.state_dict()['pending'])
    named = ('taken', 'filtered', 'dropped', 'expired', 'stale', 'unplayed')
    fates = sum(counts[name] for name in named)
    assert counts['taken'] == len(groups)
    assert len(numbers) <= fates + left


async def play(
  queue: Book,
  engine: Engine,
  pool: Pool,
  make_env: Any,
  *,
  steps: Iterable[int] = range(3),
  group_size: int = 8,
  dataset: Any = None,
  within: float = 10_000.0,
  num_workers: int = 4,
  pause: float = 0.0,
  **options: Any,
) -> Run:
  """Plays and takes the batches of `steps`, in `within` seconds or TimeoutError.

  pause: of the trainer, between two batches.
  """
  clock = asyncio.get_running_loop().time
  shared = EnvContext(make_env, engine, FakeChat(), pool, queue, dataset)
  settings = {'max_steps': TURNS, 'timeouts': Timeouts(generate=60), **options}
  parts = partition_envs(queue.num_env_groups, group_size, num_workers)
  workers = [EnvWorker(shared, places, settings) for places in parts]
  tasks = [asyncio.create_task(worker.run({'seed': 0})) for worker in workers]
  listener = asyncio.create_task(queue.listen())
  batches, error = [], None
  async with asyncio.timeout(within):
    try:
      for step in steps:
        engine.version = step
        await queue.advance_step(step)
        batches.append(await queue.get_batch(current_step=step))
        await asyncio.sleep(pause)
    except RuntimeError as raised:
      error = raised
    seconds = clock()
    await queue.shutdown()
    puts = sum(await asyncio.gather(*tasks))
  listener.cancel()
  await asyncio.gather(listener, return_exceptions=True)
  assert asyncio.all_tasks() == {asyncio.current_task()}, 'nothing goes on alone'
  return Run(queue, engine, batches, puts, seconds, error)
