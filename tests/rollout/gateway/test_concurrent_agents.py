"""Many agents at once: what is recorded is what the engine saw and returned."""

import asyncio
import random

import pytest

from tests.marks import slow
from tests.rollout.gateway.agents import TOOLS, Engine, endpoint, events, post

PATH = '/v1/chat/completions'


async def reply_messages(client, body, name, rng):
  """The messages of the choices, whole or put together from a stream."""
  if rng.random() < 0.7:
    status, response = await post(client, PATH, body, x_session_id=name)
    assert status == 200, response
    return [choice['message'] for choice in response['choices']]
  messages = [{'role': 'assistant', 'content': ''} for _ in range(body['n'])]
  for chunk in await events(client, PATH, body, x_session_id=name):
    for choice in chunk['choices']:
      message, delta = messages[choice['index']], choice['delta']
      message['content'] += delta.get('content') or ''
      for call in delta.get('tool_calls', ()):
        call.pop('index')
        message.setdefault('tool_calls', []).append(call)
  return messages


async def agent(client, number, seed):
  """Some turns: goes on, goes back, asks for several replies, or rewrites history."""
  rng = random.Random(f'{seed} {number}')
  name, tools = f'agent-{number}', rng.choice(([], TOOLS))
  known = [[{'role': 'user', 'content': rng.choice('pq')}]]
  for turn in range(rng.randrange(1, 7)):
    messages = rng.choice(known)
    if rng.random() < 0.1:
      messages = [{'role': 'system', 'content': f'now {turn}'}, *messages]
    body = {'messages': messages, 'tools': tools, 'n': rng.choice((1, 1, 1, 2))}
    if rng.random() < 0.3:
      body['max_tokens'] = rng.randrange(1, 30)
    if rng.random() < 0.2:
      body['stop'] = ['a', 'bc']
    for message in await reply_messages(client, body, name, rng):
      calls = message.get('tool_calls', [])
      heard = [
        {'role': 'tool', 'tool_call_id': call['id'], 'content': str(turn)}
        for call in calls
      ] or [{'role': 'user', 'content': [{'type': 'text', 'text': f'on {turn}'}]}]
      known.append([*messages, message, *heard])
  status, response = await post(client, '/feedback', {'reward': 1}, x_session_id=name)
  assert status == 200, response


def check(engine, delivered):
  """Every request was a beginning of a row; every reply is in one row, as an action."""
  requests = {}
  for request, prompt, completion, sampling in engine.calls:
    begun = prompt[: len(prompt) - sampling.num_generated]
    requests.setdefault(request.rpartition('/')[0], []).append(
      (begun, prompt, completion)
    )
  rows = [row for rows in delivered.values() for row in rows]
  rows_by_prefix = {}
  for row in rows:
    for at in range(len(row.tokens)):
      if row.action_mask[at] and (at == 0 or row.weights_version[at - 1] < 0):
        rows_by_prefix.setdefault(tuple(row.tokens[:at].tolist()), []).append((row, at))
  mismatches = 0
  for parts in requests.values():
    begun = parts[0][0]
    ids = [t for _, _, part in parts for t in part.tokens.tolist()]
    values = [v for _, _, part in parts for v in part.logprobs.tolist()]
    versions = [v for _, _, part in parts for v in part.weights_versions.tolist()]
    mine = slice(len(begun), len(begun) + len(ids))
    held = [
      row
      for row, at in rows_by_prefix.get(tuple(begun), [])
      if row.tokens[mine].tolist() == ids
      and row.rollout_logprobs[mine].tolist() == values
      and row.weights_version[mine].tolist() == versions
      and row.action_mask[mine].all()
    ]
    mismatches += not held
  actions = sum(int(row.action_mask.sum()) for row in rows)
  emitted = sum(len(c.tokens) for _, _, c, _ in engine.calls)
  assert (mismatches, actions) == (0, emitted)
  return len(requests), len(rows)


@pytest.mark.parametrize(
  'count, interrupt',
  [(200, 1), slow(1000, 0)],
)
async def test_no_token_differs(count, interrupt):
  engine = Engine(interrupt=interrupt)
  async with endpoint(engine) as (client, delivered):
    for first in range(0, count, 50):
      numbers = range(first, min(first + 50, count))
      await asyncio.gather(*(agent(client, number, 11) for number in numbers))
  assert len(delivered) == count
  replies, rows = check(engine, delivered)
  assert replies > 3 * count and rows > 1.5 * count  # there were turns, and branches
  roles = [m['role'] for rows in delivered.values() for r in rows for m in r.messages]
  assert roles.count('tool') > count / 4
  turns = [row.metrics['turns'] for rows in delivered.values() for row in rows]
  assert max(turns) >= 4


async def test_the_check_sees_a_token_that_differs():
  engine = Engine()
  async with endpoint(engine) as (client, delivered):
    await agent(client, 0, 11)
  check(engine, delivered)
  row = delivered['0/agent-0'][0]
  row.tokens[row.action_mask.argmax()] += 1
  with pytest.raises(AssertionError):
    check(engine, delivered)
