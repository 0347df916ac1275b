"""Judge clients ask a judge model: a local engine, or an OpenAI-compatible server."""

import asyncio
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.options import JsonObject, Options, option
from jaxrl.rollout.engine.resumable_generation import (
  generate_or_abort,
  generate_with_resume,
)
from jaxrl.rollout.rewards.reward_pipeline import ScoringError
from jaxrl.types import Completion, Message, SamplingParams, TokenGenerator

_MAX_RESPONSE_BYTES = 4 << 20
# HTTP statuses worth another try, besides 500 and above.
_RETRY_STATUSES = (408, 409, 425, 429)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModelOptions(Options):
  """Where a model of fixed weights is served: by the run, or by a server."""

  checkpoint: str = option('', 'Folder of a model that the run serves itself.')
  url: str = option('', 'Address of a server up to `/v1`, in place of a folder.')
  model: str = option('', 'Name of the model on that server.')
  key_env: str = option('', "Environment variable that holds the server's key.")


class LocalJudgeClient:
  """Asks a rollout engine whose weights do not change."""

  def __init__(
    self,
    engine: TokenGenerator,
    chat: ChatTokenizer,
    *,
    timeout: float,
    concurrency: int,
  ):
    """Creates a client.

    Args:
      engine: Generates the answers.
      chat: The chat tokenizer of the engine's model.
      timeout: Seconds an answer may take once it has begun.
      concurrency: Number of answers generated at the same time.
    """
    self._engine = engine
    self._chat = chat
    self._timeout = timeout
    self._semaphore = asyncio.Semaphore(concurrency)

  async def ask(
    self,
    name: str,
    messages: Sequence[Message],
    *,
    seed: int,
    temperature: float,
    max_tokens: int,
  ) -> str:
    """Generates the judge's answer.

    Args:
      name: Names the request uniquely.
      messages: The conversation to answer.
      seed: Seed of the answer.
      temperature: Sampling temperature.
      max_tokens: The answer is cut at this many tokens.

    Returns:
      The answer's text.

    Raises:
      ScoringError: If there is no answer in time, or the engine aborts.
      ValueError: If the prompt does not fit the engine's window.
    """
    sampling = SamplingParams(
      max_tokens=max_tokens,
      temperature=temperature,
      seed=seed,
      stop_token_ids=self._chat.stop_token_ids,
    )
    prompt = self._chat.encode_prompt(messages)
    async with self._semaphore:
      try:
        async with asyncio.timeout(self._timeout):
          completion = await generate_with_resume(self._request, name, prompt, sampling)
      except TimeoutError:
        raise ScoringError(f'the judge gave no answer in {self._timeout:g} s') from None
    if completion.finish_reason == 'abort':
      raise ScoringError("the judge's engine aborted the request")
    return self._chat.decode(completion.tokens)

  async def _request(
    self, name: str, prompt: list[int], sampling: SamplingParams
  ) -> Completion:
    return await generate_or_abort(self._engine, name, prompt, sampling)


class _Response(NamedTuple):
  """The text of an answer, or the error in its place and whether to try again."""

  text: str = ''
  error: str = ''
  should_retry: bool = False


class OpenAIJudgeClient:
  """Asks a server that implements OpenAI's chat completions.

  Redirects are not followed, because the key is meant for that server alone.
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
    """Creates a client.

    Args:
      url: The server's URL up to `/v1`.
      model: The model's name on the server.
      key: Sent as a bearer token; empty for none.
      timeout: Seconds for one answer once it is requested.
      concurrency: Number of requests at the same time.
      retries: How often a request is sent again if the server was busy or could not be
        reached.
      pause: Seconds before the first retry; doubles with each further one.

    Raises:
      ValueError: If the URL is not valid.
    """
    self._url = validate_judge_url(url)
    self._model = model
    self._key = key
    self._timeout = timeout
    self._retries = retries
    self._pause = pause
    self._semaphore = asyncio.Semaphore(concurrency)

  async def ask(
    self,
    name: str,
    messages: Sequence[Message],
    *,
    seed: int,
    temperature: float,
    max_tokens: int,
  ) -> str:
    """Requests the judge's answer; for the arguments see `LocalJudgeClient.ask`.

    Raises:
      ScoringError: If all tries failed; says how the last one did.
    """
    body = {
      'model': self._model,
      'messages': list(messages),
      'temperature': temperature,
      'max_tokens': max_tokens,
      'seed': seed,
    }
    num_tries, error = 0, ''
    for attempt in range(self._retries + 1):
      if attempt:
        await asyncio.sleep(self._pause * 2 ** (attempt - 1))
      async with self._semaphore:
        response = await self._post(body)
      num_tries, error = attempt + 1, response.error
      if not error:
        return response.text
      if not response.should_retry:
        break
    raise ScoringError(f'{self._url}: {error} (request {name}, {num_tries} tries)')

  async def _post(self, body: JsonObject) -> _Response:
    import aiohttp

    headers = {'Authorization': f'Bearer {self._key}'} if self._key else {}
    timeout = aiohttp.ClientTimeout(total=self._timeout)
    try:
      async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(
          f'{self._url}/chat/completions',
          json=body,
          headers=headers,
          allow_redirects=False,
        ) as response,
      ):
        data = b''
        async for chunk in response.content.iter_chunked(1 << 16):
          data += chunk
          if len(data) > _MAX_RESPONSE_BYTES:
            limit = _MAX_RESPONSE_BYTES
            return _Response(error=f'an answer of more than {limit} bytes')
    except TimeoutError:
      error = f'no answer in {self._timeout:g} s'
      return _Response(error=error, should_retry=True)
    except aiohttp.ClientError as error:
      return _Response(error=f'{type(error).__name__}: {error}', should_retry=True)
    if response.status != 200:
      text = data[:300].decode('utf-8', 'replace')
      should_retry = response.status in _RETRY_STATUSES or response.status >= 500
      return _Response('', f'status {response.status}: {text}', should_retry)
    return _parse_response(data)


def _parse_response(data: bytes) -> _Response:
  try:
    text = json.loads(data)['choices'][0]['message']['content']
  except (ValueError, LookupError, TypeError, RecursionError) as error:
    kind = type(error).__name__
    return _Response(error=f'its answer is not a chat completion: {kind}')
  if not isinstance(text, str):
    kind = type(text).__name__
    return _Response(error=f'its answer has a content of type {kind}')
  return _Response(text)


def validate_judge_limits(
  *,
  timeout: float = 1.0,
  concurrency: int = 1,
  retries: int = 0,
  pause: float = 0.0,
  **others: object,
) -> None:
  """Checks limits within which an answer can arrive.

  Args:
    timeout: Seconds for one answer.
    concurrency: Number of requests at the same time.
    retries: How often a request is sent again.
    pause: Seconds before the first retry.
    **others: Options that are not limits; ignored.

  Raises:
    ValueError: If a limit is out of range.
  """
  del others
  if timeout <= 0 or concurrency < 1 or retries < 0 or pause < 0:
    raise ValueError(
      f'judge: timeout={timeout:g} must be above 0, concurrency={concurrency} at least '
      f'1, retries={retries} and pause={pause:g} at least 0'
    )


def validate_judge_url(url: str) -> str:
  """Checks a judge's URL.

  Args:
    url: The URL.

  Returns:
    The URL without a trailing slash.

  Raises:
    ValueError: If it is not an HTTP URL, or contains a user or password.
  """
  parts = urlsplit(url)
  if parts.scheme not in ('http', 'https') or not parts.hostname:
    raise ValueError(f'judge: url={url!r}; write http://HOST:PORT/v1 or https://…')
  if parts.username or parts.password:
    raise ValueError('judge: a key does not belong in the url; set key_env instead')
  return url.rstrip('/')


def read_api_key(name: str) -> str:
  """Reads an API key from the environment.

  Args:
    name: The environment variable; '' for no key.

  Returns:
    The key, or ''.

  Raises:
    ValueError: If the variable is not set or empty.
  """
  if not name:
    return ''
  if not os.environ.get(name):
    raise ValueError(
      f'judge: key_env={name!r}: this environment variable is not set, or empty'
    )
  return os.environ[name]
