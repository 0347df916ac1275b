"""ChoiceRunner generates one reply of a session and records it.

A request may want several replies, which OpenAI's API calls choices.
"""

import asyncio
import bisect
import dataclasses
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.tool_formats import (
  UNKNOWN,
  InvalidToolCall,
  ReplyParts,
  ToolCall,
  overlap,
)
from jaxrl.options import JsonObject
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.engine.engine_base import ImageError
from jaxrl.rollout.engine.resumable_generation import (
  generate_or_abort,
  generate_with_resume,
)
from jaxrl.rollout.gateway.generation_request import ApiError, GenerationRequest
from jaxrl.rollout.gateway.openai_requests import parse_client_messages
from jaxrl.rollout.gateway.request_cache import RequestCache
from jaxrl.rollout.gateway.session_recorder import AgentSession, SessionPrompt
from jaxrl.types import (
  Completion,
  Message,
  PromptTooLongError,
  SamplingParams,
  TokenGenerator,
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
    instructed: Replies whose conversation begins with the instructions of a request.
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
  instructed: set[str] = dataclasses.field(default_factory=set)
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
    thought: The thought, if the client gets it apart from the text; else ''.
    text: The reply's text without its calls, and without a thought that stands apart.
    num_thought_tokens: Tokens up to the end of that thought.
    stop_string: The stop string that ended the reply; '' if none did.
  """

  name: str
  message: Message
  prompt: list[int]
  completion: Completion
  finish_reason: str
  thought: str = ''
  text: str = ''
  num_thought_tokens: int = 0
  stop_string: str = ''

  @property
  def tool_calls(self) -> list[JsonObject]:
    """Returns the reply's tool calls, in the form of OpenAI's chat API."""
    return self.message.get('tool_calls', [])


@dataclasses.dataclass(frozen=True)
class ReplyDelta:
  """Holds what is new of a reply that is being written.

  Attributes:
    thought: What is new of its thought, if the client gets it apart from the text.
    text: What is new of its text.
  """

  thought: str = ''
  text: str = ''


class ChoiceRunner:
  """Generates one reply to a request, once, and records it.

  Attributes:
    name: The reply's id, as clients know it.
    key: The part of it that no other reply has; ids of parts of the reply contain it.
    num_prompt_tokens: Tokens of the prompt.
  """

  def __init__(
    self,
    engine: TokenGenerator,
    chat: ChatTokenizer,
    state: SessionState,
    request: GenerationRequest,
    prompt: SessionPrompt,
    sampling: SamplingParams,
    *,
    key: str,
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
      key: The part of the reply's id that no other reply has.
      request_name: The beginning of the engine's request ids.
    """
    self._engine = engine
    self._chat = chat
    self._state = state
    self._request = request
    self._prompt = prompt
    self._sampling = sampling
    self.key = key
    self.name = f'{request.form.id_prefix}{key}'
    self.num_prompt_tokens = len(prompt.tokens)
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
      spellings = self._spellings(result) if self._request.messages is not None else []
      message = spellings[0] if spellings else None
      state.session.record(self.name, self._prompt, completion, message, spellings[1:])
      if self._request.has_instructions:
        state.instructed.add(self.name)
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
    if sampling.constraint is not None and sampling.num_generated:
      # No engine continues in the middle of what a constraint describes.
      raise ApiError(503, 'the engine was interrupted; send the request again')
    self._engine_request = name, prompt[len(self._prompt.tokens) :]
    timeout = self._state.limits.timeout
    return await generate_or_abort(
      self._engine, name, prompt, sampling, self._prompt.images, timeout=timeout
    )

  async def partial_reply(self) -> tuple[str, str]:
    """Returns the thought and the text that are certain to begin those of the reply."""
    if self._engine_request is None or self._has_channels:
      return '', ''
    name, earlier_ids = self._engine_request
    progress = (await maybe_await(self._engine.progress([name]))).get(name)
    new_ids = progress.tokens.tolist() if progress is not None else []
    # A letter whose tokens are not all there yet is decoded as U+FFFD.
    text = self._decode([*earlier_ids, *new_ids]).rstrip('\ufffd')
    calls = self._chat.tool_format or UNKNOWN
    markers = list(self._sampling.stop)
    if self._request.tools:
      markers += calls.markers
      for marker in calls.markers:
        text = text.partition(marker)[0]
    num_uncertain = max((overlap(text, marker) for marker in markers), default=0)
    text, thought = text[: len(text) - num_uncertain], ''
    thoughts = self._chat.thought_format
    if self._request.form.splits_thoughts and thoughts is not None:
      opened = self._chat.opens_thought
      thought, text = thoughts.split_begun(text, opened=opened)
    if self._request.tools:
      text = '' if calls.may_begin(text) else text.rstrip()
    return thought, text

  @property
  def _has_channels(self) -> bool:
    """Returns whether the model writes thought and answer as separate messages."""
    thoughts = self._chat.thought_format
    is_chat = self._request.messages is not None
    return is_chat and thoughts is not None and thoughts.has_channels

  def _decode(self, tokens: Sequence[int]) -> str:
    """Decodes ids, without the stop string that ended them."""
    text = self._chat.decode(tokens)
    stop = self._find_stop(text)
    return text[: stop[0]] if stop else text

  def _find_stop(self, text: str) -> tuple[int, str] | None:
    """Returns where the first stop string is, and which one it is."""
    found = ((text.find(stop), stop) for stop in self._sampling.stop)
    return min((pair for pair in found if pair[0] >= 0), default=None)

  def _make_result(self, completion: Completion) -> ChoiceResult:
    tokens = completion.tokens.tolist()
    whole = self._chat.decode(tokens)
    stop_at, stop = self._find_stop(whole) or (len(whole), '')
    text = content = whole[:stop_at]
    parts, calls = None, []
    if self._request.tools or self._has_channels:
      parts = self._chat.parse_reply(text, self._request.tools)
      calls = [call for call in parts.calls if not isinstance(call, InvalidToolCall)]
      # With an unreadable call it stays text, so that the client sees what was written.
      content = parts.text if len(calls) == len(parts.calls) else text
    thought, answer = self._split_thought(text, content, parts)
    message: JsonObject = {'role': 'assistant', 'content': content}
    if calls:
      message['tool_calls'] = [self._format_call(i, one) for i, one in enumerate(calls)]
    return ChoiceResult(
      self.name,
      message,
      self._prompt.tokens,
      completion,
      'tool_calls' if calls else completion.finish_reason,
      thought=thought,
      text=answer,
      num_thought_tokens=self._count_tokens(tokens, text, thought),
      stop_string=stop,
    )

  def _format_call(self, index: int, call: ToolCall) -> JsonObject:
    arguments = json.dumps(call['arguments'], ensure_ascii=False)
    function = {'name': call['name'], 'arguments': arguments}
    return {'id': f'call-{self.key}-{index}', 'type': 'function', 'function': function}

  def _split_thought(
    self, text: str, content: str, parts: ReplyParts | None
  ) -> tuple[str, str]:
    """Returns the thought that the client gets apart from the text, and the text.

    Args:
      text: The whole reply.
      content: What the chat API calls the reply's content.
      parts: The parts of the reply, if it may have calls.
    """
    thoughts, opened = self._chat.thought_format, self._chat.opens_thought
    if not self._request.form.splits_thoughts or thoughts is None:
      return '', content
    if not thoughts.is_marked(text, opened=opened):
      return '', content
    if parts is None:
      thought, rest = thoughts.split(text, opened=opened)
      return thought or '', rest
    return parts.thought, parts.content if content == parts.text else parts.rest

  def _count_tokens(self, tokens: list[int], text: str, thought: str) -> int:
    """Counts the tokens of a reply up to the end of its thought."""
    at = text.find(thought) if thought else -1
    if at < 0:  # also where thoughts are several messages
      return 0
    sizes = range(len(tokens) + 1)
    return bisect.bisect_left(
      sizes, at + len(thought), key=lambda n: len(self._chat.decode_all(tokens[:n]))
    )

  def _spellings(self, result: ChoiceResult) -> list[Message]:
    """Returns the reply as the agent may send it back, first as the chat API has it."""
    spellings = [result.message]
    if self._request.form.splits_thoughts:
      apart = {'content': result.text, 'reasoning_content': result.thought}
      for write in (lambda call: call, _with_plain_numbers):
        calls = [write(call) for call in result.tool_calls]
        spellings.append({'role': 'assistant', **apart, 'tool_calls': calls})
    return parse_client_messages(spellings)


def tool_input(call: JsonObject) -> JsonObject:
  """Returns the arguments of a tool call as an object.

  Args:
    call: The call, in the form of OpenAI's chat API.

  Returns:
    The arguments. A whole number is an int, as programs in JavaScript send it back.
  """
  return _plain_numbers(json.loads(call['function']['arguments']))


def _plain_numbers(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _plain_numbers(one) for key, one in value.items()}
  if isinstance(value, list):
    return [_plain_numbers(one) for one in value]
  is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
  return int(value) if is_whole else value


def _with_plain_numbers(call: JsonObject) -> JsonObject:
  function = {**call['function'], 'arguments': json.dumps(tool_input(call))}
  return {**call, 'function': function}


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


async def stream_chunks(
  choices: Sequence[ChoiceRunner], interval: float | None
) -> AsyncGenerator[tuple[int, ReplyDelta | ChoiceResult | None], None]:
  """Runs choices concurrently and yields what is new.

  Closing the generator cancels the choices.

  Args:
    choices: The choices to run.
    interval: Seconds between looks at partial replies; None yields text at the end.

  Yields:
    (index of the choice, what is new of it), and at last (index of the choice, its
    result), which has all of it. (0, None) after each look that found nothing new.

  Raises:
    ApiError: If a choice fails.
  """
  tasks = [asyncio.ensure_future(choice.run()) for choice in choices]
  sent, unfinished = [ReplyDelta()] * len(tasks), list(range(len(tasks)))
  try:
    while unfinished:
      running = {tasks[i] for i in unfinished}
      await asyncio.wait(running, timeout=interval, return_when='FIRST_COMPLETED')
      is_silent = True
      for i in list(unfinished):
        result = tasks[i].result() if tasks[i].done() else None
        if result is None and interval is None:
          continue
        if result is not None:
          now = ReplyDelta(result.thought, result.text)
        else:
          now = ReplyDelta(*await choices[i].partial_reply())
        new = ReplyDelta(
          _added(sent[i].thought, now.thought), _added(sent[i].text, now.text)
        )
        if new.thought or new.text:
          yield i, new
          sent[i] = ReplyDelta(sent[i].thought + new.thought, sent[i].text + new.text)
          is_silent = False
        if result is not None:
          yield i, result
          unfinished.remove(i)
          is_silent = False
      if is_silent:
        yield 0, None
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _added(sent: str, now: str) -> str:
  """Returns what follows what was sent; '' if that is not how the text begins."""
  return now[len(sent) :] if now.startswith(sent) else ''
