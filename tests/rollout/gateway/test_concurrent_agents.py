"""Many agents at once: what is recorded is what the engine saw and returned."""

import asyncio
import collections
import dataclasses
import random

import pytest

from tests.marks import slow
from tests.rollout.gateway.agents import (
  TOOLS,
  Engine,
  ThinkingTokens,
  endpoint,
  post,
)
from tests.rollout.gateway.wire_forms import APIS, Reply, ask


async def agent(client, number, seed, went_on):
  """Some turns: goes on, goes back, asks for several replies, or rewrites history.

  Each turn may use another API. `went_on` gets the replies, each with the one before it
  in the conversation, which is None where the conversation begins.
  """
  rng = random.Random(f'{seed} {number}')
  name, tools = f'agent-{number}', rng.choice(([], TOOLS))
  apis = rng.choice((APIS, APIS, *((api,) for api in APIS)))
  known = [[('user', rng.choice('pq'))]]
  if rng.random() < 0.3:
    known = [[('system', 'be kind'), *known[0]]]
  for turn in range(rng.randrange(1, 7)):
    entries = rng.choice(known)
    replies = [entry for entry in entries if isinstance(entry, Reply)]
    parent = replies[-1] if replies else None
    if rng.random() < 0.1:
      entries, parent = [('system', f'now {turn}'), *strip(entries)], None
    options = {'tools': tools, 'n': rng.choice((1, 1, 1, 2)), 'session': name}
    if rng.random() < 0.3:
      options['max_tokens'] = rng.randrange(1, 30)
    if rng.random() < 0.2:
      options['stop'] = ['a', 'bc']
    for reply in await ask(client, rng.choice(apis), entries, rng, **options):
      went_on.append((name, parent, reply))
      heard = [('tool', call[0], str(turn)) for call in reply.calls]
      if not heard or rng.random() < 0.2:
        heard.append(('user', f'on {turn}'))
      known.append([*entries, reply, *heard])
  status, response = await post(client, '/feedback', {'reward': 1}, x_session_id=name)
  assert status == 200, response


def strip(entries):
  """The same words without what the endpoint may know them by."""
  return [
    dataclasses.replace(entry, name='', api='', items=[], text=f'{entry.text}.')
    if isinstance(entry, Reply)
    else entry
    for entry in entries
    if isinstance(entry, Reply) or entry[0] != 'system'
  ]


def check_histories(engine, went_on, delivered):
  """Every reply to a known conversation was asked for with the ids of that one.

  Of replies that read alike in the same place, the latest may be meant.
  """
  whole, begun, alike = {}, {}, collections.defaultdict(list)
  for request, prompt, completion, sampling in engine.calls:
    _, session, _, number, _ = request.split('/')
    place = int(session), number
    begun.setdefault(place, prompt[: len(prompt) - sampling.num_generated])
    whole[place] = [*prompt, *completion.tokens.tolist()]

  def place_of(name, reply):
    return delivered[f'0/{name}'][0].episode_id, reply.name.rpartition('-')[2]

  for name, _, reply in went_on:
    alike[name, reply.text].append(whole[place_of(name, reply)])
  count = num_mistaken = 0
  for name, parent, child in went_on:
    if parent is not None:
      after, before = begun[place_of(name, child)], whole[place_of(name, parent)]
      if after[: len(before)] != before:
        num_mistaken += 1
        others = alike[name, parent.text]
        assert any(after[: len(other)] == other for other in others), (parent, child)
      count += 1
  assert num_mistaken <= count / 1000
  return count


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
  [(200, 1), slow(3000, 0)],
)
async def test_no_token_differs(count, interrupt):
  engine, went_on = Engine(interrupt=interrupt), []
  async with endpoint(engine, tokens=ThinkingTokens) as (client, delivered):
    for first in range(0, count, 50):
      numbers = range(first, min(first + 50, count))
      agents = (agent(client, number, 11, went_on) for number in numbers)
      await asyncio.gather(*agents)
  assert len(delivered) == count
  replies, rows = check(engine, delivered)
  assert replies > 3 * count and rows > 1.5 * count  # there were turns, and branches
  assert replies == len(went_on)
  assert check_histories(engine, went_on, delivered) > count
  roles = [m['role'] for rows in delivered.values() for r in rows for m in r.messages]
  assert roles.count('tool') > count / 4
  turns = [row.metrics['turns'] for rows in delivered.values() for row in rows]
  assert max(turns) >= 4


async def test_the_check_sees_a_token_that_differs():
  engine, went_on = Engine(), []
  async with endpoint(engine) as (client, delivered):
    await agent(client, 0, 11, went_on)
  check(engine, delivered)
  row = delivered['0/agent-0'][0]
  row.tokens[row.action_mask.argmax()] += 1
  with pytest.raises(AssertionError):
    check(engine, delivered)
