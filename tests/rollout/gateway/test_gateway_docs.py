"""The examples of docs/gateway.md and docs/agents.md, with the clients themselves."""

import asyncio
import re

import pytest

from tests.data.letters import END
from tests.docs.blocks import ROOT
from tests.rollout.gateway.agents import KEY, Engine, endpoint


def block(page, first_line):
  """The Python block of a page that begins with a line."""
  text = (ROOT / 'docs' / page).read_text()
  (found,) = (
    code
    for code in re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)
    if code.startswith(first_line)
  )
  return found


@pytest.mark.parametrize('name', ['ask_openai.py', 'ask_anthropic.py'])
async def test_the_examples_of_the_clients(name, monkeypatch, capsys):
  code = compile(block('gateway.md', f'# {name}'), name, 'exec')
  engine = Engine(lambda prompt, sampling: f'It is {len(prompt)}.{END}')
  async with endpoint(engine) as (http, _):
    monkeypatch.setenv('OPENAI_BASE_URL', f'{http._base_url}/v1')
    monkeypatch.setenv('ANTHROPIC_BASE_URL', str(http._base_url))
    for variable in ('OPENAI_API_KEY', 'ANTHROPIC_API_KEY'):
      monkeypatch.setenv(variable, KEY)
    await asyncio.to_thread(exec, code, {})
  prompt = engine.calls[-1][1]
  assert capsys.readouterr().out == f'It is {len(prompt)}.\n'


async def test_the_agent_of_anthropics_client():
  names = {}
  exec(block('agents.md', '# polite.py'), names)
  engine = Engine(lambda prompt, sampling: f'It is 42.{END}')
  async with endpoint(engine) as (http, _):
    for answer, reward in (('42', 1.0), ('43', 0.0)):
      task = {'question': 'What is 17 + 25?', 'answer': answer}
      arguments = task, f'{http._base_url}/v1', f'{KEY}/{answer}'
      assert await asyncio.to_thread(names['run'], *arguments) == reward
