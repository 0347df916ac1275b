"""OpenAI's own client against the endpoint."""

import pytest

from tests.data.letters import END
from tests.rollout.gateway.agents import CALL, KEY, OWN, TOOLS, Engine, endpoint


def reply(prompt, sampling):
  """Calls the tool until it has answered."""
  heard = ''.join(chr(i % OWN) for i in prompt)
  return (f'It is {heard.count("<tool:")}.' if '<tool:' in heard else CALL) + END


async def test_an_agent_with_tools_streams_and_branches():
  import openai  # two seconds, which every process would wait for

  engine = Engine(reply, delay=0.001)
  async with endpoint(engine, model='tiny') as (http, delivered):
    client = openai.AsyncOpenAI(api_key=f'{KEY}/s', base_url=f'{http._base_url}/v1')
    assert [model.id async for model in client.models.list()] == ['tiny']
    chat = client.chat.completions
    options = {'model': 'tiny', 'tools': TOOLS}
    messages = [{'role': 'user', 'content': 'Add.'}]
    first = await chat.create(messages=messages, **options)
    call = first.choices[0].message.tool_calls[0]
    assert call.function.name == 'add'
    answer = {'role': 'tool', 'tool_call_id': call.id, 'content': '2'}
    messages += [first.choices[0].message, answer]
    async with chat.stream(messages=messages, **options) as stream:
      text = [e.delta async for e in stream if e.type == 'content.delta']
      final = (await stream.get_final_completion()).choices[0]
    assert ''.join(text) == final.message.content == 'It is 1.'
    other = [*messages, {'role': 'user', 'content': 'Why?'}]
    await chat.create(messages=other, **options)
    messages += [final.message, {'role': 'user', 'content': 'Sure?'}]
    await chat.create(messages=messages, **options)
    text = await client.completions.create(model='tiny', prompt='<tool:')
    assert text.choices[0].text == 'It is 1.'
    with pytest.raises(openai.BadRequestError, match='top_p'):
      await chat.create(messages=messages, top_p=7, **options)
    stranger = client.with_options(api_key='nobody', max_retries=0)
    with pytest.raises(openai.AuthenticationError):
      await stranger.models.list()
    await client.post('/feedback', body={'reward': 1.0}, cast_to=object)
    await client.close()
  rows = delivered['0/s']
  written = [''.join(chr(i % OWN) for i in row.tokens[row.action_mask]) for row in rows]
  last = 'It is 1.' + END
  assert sorted(written) == sorted([CALL + END + last, last + last, last])
  for _, prompt, output, _ in engine.calls:
    whole = [*prompt, *output.tokens.tolist()]
    assert any(row.tokens[: len(whole)].tolist() == whole for row in rows)
