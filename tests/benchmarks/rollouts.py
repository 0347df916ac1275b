"""What rollouts cost beside the model: the scheduling of an episode, steps of
environments, tasks drawn from a data set in this process and as an actor.
"""

import asyncio
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.data.dataset import GlobalDataset
from jaxrl.envs.env_registry import Env, env_factory
from jaxrl.envs.sandbox import local_sandbox
from jaxrl.rollout.env_manager import EnvContext
from jaxrl.rollout.env_worker import EnvWorker, partition_envs
from jaxrl.rollout.queue.group_queue import GroupQueue
from jaxrl.rollout.thread_pool import ThreadPool
from jaxrl.types import Task
from launch.runtime.ray_runtime import RayRuntime
from tests.rollout.fakes import END, EchoEnv, FakeChat, completion

SIZES = {'64': (8, 8), '512': (64, 8), '2000': (250, 8)}  # groups, and of how many
EPISODES = 4000
ITEMS, ENVS = 100_000, 64
SECONDS = 0.5  # for which an environment is played

SUM = {
  'question': 'Add.',
  'answer': [{'input': f'{n}\n{n}\n', 'output': str(2 * n)} for n in range(4)],
}
PROGRAM = '```python\nprint(int(input()) + int(input()))\n```'
PLAYED: dict[str, tuple[dict[str, Any], list[str], Any]] = {  # options, replies, item
  'frozen_lake': ({}, ['right', 'down', 'left', 'up'], None),
  'sokoban': ({}, ['right', 'down', 'left', 'up'], None),
  'sudoku': ({}, ['r1c1=1', 'r2c2=4', 'r3c3=3'], None),
  'countdown': ({'attempts': 8}, ['1 + 2 * 3'], None),
  'web_shop': ({}, ['search[red waterproof backpack]', 'click[next]'], None),
  'gymnasium': (
    {'id': 'CliffWalking-v1', 'actions': ['up', 'right', 'down', 'left']},
    ['up', 'right', 'down', 'left'],
    None,
  ),
  'reasoning_gym': ({'name': 'chain_sum'}, ['<answer>5</answer>'], None),
  'textarena': ({'id': 'GuessTheNumber-v0'}, ['[5]', '[9]'], None),
  'isolated:frozen_lake': ({}, ['right', 'down', 'left', 'up'], None),
  'math': ({}, ['#### 4'], {'question': '2 + 2?', 'answer': '#### 4'}),
  'math, by algebra': (
    {'grader': 'math'},
    [r'\boxed{\frac{x^2 - 1}{x - 1}}'],
    {'question': '?', 'answer': 'x + 1'},
  ),
  'code, 4 tests': ({}, [PROGRAM], SUM),
}
OPTIONAL = ('reasoning_gym', 'textarena')  # packages by the same names


class FreeEngine:
  """An engine that costs nothing."""

  async def generate(self, request_id: str, token_ids: Any, sampling: Any) -> Any:
    return completion([65, END])


async def _episodes(groups: int, size: int) -> tuple[float, float]:
  """Seconds an episode, of the wall clock and of the processor."""
  queue = GroupQueue(num_groups=groups, group_size=size, num_env_groups=groups)
  pool = ThreadPool()
  world = EnvContext(EchoEnv, FreeEngine(), FakeChat(), pool, queue)  # pyright: ignore
  worker = EnvWorker(world, partition_envs(groups, size, 1)[0])
  task = asyncio.create_task(worker.run({'seed': 0}))
  steps = max(EPISODES // (groups * size), 1)
  start, cpu = time.perf_counter(), time.process_time()
  for step in range(steps):
    await queue.advance_step(step)
    await queue.get_batch(groups, step)
  seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
  await queue.shutdown()
  await task
  pool.close()
  return seconds / (steps * groups * size), cpu / (steps * groups * size)


async def _hand_overs(count: int = EPISODES) -> float:
  """Seconds for two bare calls in the pool's threads, which each episode needs."""
  pool, start = ThreadPool(), time.perf_counter()
  for _ in range(2):
    await asyncio.gather(*(pool.run(int) for _ in range(count)))
  pool.close()
  return (time.perf_counter() - start) / count


def _scheduler(repeats: int = 3) -> dict[str, float]:
  figures = {'hand_overs_s': min(asyncio.run(_hand_overs()) for _ in range(repeats))}
  for name, (groups, size) in SIZES.items():
    both = [asyncio.run(_episodes(groups, size)) for _ in range(repeats)]
    wall, cpu = zip(*both, strict=True)
    figures[f'episode_{name}_s'] = statistics.median(wall)
    figures[f'episode_{name}_cpu_s'] = statistics.median(cpu)
  return figures


def _play(env: Env, replies: list[str], task: Task | None) -> dict[str, float]:
  """Seconds of a reset and of a step, each the median of what `SECONDS` allow."""
  options = {'task': task} if task is not None else {}
  resets, steps, over, seed = [], [], True, 0
  env.reset(seed=0, options=options)  # what is loaded at first use is loaded
  env.step(replies[0])
  end = time.perf_counter() + SECONDS
  while not steps or time.perf_counter() < end:
    start = time.perf_counter()
    if over:
      env.reset(seed=seed, options=options)
      resets.append(time.perf_counter() - start)
      over, seed = False, seed + 1
    else:
      _, _, terminated, truncated, _ = env.step(replies[len(steps) % len(replies)])
      steps.append(time.perf_counter() - start)
      over = terminated or truncated or len(steps) % 20 == 0
  return {'reset_s': statistics.median(resets), 'step_s': statistics.median(steps)}


def _environments() -> dict[str, dict[str, Any]]:
  """By name its seconds, or as 'missing' the reason why there are none."""
  figures: dict[str, dict[str, Any]] = {'none': _play(EchoEnv(turns=20), ['a'], None)}
  for name, (options, replies, item) in PLAYED.items():
    if name.startswith('code') and local_sandbox.unsupported_reason():
      continue
    task = None if item is None else Task(seed=0, index=0, item=item)
    if name in OPTIONAL and importlib.util.find_spec(name) is None:
      figures[name] = {'missing': f'{name}, which is of the extra envs'}
      continue
    env: Any = env_factory(name.split(',')[0], options)()
    figures[name] = _play(env, replies, task)
    if hasattr(env, 'kill'):
      env.kill()
  return figures


class _Nothing:
  """An actor that does nothing, as fast as actors can."""

  def ask(self, seed: int) -> None:
    return None


async def _ask(ask: Callable[[int], Any], count: int) -> float:
  """Calls a second, of `ENVS` callers at once."""

  async def caller(first: int) -> None:
    for seed in range(first, count, ENVS):
      await ask(seed)

  start = time.perf_counter()
  await asyncio.gather(*map(caller, range(ENVS)))
  return count / (time.perf_counter() - start)


def _data() -> dict[str, float]:
  rows = [{'question': f'{i}: ' + 'x' * 400, 'answer': '-'} for i in range(ITEMS)]
  alone = GlobalDataset(rows)
  alone.get_task(0)
  start = time.perf_counter()
  for seed in range(ITEMS):
    alone.get_task(seed)
  figures = {'local_per_s': ITEMS / (time.perf_counter() - start)}
  host = RayRuntime()
  try:
    calls = (host.spawn(GlobalDataset, rows).get_task, host.spawn(_Nothing).ask)
    for name, ask in zip(('actor', 'empty_actor'), calls, strict=True):
      asyncio.run(_ask(ask, 256))
      figures[f'{name}_per_s'] = asyncio.run(_ask(ask, 4096))
  finally:
    asyncio.run(host.close())
  return figures


def measure() -> Mapping[str, Any]:
  return {
    'scheduler': _scheduler(),
    'environments': _environments(),
    'data': _data(),
  }
