"""EnvManager: plays episodes of one environment with one engine.

Many of them run as coroutines in one worker. Everything is injected and may be
local or remote. Whatever breaks costs one episode, which is put with its reason.
"""

import asyncio
import dataclasses
import functools
import math
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.data.chat import Chat
from jaxrl.data.seeds import fold
from jaxrl.envs.base import Env
from jaxrl.rollout.call_pool import CallPool, CallTimeout
from jaxrl.rollout.episode import RolloutCache
from jaxrl.rollout.formulation import FORMULATIONS
from jaxrl.rollout.group import Lease
from jaxrl.rollout.handles import settle
from jaxrl.rollout.members import CUT_OFF
from jaxrl.rollout.reply import request, whole_reply
from jaxrl.rollout.rewards.stage import Rewards
from jaxrl.rollout.templates import Templates
from jaxrl.rollout.timeouts import read as read_timeouts
from jaxrl.types import Completion, RolloutEngine, SamplingParams, Trajectory


@dataclasses.dataclass(frozen=True)
class EnvWorld:
  """What all environments of a tag share, local objects or handles.

  make_env: makes an environment. dataset: None for games, whose task is the seed.
  rewards: what is added to an episode's reward after its end.
  endpoint: where agents reach the engine, None where environments are stepped.
  """

  make_env: Callable[[], Env]
  engine: RolloutEngine
  chat: Chat
  pool: CallPool
  queue: Any = None
  dataset: Any = None
  rewards: Rewards | None = None
  endpoint: Any = None

  async def close(self) -> None:
    """Lets go of threads and of the endpoint's port."""
    self.pool.close()
    if self.endpoint is not None:
      await self.endpoint.close()


class EnvManager:
  """One environment: env `env_id` of env group `group_id`.

  tag: the environment's tag. max_steps: turns an episode may take. max_length:
  tokens of the whole episode. max_tokens_per_step: tokens of one reply.
  temperature, top_p, top_k, stop: how replies are drawn. system_template,
  first_template, turn_template: see `templates`. formulation: 'trajectory', 'step' or
  'concatenated'. timeouts: seconds, 0 = none, as in 'reset=60, step=60, generate=0'.
  """

  def __init__(
    self,
    world: EnvWorld,
    group_id: int = 0,
    env_id: int = 0,
    *,
    tag: str = '',
    max_steps: int = 1,
    max_length: int = 1024,
    max_tokens_per_step: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: tuple[str, ...] = (),
    system_template: str = '',
    first_template: str = '',
    turn_template: str = '{observation}',
    formulation: str = 'trajectory',
    timeouts: str = '',
  ):
    if formulation not in FORMULATIONS:
      raise ValueError(
        f'no formulation {formulation!r}; there are {", ".join(FORMULATIONS)}'
      )
    if min(max_steps, max_length, max_tokens_per_step) < 1:
      raise ValueError('max_steps, max_length and max_tokens_per_step start at 1')
    self.world, self.group_id, self.env_id, self.tag = world, group_id, env_id, tag
    self.max_steps, self.max_length = max_steps, max_length
    self.max_tokens_per_step = max_tokens_per_step
    self._templates = Templates(system_template, first_template, turn_template)
    self._formulate = functools.partial(FORMULATIONS[formulation], room=max_length)
    self._timeouts = read_timeouts(timeouts)
    self._sampling = SamplingParams(
      max_tokens=max_tokens_per_step,
      temperature=temperature,
      top_p=top_p,
      top_k=top_k,
      stop=tuple(stop),
      stop_token_ids=(world.chat.eos_id,),
    )
    self._env: Any = None
    self._starting: RolloutCache | None = None  # who may still bring an environment
    self._lock = threading.Lock()
    self._base_seed = 0
    self._playing: tuple[Lease, asyncio.Task] | None = None

  async def run_rollout_loop(self, data: Mapping[str, Any]) -> int:
    """Plays until the queue has no more leases; returns the number of episodes put.

    data: {'seed': base seed}, or an object whose `meta_info` is that.
    """
    self._base_seed = int(getattr(data, 'meta_info', data)['seed'])
    queue, count = self.world.queue, 0
    while True:
      lease = await settle(queue.get_episode_id(self.group_id, self.env_id))
      if lease is None:
        self._drop_env()
        return count
      rollout = await self._play_unless_aborted(Lease(*lease))
      await settle(
        queue.put(
          self.group_id, lease.episode_id, lease.start_step, rollout, self.env_id
        )
      )
      count += 1

  def abort(self, lease: Lease) -> None:
    """Ends the attempt `lease` if it is being played; it is put as aborted."""
    if self._playing is not None and self._playing[0] == Lease(*lease):
      self._playing[1].cancel()

  async def _play_unless_aborted(self, lease: Lease) -> list[Trajectory] | None:
    task = asyncio.ensure_future(self.play(lease, base_seed=self._base_seed))
    self._playing = (lease, task)
    try:
      return await task
    except asyncio.CancelledError:
      self._drop_env()  # it may still be at work for the attempt that was ended
      own = asyncio.current_task()
      if not task.cancelled() or (own is not None and own.cancelling()):
        task.cancel()
        raise
      cache = RolloutCache(lease, self._seed_of(lease))
      cache.stop('abort', 'the queue gave the attempt up')
      return self.formulate_rollouts(cache)
    finally:
      self._playing = None

  def _seed_of(self, lease: Lease) -> int:
    return self._base_seed + lease.group_id + lease.episode_id

  def _drop_env(self) -> None:
    """Forgets the environment; one in a process of its own is killed."""
    with self._lock:
      env, self._env, self._starting = self._env, None, None
    _kill(env)

  async def play(self, lease: Lease, *, base_seed: int) -> list[Trajectory] | None:
    """Plays one attempt; None when the data set is traversed. Does not raise."""
    self._base_seed = base_seed
    cache = await self.reset(lease)
    if cache is None:
      return None
    while not cache.done:
      completion = await self.make_decision(cache)
      if completion is not None:
        await self.step(cache, completion)
    if self.world.rewards is not None:
      seed = fold(base_seed, cache.seed, lease.member, 'rewards')
      name = f'{self._name(cache)}/{lease.attempt}'
      await self.world.rewards.add(cache, name, seed, self.world.pool)
    return self.formulate_rollouts(cache)

  async def reset(self, lease: Lease) -> RolloutCache | None:
    """Draws the task and starts the environment; None when there is no task."""
    cache = self._starting = RolloutCache(lease, self._seed_of(lease))
    try:
      if self.world.dataset is not None:
        number = lease.group_id + lease.episode_id
        task = self.world.dataset.get_task(cache.seed, number)
        cache.task = await settle(task)
        if cache.task is None:
          return None
      prompt = await self._call(self._start_env, cache, self._timeouts.reset)
    except Exception as error:
      self._drop_env()
      cache.stop('env_reset_failed', error)
    else:
      if prompt is None:
        return None
      cache.hear(prompt[: self.max_length])
      if len(prompt) >= self.max_length:
        size = f'{len(prompt)} tokens of max_length={self.max_length}'
        cache.stop('max_length', f'the first prompt takes {size}')
    return cache

  async def make_decision(self, cache: RolloutCache) -> Completion | None:
    """The model's next reply; None if the episode ends for want of one."""
    room = self.max_length - len(cache.tokens)
    if room < 1:
      cache.stop('max_length')
      return None
    room = min(room, self.max_tokens_per_step)
    try:
      completion = await self._generate(cache, room)
    except ValueError as error:  # the prompt is longer than the engine's window
      cache.stop('max_length', error)
      return None
    except TimeoutError:
      cache.stop('generate_failed', f'no reply within {self._timeouts.generate} s')
      return None
    except Exception as error:
      cache.stop('generate_failed', error)
      return None
    if len(completion.tokens) == 0:
      cache.stop('generate_failed', 'the engine returned no token')
      return None
    cache.say(completion)
    cache.extras[CUT_OFF] = completion.finish_reason == 'length'
    if completion.finish_reason == 'abort':
      cache.stop('abort', 'the engine aborted the request')
      return None
    return completion

  async def step(self, cache: RolloutCache, completion: Completion) -> None:
    """Gives the reply to the environment and hears what comes back."""
    ended = completion.tokens[-1] == self.world.chat.eos_id
    try:
      heard = await self._call(
        self._step_env, cache, self._timeouts.step, completion, bool(ended)
      )
    except CallTimeout as error:
      self._drop_env()
      cache.stop('env_timeout', error)
    except Exception as error:
      self._drop_env()
      cache.stop('env_error', error)
    else:
      if not cache.done:
        cache.hear(heard[: self.max_length - len(cache.tokens)])

  def formulate_rollouts(self, cache: RolloutCache) -> list[Trajectory]:
    """The training rows of a finished episode."""
    said = sum(turn.stop - turn.start for turn in cache.turns)
    cache.metrics.setdefault('turns', float(len(cache.turns)))
    cache.metrics.setdefault('response_length', float(said))
    return self._formulate(cache, self.tag)

  # ---- on the pool's threads

  def _have_env(self, cache: RolloutCache) -> None:
    """Gives the attempt the environment, made if there is none.

    What is made too late, for an attempt that was given up, is nobody's.
    """
    env = self._env if self._env is not None else self.world.make_env()
    with self._lock:
      if self._starting is cache:
        self._env = cache.env = env
        return
    _kill(env)
    raise RuntimeError('the attempt was given up while its environment was made')

  def _start_env(self, cache: RolloutCache) -> list[int] | None:
    self._have_env(cache)
    task = {'task': cache.task} if cache.task is not None else {}
    observation, info = cache.env.reset(seed=cache.seed, options=task)
    if observation is None:
      return None
    self._note(cache, info)
    chat, tools = self.world.chat, info.get('tools')
    cache.chat = chat.with_tools(tools) if tools else chat
    messages = self._show(cache, observation, info)
    return cache.chat.first_prompt(messages)

  def _step_env(
    self, cache: RolloutCache, completion: Completion, ended: bool
  ) -> list[int]:
    text = self.world.chat.decode(completion.tokens)
    observation, reward, terminated, truncated, info = cache.env.step(text)
    cache.messages.append({'role': 'assistant', 'content': text})
    if not math.isfinite(reward):
      raise ValueError(f'the environment gave a reward of {reward}')
    cache.turns[-1].reward = float(reward)
    self._note(cache, info)
    if terminated:
      cache.terminated = True
    elif truncated or len(cache.turns) >= self.max_steps:
      cache.stop('max_steps')
    elif len(cache.tokens) >= self.max_length:
      cache.stop('max_length')
    if cache.done:
      return []
    messages = self._show(cache, observation, info)
    return cache.chat.next_prompt(messages, ended=ended)

  def _show(self, cache: RolloutCache, observation: Any, info: Mapping[str, Any]):
    messages = self._templates.messages(
      observation,
      info,
      turn_idx=len(cache.turns),
      actions_left=self.max_steps - len(cache.turns),
      max_response_length=self.max_tokens_per_step,
    )
    shown = '\n'.join(str(message['content']) for message in messages)
    cache.state_hash = zlib.crc32(shown.encode()) >> 1
    cache.messages += messages
    return messages

  @staticmethod
  def _note(cache: RolloutCache, info: Mapping[str, Any]) -> None:
    """Keeps what the environment reports; later turns overwrite earlier ones."""
    cache.metrics.update({k: float(v) for k, v in info.get('metrics', {}).items()})
    cache.columns.update(info.get('columns', {}))

  # ---- on the event loop

  async def _call(self, fn: Callable, cache: RolloutCache, timeout, *args) -> Any:
    return await self.world.pool.run(fn, cache, *args, timeout=timeout)

  async def _generate(self, cache: RolloutCache, room: int) -> Completion:
    """One reply; if the engine is interrupted, it goes on from what it had."""
    lease, turn = cache.lease, len(cache.turns)
    name = f'{self._name(cache)}/{turn}/{lease.attempt}'
    # The 0 is there for the sake of the seeds that runs have always had.
    seed = fold(self._base_seed, cache.seed, lease.member, turn, 0)
    sampling = dataclasses.replace(
      self._sampling,
      max_tokens=room,
      seed=seed,
      temperature=0.0 if lease.greedy else self._sampling.temperature,
    )
    return await whole_reply(self._request, name, cache.tokens, sampling)

  def _name(self, cache: RolloutCache) -> str:
    """Of the member's part in its group, the same at every attempt."""
    lease = cache.lease
    return f'{self.tag}/{lease.group_id}/{lease.episode_id}/{cache.seed}/{lease.member}'

  async def _request(self, request_id, prompt, sampling) -> Completion:
    engine, timeout = self.world.engine, self._timeouts.generate
    return await request(engine, request_id, prompt, sampling, timeout=timeout)


def _kill(env: Any) -> None:
  if hasattr(env, 'kill'):
    env.kill()
