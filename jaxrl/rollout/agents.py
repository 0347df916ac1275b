"""Episodes that an agent plays by itself, through the OpenAI-compatible endpoint.

The agent calls the model as often as it likes. What it was given and what the engine
returned is on record at the endpoint, token by token, and becomes the episode's rows.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.data.seeds import fold
from jaxrl.rollout.call_pool import CallTimeout
from jaxrl.rollout.env_manager import EnvManager, EnvWorld
from jaxrl.rollout.episode import RolloutCache
from jaxrl.rollout.gateway.choice import Seat, Terms
from jaxrl.rollout.group import Lease
from jaxrl.rollout.templates import Templates
from jaxrl.signature import ConfigError
from jaxrl.types import Trajectory


def make_manager(
  world: EnvWorld, group_id: int = 0, env_id: int = 0, **options: Any
) -> EnvManager:
  """The manager that fits what is played. options: those of EnvManager."""
  kind = EnvManager if world.endpoint is None else AgentManager
  return kind(world, group_id, env_id, **options)


@dataclasses.dataclass
class AgentCache(RolloutCache):
  """An agent's attempt. branches: a cache for each of its conversations."""

  branches: list[RolloutCache] = dataclasses.field(default_factory=list)


class AgentManager(EnvManager):
  """Lets an agent play: its whole run is the one decision and step of an episode.

  max_steps: replies that an episode may have. max_length: tokens of a conversation.
  timeouts: of a step, seconds the agent may take. All else as in EnvManager; the agent
  writes its own messages, so there are no templates.
  """

  def __init__(
    self, world: EnvWorld, group_id: int = 0, env_id: int = 0, **options: Any
  ):
    super().__init__(world, group_id, env_id, **options)
    own, plain = self._templates, Templates()
    if (own.system, own.first, own.turn) != (plain.system, plain.first, plain.turn):
      raise ConfigError(
        'an agent writes its own messages: leave system_template, first_template and '
        'turn_template out'
      )

  async def reset(self, lease: Lease) -> RolloutCache | None:
    cache = await super().reset(lease)
    return cache and AgentCache(**vars(cache))

  async def make_decision(self, cache: RolloutCache) -> None:
    """Runs the agent to its end, and rewards and keeps what it said."""
    assert isinstance(cache, AgentCache)
    endpoint, lease = self.world.endpoint, cache.lease
    terms = self._terms(cache)
    try:
      key = await endpoint.open(terms.request_name, lease, cache.seed, terms)
    except Exception as error:  # it cannot listen here
      cache.stop('generate_failed', error)
      return
    told: Mapping[str, Any] = {}
    error: Exception | None = None
    try:
      told = await self._agent(cache.env.run, endpoint.url, key)
    except asyncio.CancelledError:
      self._drop_env()  # which ends its process
      raise
    except Exception as raised:
      error = raised
    finally:
      seat = endpoint.end(key)
    self._conclude(cache, seat, error)
    if not cache.failed and seat.session.replies:
      await self._reward(cache, seat, told)
    cache.branches = seat.session.caches()
    # For whoever rewards the episode further: its turns are those of its branches.
    cache.turns = [turn for branch in cache.branches for turn in branch.turns]
    cache.messages = [m for branch in cache.branches[-1:] for m in branch.messages]

  async def _agent(self, fn: Callable[..., Any], *args: Any) -> Any:
    return await self.world.pool.run(fn, *args, timeout=self._timeouts.step)

  def _conclude(self, cache: AgentCache, seat: Seat, error: Exception | None) -> None:
    """Why it ended. An agent that fails once a limit was reached is not at fault."""
    replies = seat.session.replies
    cache.metrics['agent/replies'] = float(len(replies))
    cache.metrics['agent/overruled'] = float(seat.overruled)
    if isinstance(error, CallTimeout):
      cache.stop('env_timeout', error)
    elif error is not None and seat.fault:
      cache.stop('generate_failed', seat.fault)
    elif seat.cut and (replies or seat.refused):
      cache.stop(seat.cut)
      cache.hear([] if replies else seat.refused[: self.max_length])
    elif error is not None:
      cache.stop('env_error', error)
    elif not replies and seat.fault:
      cache.stop('generate_failed', seat.fault)
    elif not replies:
      cache.stop('env_error', 'the agent asked for no reply')
    else:
      cache.terminated = True
    if error is not None:
      self._drop_env()

  async def _reward(
    self, cache: AgentCache, seat: Seat, told: Mapping[str, Any]
  ) -> None:
    """Gives the last reply what agent, clients and grader say of the episode."""
    last = list(seat.session.replies.values())[-1]
    text = self.world.chat.decode(last.said.tokens)
    try:
      info = await self._agent(cache.env.judge, told, text, seat.reward)
    except Exception as error:
      self._drop_env()
      cache.stop('env_error', error)
    else:
      self._note(cache, info)
      last.reward += info['reward']

  def formulate_rollouts(self, cache: RolloutCache) -> list[Trajectory]:
    """The rows of every conversation, one after the other; `step` counts them."""
    branches = cache.branches if isinstance(cache, AgentCache) else []
    rows = []
    for branch in branches:
      branch.task, branch.stop_reason = cache.task, cache.stop_reason
      branch.metrics |= cache.metrics | {'agent/branches': float(len(branches))}
      branch.columns |= cache.columns
      branch.extras |= cache.extras
      rows += super().formulate_rollouts(branch)
    for i, row in enumerate(rows):
      row.step = i
    return rows or super().formulate_rollouts(cache)

  def _start_env(self, cache: RolloutCache) -> list[int] | None:
    """On the pool's threads. There is no prompt: the agent will write it."""
    self._have_env(cache)
    task = {'task': cache.task} if cache.task is not None else {}
    observation, info = cache.env.reset(seed=cache.seed, options=task)
    self._note(cache, info)
    return None if observation is None else []

  def _terms(self, cache: RolloutCache) -> Terms:
    """Replies are drawn as any environment's, the reply's number being the turn."""
    greedy, member = cache.lease.greedy, cache.lease.member
    base, seed = self._base_seed, cache.seed
    sampling = self._sampling
    if greedy:
      sampling = dataclasses.replace(sampling, temperature=0.0)
    return Terms(
      sampling,
      seed=lambda number: fold(base, seed, member, number, 0),
      request_name=f'{self._name(cache)}/{cache.lease.attempt}',
      max_length=self.max_length,
      max_replies=self.max_steps,
      fixed=True,
      timeout=self._timeouts.generate,
      owned=True,
    )
