"""Anthropic's own client against the endpoint."""

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

TOOL = {'name': 'add', 'input_schema': TOOLS[0]['function']['parameters']}
THOUGHT = '<think>\nHm, so.\n</think>\n\n'


def think(prompt, sampling):
  """Thinks, and calls the tool until it has answered."""
  heard = ''.join(chr(i % OWN) for i in prompt)
  said = f'It is {heard.count("<tool:")}.' if '<tool:' in heard else CALL
  return f'{THOUGHT}{said}{END}'


async def test_an_agent_with_tools_streams_and_branches():
  import anthropic  # seconds, which every process would wait for

  engine = Engine(think, delay=0.001)
  async with endpoint(engine, model='tiny', tokens=ThinkingTokens) as (http, delivered):
    client = anthropic.AsyncAnthropic(api_key=f'{KEY}/s', base_url=str(http._base_url))
    options = {
      'model': 'tiny',
      'max_tokens': 300,
      'tools': [TOOL],
      'system': 'Be kind.',
    }
    assert [one.display_name async for one in client.models.list()] == ['tiny']
    assert (await client.models.retrieve('tiny')).created_at.year >= 2024
    messages = [{'role': 'user', 'content': 'Add.'}]
    first = await client.messages.create(messages=messages, **options)
    thinking, call = first.content
    assert (thinking.type, thinking.thinking) == ('thinking', 'Hm, so.')
    assert (call.type, call.name, call.input) == ('tool_use', 'add', {'x': 1, 'y': 'é'})
    assert first.stop_reason == 'tool_use'
    assert first.usage.input_tokens == len(engine.calls[0][1])
    assert first.usage.output_tokens == len(engine.calls[0][2].tokens)
    assert 0 < first.usage.output_tokens_details.thinking_tokens < 20
    result = {'type': 'tool_result', 'tool_use_id': call.id, 'content': '2'}
    heard = {'role': 'user', 'content': [result]}
    messages += [{'role': 'assistant', 'content': first.content}, heard]
    async with client.messages.stream(messages=messages, **options) as stream:
      events = [event async for event in stream]
      second = await stream.get_final_message()
    assert [block.type for block in second.content] == ['thinking', 'text']
    assert second.content[1].text == 'It is 1.'
    assert (second.stop_reason, second.stop_sequence) == ('end_turn', None)
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == [
      'message_start',
      'content_block_start',
      'content_block_delta',
      'thinking',
      'signature',
      'content_block_stop',
      'text',
      'message_delta',
      'message_stop',
    ]
    assert kinds.count('thinking') > 2 and kinds.count('text') > 2
    answer = {'role': 'assistant', 'content': second.content}
    for text in ('Sure?', 'Why?'):
      question = {'role': 'user', 'content': [{'type': 'text', 'text': text}]}
      third = await client.messages.create(
        messages=[*messages, answer, question], stop_sequences=['1'], **options
      )
    assert (third.stop_reason, third.stop_sequence) == ('stop_sequence', '1')
    assert third.content[1].text == 'It is '
    short = await client.messages.create(
      messages=messages, **{**options, 'max_tokens': 12}
    )
    assert (short.stop_reason, short.content[0].thinking) == ('max_tokens', 'Hm,')
    await client.post('/feedback', body={'reward': 1.0}, cast_to=object)
    await client.close()
  rows = delivered['0/s']
  written = [''.join(chr(i % OWN) for i in row.tokens[row.action_mask]) for row in rows]
  last = f'{THOUGHT}It is 1.{END}'
  first = f'{THOUGHT}{CALL}{END}{last}{last}'
  assert sorted(written) == sorted([first, last, '<think>\nHm, '])


async def test_a_call_is_streamed_as_json():
  import anthropic

  engine = Engine(lambda prompt, sampling: f'So:{CALL}{CALL}{END}', delay=0.001)
  async with endpoint(engine) as (http, _):
    client = anthropic.AsyncAnthropic(api_key=KEY, base_url=str(http._base_url))
    options = {'model': 'policy', 'max_tokens': 300, 'tools': [TOOL]}
    messages = [{'role': 'user', 'content': 'Add.'}]
    async with client.messages.stream(messages=messages, **options) as stream:
      message = await stream.get_final_message()
    await client.close()
  text, *calls = message.content
  assert text.text == 'So:' and message.stop_reason == 'tool_use'
  assert [call.input for call in calls] == [{'x': 1, 'y': 'é'}] * 2
  assert calls[0].id != calls[1].id


async def test_errors_are_those_that_the_client_knows():
  import anthropic

  engine = Engine(lambda prompt, sampling: RuntimeError('secret'))
  async with endpoint(engine) as (http, _):
    options = {'base_url': str(http._base_url), 'max_retries': 0}
    client = anthropic.AsyncAnthropic(api_key=KEY, **options)
    ask = {'model': 'policy', 'max_tokens': 9}
    hello = [{'role': 'user', 'content': 'hi'}]
    with pytest.raises(anthropic.BadRequestError, match='max_tokens') as error:
      await client.messages.create(messages=hello, model='policy', max_tokens=0)
    assert error.value.body['error']['type'] == 'invalid_request_error'
    with pytest.raises(anthropic.BadRequestError, match='tool_choice'):
      await client.messages.create(
        messages=hello, tools=[TOOL], tool_choice={'type': 'any'}, **ask
      )
    with pytest.raises(anthropic.InternalServerError) as error:
      await client.messages.create(messages=hello, **ask)
    assert error.value.body['error']['type'] == 'api_error'
    assert 'secret' not in str(error.value)
    with pytest.raises(anthropic.APIStatusError, match='the engine failed'):
      async with client.messages.stream(messages=hello, **ask) as stream:
        await stream.until_done()
    stranger = anthropic.AsyncAnthropic(api_key='nobody', **options)
    with pytest.raises(anthropic.AuthenticationError):
      await stranger.messages.create(messages=hello, **ask)
    await client.close()
    await stranger.close()
