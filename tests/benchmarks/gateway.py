"""What the OpenAI-compatible endpoint adds to a reply, early and late in a session."""

import asyncio
import json
import statistics
import time
from typing import Any

import aiohttp
import numpy as np

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.rollout.gateway.gateway import Gateway
from jaxrl.rollout.gateway.http_server import GatewayServer, serve_gateway
from jaxrl.types import Completion, SamplingParams

KEY = 'bench'
HEARD = (
  'The tool says that there are 42 files, of which 7 were changed since then. ' * 2
)
SAID = 'Then I look at those that were changed, one after the other, and tell. ' * 2
TURNS = (40, 200)
LAST = 10  # turns at the end of a session whose median counts
SESSIONS = 3


class _Engine:
  """Says the same at once, so that what is left is what others take."""

  def __init__(self, tokens: list[int]):
    n = len(tokens)
    zeros = np.zeros(n, np.float32)
    versions = np.zeros(n, np.int32)
    self._completion = Completion(np.array(tokens, np.int32), zeros, versions, 'stop')
    self.prompt: list[int] = []

  async def generate(self, request_id, token_ids, sampling) -> Completion:
    self.prompt = list(token_ids)
    await asyncio.sleep(0)
    return self._completion


async def _session(client: aiohttp.ClientSession, name: str, turns: int) -> list[float]:
  """Seconds of each turn's request, as one who has the body at hand sees it."""
  messages: list[dict[str, Any]] = [{'role': 'system', 'content': 'Be of use.'}]
  times = []
  for _ in range(turns):
    messages.append({'role': 'user', 'content': HEARD})
    body = json.dumps({'messages': messages, 'model': 'm'}).encode()
    start = time.perf_counter()
    async with client.post(
      '/v1/chat/completions', data=body, headers={'x-session-id': name}
    ) as response:
      text = await response.read()
    times.append(time.perf_counter() - start)
    messages.append(json.loads(text)['choices'][0]['message'])
  return times


async def _direct(engine: _Engine, repeats: int = 200) -> float:
  """Seconds that a call of the engine itself takes, with the longest prompt."""
  prompt, times = list(engine.prompt), []
  for i in range(repeats):
    start = time.perf_counter()
    await engine.generate(str(i), prompt, SamplingParams(max_tokens=1))
    times.append(time.perf_counter() - start)
  return statistics.median(times)


async def _measure() -> dict[str, float]:
  chat = ChatTokenizer(train_tokenizer([HEARD, SAID], 512))
  engine: Any = _Engine([*chat.encode(SAID), chat.end_id])
  gateway = Gateway(engine, chat, max_length=1 << 20)
  headers = {'Authorization': f'Bearer {KEY}'}
  figures: dict[str, float] = {'last': LAST}
  try:
    async with (
      serve_gateway(GatewayServer(gateway, [KEY])) as url,
      aiohttp.ClientSession(url, headers=headers) as client,
    ):
      for turns in TURNS:
        runs = [await _session(client, f'{turns}/{i}', turns) for i in range(SESSIONS)]
        late = [seconds for times in runs for seconds in times[-LAST:]]
        figures[f'turn_{turns}_ms'] = 1e3 * statistics.median(late)
        figures[f'tokens_{turns}'] = len(engine.prompt)
        direct = 1e3 * await _direct(engine)
        figures[f'direct_{turns}_ms'] = direct
        figures[f'added_{turns}_ms'] = figures[f'turn_{turns}_ms'] - direct
  finally:
    gateway.close()
  return figures


def measure() -> dict[str, float]:
  """Medians over the last turns of sessions of each length, in milliseconds."""
  return asyncio.run(_measure())
