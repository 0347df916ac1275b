"""AgentEnvManager plays episodes in which an agent calls the model by itself.

The agent reaches the model through an OpenAI-compatible endpoint, as often as it likes.
The endpoint records the tokens of every prompt and response, and these records become
the rows of the episode.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl.data.seeds import fold_seed
from jaxrl.envs.agents.agent_env import AgentResult
from jaxrl.options import Keywords
from jaxrl.rollout.env_manager import EnvContext, EnvManager
from jaxrl.rollout.episodes.prompt_templates import PromptTemplates
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.gateway.choice_runner import SessionLimits, SessionState
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.rollout.thread_pool import CallTimeoutError
from jaxrl.types import Trajectory


@dataclasses.dataclass
class AgentRolloutCache(RolloutCache):
  """Holds the state of an episode that an agent plays.

  Attributes:
    branches: The state of each of the agent's conversations.
  """

  branches: list[RolloutCache] = dataclasses.field(default_factory=list)


class AgentEnvManager(EnvManager):
  """Runs an agent, whose whole run is the one decision and step of an episode.

  The options are those of `EnvManager`, where `max_steps` limits the responses of an
  episode, `max_length` the tokens of a conversation, and the timeout of a step the
  seconds that the agent may take. The agent writes its own messages, so there are no
  templates.
  """

  def __init__(
    self, context: EnvContext, group_id: int = 0, env_id: int = 0, **options: Any
  ):
    """Creates a manager; see `EnvManager`.

    Args:
      context: What all environments of the tag share.
      group_id: The env group.
      env_id: The environment within the env group.
      **options: Options of `EnvManager`.

    Raises:
      ValueError: If a template is set.
    """
    super().__init__(context, group_id, env_id, **options)
    if vars(self._templates) != vars(PromptTemplates()):
      raise ValueError(
        'an agent writes its own messages: leave system_template, first_template and '
        'turn_template out'
      )

  async def reset(self, lease: EpisodeLease) -> RolloutCache | None:
    """Draws the task and starts the agent; see `EnvManager.reset`."""
    cache = await super().reset(lease)
    return cache and AgentRolloutCache(**vars(cache))

  async def make_decision(self, cache: RolloutCache) -> None:
    """Runs the agent to its end, rewards the episode and keeps its conversations."""
    assert isinstance(cache, AgentRolloutCache)
    endpoint, limits = self.context.endpoint, self._session_limits(cache)
    assert endpoint is not None, 'an agent needs an endpoint'
    try:
      key = await endpoint.open_session(
        limits.request_prefix, cache.lease, cache.seed, limits
      )
    except Exception as error:  # the endpoint cannot listen on this machine
      cache.truncate('generate_failed', error)
      return
    result: AgentResult = {}
    agent_error: Exception | None = None
    try:
      result = await self._run_agent(cache.env.run, endpoint.url, key)
    except asyncio.CancelledError:
      self._discard_env()  # this ends the agent's process
      raise
    except Exception as error:
      agent_error = error
    finally:
      state = endpoint.close_session(key)
    self._set_stop_reason(cache, state, agent_error)
    if not cache.failed and state.session.replies:
      await self._reward_last_reply(cache, state, result)
    cache.branches = state.session.rollout_caches()
    # Rewards that are added after the episode look at its turns and messages.
    cache.turns = [turn for branch in cache.branches for turn in branch.turns]
    cache.messages = [m for branch in cache.branches[-1:] for m in branch.messages]

  async def _run_agent(self, fn: Callable[..., object], *args: object) -> Any:
    return await self._run_on_thread(fn, *args, timeout=self._timeouts.step)

  def _set_stop_reason(
    self, cache: AgentRolloutCache, state: SessionState, error: Exception | None
  ) -> None:
    """Sets why the episode ended.

    An agent that fails after a limit was reached is not at fault.
    """
    replies = state.session.replies
    cache.metrics['agent/replies'] = float(len(replies))
    cache.metrics['agent/overruled'] = float(state.num_sampling_overrides)
    if isinstance(error, CallTimeoutError):
      cache.truncate('env_timeout', error)
    elif error is not None and state.error:
      cache.truncate('generate_failed', state.error)
    elif state.limit_reached and (replies or state.refused_prompt):
      if replies:
        cache.truncate(state.limit_reached)
      else:
        cache.append_observation(state.refused_prompt[: self.max_length])
        text = self._describe_long_prompt(cache, len(state.refused_prompt))
        cache.truncate('prompt_too_long', text)
    elif error is not None:
      cache.truncate('env_error', error)
    elif not replies and state.error:
      cache.truncate('generate_failed', state.error)
    elif not replies:
      cache.truncate('env_error', 'the agent requested no response')
    else:
      cache.terminated = True
    if error is not None:
      self._discard_env()

  async def _reward_last_reply(
    self, cache: AgentRolloutCache, state: SessionState, result: AgentResult
  ) -> None:
    """Adds what agent, clients and grader say of the episode to the last reply."""
    last_reply = list(state.session.replies.values())[-1]
    text = self.context.chat.decode(last_reply.completion.tokens)
    try:
      info = await self._run_agent(cache.env.judge, result, text, state.reward)
    except Exception as error:
      self._discard_env()
      cache.truncate('env_error', error)
    else:
      self._record_info(cache, info)
      last_reply.reward += info['reward']

  def formulate_rollouts(self, cache: RolloutCache) -> list[Trajectory]:
    """Turns every conversation into rows, numbered by their turn index.

    Args:
      cache: The finished episode.

    Returns:
      The rows of all conversations, one after the other.
    """
    branches = cache.branches if isinstance(cache, AgentRolloutCache) else []
    rows = []
    for branch in branches:
      branch.task, branch.stop_reason = cache.task, cache.stop_reason
      branch.metrics |= cache.metrics | {'agent/branches': float(len(branches))}
      branch.columns |= cache.columns
      branch.extras |= cache.extras
      rows += super().formulate_rollouts(branch)
    for i, row in enumerate(rows):
      row.turn = i
    return rows or super().formulate_rollouts(cache)

  def _start_env(self, cache: RolloutCache) -> list[int] | None:
    """Resets the environment; the agent writes the prompt, so it is empty here."""
    self._assign_env(cache)
    cache.generation_prompt = self.context.chat.generation_prompt
    options: Keywords = {'generation_prompt': cache.generation_prompt}
    if cache.task is not None:
      options['task'] = cache.task
    observation, info = cache.env.reset(seed=cache.seed, options=options)
    self._record_info(cache, info)
    return None if observation is None else []

  def _session_limits(self, cache: RolloutCache) -> SessionLimits:
    """Samples responses as for any environment; their number stands for the turn."""
    base_seed, lease = self._base_seed, cache.lease
    sampling = self._sampling
    if lease.greedy:
      sampling = dataclasses.replace(sampling, temperature=0.0)

    def seed_of_reply(number: int) -> int:
      return fold_seed(base_seed, cache.seed, lease.sample_index, number, 0)

    return SessionLimits(
      sampling,
      seed=seed_of_reply,
      request_prefix=f'{self._sample_name(cache)}/{lease.attempt}',
      max_length=self.max_length,
      max_replies=self.max_steps,
      fixed_sampling=True,
      timeout=self._timeouts.generate or None,
      owned=True,
    )
