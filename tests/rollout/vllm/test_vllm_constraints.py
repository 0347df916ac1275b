"""A real vLLM that writes only what a constraint allows, and tells likely tokens."""

import json

import aiohttp
import numpy as np
import pytest

from jaxrl.data.chat_tokenizer import ChatOptions, ChatTokenizer
from jaxrl.rollout.gateway.gateway import Gateway
from jaxrl.rollout.gateway.http_server import GatewayServer, serve_gateway
from jaxrl.types import SamplingParams, TextConstraint
from tests.rollout.gateway.agents import KEY, post
from tests.rollout.vllm.needs import VLLM

pytestmark = [*VLLM, pytest.mark.asyncio(loop_scope='session')]

SCHEMA = {
  'type': 'object',
  'properties': {'x': {'enum': [1, 22]}},
  'required': ['x'],
  'additionalProperties': False,
}

# Names the tool alone, because the engine's window is short.
TEMPLATE = (
  '{% if tools %}<|im_start|>{{ tools[0].function.name }}<|im_end|>{% endif %}'
  '{% for one in messages %}'
  "<|im_start|>{{ one.role + '\\n' + one.content }}<|im_end|>{{ '\\n' }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)


async def test_a_constraint_holds(world):
  await world.engine.load(world.next(), world.old)
  chat = ChatTokenizer(world.tokenizer)
  constraint = TextConstraint((('', json.dumps(SCHEMA), ''),))
  for seed in range(8):
    sampling = SamplingParams(
      max_tokens=60,
      seed=seed,
      stop_token_ids=chat.stop_token_ids,
      constraint=constraint,
    )
    done = await world.engine.generate(f'json/{seed}', [7, 8, 9], sampling)
    if done.finish_reason == 'stop':  # it may have drawn nothing but spaces
      assert json.loads(chat.decode(done.tokens))['x'] in (1, 22)
    assert np.isfinite(done.logprobs).all()
  with pytest.raises(ValueError, match='cannot be continued'):
    rest = SamplingParams(max_tokens=5, num_generated=1, constraint=constraint)
    await world.engine.generate('rest', [7, 8, 9], rest)


async def test_the_likeliest_tokens_are_told(world):
  await world.engine.load(world.next(), world.old)
  sampling = SamplingParams(max_tokens=20, seed=3, top_logprobs=4)
  done = await world.engine.generate('top', [7, 8, 9], sampling)
  plain = await world.engine.generate('plain', [7, 8, 9], SamplingParams(20, seed=3))
  assert done.tokens.tolist() == plain.tokens.tolist() and plain.top_logprobs is None
  for token, logprob, top in zip(
    done.tokens.tolist(), done.logprobs.tolist(), done.top_logprobs, strict=True
  ):
    values = list(top.values())
    assert len(top) == 4 and values == sorted(values, reverse=True)
    assert top.get(token, logprob) == logprob <= values[0]


async def test_a_forced_call_and_json_through_the_gateway(world):
  await world.engine.load(world.next(), world.old)
  chat = ChatTokenizer(world.tokenizer, ChatOptions(chat_template=TEMPLATE))
  gateway = Gateway(world.engine, chat, max_length=256, max_tokens=100)
  tool = {'name': 'add', 'parameters': SCHEMA}
  try:
    async with (
      serve_gateway(GatewayServer(gateway, [KEY])) as url,
      aiohttp.ClientSession(url, headers={'Authorization': f'Bearer {KEY}'}) as client,
    ):
      seen = set()
      for seed in range(6):
        body = {
          'messages': [{'role': 'user', 'content': 'the cat'}],
          'tools': [{'type': 'function', 'function': tool}],
          'tool_choice': 'required',
          'logprobs': True,
          'top_logprobs': 2,
          'seed': seed,
        }
        status, response = await post(client, '/v1/chat/completions', body)
        assert status == 200, response
        (choice,) = response['choices']
        if choice['finish_reason'] == 'length':  # nothing but spaces
          continue
        (call,) = choice['message']['tool_calls']
        assert call['function']['name'] == 'add'
        seen.add(json.loads(call['function']['arguments'])['x'])
        assert len(choice['logprobs']['content'][0]['top_logprobs']) in (1, 2)
      assert seen and seen <= {1, 22}
  finally:
    gateway.close()
