"""One reply being written."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxrl.data import tool_calls
from jaxrl.data.chat import Chat
from jaxrl.rollout.gateway.errors import ApiError
from jaxrl.rollout.gateway.recorder import Prompt, Session
from jaxrl.rollout.gateway.requests import Ask, messages
from jaxrl.rollout.gateway.seen import Seen
from jaxrl.rollout.handles import settle
from jaxrl.rollout.reply import request, whole_reply
from jaxrl.types import Completion, Message, RolloutEngine, SamplingParams

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Terms:
  """What holds for the replies of a session.

  sampling: how they are drawn if nothing else is asked for; fixed: whatever is asked
  for. seed: a reply's number → its seed. request_name: what the engine's names of them
  begin with. max_length: tokens of prompt and reply. max_replies: of the session.
  timeout: seconds a reply may take, None = any. owned: the session was opened by the
  one who will collect it: clients neither begin nor end it, and see it end.
  """

  sampling: SamplingParams
  seed: Callable[[int], int]
  request_name: str
  max_length: int
  max_replies: int
  fixed: bool = False
  timeout: float | None = None
  owned: bool = False


@dataclasses.dataclass
class Seat:
  """A session, the `number` of all; replies begun in it, and those under way.

  reward: what clients gave for all of it. cut: 'max_steps' or 'max_length' once a
  reply was refused for that; refused: the prompt that was too long. fault: why the
  latest reply failed, '' if it did not. overruled: replies for which other sampling
  was asked. over: no more replies. seen: what it has sent. work: the replies being
  written.
  """

  session: Session
  number: int
  terms: Terms
  begun: int = 0
  busy: int = 0
  reward: float = 0.0
  cut: str = ''
  refused: list[int] = dataclasses.field(default_factory=list)
  fault: str = ''
  overruled: int = 0
  over: bool = False
  seen: Seen = dataclasses.field(default_factory=Seen)
  work: set[asyncio.Task] = dataclasses.field(default_factory=set)

  def check(self) -> None:
    """Raises ApiError once the session is over."""
    if self.over:
      raise ApiError(400, 'the session is over', code='session_over')


@dataclasses.dataclass(frozen=True)
class Answer:
  """A reply as clients are told of it. finish: OpenAI's finish_reason."""

  name: str
  message: Message
  prompt: list[int]
  said: Completion
  finish: str


class Choice:
  """A reply to `ask` in a session: run once, then recorded.

  name: as clients know it. request_name: as the engine does.
  """

  def __init__(
    self,
    engine: RolloutEngine,
    chat: Chat,
    seat: Seat,
    ask: Ask,
    prompt: Prompt,
    sampling: SamplingParams,
    *,
    name: str,
    request_name: str,
  ):
    self._engine, self._chat, self._seat, self._ask = engine, chat, seat, ask
    self._prompt, self._sampling = prompt, sampling
    self.name, self._request_name = name, request_name
    self._asked: tuple[str, list[int]] | None = None  # the request at hand

  async def run(self) -> Answer:
    """Has it written and records it. Cancelling it ends the engine's work.

    Raises ApiError where the engine fails; nothing is recorded then.
    """
    seat, task = self._seat, asyncio.current_task()
    assert task is not None
    seat.busy += 1
    seat.work.add(task)
    try:
      seat.check()
      prompt = self._prompt.tokens
      said = await whole_reply(
        self._request, self._request_name, prompt, self._sampling
      )
      if len(said.tokens) >= self._sampling.max_tokens:
        finish = 'length' if said.finish_reason == 'abort' else said.finish_reason
        said = dataclasses.replace(said, finish_reason=finish)
      if said.finish_reason == 'abort':
        seat.fault = 'the engine was interrupted in the reply'
        raise ApiError(503, f'{seat.fault}; ask again')
      if not len(said.tokens):
        seat.fault = 'the engine returned no token'
        raise ApiError(500, seat.fault)
      answer = self._answer(said)
      told = None if self._ask.messages is None else messages([answer.message])[0]
      seat.session.record(self.name, self._prompt, said, told)
      seat.fault = ''
      return answer
    except asyncio.CancelledError:
      seat.check()
      raise
    except ApiError:
      raise
    except ValueError as error:  # the prompt is longer than the engine's window
      seat.cut = 'max_length'
      raise ApiError(400, f'the engine refuses: {error}') from error
    except Exception as error:
      log.exception('a reply failed')
      seat.fault = f'{type(error).__name__}: {error}'
      raise ApiError(500, f'the engine failed: {type(error).__name__}') from error
    finally:
      seat.busy -= 1
      seat.work.discard(task)

  async def _request(
    self, name: str, prompt: list[int], sampling: SamplingParams
  ) -> Completion:
    self._asked = name, prompt[len(self._prompt.tokens) :]
    timeout = self._seat.terms.timeout
    return await request(self._engine, name, prompt, sampling, timeout=timeout)

  async def so_far(self) -> str:
    """The text that is certain to begin the reply."""
    if self._asked is None:
      return ''
    name, before = self._asked
    known = (await settle(self._engine.progress([name]))).get(name)
    new = known.tokens.tolist() if known is not None else []
    # A letter of several tokens that is not whole yet is decoded as U+FFFD.
    text = self._text([*before, *new]).rstrip('\ufffd')
    marks = list(self._sampling.stop)
    if self._ask.tools:
      if tool_calls.begins(text):
        return ''
      marks.append(tool_calls.OPEN)
      text = text.partition(tool_calls.OPEN)[0]
    text = text[: len(text) - max((_overlap(text, m) for m in marks), default=0)]
    return text.rstrip() if self._ask.tools else text

  def _text(self, tokens: Sequence[int]) -> str:
    """Without the stop string that ended it."""
    text = self._chat.decode(tokens)
    found = [at for stop in self._sampling.stop if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text

  def _answer(self, said: Completion) -> Answer:
    text, calls = self._text(said.tokens.tolist()), []
    if self._ask.tools:
      text, calls = tool_calls.read(text)
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
    finish = 'tool_calls' if calls else said.finish_reason
    return Answer(self.name, message, self._prompt.tokens, said, finish)


def _overlap(text: str, mark: str) -> int:
  """How many of the last letters of `text` may be the beginning of `mark`."""
  sizes = range(min(len(text), len(mark) - 1), 0, -1)
  return next((n for n in sizes if text.endswith(mark[:n])), 0)


async def pieces(
  choices: Sequence[Choice], interval: float | None
) -> AsyncGenerator[tuple[int, str | Answer], None]:
  """Runs the choices side by side; pairs of a choice's index and what is new of it.

  That is text, as it comes, and at last the Answer, whose content is all that text.
  interval: seconds between looks; None gives the text at the end. Whoever stops
  listening must close it: the work is then ended.
  """
  tasks = [asyncio.ensure_future(choice.run()) for choice in choices]
  sent, open_ = [''] * len(tasks), list(range(len(tasks)))
  try:
    while open_:
      waits = {tasks[i] for i in open_}
      await asyncio.wait(waits, timeout=interval, return_when=asyncio.FIRST_COMPLETED)
      for i in list(open_):
        done = tasks[i].result() if tasks[i].done() else None
        if done is None and interval is None:
          continue
        text = done.message['content'] if done else await choices[i].so_far()
        if text.startswith(sent[i]) and len(text) > len(sent[i]):
          yield i, text[len(sent[i]) :]
          sent[i] = text
        if done:
          yield i, done
          open_.remove(i)
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
