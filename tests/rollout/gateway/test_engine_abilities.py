"""What only some engines can: constrained replies, and the likeliest tokens."""

import dataclasses
import json

import pytest

from jaxrl.rollout.engine.engine_base import EngineTraits
from jaxrl.rollout.engine.router import EngineRouter
from tests.data.letters import END
from tests.rollout.gateway.agents import CALL, TOOLS, Engine, endpoint, post
from tests.rollout.gateway.wire_forms import PATHS, tools_of

SCHEMA = {'type': 'object', 'properties': {'x': {'type': 'integer'}}}
ASK = {
  'chat': {'messages': [{'role': 'user', 'content': 'hi'}]},
  'responses': {'input': 'hi'},
  'messages': {'max_tokens': 90, 'messages': [{'role': 'user', 'content': 'hi'}]},
}
AS_JSON = {
  'chat': {
    'response_format': {
      'type': 'json_schema',
      'json_schema': {'name': 'a', 'schema': SCHEMA},
    }
  },
  'responses': {
    'text': {'format': {'type': 'json_schema', 'name': 'a', 'schema': SCHEMA}}
  },
  'messages': {'output_config': {'format': {'type': 'json_schema', 'schema': SCHEMA}}},
}
FORCED = {
  'chat': [
    'required', {'type': 'function', 'function': {'name': 'add'}},
  ],
  'responses': ['required', {'type': 'function', 'name': 'add'}],
  'messages': [{'type': 'any'}, {'type': 'tool', 'name': 'add'}],
}  # fmt: skip


class AbleEngine(Engine):
  """Tells the likeliest tokens, and writes what the constraint's first one allows."""

  traits = EngineTraits(constrains_output=True, max_top_logprobs=3)

  def __init__(self):
    super().__init__(lambda prompt, sampling: self._write(sampling.constraint))

  def _write(self, constraint):
    if constraint is None:
      return 'yes' + END
    begin, schema, end = constraint.alternatives[0]
    assert json.loads(schema)['type'] == 'object'
    return f'{begin}{{"x": 1}}{end}{END}'

  async def generate(self, request_id, token_ids, sampling):
    output = await super().generate(request_id, token_ids, sampling)
    if not sampling.top_logprobs:
      return output
    ids = [ord('a') + i for i in range(sampling.top_logprobs)]
    top = tuple({i: -float(n) for n, i in enumerate(ids)} for _ in output.tokens)
    return dataclasses.replace(output, top_logprobs=top)


def tools(api):
  described = [{'type': 'function', 'function': {'name': 'sub', 'parameters': SCHEMA}}]
  function = {'name': 'add', 'parameters': SCHEMA}
  return tools_of(api, [{'type': 'function', 'function': function}, *described])


@pytest.mark.parametrize('api', PATHS)
async def test_json(api):
  engine = AbleEngine()
  async with endpoint(EngineRouter([engine])) as (client, _):
    status, response = await post(client, PATHS[api], {**ASK[api], **AS_JSON[api]})
    assert status == 200, response
  assert '{\\"x\\": 1}' in json.dumps(response)
  (alternative,) = engine.calls[0][3].constraint.alternatives
  assert (alternative[0], json.loads(alternative[1]), alternative[2]) == (
    '',
    SCHEMA,
    '',
  )


@pytest.mark.parametrize(
  ('api', 'choice'), [(api, choice) for api in FORCED for choice in FORCED[api]]
)
async def test_a_forced_call(api, choice):
  engine = AbleEngine()
  async with endpoint(engine) as (client, _):
    body = {**ASK[api], 'tools': tools(api), 'tool_choice': choice}
    status, response = await post(client, PATHS[api], body)
    assert status == 200, response
  constraint = engine.calls[0][3].constraint
  assert len(constraint.alternatives) == (
    2 if choice in ('required', {'type': 'any'}) else 1
  )
  begin, schema, end = constraint.alternatives[0]
  assert begin.startswith('<tool_call>') and end.endswith('</tool_call>')
  assert json.loads(schema) == SCHEMA
  text = json.dumps(response)
  assert '"add"' in text and 'tool_call>' not in text


@pytest.mark.parametrize('api', PATHS)
async def test_what_would_not_be_sampled_as_in_training_is_refused(api):
  async with endpoint(AbleEngine(), fixed_sampling=True) as (client, _):
    forced = {'tools': tools(api), 'tool_choice': FORCED[api][0]}
    for change, field in ((AS_JSON[api], 'format'), (forced, 'tool_choice')):
      status, response = await post(client, PATHS[api], {**ASK[api], **change})
      message = response['error']['message']
      assert status == 400 and 'as in training' in message and field in message


async def test_a_tool_that_is_not_there_cannot_be_forced():
  async with endpoint(AbleEngine()) as (client, _):
    for change in ({}, {'tools': TOOLS}):
      choice = {'type': 'function', 'function': {'name': 'nothing'}}
      body = {**ASK['chat'], **change, 'tool_choice': choice}
      status, response = await post(client, PATHS['chat'], body)
      assert (status, response['error']['param']) == (400, 'tool_choice')


async def test_the_likeliest_tokens():
  async with endpoint(AbleEngine()) as (client, _):
    body = {**ASK['chat'], 'logprobs': True, 'top_logprobs': 2}
    _, response = await post(client, PATHS['chat'], body)
    content = response['choices'][0]['logprobs']['content']
    assert len(content) == 4
    for entry in content:
      assert [one['token'] for one in entry['top_logprobs']] == ['a', 'b']
      assert [one['logprob'] for one in entry['top_logprobs']] == [0.0, -1.0]
    body = {**ASK['responses'], 'top_logprobs': 3}
    _, response = await post(client, PATHS['responses'], body)
    entries = response['output'][0]['content'][0]['logprobs']
    assert [len(entry['top_logprobs']) for entry in entries] == [3] * 4
    for api, change in (
      ('responses', {'top_logprobs': 4}),
      ('chat', {'logprobs': True, 'top_logprobs': 4}),
      ('chat', {'top_logprobs': 2}),
    ):
      status, response = await post(client, PATHS[api], {**ASK[api], **change})
      assert (status, response['error']['param']) == (400, 'top_logprobs')


async def test_a_call_that_is_not_forced_is_free():
  engine = Engine(lambda prompt, sampling: CALL + END)
  async with endpoint(engine) as (client, _):
    body = {**ASK['chat'], 'tools': TOOLS, 'response_format': {'type': 'text'}}
    assert (await post(client, PATHS['chat'], body))[0] == 200
  assert engine.calls[0][3].constraint is None
