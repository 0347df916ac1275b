"""A run without models: real loop, queue, workers and sync; time and tokens simulated.

Times are in medians of an episode's length. A token is what one dispatch of the engine
gives a slot.
"""

import asyncio
import collections
import dataclasses
import json
import math

import numpy as np

from jaxrl import loop
from jaxrl.rollout.env_manager import EnvContext, EnvManager
from jaxrl.rollout.env_worker import EnvWorker, partition_envs
from jaxrl.rollout.queue.group_queue import GroupQueue, QueueOptions
from jaxrl.rollout.weights import weight_sync
from jaxrl.training import staleness
from jaxrl.types import Trajectory
from tests.calls import parse_sync_policy

DISPATCH = 0.05
SIGMA = math.log(10) / 2.326  # of the lengths' logarithm: the 99th percentile is at 10
GROUP_SIZE = 8


@dataclasses.dataclass(eq=False)
class Request:
  left: int
  done: asyncio.Future
  versions: list[int] = dataclasses.field(default_factory=list)


class Engine:
  """Slots that decode together; weights are taken between two dispatches.

  waits: how long each new version waited for that. lines: requests without a slot at
  those times. busy: the share of slots at work, a dispatch each.
  """

  def __init__(self, num_slots):
    self._slots, self.version = num_slots, None
    self._line, self._running = collections.deque(), []
    self._news, self._idle, self._landed = (asyncio.Event() for _ in range(3))
    self._admits, self._flying = True, False
    self.waits, self.lines, self.busy = [], [], []

  async def run(self):
    while True:
      while self._admits and self._line and len(self._running) < self._slots:
        self._running.append(self._line.popleft())
      if not self._running:
        self._idle.set()
        self._news.clear()
        await self._news.wait()
        continue
      self._idle.clear()
      self._flying, version = True, self.version
      await asyncio.sleep(DISPATCH)
      self._flying = False
      self._land(version)
      self._landed.set()
      self._landed = asyncio.Event()

  def _land(self, version):
    self.busy.append(len(self._running) / self._slots)
    for request in self._running:
      request.versions.append(version)
      request.left -= 1
      if not request.left and not request.done.done():
        request.done.set_result(request.versions)
    self._running = [r for r in self._running if r.left and not r.done.done()]

  async def generate(self, tokens):
    """The version of each token."""
    request = Request(tokens, asyncio.get_running_loop().create_future())
    self._line.append(request)
    self._news.set()
    try:
      return await request.done
    finally:  # given up: its slot is free at the next dispatch
      if request in self._line:
        self._line.remove(request)

  async def publish(self, version, params):
    """As the store of one engine: returns when it serves `version`."""
    start = asyncio.get_running_loop().time()
    self.lines.append(len(self._line))
    if self._flying:
      await self._landed.wait()
    self.version = version
    self.waits.append(asyncio.get_running_loop().time() - start)

  async def drain(self):
    self._admits = False
    if self._running:
      await self._idle.wait()

  async def resume(self):
    self._admits = True
    self._news.set()


class Player(EnvManager):
  """Plays by the lease protocol; an episode is one request, its length drawn."""

  async def play_episode(self, lease, *, base_seed):
    number = lease.env_group + lease.episode_id
    rng = np.random.default_rng([base_seed, number, lease.sample_index])
    tokens = math.ceil(math.exp(SIGMA * rng.standard_normal()) / DISPATCH)
    versions = np.array(await self.context.engine.generate(tokens), np.int32)
    numbers = np.zeros(tokens, np.float32)
    row = Trajectory(
      tokens=versions,
      action_mask=np.ones(tokens, bool),
      rollout_logprobs=numbers,
      rewards=numbers,
      weights_version=versions,
      env_group=lease.env_group,
      episode_id=lease.episode_id,
      sample_index=lease.sample_index,
    )
    return [row]


class Worker(EnvWorker):
  def __init__(self, world, places):
    super().__init__(world, [])
    self.managers = {place: Player(world, *place) for place in places}


class Chat:
  stop_token_ids = (0,)


@dataclasses.dataclass
class Run:
  """What a run came to. seconds: when each step had been learned from. states: what
  a checkpoint before each step holds of the queue.
  """

  engine: Engine
  queue: GroupQueue
  num_groups: int
  seconds: list[float]
  ages: list[int]
  groups: list[list[Trajectory]]
  states: dict[int, dict] = dataclasses.field(default_factory=dict)

  @property
  def episodes_per_second(self):
    return len(self.seconds) * self.num_groups * GROUP_SIZE / self.seconds[-1]


async def train(
  *,
  ratio=0.0,
  style='fixed',
  most=None,
  num_steps=20,
  num_groups=64,
  num_slots=128,
  step_time=4.0,
  seed=0,
  start=0,
  state=None,
):
  """Trains on `num_groups` groups a step. most: the bound on staleness, or ratio's.
  start, state: the step of a checkpoint and what it held of the queue.
  """
  clock = asyncio.get_running_loop().time
  engine = Engine(num_slots)
  ahead = math.ceil((1 + ratio) * num_groups)
  queue = GroupQueue(
    clock=clock,
    num_groups=num_groups,
    group_size=GROUP_SIZE,
    num_env_groups=ahead,
    in_order=ratio == 0,
    expires=most is None,
    options=QueueOptions(async_ratio=ratio),
  )

  if state is not None:
    queue.load_state_dict(state)

  async def played():
    return queue.counts['whole']

  async def copy(params):
    return params

  syncer = weight_sync.WeightSyncer(
    parse_sync_policy(style),
    engine,
    engine,
    copy=copy,
    finished_groups=played,
    num_groups=num_groups,
  )
  run = Run(engine, queue, num_groups, [], [], [])

  class Learner:
    step, params = start, None

    async def update(self, groups):
      await asyncio.sleep(step_time)
      self.step += 1
      return {}

  class Sampler:
    async def next(self, step):
      oldest = None if most is None else step - most
      groups = await queue.get_batch(num_groups, step, oldest)
      if most is not None:
        staleness.check_groups(groups, step, most)
      run.ages += [
        staleness.group_staleness([row], step) for group in groups for row in group
      ]
      run.groups += groups
      return groups

  async def nothing(*_):
    return {}

  async def save(step, last):
    run.states[step] = json.loads(json.dumps(queue.state_dict()))

  hooks = loop.Hooks(
    publish=lambda step: syncer.maybe_sync(step, nothing),
    advance=queue.advance_step,
    evaluate=nothing,
    record=lambda *_: run.seconds.append(clock()),
    save=save,
    stop=lambda: False,
  )
  world = EnvContext(None, engine, Chat(), None, queue)
  worker = Worker(world, partition_envs(ahead, GROUP_SIZE, 1)[0])
  tasks = [
    asyncio.create_task(worker.run({'seed': seed})),
    asyncio.create_task(engine.run()),
  ]
  try:
    async with asyncio.timeout(10_000):
      await loop.train(Learner(), Sampler(), hooks, num_steps=num_steps, workers=tasks)
  finally:
    await syncer.close()
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
  return run
