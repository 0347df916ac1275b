"""What the official clients make of replies goes back to the endpoint as it is."""

import pydantic

from tests.data.letters import END
from tests.rollout.gateway.agents import KEY, OWN, Engine, ThinkingTokens, endpoint
from tests.rollout.gateway.test_engine_abilities import AbleEngine

CALL = '<tool_call>{"name": "add", "arguments": {"x": 1, "y": 2}}</tool_call>'
ASKED = {'role': 'user', 'content': 'Add.'}


class Sum(pydantic.BaseModel):
  """A reply, or the arguments of a call."""

  x: int


class add(pydantic.BaseModel):
  """Adds."""

  x: int
  y: int


def reply(prompt, sampling):
  """Thinks and calls the tool until it has answered."""
  heard = ''.join(chr(i % OWN) for i in prompt)
  said = f'It is {heard.count("<tool:")}.' if '<tool:' in heard else CALL
  return f'<think>\nHm.\n</think>\n\n{said}{END}'


def openai_client(http):
  import openai  # seconds, which every process would wait for

  return openai.AsyncOpenAI(api_key=f'{KEY}/s', base_url=f'{http._base_url}/v1')


def anthropic_client(http):
  import anthropic

  return anthropic.AsyncAnthropic(api_key=f'{KEY}/s', base_url=str(http._base_url))


async def test_parsed_chats():
  import openai

  async with endpoint(AbleEngine(), model='tiny') as (http, delivered):
    client = openai_client(http)
    messages = [ASKED]
    for _ in range(3):
      parsed = await client.chat.completions.parse(
        model='tiny', messages=messages, response_format=Sum
      )
      message = parsed.choices[0].message
      assert message.parsed == Sum(x=1)
      messages += [message, ASKED]
    async with client.chat.completions.stream(
      model='tiny', messages=messages, response_format=Sum
    ) as stream:
      final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Sum(x=1)
    await client.post('/feedback', body={'reward': 1.0}, cast_to=object)
    await client.close()
  assert len(delivered['0/s']) == 1
  async with endpoint(Engine(reply), model='tiny') as (http, delivered):
    client = openai_client(http)
    options = {'model': 'tiny', 'tools': [openai.pydantic_function_tool(add)]}
    first = await client.chat.completions.parse(messages=[ASKED], **options)
    (call,) = first.choices[0].message.tool_calls
    assert call.function.parsed_arguments == add(x=1, y=2)
    heard = {'role': 'tool', 'tool_call_id': call.id, 'content': '3'}
    messages = [ASKED, first.choices[0].message, heard]
    second = await client.chat.completions.parse(messages=messages, **options)
    assert second.choices[0].message.content.endswith('It is 1.')
    await client.post('/feedback', body={'reward': 1.0}, cast_to=object)
    await client.close()
  assert len(delivered['0/s']) == 1


async def test_parsed_responses():
  import openai

  async with endpoint(AbleEngine(), model='tiny') as (http, delivered):
    client = openai_client(http)
    items = [ASKED]
    for _ in range(3):
      parsed = await client.responses.parse(model='tiny', input=items, text_format=Sum)
      assert parsed.output_parsed == Sum(x=1)
      items += [*parsed.output, ASKED]
    async with client.responses.stream(
      model='tiny', input=items, text_format=Sum
    ) as stream:
      assert (await stream.get_final_response()).output_parsed == Sum(x=1)
    await client.post('/feedback', body={'reward': 1.0}, cast_to=object)
    await client.close()
  assert len(delivered['0/s']) == 1
  engine = Engine(reply)
  async with endpoint(engine, model='tiny', tokens=ThinkingTokens) as (http, delivered):
    client = openai_client(http)
    tool = openai.pydantic_function_tool(add)['function']
    options = {'model': 'tiny', 'tools': [{'type': 'function', **tool}]}
    first = await client.responses.parse(
      input=[ASKED], include=['reasoning.encrypted_content'], **options
    )
    thought, call = first.output
    assert call.parsed_arguments == {'x': 1, 'y': 2}
    heard = {'type': 'function_call_output', 'call_id': call.call_id, 'output': '3'}
    items = [ASKED, thought, call, heard]
    second = await client.responses.parse(input=items, **options)
    assert second.output_text == 'It is 1.'
    await client.post('/feedback', body={'reward': 1.0}, cast_to=object)
    await client.close()
  assert len(delivered['0/s']) == 1


async def test_anthropics_parser_and_runner_of_tools():
  import anthropic

  async with endpoint(AbleEngine(), model='tiny') as (http, _):
    client = anthropic_client(http)
    options = {'model': 'tiny', 'max_tokens': 300, 'messages': [ASKED]}
    for messages in (client.messages, client.beta.messages):
      parsed = await messages.parse(output_format=Sum, **options)
      assert parsed.parsed_output == Sum(x=1)
    await client.close()

  @anthropic.beta_async_tool
  async def add(x: int, y: int) -> str:
    """Adds.

    Args:
      x: One.
      y: Another.
    """
    return str(x + y)

  for stream in (False, True):
    engine = Engine(reply)
    async with endpoint(engine, model='tiny', tokens=ThinkingTokens) as (http, rows):
      client = anthropic_client(http)
      runner = client.beta.messages.tool_runner(
        tools=[add], stream=stream, system='Be kind.', **options
      )
      final = await runner.until_done()
      assert final.content[-1].text == 'It is 1.'
      await client.post('/feedback', body={'reward': 1.0}, cast_to=object)
      await client.close()
    assert len(rows['0/s']) == 1
    heard = ''.join(chr(i % OWN) for i in engine.calls[-1][1])
    assert '<tool:3>' in heard
