"""Who answers a judge's questions: an engine with weights of its own, or a server."""

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from jaxrl.data.chat import Chat
from jaxrl.rollout.reply import request, whole_reply
from jaxrl.rollout.rewards.stage import NoScore
from jaxrl.signature import ConfigError
from jaxrl.types import Completion, Message, RolloutEngine, SamplingParams

_LARGEST = 4 << 20  # bytes of a server's answer
_AGAIN = (408, 409, 425, 429)  # of HTTP, and 500 and above: worth another try


class EngineSpeaker:
  """Asks an engine whose weights do not change.

  timeout: seconds an answer may take, once it is begun. concurrency: answers at once.
  """

  def __init__(
    self, engine: RolloutEngine, chat: Chat, *, timeout: float, concurrency: int
  ):
    self._engine, self._chat, self._timeout = engine, chat, timeout
    self._places = asyncio.Semaphore(concurrency)

  async def ask(
    self,
    name: str,
    messages: Sequence[Message],
    *,
    seed: int,
    temperature: float,
    max_tokens: int,
  ) -> str:
    """The answer, cut at max_tokens. Raises NoScore, and ValueError for what does not
    fit the engine's window.
    """
    sampling = SamplingParams(
      max_tokens=max_tokens,
      temperature=temperature,
      seed=seed,
      stop_token_ids=(self._chat.eos_id,),
    )
    prompt = self._chat.first_prompt(messages)
    async with self._places:
      try:
        async with asyncio.timeout(self._timeout):
          found = await whole_reply(self._request, name, prompt, sampling)
      except TimeoutError:
        raise NoScore(f'the judge gave no answer in {self._timeout:g} s') from None
    if found.finish_reason == 'abort':
      raise NoScore("the judge's engine aborted the request")
    return self._chat.decode(found.tokens)

  async def _request(self, name, prompt, sampling) -> Completion:
    return await request(self._engine, name, prompt, sampling)


class Endpoint:
  """Asks a server that speaks OpenAI's chat completions.

  url: up to `/v1`. model: as the server knows it. key: sent as a bearer token; empty:
  none. timeout: seconds for an answer, once it is asked for. concurrency: requests at
  once. retries: how often a request is sent again that the server was too busy for or
  that did not come through; the pause doubles from `pause` seconds.

  Redirects are not followed: the key is for that server alone.
  """

  def __init__(
    self,
    url: str,
    model: str,
    key: str = '',
    *,
    timeout: float = 120.0,
    concurrency: int = 32,
    retries: int = 3,
    pause: float = 0.5,
  ):
    self._url = check_url(url)
    self._model, self._key, self._timeout = model, key, timeout
    self._retries, self._pause = retries, pause
    self._places = asyncio.Semaphore(concurrency)

  async def ask(
    self,
    name: str,
    messages: Sequence[Message],
    *,
    seed: int,
    temperature: float,
    max_tokens: int,
  ) -> str:
    """The answer's text. Raises NoScore when all tries failed, as the last did."""
    body = {
      'model': self._model,
      'messages': list(messages),
      'temperature': temperature,
      'max_tokens': max_tokens,
      'seed': seed,
    }
    for attempt in range(self._retries + 1):
      if attempt:
        await asyncio.sleep(self._pause * 2 ** (attempt - 1))
      async with self._places:
        text, wrong, lasting = await self._post(body)
      if not wrong:
        return text
      if lasting:
        break
    raise NoScore(f'{self._url}: {wrong} (request {name}, {attempt + 1} tries)')

  async def _post(self, body: dict[str, Any]) -> tuple[str, str, bool]:
    """The text, what went wrong instead, and whether it would again."""
    import aiohttp

    headers = {'Authorization': f'Bearer {self._key}'} if self._key else {}
    limit = aiohttp.ClientTimeout(total=self._timeout)
    try:
      async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(
          f'{self._url}/chat/completions',
          json=body,
          headers=headers,
          allow_redirects=False,
        ) as answer,
      ):
        said = b''
        async for piece in answer.content.iter_chunked(1 << 16):
          said += piece
          if len(said) > _LARGEST:
            return '', f'an answer of more than {_LARGEST} bytes', True
    except TimeoutError:
      return '', f'no answer in {self._timeout:g} s', False
    except aiohttp.ClientError as error:
      return '', f'{type(error).__name__}: {error}', False
    if answer.status != 200:
      told = said[:300].decode('utf-8', 'replace')
      again = answer.status in _AGAIN or answer.status >= 500
      return '', f'status {answer.status}: {told}', not again
    return _content(said)


def _content(said: bytes) -> tuple[str, str, bool]:
  try:
    text = json.loads(said)['choices'][0]['message']['content']
  except (ValueError, LookupError, TypeError, RecursionError) as error:
    return '', f'its answer is no chat completion: {type(error).__name__}', True
  if not isinstance(text, str):
    return '', f'its answer has a content of type {type(text).__name__}', True
  return text, '', False


def check_limits(
  *,
  timeout: float = 1.0,
  concurrency: int = 1,
  retries: int = 0,
  pause: float = 0.0,
  **others: Any,
) -> None:
  """Raises ConfigError for limits within which no answer would ever come."""
  del others
  if timeout <= 0 or concurrency < 1 or retries < 0 or pause < 0:
    raise ConfigError(
      f'judge: timeout={timeout:g} must be above 0, concurrency={concurrency} at least '
      f'1, retries={retries} and pause={pause:g} at least 0'
    )


def check_url(url: str) -> str:
  """The URL without a slash at its end. ConfigError for what is none."""
  parts = urlsplit(url)
  if parts.scheme not in ('http', 'https') or not parts.hostname:
    raise ConfigError(f'judge: url={url!r}; write http://HOST:PORT/v1 or https://…')
  if parts.username or parts.password:
    raise ConfigError('judge: a key does not belong into the url; name key_env')
  return url.rstrip('/')


def key_from(name: str) -> str:
  """The key that the environment variable `name` holds; '' where none is named."""
  if not name:
    return ''
  if not os.environ.get(name):
    raise ConfigError(f'judge: key_env={name!r}: there is no such variable, or no key')
  return os.environ[name]
