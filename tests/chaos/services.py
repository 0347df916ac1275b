"""Hostile clients of the gateway; an honest one is served all the same."""

import asyncio
import json

from jaxrl.rollout.gateway.connection_limits import ConnectionLimits
from tests.chaos.trials import TRACEBACK, Trials
from tests.rollout.gateway.agents import Engine, endpoint, post

PATHS = ('/v1/chat/completions', '/v1/completions', '/feedback', '/v1/models/x', '/x')
ASK = {'model': 'policy', 'messages': [{'role': 'user', 'content': 'hi'}]}
VALUES = (
  None, True, -1, 0, 1, 2**70, 1e308, '', 'x', '\ud800', 'x' * 5000, [], [[]], {},
  [{'role': 'user'}], {'a': {'b': {}}}, [1] * 3000, 'assistant', [{'role': 'tool'}],
)  # fmt: skip
FIELDS = (
  'messages', 'prompt', 'tools', 'n', 'stream', 'max_tokens', 'temperature', 'top_p',
  'top_k', 'stop', 'seed', 'logprobs', 'reward', 'done', 'completion_id', 'user',
  'tool_choice', 'logit_bias', 'stream_options',
)  # fmt: skip
BATCH = 100


def fuzzed_requests(rng, folder) -> Trials:
  """Batches of random requests, each followed by an honest one."""
  del folder
  for number in range(100):
    seed = int(rng.integers(1 << 30))
    yield (
      f'{BATCH} random requests, batch {number}',
      lambda seed=seed: asyncio.run(_fuzz(seed)),
    )


def silent_connections(rng, folder) -> Trials:
  """Many connections that send nothing, or a few bytes."""
  del folder
  for count in (300, 600):
    data = [b'', b'GET', b'POST /v1/models HTTP/1.1\r\nA: '][rng.integers(3)]
    yield (
      f'{count} connections that send {data!r}',
      lambda count=count, data=data: asyncio.run(_silent(count, data)),
    )


async def _fuzz(seed: int) -> str:
  import numpy as np

  rng = np.random.default_rng(seed)
  async with endpoint(Engine()) as (client, _):
    for _ in range(BATCH):
      path = PATHS[rng.integers(len(PATHS))]
      async with client.post(path, data=_body(rng)) as response:
        text = await response.text()
        if response.status >= 500 or TRACEBACK in text or '/jaxrl/' in text:
          return f'{path} answered {response.status}: {text[:200]}'
    status, _ = await post(client, PATHS[0], ASK)
    return '' if status == 200 else f'an honest request was answered {status}'


def _body(rng) -> bytes:
  body = dict(ASK)
  for _ in range(rng.integers(1, 5)):
    field = FIELDS[rng.integers(len(FIELDS))]
    body[field] = VALUES[rng.integers(len(VALUES))]
  data = bytearray(json.dumps(body).encode())
  if rng.random() < 0.3:
    for place in rng.integers(0, len(data), size=3):
      data[place] = rng.integers(256)
  return bytes(data)


async def _silent(count: int, data: bytes) -> str:
  limits = ConnectionLimits(max_connections=256, max_per_client=128, header_timeout=5)
  async with endpoint(Engine(), limits={'connections': limits}) as (client, _):
    url = client._base_url
    assert url is not None
    host, port = url.host, url.port
    writers = []
    for _ in range(count):
      _, writer = await asyncio.open_connection(host, port)
      writer.write(data)
      writers.append(writer)
    await asyncio.sleep(1.5)
    async with asyncio.timeout(10):
      status, _ = await post(client, PATHS[0], ASK)
    for writer in writers:
      writer.close()
    return '' if status == 200 else f'an honest request was answered {status}'
