"""An engine whose ids only it can have written, a chat with tools, and a server."""

import asyncio
import contextlib
import json
import random
import zlib

import aiohttp
import numpy as np

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.rollout.gateway.gateway import Gateway
from jaxrl.rollout.gateway.http_server import GatewayServer, serve_gateway
from jaxrl.types import Completion
from tests.data.letters import END, Letters

KEY = 'secret'
OWN = 1000  # an id that the engine writes is this more than the tokenizer would have
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1, "y": "\u00e9"}}</tool_call>'
TOOLS = [{'type': 'function', 'function': {'name': 'add', 'parameters': {}}}]


class Tokens(Letters):
  """Every letter has two ids, so that tokenising a reply anew cannot pass unseen."""

  def decode(self, ids, skip_special_tokens=False, **_):
    ids = [i for i in ids if not (skip_special_tokens and i == self.eos_token_id)]
    return super().decode([i % OWN for i in ids])

  def apply_chat_template(
    self, messages, *, add_generation_prompt=False, tools=(), **_
  ):
    text = f'<tools:{",".join(t["function"]["name"] for t in tools)}>' if tools else ''
    for message in messages:
      written = (json.dumps(c['function']) for c in message.get('tool_calls', ()))
      calls = [f'call {call}' for call in written]  # in no known format
      text += f'<{message["role"]}:{message["content"]}{"".join(calls)}{END}'
    return text + '<assistant:' * add_generation_prompt


class ThinkingTokens(Tokens):
  """Writes thoughts as many models do."""

  def apply_chat_template(self, messages, **options):
    written = [
      {**m, 'content': f'<think>{m["reasoning_content"]}</think>{m["content"]}'}
      if m.get('reasoning_content')
      else m
      for m in messages
    ]
    return super().apply_chat_template(written, **options)


class Engine:
  """Writes `reply(prompt, sampling)`, letter by letter; keeps all that it saw and said.

  The default reply follows from prompt and seed: letters, now and then a tool call.
  interrupt: how often every reply is broken off. delay: seconds a letter.
  """

  def __init__(self, reply=None, *, delay=0.0, interrupt=0):
    self.reply, self.delay, self.interrupt = reply or drawn, delay, interrupt
    self.calls, self.aborted, self.now = [], [], {}

  async def generate(self, request_id, token_ids, sampling):
    prompt = list(token_ids)
    begun = prompt[: len(prompt) - sampling.num_generated]
    text = self.reply(begun, sampling)
    if isinstance(text, Exception):
      raise text
    ids = [ord(c) + OWN for c in text.removesuffix(END)]
    ids += [ord(END)] * text.endswith(END)
    finish = 'stop' if text.endswith(END) or text.endswith(sampling.stop or END) else ''
    room = sampling.max_tokens
    rest = ids[sampling.num_generated :]
    part = int(request_id.rpartition('/')[2])
    if part < self.interrupt and len(rest) > 1:
      rest, finish = rest[: len(rest) // 2], 'abort'
    elif len(rest) > room or not finish:
      rest, finish = rest[:room], 'length'
    for n in range(len(rest) if self.delay else 0):
      self.now[request_id] = completion(rest[:n], 'length', begun)
      await asyncio.sleep(self.delay)
    self.now.pop(request_id, None)
    output = completion(rest, finish, prompt)
    self.calls.append((request_id, prompt, output, sampling))
    return output

  async def progress(self, names):
    return {name: self.now[name] for name in names if name in self.now}

  async def abort(self, name):
    self.aborted.append(name)


def completion(ids, finish, prompt):
  """Log-probs that no two prompts share."""
  n = len(ids)
  start = zlib.crc32(np.array(prompt, np.int64).tobytes()) / 2**32
  logprobs = -np.linspace(start, start + 1, n, dtype=np.float32)
  return Completion(
    np.array(ids, np.int32), logprobs, np.full(n, len(prompt), np.int32), finish
  )


def drawn(prompt, sampling):
  rng = random.Random(f'{prompt} {sampling.seed}')
  text = ''.join(rng.choice('abc \n') for _ in range(rng.randrange(1, 12)))
  calls = CALL * rng.choice((0, 0, 1, 2))
  thought = ''.join(rng.choice('ab \n') for _ in range(rng.randrange(6)))
  thought += CALL * rng.choice((0, 0, 0, 1)) + '</think>' * rng.choice((0, 1, 1, 1))
  begun = rng.choice(('', '', f'<think>{thought}', f'\n<think>\n{thought}\n\n'))
  return begun + text + calls + END * rng.choice((0, 1, 1))


@contextlib.asynccontextmanager
async def endpoint(engine=None, limits=None, tokens=Tokens, **options):
  """A base URL, a client's session that has the key, and what was delivered."""
  delivered = {}
  options = {'max_length': 2000, 'max_tokens': 400, 'seed': 3, **options}
  gateway = Gateway(
    engine or Engine(),
    ChatTokenizer(tokens()),
    deliver=delivered.__setitem__,
    **options,
  )
  server = GatewayServer(
    gateway, [KEY, 'other'], **{'interval': 0.001, **(limits or {})}
  )
  try:
    async with (
      serve_gateway(server) as url,
      aiohttp.ClientSession(url, headers={'Authorization': f'Bearer {KEY}'}) as client,
    ):
      yield client, delivered
  finally:
    gateway.close()


async def post(client, path, body, **headers):
  """Status and JSON. A header's name has _ for -."""
  headers = {name.replace('_', '-'): value for name, value in headers.items()}
  send = {'data': body} if isinstance(body, bytes) else {'json': body}
  async with client.post(path, headers=headers, **send) as response:
    return response.status, await response.json()


async def events(client, path, body, **headers):
  """The chunks of a stream."""
  headers = {name.replace('_', '-'): value for name, value in headers.items()}
  async with client.post(
    path, json={**body, 'stream': True}, headers=headers
  ) as response:
    assert response.status == 200, await response.text()
    assert response.content_type == 'text/event-stream'
    lines = (await response.text()).split('\n\n')
  assert lines[-2:] == ['data: [DONE]', ''], lines
  return [json.loads(line.removeprefix('data: ')) for line in lines[:-2]]


async def named_events(client, path, body, **headers):
  """The events of a stream whose events have names, those of their types."""
  headers = {name.replace('_', '-'): value for name, value in headers.items()}
  async with client.post(
    path, json={**body, 'stream': True}, headers=headers
  ) as response:
    assert response.status == 200, await response.text()
    *blocks, rest = (await response.text()).split('\n\n')
  assert rest == ''
  found = []
  for block in blocks:
    name, data = block.split('\n')
    found.append(json.loads(data.removeprefix('data: ')))
    assert name == f'event: {found[-1]["type"]}'
  return found
