"""ChoiceRunner generates one reply of a session and records it.

A request may want several replies, which OpenAI's API calls choices.
"""

import asyncio
import dataclasses
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.tool_formats import UNKNOWN, InvalidToolCall, ToolCall
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.engine.engine_base import ImageError
from jaxrl.rollout.engine.resumable_generation import (
  generate_or_abort,
  generate_with_resume,
)
from jaxrl.rollout.gateway.openai_requests import (
  ApiError,
  GenerationRequest,
  parse_client_messages,
)
from jaxrl.rollout.gateway.request_cache import RequestCache
from jaxrl.rollout.gateway.session_recorder import AgentSession, SessionPrompt
from jaxrl.types import (
  Completion,
  Message,
  PromptTooLongError,
  RolloutEngine,
  SamplingParams,
)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SessionLimits:
  """Holds the limits and the sampling of a session's replies.

  Attributes:
    sampling: How replies are sampled unless a request says otherwise.
    seed: Returns the seed of the n-th reply.
    request_prefix: The beginning of the engine's request ids.
    max_length: Tokens that prompt and reply may have together.
    max_replies: Replies that the session may have.
    fixed_sampling: Whether `sampling` holds whatever a request says.
    timeout: Seconds a reply may take; None for no limit.
    owned: Whether the session was opened by the one who will collect it. Clients then
      neither begin nor end it, and are told when it is over.
  """

  sampling: SamplingParams
  seed: Callable[[int], int]
  request_prefix: str
  max_length: int
  max_replies: int
  fixed_sampling: bool = False
  timeout: float | None = None
  owned: bool = False


@dataclasses.dataclass
class SessionState:
  """Tracks a session and its running replies.

  Attributes:
    session: The recorded conversations.
    number: The session's number within its gateway.
    limits: The session's limits and sampling.
    num_started: How many replies were started.
    num_running: How many replies are being generated.
    reward: What clients gave for the whole session.
    limit_reached: 'max_steps' or 'max_length' once a reply was refused for it, else ''.
    refused_prompt: The ids of the prompt that was too long.
    error: Why the latest reply failed; '' if it did not.
    num_sampling_overrides: Replies for which a request wanted other sampling than the
      fixed one.
    closed: Whether the session takes no more replies.
    request_cache: The session's latest requests.
    tasks: The tasks of the running replies.
  """

  session: AgentSession
  number: int
  limits: SessionLimits
  num_started: int = 0
  num_running: int = 0
  reward: float = 0.0
  limit_reached: str = ''
  refused_prompt: list[int] = dataclasses.field(default_factory=list)
  error: str = ''
  num_sampling_overrides: int = 0
  closed: bool = False
  request_cache: RequestCache = dataclasses.field(default_factory=RequestCache)
  tasks: set[asyncio.Task] = dataclasses.field(default_factory=set)

  def raise_if_closed(self) -> None:
    """Raises ApiError once the session is over."""
    if self.closed:
      raise ApiError(400, 'the session is over', code='session_over')


@dataclasses.dataclass(frozen=True)
class ChoiceResult:
  """Holds a finished reply.

  Attributes:
    name: The reply's id, as clients know it.
    message: The reply as a message, tool calls included.
    prompt: The ids that were completed.
    completion: What the engine returned.
    finish_reason: OpenAI's finish reason.
  """

  name: str
  message: Message
  prompt: list[int]
  completion: Completion
  finish_reason: str


class ChoiceRunner:
  """Generates one reply to a request, once, and records it.

  Attributes:
    name: The reply's id, as clients know it.
  """

  def __init__(
    self,
    engine: RolloutEngine,
    chat: ChatTokenizer,
    state: SessionState,
    request: GenerationRequest,
    prompt: SessionPrompt,
    sampling: SamplingParams,
    *,
    name: str,
    request_name: str,
  ):
    """Creates a runner; `run` starts it.

    Args:
      engine: Generates the reply.
      chat: The chat tokenizer of the engine's model.
      state: The session.
      request: What the client asked for.
      prompt: What is completed.
      sampling: How the reply is sampled.
      name: The reply's id, as clients know it.
      request_name: The beginning of the engine's request ids.
    """
    self._engine = engine
    self._chat = chat
    self._state = state
    self._request = request
    self._prompt = prompt
    self._sampling = sampling
    self.name = name
    self._request_name = request_name
    # The engine's present request: its id, and the reply's ids from earlier requests.
    self._engine_request: tuple[str, list[int]] | None = None

  async def run(self) -> ChoiceResult:
    """Generates and records the reply. Cancelling it cancels the engine's work.

    Returns:
      The reply.

    Raises:
      ApiError: If the engine fails; nothing is recorded then.
    """
    state, task = self._state, asyncio.current_task()
    assert task is not None
    state.num_running += 1
    state.tasks.add(task)
    try:
      state.raise_if_closed()
      completion = await self._complete()
      result = self._make_result(completion)
      message = None
      if self._request.messages is not None:
        message = parse_client_messages([result.message])[0]
      state.session.record(self.name, self._prompt, completion, message)
      state.error = ''
      return result
    except asyncio.CancelledError:
      state.raise_if_closed()
      raise
    except ApiError:
      raise
    except PromptTooLongError as error:
      state.limit_reached = 'max_length'
      state.refused_prompt = self._prompt.tokens[: state.limits.max_length]
      raise ApiError(
        400,
        f'the engine refuses: {public_message(error)}',
        code='context_length_exceeded',
      ) from error
    except (ValueError, ImageError) as error:  # what was asked for, not the engine
      state.error = f'the engine refuses: {public_message(error)}'
      raise ApiError(400, state.error) from error
    except Exception as error:
      log.exception('a reply failed')
      state.error = f'{type(error).__name__}: {error}'
      raise ApiError(500, f'the engine failed: {type(error).__name__}') from error
    finally:
      state.num_running -= 1
      state.tasks.discard(task)

  async def _complete(self) -> Completion:
    """Generates the reply's tokens; raises ApiError if the engine was interrupted."""
    completion = await generate_with_resume(
      self._generate, self._request_name, self._prompt.tokens, self._sampling
    )
    was_aborted = completion.finish_reason == 'abort'
    if was_aborted and len(completion.tokens) >= self._sampling.max_tokens:
      return dataclasses.replace(completion, finish_reason='length')
    if was_aborted:
      self._state.error = 'the engine was interrupted in the reply'
      raise ApiError(503, f'{self._state.error}; send the request again')
    if not len(completion.tokens):
      self._state.error = 'the engine returned no token'
      raise ApiError(500, self._state.error)
    return completion

  async def _generate(
    self, name: str, prompt: list[int], sampling: SamplingParams
  ) -> Completion:
    self._engine_request = name, prompt[len(self._prompt.tokens) :]
    timeout = self._state.limits.timeout
    return await generate_or_abort(
      self._engine, name, prompt, sampling, self._prompt.images, timeout=timeout
    )

  async def partial_text(self) -> str:
    """Returns the text that is certain to begin the reply, for streaming."""
    if self._engine_request is None or self._has_channels:
      return ''
    name, earlier_ids = self._engine_request
    progress = (await maybe_await(self._engine.progress([name]))).get(name)
    new_ids = progress.tokens.tolist() if progress is not None else []
    # A letter whose tokens are not all there yet is decoded as U+FFFD.
    text = self._decode([*earlier_ids, *new_ids]).rstrip('\ufffd')
    markers = list(self._sampling.stop)
    if self._request.tools:
      calls = self._chat.tool_format or UNKNOWN
      if not text or calls.may_begin(text):
        return ''
      markers += calls.markers
      for marker in calls.markers:
        text = text.partition(marker)[0]
    num_uncertain = max((_overlap(text, marker) for marker in markers), default=0)
    text = text[: len(text) - num_uncertain]
    return text.rstrip() if self._request.tools else text

  @property
  def _has_channels(self) -> bool:
    """Returns whether the model writes thought and answer as separate messages."""
    thoughts = self._chat.thought_format
    is_chat = self._request.messages is not None
    return is_chat and thoughts is not None and thoughts.has_channels

  def _decode(self, tokens: Sequence[int]) -> str:
    """Decodes ids, without the stop string that ended them."""
    text = self._chat.decode(tokens)
    stops = [at for stop in self._sampling.stop if (at := text.find(stop)) >= 0]
    return text[: min(stops)] if stops else text

  def _make_result(self, completion: Completion) -> ChoiceResult:
    text = self._decode(completion.tokens.tolist())
    calls: list[ToolCall] = []
    if self._request.tools or self._has_channels:
      content, read = self._chat.parse_reply(text, self._request.tools)
      calls = [call for call in read if not isinstance(call, InvalidToolCall)]
      # With an unreadable call it stays text, so that the client sees what was written.
      text = content if len(calls) == len(read) else text
    message: dict[str, Any] = {'role': 'assistant', 'content': text}
    if calls:
      message['tool_calls'] = [
        {
          'id': f'call-{self.name.partition("-")[2]}-{i}',
          'type': 'function',
          'function': {
            'name': call['name'],
            'arguments': json.dumps(call['arguments'], ensure_ascii=False),
          },
        }
        for i, call in enumerate(calls)
      ]
    finish_reason = 'tool_calls' if calls else completion.finish_reason
    return ChoiceResult(
      self.name, message, self._prompt.tokens, completion, finish_reason
    )


def public_message(error: Exception) -> str:
  """Returns what an error says, without a traceback or the paths of this machine.

  Args:
    error: The error; one that an actor raised has its `cause`.

  Returns:
    At most 300 characters of its first line.
  """
  cause = getattr(error, 'cause', None)
  text = str(cause if isinstance(cause, Exception) else error).strip()
  first_line = text.partition('\n')[0]
  return re.sub(r'(?:/[^\s/:\'"]+){2,}', '…', first_line)[:300]


def _overlap(text: str, marker: str) -> int:
  """Returns how many of the last letters of `text` may be the start of `marker`."""
  sizes = range(min(len(text), len(marker) - 1), 0, -1)
  return next((n for n in sizes if text.endswith(marker[:n])), 0)


async def stream_chunks(
  choices: Sequence[ChoiceRunner], interval: float | None
) -> AsyncGenerator[tuple[int, str | ChoiceResult], None]:
  """Runs choices concurrently and yields what is new.

  Closing the generator cancels the choices.

  Args:
    choices: The choices to run.
    interval: Seconds between looks at partial replies; None yields text at the end.

  Yields:
    (index of the choice, new text), and at last (index of the choice, its result). The
    content of the result is all of its text.

  Raises:
    ApiError: If a choice fails.
  """
  tasks = [asyncio.ensure_future(choice.run()) for choice in choices]
  sent_texts, unfinished = [''] * len(tasks), list(range(len(tasks)))
  try:
    while unfinished:
      running = {tasks[i] for i in unfinished}
      await asyncio.wait(running, timeout=interval, return_when='FIRST_COMPLETED')
      for i in list(unfinished):
        result = tasks[i].result() if tasks[i].done() else None
        if result is None and interval is None:
          continue
        if result is not None:
          text = result.message['content']
        else:
          text = await choices[i].partial_text()
        if text.startswith(sent_texts[i]) and len(text) > len(sent_texts[i]):
          yield i, text[len(sent_texts[i]) :]
          sent_texts[i] = text
        if result is not None:
          yield i, result
          unfinished.remove(i)
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
