"""The gateway turns clients' requests into recorded replies of a rollout engine."""

import asyncio
import dataclasses
import functools
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.model_text.chat_template import ChatOptionError
from jaxrl.data.seeds import fold_seed
from jaxrl.data.tool_formats import UNKNOWN
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.engine.engine_base import EngineTraits
from jaxrl.rollout.episodes.row_format import ROW_FORMATS
from jaxrl.rollout.gateway.choice_runner import (
  ChoiceRunner,
  SessionLimits,
  SessionState,
)
from jaxrl.rollout.gateway.generation_request import (
  ApiError,
  GenerationRequest,
  invalid_field,
)
from jaxrl.rollout.gateway.request_cache import RequestCache
from jaxrl.rollout.gateway.session_recorder import AgentSession, SessionPrompt
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.rollout.thread_pool import Arguments
from jaxrl.types import (
  Message,
  SamplingParams,
  TextConstraint,
  TokenGenerator,
  Trajectory,
  Value,
)


class Gateway:
  """Replies to requests and records the conversations of each session.

  Attributes:
    model: The model's name, as clients see it.
  """

  def __init__(
    self,
    engine: TokenGenerator,
    chat: ChatTokenizer,
    *,
    deliver: Callable[[str, list[Trajectory]], Any] | None = None,
    model: str = 'policy',
    seed: int = 0,
    max_length: int = 4096,
    max_tokens: int = 1024,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    fixed_sampling: bool = False,
    max_choices: int = 8,
    max_sessions: int = 4096,
    max_replies: int = 1024,
    evict_idle: bool = False,
    allow_new_sessions: bool = True,
    row_format: str = 'trajectory',
    tag: str = '',
    traits: EngineTraits | None = None,
  ):
    """Creates a gateway without sessions.

    Args:
      engine: Generates the replies.
      chat: The chat tokenizer of the engine's model.
      deliver: Receives a session's name and rows when the session ends; its result may
        be awaited.
      model: The model's name, as clients see it.
      seed: Together with a session's name and a reply's number, gives the reply's seed.
      max_length: Tokens that prompt and reply may have together.
      max_tokens: Tokens a reply may have.
      temperature: Sampling temperature of requests that set none.
      top_p: Nucleus sampling of requests that set none.
      top_k: top-k sampling of requests that set none.
      fixed_sampling: Whether these options, and the seeds, hold whatever a request
        sets.
      max_choices: Replies to one request.
      max_sessions: Sessions at the same time.
      max_replies: Replies of one session.
      evict_idle: Beyond these limits, whether the session unused for longest is
        dropped, and a session that is too long starts anew. Otherwise requests are
        refused.
      allow_new_sessions: Whether a request under a new name begins a session. Otherwise
        only `open_session` does.
      row_format: How sessions become rows; one of `ROW_FORMATS`.
      tag: The tag of the rows.
      traits: What the engine can do; by default what it says of itself.

    Raises:
      ValueError: If there is no such row format.
    """
    if row_format not in ROW_FORMATS:
      raise ValueError(
        f'no row format {row_format!r}; there are {", ".join(ROW_FORMATS)}'
      )
    self._engine = engine
    own_traits = getattr(engine, 'traits', None)  # of a handle, it is a method
    own_traits = own_traits if isinstance(own_traits, EngineTraits) else EngineTraits()
    self._traits = traits or own_traits
    self._chat = chat
    self.model = model
    self._deliver = deliver
    self._seed = seed
    self._max_choices = max_choices
    self._evict_idle = evict_idle
    self._max_sessions = max_sessions
    self._allow_new_sessions = allow_new_sessions
    self._row_format = row_format
    self._tag = tag
    sampling = SamplingParams(
      max_tokens=max_tokens,
      temperature=temperature,
      top_p=top_p,
      top_k=top_k,
      stop_token_ids=chat.stop_token_ids,
    )
    self._default_limits = SessionLimits(
      sampling,
      seed=lambda number: number,
      request_prefix='gateway',
      max_length=max_length,
      max_replies=max_replies,
      fixed_sampling=fixed_sampling,
    )
    self._sessions: OrderedDict[str, SessionState] = OrderedDict()
    self._num_opened = 0
    # A single thread, because tokenizers are not safe for two at a time.
    self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix='gateway-chat')

  def close(self) -> None:
    """Ends the tokenizer's thread."""
    self._tokenizer_thread.shutdown(wait=False)

  def decode(self, tokens: list[int]) -> str:
    """Returns the text of ids, without special tokens."""
    return self._chat.decode(tokens)

  def request_cache(self, name: str) -> RequestCache:
    """Returns the latest requests of a session, or an empty cache if there is none."""
    state = self._sessions.get(name)
    return RequestCache() if state is None else state.request_cache

  def find_conversation(self, name: str, reply_name: str) -> list[Message]:
    """Returns a session's conversation up to the end of one of its replies.

    Args:
      name: The session's name.
      reply_name: The reply's id, as the client knows it.

    Returns:
      The messages, without the instructions of the request that got the reply.

    Raises:
      ApiError: If the session has no such reply.
    """
    state = self._sessions.get(name)
    reply = state.session.replies.get(reply_name) if state is not None else None
    messages = [] if reply is None else [m for r in reply.path for m in r.messages]
    if state is None or not messages:
      raise ApiError(
        400,
        f'previous_response_id: this session has no response {reply_name!r}'[:200],
        param='previous_response_id',
        code='previous_response_not_found',
      )
    return messages[1:] if reply_name in state.instructed else messages

  async def start_choices(
    self, name: str, request: GenerationRequest, cache: RequestCache | None = None
  ) -> list[ChoiceRunner]:
    """Prepares the replies to a request.

    Args:
      name: The session's name.
      request: The request.
      cache: Becomes the session's cache of requests.

    Returns:
      The choices, ready to be run.

    Raises:
      ApiError: If the request exceeds a limit, or its messages are refused.
    """
    if request.n > self._max_choices:
      raise ApiError(400, f'n: at most {self._max_choices}', param='n')
    request = self._apply_thinking(request)
    state = self._find_session(name, request.n)
    self._raise_if_unsupported(request, state)
    state.request_cache = cache or state.request_cache
    field = request.form.prompt_field
    # Counts the replies as running, so that the session is not dropped or overfull.
    state.num_running += request.n
    try:
      prompt = await self.run_on_tokenizer_thread(self._make_prompt, state, request)
    except ValueError as error:
      raise ApiError(400, f'{field}: {error}', param=field) from error
    finally:
      state.num_running -= request.n
    state.raise_if_closed()
    num_tokens_left = state.limits.max_length - len(prompt.tokens)
    if num_tokens_left < 1:
      state.limit_reached = 'max_length'
      state.refused_prompt = prompt.tokens[: state.limits.max_length]
      state.request_cache = RequestCache()  # it may hold megabytes
      raise ApiError(
        400,
        f'the prompt of at least {len(prompt.tokens)} tokens leaves no room in the '
        f'window of {state.limits.max_length}',
        param=field,
        code='context_length_exceeded',
      )
    return [
      self._make_choice(name, state, request, prompt, num_tokens_left, index)
      for index in range(request.n)
    ]

  def _apply_thinking(self, request: GenerationRequest) -> GenerationRequest:
    """Returns the request with the template's option for whether the model thinks."""
    if request.thinking is None:
      return request
    has_thoughts = self._chat.thought_format is not None
    if request.thinking and not has_thoughts:
      raise invalid_field('thinking', 'the model writes no thoughts')
    options = {'enable_thinking': request.thinking, **request.template_options}
    try:
      self._chat.with_options(**options)
    except ChatOptionError as error:
      if has_thoughts and not request.thinking:
        message = 'the chat template has no option that turns thoughts off'
        raise invalid_field('thinking', message, 'unsupported_value') from error
      return request
    return dataclasses.replace(request, template_options=options)

  def _raise_if_unsupported(
    self, request: GenerationRequest, state: SessionState
  ) -> None:
    """Raises ApiError if the engine cannot do what a request asks for."""
    max_top_logprobs = self._traits.max_top_logprobs
    if request.top_logprobs > max_top_logprobs:
      message = f'this engine tells at most {max_top_logprobs} of the likeliest tokens'
      raise invalid_field('top_logprobs', message, 'unsupported_value')
    if not request.forced_tools and request.json_schema is None:
      return
    reason = ''
    if not self._traits.constrains_output:
      reason = 'this engine cannot constrain what it draws'
    elif state.limits.fixed_sampling:
      reason = 'replies are sampled as in training'
    elif self._chat.opens_thought:
      reason = 'a reply begins with a thought'
    elif request.forced_tools and _constraint(request, self._chat) is None:
      reason = 'the model does not write calls as text and JSON'
    if reason and request.forced_tools:
      message = f"only 'auto' and 'none' are supported, as {reason}"
      raise invalid_field('tool_choice', message, 'unsupported_value')
    if reason:
      message = f'only text is supported, as {reason}'
      raise invalid_field(request.form.format_field, message, 'unsupported_value')

  async def run_on_tokenizer_thread(
    self, fn: Callable[[*Arguments], Value], *args: *Arguments
  ) -> Value:
    """Runs what takes long on the one thread that also tokenizes.

    Args:
      fn: The function.
      *args: Its arguments.

    Returns:
      What the function returns.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._tokenizer_thread, fn, *args)

  def _make_prompt(
    self, state: SessionState, request: GenerationRequest
  ) -> SessionPrompt:
    """Builds the prompt, on the tokenizer's thread.

    Text far beyond the window is not encoded: 4 MB of it would take 1.7 GB of memory.
    """
    max_length = state.limits.max_length
    if request.messages is not None:
      return state.session.make_prompt(
        request.messages,
        request.tools,
        request.template_options,
        max_length=max_length,
      )
    prompt = request.prompt or ''
    if isinstance(prompt, str):
      prompt = self._chat.encode(prompt, max_tokens=max_length)
    return state.session.make_token_prompt(prompt)

  def _make_choice(
    self,
    name: str,
    state: SessionState,
    request: GenerationRequest,
    prompt: SessionPrompt,
    num_tokens_left: int,
    index: int,
  ) -> ChoiceRunner:
    number = state.num_started
    state.num_started += 1
    limits, defaults = state.limits, state.limits.sampling
    sampling = dataclasses.replace(
      defaults,
      max_tokens=min(
        num_tokens_left, defaults.max_tokens, request.max_tokens or num_tokens_left
      ),
      stop=(*request.stop, *defaults.stop),
      seed=limits.seed(number),
      top_logprobs=request.top_logprobs,
      constraint=_constraint(request, self._chat),
    )
    overrides = _sampling_overrides(request, index)
    if not limits.fixed_sampling:
      sampling = dataclasses.replace(sampling, **overrides)
    elif any(getattr(sampling, key) != value for key, value in overrides.items()):
      state.num_sampling_overrides += 1
    session_hash = hashlib.sha256(f'{state.number}/{name}'.encode()).hexdigest()[:12]
    chat = self._chat
    if request.template_options:  # which may open a thought, or close it
      chat = chat.with_options(**request.template_options)
    return ChoiceRunner(
      self._engine,
      chat,
      state,
      request,
      prompt,
      sampling,
      key=f'{session_hash}-{number}',
      request_name=f'{limits.request_prefix}/{number}',
    )

  # ---- sessions

  def _find_session(self, name: str, num_replies: int) -> SessionState:
    """Returns a session with room for more replies, a new one if there is none."""
    state = self._sessions.get(name)
    if state is not None and state.limits.owned:
      state.raise_if_closed()
      if self._is_full(state, num_replies):
        state.limit_reached = 'max_steps'
        raise ApiError(
          400,
          f'an episode may have {state.limits.max_replies} replies, and this one has '
          'no more left',
          code='max_steps',
        )
    elif state is not None and self._is_full(state, num_replies):
      if not self._evict_idle or state.num_running:
        max_replies = state.limits.max_replies
        raise ApiError(
          429, f'the session has {max_replies} replies: end it by /feedback'
        )
      del self._sessions[name]
      state = None
    if state is None and not self._allow_new_sessions:
      # The session ended while the body of this request was read.
      raise ApiError(400, 'the session is over', code='session_over')
    if state is None:
      limits = dataclasses.replace(
        self._default_limits,
        seed=functools.partial(fold_seed, self._seed, name),
        request_prefix=f'gateway/{self._num_opened}/0',
      )
      lease = EpisodeLease(0, self._num_opened, 0, 0, 0)
      state = self.open_session(name, lease, fold_seed(self._seed, name), limits)
    self._sessions.move_to_end(name)
    return state

  def _is_full(self, state: SessionState, num_replies: int) -> bool:
    num_after = len(state.session.replies) + state.num_running + num_replies
    return num_after > state.limits.max_replies

  def open_session(
    self, name: str, lease: EpisodeLease, seed: int, limits: SessionLimits
  ) -> SessionState:
    """Begins a session.

    Args:
      name: The session's name.
      lease: Which sample of which group is played.
      seed: The episode seed.
      limits: The session's limits and sampling.

    Returns:
      The session.

    Raises:
      ApiError: If there are too many sessions.
    """
    self._make_room()
    session = AgentSession(self._chat, lease, seed=seed)
    state = SessionState(session, self._num_opened, limits)
    self._num_opened += 1
    self._sessions[name] = state
    return state

  def close_session(self, name: str) -> SessionState:
    """Ends an owned session and cancels its running replies.

    Args:
      name: The session's name.

    Returns:
      The session's final state.
    """
    state = self._sessions.pop(name)
    state.closed = True
    for task in list(state.tasks):
      task.cancel()
    return state

  def _make_room(self) -> None:
    if len(self._sessions) < self._max_sessions:
      return
    idle = (name for name, state in self._sessions.items() if not state.num_running)
    oldest_idle = next(idle, None)
    if not self._evict_idle or oldest_idle is None:
      raise ApiError(
        429, f'there are {self._max_sessions} sessions: end one by /feedback'
      )
    del self._sessions[oldest_idle]

  async def feedback(
    self,
    name: str,
    reward: float | None = None,
    reply_name: str = '',
    *,
    done: bool = True,
  ) -> Sequence[Trajectory]:
    """Rewards a session or one of its replies, and delivers its rows if it is done.

    A done session is forgotten even if `deliver` raises, and a later request under its
    name begins another. An owned session is kept for its owner; a reward without
    `reply_name` is then the episode's.

    Args:
      name: The session's name.
      reward: The reward, if any.
      reply_name: The reply's id, as the client knows it; '' rewards the last reply of
        every conversation.
      done: Whether the session ends.

    Returns:
      The rows that were delivered.

    Raises:
      ApiError: If there is no such session or reply, or one is still being generated.
    """
    state = self._sessions.get(name)
    if state is None:
      raise ApiError(404, 'there is no such session', code='session_not_found')
    if done and state.num_running:
      raise ApiError(409, f'{state.num_running} replies are still being generated')
    state.raise_if_closed()
    if reply_name and reply_name not in state.session.replies:
      raise ApiError(
        404, f'no reply {reply_name!r} in this session', param='completion_id'
      )
    if reward is not None and state.limits.owned and not reply_name:
      state.reward += float(reward)
    elif reward is not None:
      state.session.add_reward(float(reward), reply_name)
    if state.limits.owned:
      state.closed = done
      return []
    if not done:
      return []
    rows = state.session.trajectories(row_format=self._row_format, tag=self._tag)
    del self._sessions[name]
    if self._deliver is not None:
      await maybe_await(self._deliver(name, rows))
    return rows


def _constraint(
  request: GenerationRequest, chat: ChatTokenizer
) -> TextConstraint | None:
  """Returns what a reply must be; None if it may be any text, or cannot be told."""
  if request.json_schema is not None:
    return TextConstraint((('', json.dumps(request.json_schema), ''),))
  added = getattr(chat.tokenizer, 'added_tokens_decoder', {}).values()
  special = [str(one) for one in added if getattr(one, 'special', False)]
  alternatives = []
  for tool in request.tools:
    function = tool['function']
    if function['name'] in request.forced_tools:
      frame = (chat.tool_format or UNKNOWN).frame(function['name'])
      # A grammar describes text, which special tokens are not.
      if frame is None or any(one in text for one in special for text in frame):
        return None
      schema = json.dumps(function.get('parameters') or {'type': 'object'})
      alternatives.append((frame[0], schema, frame[1]))
  return TextConstraint(tuple(alternatives)) if alternatives else None


def _sampling_overrides(
  request: GenerationRequest, index: int
) -> dict[str, int | float]:
  """Returns the sampling options that the client sets for the reply `index`."""
  top_k, seed = request.top_k, request.seed
  overrides = {
    'temperature': request.temperature,
    'top_p': request.top_p,
    'top_k': None if top_k is None else max(top_k, 0),
    'seed': None if seed is None else fold_seed(abs(seed), index),
  }
  return {key: value for key, value in overrides.items() if value is not None}
