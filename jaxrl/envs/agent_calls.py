"""An agent that is a Python function."""

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from jaxrl import signature
from jaxrl.signature import ConfigError

GIVEN = ('task', 'base_url', 'api_key', 'client')


class Call:
  """Calls the function that `spec` names, with the options it says there.

  Raises ConfigError for one that is not there, or asks for what it is not given.
  """

  def __init__(self, spec: str):
    target, self._options = signature.parse_call(spec)
    self._run = signature.resolve(target)
    if not callable(self._run):
      raise ConfigError(f'env_config.agent={spec!r}: {target} is not a function')
    signature.check_options(self._run, self._options, f'agent {target!r}')
    parameters = inspect.signature(self._run).parameters.values()
    own = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    self._wants = [p.name for p in own if p.default is p.empty or p.name in GIVEN]
    for name in self._wants:
      if name not in GIVEN:
        raise signature.unknown(name, GIVEN, 'argument for agents', f'agent {target!r}')
    if 'client' in self._wants:
      _openai()

  def __call__(self, task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    given = {'task': dict(task), 'base_url': base_url, 'api_key': api_key}
    if inspect.iscoroutinefunction(self._run):
      return asyncio.run(self._play(given))
    if 'client' not in self._wants:
      return self._run(*(given[name] for name in self._wants), **self._options)
    openai = _openai()
    plain = openai.DefaultHttpxClient(trust_env=False)  # no proxy on the way to itself
    with openai.OpenAI(base_url=base_url, api_key=api_key, http_client=plain) as client:
      given['client'] = client
      return self._run(*(given[name] for name in self._wants), **self._options)

  async def _play(self, given: dict[str, Any]) -> Any:
    if 'client' not in self._wants:
      return await self._run(*(given[n] for n in self._wants), **self._options)
    openai = _openai()
    plain = openai.DefaultAsyncHttpxClient(trust_env=False)
    where = {'base_url': given['base_url'], 'api_key': given['api_key']}
    async with openai.AsyncOpenAI(**where, http_client=plain) as client:
      given['client'] = client
      return await self._run(*(given[n] for n in self._wants), **self._options)

  def kill(self) -> None:
    """A thread cannot be ended; its key, which no longer opens a session, ends it."""


def _openai() -> Any:
  try:
    import openai
  except ImportError as error:
    raise ConfigError(
      "an agent that takes a client needs openai: pip install 'openai'"
    ) from error
  return openai
