"""OpenAI's own client against the endpoint."""

import pytest

from tests.data.letters import END
from tests.rollout.gateway.agents import (
  CALL,
  KEY,
  OWN,
  TOOLS,
  Engine,
  ThinkingTokens,
  endpoint,
)


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


def think(prompt, sampling):
  """Thinks, and calls the tool until it has answered."""
  return f'<think>\nHm, so.\n</think>\n\n{reply(prompt, sampling)}'


def flat_tools():
  return [{'type': 'function', 'strict': True, **tool['function']} for tool in TOOLS]


async def test_an_agent_of_the_responses_api_streams_and_branches():
  import openai

  engine = Engine(think, delay=0.001)
  async with endpoint(engine, model='tiny', tokens=ThinkingTokens) as (http, delivered):
    client = openai.AsyncOpenAI(api_key=f'{KEY}/s', base_url=f'{http._base_url}/v1')
    options = {'model': 'tiny', 'tools': flat_tools(), 'instructions': 'Be kind.'}
    first = await client.responses.create(input='Add.', **options)
    thought, call = first.output
    assert thought.content[0].text == 'Hm, so.' and call.type == 'function_call'
    assert first.status == 'completed' and first.instructions == 'Be kind.'
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < 20
    answer = {'type': 'function_call_output', 'call_id': call.call_id, 'output': '2'}
    history = [{'role': 'user', 'content': 'Add.'}, *first.output, answer]
    async with client.responses.stream(input=history, **options) as stream:
      events = [event async for event in stream]
      second = await stream.get_final_response()
    assert second.output_text == 'It is 1.'
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == [
      'response.created',
      'response.in_progress',
      'response.output_item.added',
      'response.content_part.added',
      'response.reasoning_text.delta',
      'response.reasoning_text.done',
      'response.content_part.done',
      'response.output_item.done',
      'response.output_text.delta',
      'response.output_text.done',
      'response.completed',
    ]
    assert kinds.count('response.reasoning_text.delta') > 2
    deltas = [e.delta for e in events if e.type == 'response.output_text.delta']
    assert len(deltas) > 2 and ''.join(deltas) == 'It is 1.'
    # Goes on from either response, of which the second time only the new part is sent.
    for previous, text in ((second, 'Sure?'), (second, 'Why?')):
      third = await client.responses.create(
        input=text, previous_response_id=previous.id, **options
      )
      assert third.previous_response_id == previous.id
    async with client.responses.stream(
      input=[answer], previous_response_id=first.id, **options
    ) as stream:
      await stream.until_done()
    with pytest.raises(openai.BadRequestError, match='no response') as error:
      await client.responses.create(
        input='x', previous_response_id='resp_x', model='tiny'
      )
    assert error.value.code == 'previous_response_not_found'
    with pytest.raises(openai.BadRequestError, match='max_output_tokens') as error:
      await client.responses.create(input='x', max_output_tokens=0, model='tiny')
    assert error.value.param == 'max_output_tokens'
    await client.post('/feedback', body={'reward': 1.0}, cast_to=object)
    await client.close()
  rows = delivered['0/s']
  written = [''.join(chr(i % OWN) for i in row.tokens[row.action_mask]) for row in rows]
  begun = '<think>\nHm, so.\n</think>\n\n'
  last = f'{begun}It is 1.{END}'
  assert sorted(written) == sorted([f'{begun}{CALL}{END}{last}{last}', last, last])


async def test_a_call_and_its_arguments_are_streamed_as_events():
  import openai

  engine = Engine(reply, delay=0.001)
  async with endpoint(engine) as (http, _):
    client = openai.AsyncOpenAI(api_key=KEY, base_url=f'{http._base_url}/v1')
    options = {'model': 'policy', 'tools': flat_tools(), 'input': 'Add.'}
    async with client.responses.stream(**options) as stream:
      events = [event async for event in stream]
    await client.close()
  assert [event.type for event in events] == [
    'response.created',
    'response.in_progress',
    'response.output_item.added',
    'response.function_call_arguments.delta',
    'response.function_call_arguments.done',
    'response.output_item.done',
    'response.completed',
  ]
  begun, (call,) = events[2].item, events[-1].response.output
  # Clients put the pieces together, beginning with what the item has at first.
  assert (begun.name, begun.arguments, begun.status) == ('add', '', 'in_progress')
  assert call.status == 'completed'
  assert ''.join(e.delta for e in events if e.type.endswith('delta')) == call.arguments
  assert (call.name, call.arguments) == ('add', '{"x": 1, "y": "é"}')
