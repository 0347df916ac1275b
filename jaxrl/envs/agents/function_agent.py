"""FunctionAgent is an agent that is a Python function."""

import asyncio
import contextlib
import inspect
from typing import Any

from jaxrl.component_table import Component, ComponentTable, component_name
from jaxrl.envs.graders.rule_graders import TaskItem
from jaxrl.options import unknown_name_error

AGENTS = ComponentTable[str]('agent', 'env_config.agent')  # all are users' own
AGENT_ARGUMENTS = ('task', 'base_url', 'api_key', 'client')


class FunctionAgent:
  """Calls a function with the arguments that it names.

  Args:
    agent: The function, or where it is ('package.module:run' or 'file.py:run'), and its
      options.

  Raises:
    ValueError: If the function does not exist or names an argument that agents do not
      get.
  """

  def __init__(self, agent: Component):
    where = f'env_config.agent={component_name(agent, whole=True)!r}'
    name, self._function, self._options = AGENTS.find(agent, where)
    parameters = inspect.signature(self._function).parameters.values()
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    self._argument_names = [
      p.name for p in positional if p.default is p.empty or p.name in AGENT_ARGUMENTS
    ]
    for name in self._argument_names:
      if name not in AGENT_ARGUMENTS:
        raise unknown_name_error(
          name, AGENT_ARGUMENTS, 'argument for agents', f'agent {name!r}'
        )
    if 'client' in self._argument_names:
      _import_openai()

  def __call__(self, task: TaskItem, base_url: str, api_key: str) -> Any:
    """Calls the function.

    Args:
      task: The row of the task.
      base_url: The URL of the endpoint.
      api_key: The key of the session.

    Returns:
      What the function returned.
    """
    arguments = {'task': dict(task), 'base_url': base_url, 'api_key': api_key}
    if inspect.iscoroutinefunction(self._function):
      return asyncio.run(self._call_async(arguments))
    with contextlib.ExitStack() as stack:
      if 'client' in self._argument_names:
        openai = _import_openai()
        # The endpoint is on this machine, so no proxy is used.
        http_client = openai.DefaultHttpxClient(trust_env=False)
        client = openai.OpenAI(
          base_url=base_url, api_key=api_key, http_client=http_client
        )
        arguments['client'] = stack.enter_context(client)
      return self._call(arguments)

  async def _call_async(self, arguments: dict[str, object]) -> Any:
    async with contextlib.AsyncExitStack() as stack:
      if 'client' in self._argument_names:
        openai = _import_openai()
        http_client = openai.DefaultAsyncHttpxClient(trust_env=False)
        endpoint = {'base_url': arguments['base_url'], 'api_key': arguments['api_key']}
        client = openai.AsyncOpenAI(**endpoint, http_client=http_client)
        arguments['client'] = await stack.enter_async_context(client)
      return await self._call(arguments)

  def _call(self, arguments: dict[str, object]) -> Any:
    positional = (arguments[name] for name in self._argument_names)
    return self._function(*positional, **self._options)

  def kill(self) -> None:
    """Does nothing: a thread cannot be ended, but its key no longer opens a session."""


def _import_openai() -> Any:
  try:
    import openai
  except ImportError as error:
    raise ValueError(
      "an agent that takes a client needs openai: pip install 'openai'"
    ) from error
  return openai
