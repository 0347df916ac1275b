"""EnvManager plays the episodes of one environment with a rollout engine.

Many managers run as coroutines in one worker. Everything they need is injected and may
be local or remote. A failure costs one episode, which is put with its stop reason.
"""

import asyncio
import dataclasses
import functools
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl import spans
from jaxrl.data.chat_tokenizer import CHARS_PER_TOKEN, ChatTokenizer, has_images
from jaxrl.data.seeds import StartingEpisode, fold_seed, starting
from jaxrl.envs.env_registry import (
  Env,
  Observation,
  check_reset_result,
  check_step_result,
  cut_observation,
)
from jaxrl.group_stats import RESPONSE_TRUNCATED
from jaxrl.options import Keywords, Options, option, section
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.engine.resumable_generation import (
  generate_or_abort,
  generate_with_resume,
)
from jaxrl.rollout.episodes.prompt_templates import PromptTemplates
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.episodes.row_format import ROW_FORMATS
from jaxrl.rollout.queue.group_state import EpisodeLease, EpisodeQueue
from jaxrl.rollout.thread_pool import CallTimeoutError, ThreadPool, Timeouts
from jaxrl.types import (
  MAX_ROLES,
  Completion,
  PromptTooLongError,
  SamplingParams,
  TaskSource,
  TokenGenerator,
  Trajectory,
)

if TYPE_CHECKING:
  from jaxrl.rollout.gateway.agent_endpoint import AgentEndpoint
  from jaxrl.rollout.opponents import PlayerOptions
  from jaxrl.rollout.rewards.reward_pipeline import RewardPipeline

# Tokens of an observation that are encoded beyond the window, so that the last ones
# within it are not those that the chat template writes at the end of a message.
_SPARE_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class EnvContext:
  """Holds what all environments of a tag share, as local objects or handles.

  Attributes:
    make_env: Creates an environment.
    engine: Generates the responses.
    chat: Turns messages into tokens and back.
    pool: Runs environment code on its threads.
    queue: The `GroupQueue`; None outside a rollout loop.
    dataset: The `GlobalDataset`; None for games, whose task is the seed.
    rewards: What is added to an episode's reward after its end.
    endpoint: Where agents reach the engine; None where environments are stepped.
    players: Who plays an environment of several players; None for one player.
  """

  make_env: Callable[[], Env]
  engine: TokenGenerator
  chat: ChatTokenizer
  pool: ThreadPool
  queue: EpisodeQueue | None = None
  dataset: TaskSource | None = None
  rewards: 'RewardPipeline | None' = None
  endpoint: 'AgentEndpoint | None' = None
  players: 'PlayerOptions | None' = None

  async def close(self) -> None:
    """Releases the threads and the endpoint's port."""
    self.pool.close()
    if self.endpoint is not None:
      await self.endpoint.close()


@dataclasses.dataclass(frozen=True)
class SamplingOptions(Options):
  """How tokens are sampled."""

  temperature: float = option(1.0, 'Sampling temperature; 0 is greedy.', low=0)
  top_p: float = option(1.0, 'Nucleus sampling; 1 keeps all tokens.', above=0, high=1)
  top_k: int = option(0, 'Keeps the k likeliest tokens; 0 keeps all.', low=0)


@dataclasses.dataclass(frozen=True)
class EpisodeOptions(Options):
  """How the episodes of one environment tag are played: limits and prompts."""

  max_steps: int = option(1, 'Turns an episode may take.', low=1)
  max_tokens_per_step: int = option(256, 'Tokens one response may have.', low=1)
  stop: tuple[str, ...] = option((), 'Strings that end a response.')
  system_template: str = option('', 'The system message; empty for none.')
  first_template: str = option('', 'The first user message; empty for `turn_template`.')
  turn_template: str = option(
    '{observation}', 'The user message of each turn, with the field {observation}.'
  )
  row_format: str = option(
    'trajectory',
    "Training rows of an episode: 'trajectory', 'step' or 'concatenated'.",
    choices=tuple(ROW_FORMATS),
  )
  timeouts: Timeouts = section(Timeouts, 'Seconds before a call is cancelled.')


@dataclasses.dataclass(frozen=True)
class EnvManagerOptions(EpisodeOptions, SamplingOptions):
  """All options of an environment manager."""

  max_length: int = option(1024, 'Tokens an episode may have.', low=1)
  task_keys: tuple[str, ...] = option((), 'Columns of the task that rows keep.')


class EnvManager:
  """Plays the environment `env_id` of the env group `group_id`.

  Attributes:
    context: What all environments of the tag share.
    group_id: The env group.
    env_id: The environment within the env group.
    tag: The environment's tag.
    max_steps: Turns an episode may take.
    max_length: Tokens an episode may have.
    max_tokens_per_step: Tokens one response may have.
  """

  def __init__(
    self,
    context: EnvContext,
    group_id: int = 0,
    env_id: int = 0,
    *,
    tag: str = '',
    **options: Any,
  ):
    """Creates a manager; its environment is created at the first episode.

    Args:
      context: What all environments of the tag share.
      group_id: The env group.
      env_id: The environment within the env group.
      tag: The environment's tag.
      **options: Those of `EnvManagerOptions`.

    Raises:
      OptionError: If an option is out of range.
      ValueError: If a template has unknown fields.
    """
    self.options = EnvManagerOptions(**options)
    self.context = context
    self.group_id = group_id
    self.env_id = env_id
    self.tag = tag
    self.max_steps = self.options.max_steps
    self.max_length = self.options.max_length
    self.max_tokens_per_step = self.options.max_tokens_per_step
    self._templates = PromptTemplates(
      self.options.system_template,
      self.options.first_template,
      self.options.turn_template,
    )
    self._make_rows = functools.partial(
      ROW_FORMATS[self.options.row_format], max_tokens=self.max_length
    )
    self._timeouts = self.options.timeouts
    self._sampling = SamplingParams(
      max_tokens=self.max_tokens_per_step,
      temperature=self.options.temperature,
      top_p=self.options.top_p,
      top_k=self.options.top_k,
      stop=self.options.stop,
      stop_token_ids=context.chat.stop_token_ids,
    )
    self._env: Any = None
    # The episode that may still create the environment, guarded by the lock.
    self._starting_cache: RolloutCache | None = None
    self._lock = threading.Lock()
    self._base_seed = 0
    self._is_trial = False
    self._running: tuple[EpisodeLease, asyncio.Task] | None = None

  async def run_rollout_loop(self, data: Mapping[str, int]) -> int:
    """Plays episodes until the queue has no more leases.

    Args:
      data: `{'seed': base_seed}`, or an object whose `meta_info` is that.

    Returns:
      The number of episodes put into the queue.
    """
    self._base_seed = int(getattr(data, 'meta_info', data)['seed'])
    queue, num_episodes = self.context.queue, 0
    assert queue is not None, 'without a queue only play_episode can be called'
    while True:
      lease = await maybe_await(queue.get_episode_id(self.group_id, self.env_id))
      if lease is None:
        self._discard_env()
        return num_episodes
      rollout = await self._play_unless_aborted(EpisodeLease(*lease))
      await maybe_await(
        queue.put(
          self.group_id, lease.episode_id, lease.start_step, rollout, self.env_id
        )
      )
      num_episodes += 1

  def abort(self, lease: EpisodeLease) -> None:
    """Ends the episode of `lease` if it is being played; it is put as aborted."""
    if self._running is not None and self._running[0] == EpisodeLease(*lease):
      self._running[1].cancel()

  async def _play_unless_aborted(self, lease: EpisodeLease) -> list[Trajectory] | None:
    task = asyncio.ensure_future(self.play_episode(lease, base_seed=self._base_seed))
    self._running = (lease, task)
    try:
      return await task
    except asyncio.CancelledError:
      self._discard_env()  # it may still be working for the aborted episode
      loop_task = asyncio.current_task()
      loop_cancelled = loop_task is not None and loop_task.cancelling()
      if not task.cancelled() or loop_cancelled:
        task.cancel()
        raise
      cache = RolloutCache(lease, self._episode_seed(lease))
      cache.truncate('abort', 'the queue cancelled the lease')
      return self._make_rollout(cache)
    finally:
      self._running = None

  def _episode_seed(self, lease: EpisodeLease) -> int:
    return self._base_seed + lease.env_group + lease.episode_id

  def _discard_env(self) -> None:
    """Forgets the environment; one in a process of its own is killed."""
    with self._lock:
      env, self._env, self._starting_cache = self._env, None, None
    _kill(env)

  async def play_episode(
    self, lease: EpisodeLease, *, base_seed: int
  ) -> list[Trajectory] | None:
    """Plays one episode. Failures become its stop reason and do not raise.

    Args:
      lease: Which sample of which group to play.
      base_seed: The episode seed is `base_seed + group_id + episode_id`.

    Returns:
      The episode's rows, or None if the data set has no more tasks.
    """
    self._base_seed = base_seed
    lane = f'{self.tag} group {self.group_id} environment {self.env_id}'
    timed = functools.partial(spans.span, 'environments', lane)
    with timed('reset'):
      cache = await self.reset(lease)
    if cache is None:
      return None
    while not cache.done:
      with timed('generate'):
        completion = await self.make_decision(cache)
      if completion is not None:
        with timed('step'):
          await self.step(cache, completion)
    if self.context.rewards is not None:
      seed = fold_seed(base_seed, cache.seed, lease.sample_index, 'rewards')
      name = f'{self._sample_name(cache)}/{lease.attempt}'
      with timed('rewards'):
        await self.context.rewards.apply(cache, name, seed, self.context.pool)
    cache.check_rewards()
    return self._make_rollout(cache)

  async def reset(self, lease: EpisodeLease) -> RolloutCache | None:
    """Draws the task and starts the environment.

    Args:
      lease: Which sample of which group to play.

    Returns:
      The state of the new episode, or None if there are no more tasks.
    """
    cache = self._starting_cache = RolloutCache(lease, self._episode_seed(lease))
    try:
      if not await self._draw_task(cache):
        return None
      prompt = await self._run_on_thread(
        self._start_env, cache, timeout=self._timeouts.reset
      )
    except Exception as error:
      self._discard_env()
      cache.truncate('env_reset_failed', error)
      return cache
    if prompt is None:
      return None
    cache.append_observation(prompt[: self.max_length])
    if len(prompt) >= self.max_length:
      cache.truncate('prompt_too_long', self._describe_long_prompt(cache, len(prompt)))
    return cache

  async def _draw_task(self, cache: RolloutCache) -> bool:
    """Gives the episode its row of the data set; returns False if none is left."""
    if self.context.dataset is None:
      return True
    number = cache.lease.env_group + cache.lease.episode_id
    cache.task = await maybe_await(self.context.dataset.get_task(cache.seed, number))
    cache.keep_columns(self.options.task_keys)
    return cache.task is not None

  def _describe_long_prompt(self, cache: RolloutCache, num_tokens: int) -> str:
    row = cache.task.index if cache.task is not None else None
    what = 'the first prompt' + ('' if row is None else f', of row {row},')
    if num_tokens < self.max_length:
      return f"{what} takes {num_tokens} tokens, more than the engine's window allows"
    return (
      f'{what} takes at least {num_tokens} tokens, and max_length={self.max_length} '
      'leaves none for a reply: raise it, or shorten or drop the task'
    )

  async def make_decision(self, cache: RolloutCache) -> Completion | None:
    """Generates the model's next response.

    Args:
      cache: The episode so far.

    Returns:
      The response, or None if the episode ended without one.
    """
    num_tokens_left = self.max_length - len(cache.tokens)
    if num_tokens_left < 1:
      cache.truncate('max_length')
      return None
    max_tokens = min(num_tokens_left, self.max_tokens_per_step)
    try:
      completion = await self._generate(cache, max_tokens)
    except PromptTooLongError as error:
      cache.truncate('max_length' if cache.turns else 'prompt_too_long', error)
      return None
    except TimeoutError:
      seconds = self._timeouts.generate or None
      cache.truncate('generate_failed', f'no response within {seconds} s')
      return None
    except Exception as error:
      cache.truncate('generate_failed', error)
      return None
    if len(completion.tokens) == 0:
      cache.truncate('generate_failed', 'the engine returned no token')
      return None
    cache.append_response(completion)
    cache.extras[RESPONSE_TRUNCATED] = completion.finish_reason == 'length'
    if completion.finish_reason == 'abort':
      cache.truncate('abort', 'the engine aborted the request')
      return None
    return completion

  async def step(self, cache: RolloutCache, completion: Completion) -> None:
    """Passes a response to the environment and appends its observation.

    Args:
      cache: The episode so far, which ends with the response.
      completion: The response.
    """
    try:
      observation_ids = await self._run_on_thread(
        self._step_env, cache, completion, timeout=self._timeouts.step
      )
    except CallTimeoutError as error:
      self._discard_env()
      cache.truncate('env_timeout', error)
    except Exception as error:
      self._discard_env()
      cache.truncate('env_error', error)
    else:
      if not cache.done:
        num_tokens_left = self.max_length - len(cache.tokens)
        cache.append_observation(observation_ids[:num_tokens_left])

  async def try_reset(self, number: int, *, base_seed: int) -> RolloutCache | None:
    """Begins an episode that is not played, for the errors that this shows.

    A data set that the environment opens itself still has its row for the episode.

    Args:
      number: The episode's number, counted from 0.
      base_seed: As for `play_episode`.

    Returns:
      What `reset` returns.
    """
    self._base_seed, self._is_trial = base_seed, True
    try:
      return await self.reset(EpisodeLease(0, number, 0, 0, 0))
    finally:
      self._is_trial = False

  async def try_step(self, cache: RolloutCache) -> None:
    """Passes an empty reply to the environment, for the errors that this shows.

    Args:
      cache: An episode that has begun; it cannot go on afterwards.

    Raises:
      EnvResultError: If `step` returns something that cannot be used.
      Exception: Whatever `step` itself raises.
    """
    result = await self._run_on_thread(cache.env.step, '', timeout=self._timeouts.step)
    check_step_result(cache.env, result)

  def formulate_rollouts(self, cache: RolloutCache) -> list[Trajectory]:
    """Turns a finished episode into training rows.

    Args:
      cache: The finished episode.

    Returns:
      The rows, as the option `row_format` says.
    """
    response_length = sum(turn.stop - turn.start for turn in cache.own_turns)
    cache.metrics.setdefault('turns', float(len(cache.turns)))
    cache.metrics.setdefault('response_length', float(response_length))
    return self._make_rows(cache, self.tag)

  def _make_rollout(self, cache: RolloutCache) -> list[Trajectory]:
    """Returns the rows of `formulate_rollouts`, which a user's class may override.

    None would be taken for the end of the data.
    """
    rows = self.formulate_rollouts(cache)
    if not isinstance(rows, list):
      raise ValueError(
        f'{type(self).__name__}.formulate_rollouts returned a {type(rows).__name__}; '
        'it must return a list of rows'
      )
    return rows

  # ---- on the threads of the pool

  def _assign_env(self, cache: RolloutCache) -> None:
    """Gives the episode the environment, which is created if there is none.

    An environment that is created too late, for an aborted episode, is killed.
    """
    env = self._env if self._env is not None else self.context.make_env()
    with self._lock:
      if self._starting_cache is cache:
        self._env = cache.env = env
        return
    _kill(env)
    raise RuntimeError('the episode was aborted while its environment was created')

  def _start_env(self, cache: RolloutCache) -> list[int] | None:
    """Resets the environment; returns the ids of the first prompt."""
    self._assign_env(cache)
    cache.generation_prompt = self.context.chat.generation_prompt
    options: Keywords = {'generation_prompt': cache.generation_prompt}
    if (tool_format := self.context.chat.tool_format) is not None:
      options['tool_format'] = tool_format.name
    if cache.task is not None:
      options['task'] = cache.task
    number = cache.lease.env_group + cache.lease.episode_id
    seed = cache.seed if cache.env_seed is None else cache.env_seed
    with starting(StartingEpisode(seed, number, self._is_trial)):
      result = cache.env.reset(seed=seed, options=options)
    observation, info = check_reset_result(cache.env, result)
    if observation is None:
      return None
    self._record_info(cache, info)
    chat, tools = self.context.chat, info.get('tools')
    cache.chat = chat.with_tools(tools) if tools else chat
    encode = cache.chat.encode_prompt
    return self._encode_observation(cache, observation, info, encode)

  def _step_env(self, cache: RolloutCache, completion: Completion) -> list[int]:
    """Steps the environment; returns the ids of the next observation."""
    text = self.context.chat.decode(completion.tokens)
    result = cache.env.step(text)
    observation, reward, terminated, truncated, info = check_step_result(
      cache.env, result
    )
    cache.messages.append({'role': 'assistant', 'content': text})
    cache.turns[-1].reward = reward
    self._record_info(cache, info)
    if terminated:
      cache.terminated = True
    elif truncated or len(cache.turns) >= self.max_steps:
      cache.truncate('max_steps')
    elif len(cache.tokens) >= self.max_length:
      cache.truncate('max_length')
    if cache.done:
      return []
    encode = functools.partial(cache.chat.encode_next_prompt, reply=completion.tokens)
    return self._encode_observation(cache, observation, info, encode)

  def _encode_observation(
    self,
    cache: RolloutCache,
    observation: Observation,
    info: Mapping[str, Any],
    encode: Callable[..., list[int]],
  ) -> list[int]:
    """Records an observation and returns its ids, at least those within the window.

    Text far beyond the window is neither encoded nor kept: encoding 50 MB takes 20 GB
    of memory.
    """
    messages = self._templates.render(
      observation,
      info,
      turn_idx=len(cache.turns),
      actions_left=self.max_steps - cache.turn_number,
      max_response_length=self.max_tokens_per_step,
    )
    if has_images(messages):
      from jaxrl.data.images import with_images  # text alone needs none

      messages = with_images(messages)
    num_needed = self.max_length - len(cache.tokens) + _SPARE_TOKENS
    kept = cut_observation(messages, 2 * CHARS_PER_TOKEN * num_needed)
    tokens = encode(kept, max_tokens=num_needed)
    if kept is not messages and len(tokens) < num_needed:
      kept = messages  # it has tokens of many characters
      tokens = encode(kept, max_tokens=num_needed)
    text = '\n'.join(str(message['content']) for message in kept)
    cache.state_hash = zlib.crc32(text.encode()) >> 1
    cache.messages += kept
    if has_images(kept):
      cache.add_images(cache.chat, tokens[: self.max_length - len(cache.tokens)], kept)
    return tokens

  @staticmethod
  def _record_info(cache: RolloutCache, info: Mapping[str, Any]) -> None:
    """Keeps what the environment reports; later turns overwrite earlier ones."""
    cache.metrics.update({k: float(v) for k, v in info.get('metrics', {}).items()})
    cache.columns.update(info.get('columns', {}))
    if (role := info.get('role')) is not None:
      if role not in range(MAX_ROLES):
        raise ValueError(f"info['role'] is {role!r}; it must be 0 to {MAX_ROLES - 1}")
      cache.extras['role'] = int(role)

  # ---- on the event loop

  async def _run_on_thread(
    self, fn: Callable[..., object], *args: object, timeout: float | None
  ) -> Any:
    return await self.context.pool.run(fn, *args, timeout=timeout or None)

  async def _generate(self, cache: RolloutCache, max_tokens: int) -> Completion:
    """Generates one response; an interrupted one continues from its tokens."""
    lease, turn = cache.lease, cache.turn_number
    name = f'{self._sample_name(cache)}/{turn}/{lease.attempt}'
    # The trailing 0 keeps the seeds equal to those of earlier versions.
    seed = fold_seed(self._base_seed, cache.seed, lease.sample_index, turn, 0)
    sampling = dataclasses.replace(
      self._sampling,
      max_tokens=max_tokens,
      seed=seed,
      temperature=0.0 if lease.greedy else self._sampling.temperature,
    )
    request = self._request
    if cache.images:
      request = functools.partial(request, images=[x for _, x in cache.images])
    return await generate_with_resume(request, name, cache.tokens, sampling)

  def _sample_name(self, cache: RolloutCache) -> str:
    """Names the sample; the name is the same at every attempt."""
    lease = cache.lease
    group = f'{self.tag}/{lease.env_group}/{lease.episode_id}/{cache.seed}'
    return f'{group}/{lease.sample_index}'

  async def _request(
    self,
    request_id: str,
    prompt: list[int],
    sampling: SamplingParams,
    images: Sequence[Any] = (),
  ) -> Completion:
    return await generate_or_abort(
      self.context.engine,
      request_id,
      prompt,
      sampling,
      images,
      timeout=self._timeouts.generate or None,
    )


def _kill(env: Any) -> None:
  if hasattr(env, 'kill'):
    env.kill()
