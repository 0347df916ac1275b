"""Agents through the endpoint: each costs one episode, whatever it does."""

import asyncio
import dataclasses
import shlex
import sys

import aiohttp
import numpy as np
import pytest

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.dataset import GlobalDataset
from jaxrl.envs.agents.command_agent import CommandAgent, CommandAgentError
from jaxrl.options import ConfigError
from jaxrl.rollout.agent_env_manager import AgentEnvManager
from jaxrl.rollout.env_manager import EnvContext
from jaxrl.rollout.env_worker import EnvWorker, make_env_manager
from jaxrl.rollout.gateway.agent_endpoint import AgentEndpoint
from jaxrl.rollout.queue.group_queue import GroupQueue, QueueOptions
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.rollout.rewards.reward_pipeline import (
  RewardOutput,
  RewardPipeline,
  RewardTerm,
)
from jaxrl.rollout.thread_pool import ThreadPool, Timeouts
from jaxrl.types import PromptTooLongError
from tests.calls import env_factory
from tests.data.letters import END
from tests.processes import wait_for_end
from tests.rollout import agent_cases
from tests.rollout.gateway.agents import Engine, Tokens
from tests.rollout.gateway.test_concurrent_agents import check

CASES = 'tests.rollout.agent_cases'
OPTIONS = {'max_steps': 5, 'max_length': 400, 'max_tokens_per_step': 40, 'tag': 'bot'}
PROGRAM = shlex.join([sys.executable, agent_cases.__file__])


def world(engine=None, queue=None, *, mode='sample', **config):
  engine, chat = engine or Engine(), ChatTokenizer(Tokens())
  rows = [{'question': f'Q{i}', 'answer': 'a'} for i in range(3)]
  return EnvContext(
    make_env=env_factory('agent', config),
    engine=engine,
    chat=chat,
    pool=ThreadPool(4),
    queue=queue,
    dataset=GlobalDataset(rows, mode=mode),
    endpoint=AgentEndpoint(engine, chat),
  )


async def play(engine=None, lease=None, options=None, **config):
  """One episode's rows."""
  context = world(engine, **config)
  manager = make_env_manager(context, **{**OPTIONS, **(options or {})})
  assert isinstance(manager, AgentEnvManager)
  try:
    lease = lease or EpisodeLease(0, 2, 0, 0, 0)
    return await asyncio.wait_for(manager.play_episode(lease, base_seed=10), 30)
  finally:
    await context.close()


def says(text):
  return Engine(lambda prompt, sampling: text)


async def test_an_agent_plays_and_is_rewarded():
  engine = says('abc' + END)
  (row,) = await play(engine, agent=f'{CASES}:good(turns=3)')
  assert (row.stop_reason, row.score, row.tag) == ('finish', 3.0, 'bot')
  assert row.rewards.nonzero()[0].tolist() == [len(row.tokens) - 1]
  assert (row.episode_id, row.episode_seed, row.columns['given']) == (2, 12, 'x')
  assert row.metrics['asked'] == row.metrics['turns'] == 3
  assert row.messages[0] == {'role': 'user', 'content': 'Q2'}
  for _, prompt, output, _ in engine.calls:
    whole = [*prompt, *output.tokens.tolist()]
    assert row.tokens[: len(whole)].tolist() == whole


async def test_replies_are_drawn_as_the_run_draws_them():
  engine = says('abc' + END)
  options = {'temperature': 0.9, 'stop': ('zz',)}
  for member in (0, 1, 0):
    lease = EpisodeLease(0, 2, member, 0, 0)
    await play(engine, lease, options, agent=f'{CASES}:good')
  drawn = [call[3] for call in engine.calls]
  assert {(s.temperature, s.stop, s.max_tokens) for s in drawn} == {(0.9, ('zz',), 40)}
  seeds = [s.seed for s in drawn]
  assert len(set(seeds)) == 4 and seeds[:2] == seeds[4:]  # by member and turn; repeats
  greedy = EpisodeLease(0, 2, 2, 0, 0, greedy=True)
  (row,) = await play(engine, greedy, agent=f'{CASES}:good')
  assert engine.calls[-1][3].temperature == 0 and row.is_greedy
  assert row.metrics['agent/overruled'] == 2  # it asked for another temperature


async def test_branches_are_rows_of_one_episode_with_one_return():
  engine = Engine()
  rows = await play(engine, agent=f'{CASES}:branches', grader='exact(weight=0)')
  check(engine, {'s': rows})
  assert [row.turn for row in rows] == [0, 1, 2]
  assert {row.trajectory_id for row in rows} == {f'bot_0_2_12_0_{i}' for i in range(3)}
  assert [row.score for row in rows] == [0, 0, 2.5]  # agent and feedback, once
  assert rows[0].metrics['reward/agent'] == 2 and rows[0].metrics['reward/exact'] == 0
  assert rows[0].metrics['reward/feedback'] == 0.5
  steps = await play(Engine(), None, {'row_format': 'step'}, agent=f'{CASES}:branches')
  assert len(steps) == 4 and sum(row.score for row in steps) == 2.5
  assert len({row.extras['state_hash'] for row in steps}) == 4


async def test_what_comes_after_the_episode_rewards_its_last_reply():
  async def word(played):
    assert played.reply == 'ab' and played.messages[-2]['content'] == 'other'
    return RewardOutput(3.0)

  context = world(says('ab' + END), agent=f'{CASES}:branches')
  rewards = RewardPipeline({'word': RewardTerm(word, weight=2.0)}, env_weight=0.5)
  context = dataclasses.replace(context, rewards=rewards)
  rows = await make_env_manager(context, **OPTIONS).play_episode(
    EpisodeLease(0, 2, 0, 0, 0), base_seed=10
  )
  assert [row.score for row in rows] == [0, 0, 0.5 * 2.5 + 6]
  assert rows[0].metrics['reward/word'] == 3
  await context.close()


async def test_a_grade_that_is_too_large_costs_the_episode():
  config = {'agent': f'{CASES}:good(turns=1)', 'grader': 'exact(weight=1e300)'}
  (row,) = await play(says('a' + END), **config)
  assert (row.stop_reason, row.score) == ('reward_failed', 0)


async def test_a_grader_reads_the_last_reply():
  (row,) = await play(says('a' + END), agent=f'{CASES}:good(turns=1)', grader='exact')
  assert (row.score, row.metrics['accuracy']) == (2.0, 1.0)


@pytest.mark.parametrize(
  'agent, reason, words',
  [
    ('crashes', 'env_error', 'the agent fell over'),
    ('hangs(seconds=2.0)', 'env_timeout', 'no answer'),
    ('silent', 'env_error', 'requested no response'),
    ('garbage', 'env_error', 'much'),
    ('greedy', 'env_error', 'at most ±1e+18'),
    ('endless', 'max_steps', ''),
  ],
)
async def test_a_bad_agent_costs_an_episode(agent, reason, words):
  options = {'timeouts': Timeouts(step=0.5 if 'hangs' in agent else 20.0)}
  rows = await play(says('ab' + END), None, options, agent=f'{CASES}:{agent}')
  assert {row.stop_reason for row in rows} == {reason}
  assert words in rows[-1].extras.get('error', '')
  num_tokens = {'silent': 0, 'endless': 15}.get(agent, 3)
  if 'hangs' not in agent:  # which may not even have come to speak
    assert sum(row.action_mask.sum() for row in rows) == num_tokens


async def test_limits_and_faults_of_the_engine_have_their_own_reasons():
  agent = f'{CASES}:endless'
  rows = await play(says('ab' + END), None, {'max_length': 60}, agent=agent)
  assert rows[-1].stop_reason == 'max_length' and len(rows[-1].tokens) <= 60
  (row,) = await play(says('ab' + END), None, {'max_length': 5}, agent=agent)
  assert (row.stop_reason, len(row.tokens)) == ('prompt_too_long', 5)
  assert not row.action_mask.any()
  narrow = Engine(lambda prompt, sampling: PromptTooLongError('a window of 2'))
  (row,) = await play(narrow, agent=agent)
  assert row.stop_reason == 'prompt_too_long' and len(row.tokens)
  assert "more than the engine's window allows" in row.extras['error']
  for error in (RuntimeError('no memory'), ValueError('no such sampling')):
    broken = Engine(lambda prompt, sampling, error=error: error)
    (row,) = await play(broken, agent=agent)
    assert row.stop_reason == 'generate_failed' and str(error) in row.extras['error']
  (row,) = await play(says(''), agent=agent)
  assert row.stop_reason == 'generate_failed' and 'no token' in row.extras['error']


async def test_an_endpoint_that_cannot_listen_costs_an_episode(monkeypatch):
  async def fails(self):
    raise OSError('no port is free')

  monkeypatch.setattr(AgentEndpoint, '_start', fails)
  (row,) = await play(agent=f'{CASES}:good')
  assert row.stop_reason == 'generate_failed' and 'no port' in row.extras['error']


async def test_a_program_plays(tmp_path):
  (row,) = await play(says('abc' + END), command=f'{PROGRAM} play')
  assert (row.stop_reason, row.score, row.metrics['asked']) == ('finish', 3.0, 2)
  rows = await play(says('abc' + END), command=f'{PROGRAM} flood')
  assert {row.stop_reason for row in rows} == {'finish'}
  rows = await play(says('a' + END), command=f'{PROGRAM} memory', memory_gib=1.0)
  assert rows[-1].stop_reason == 'env_error'
  assert 'MemoryError' in rows[-1].extras['error']


async def test_a_program_that_hangs_is_ended_with_all_that_it_started(tmp_path):
  note = tmp_path / 'pid'
  for seconds in (2.0, 8.0, 30.0):  # however long it takes to start here
    options = {'timeouts': Timeouts(step=seconds)}
    rows = await play(says('a' + END), None, options, command=f'{PROGRAM} hang {note}')
    assert rows[-1].stop_reason == 'env_timeout'
    if note.exists():
      break
  await asyncio.to_thread(wait_for_end, int(note.read_text()))


def test_a_program_given_up_before_it_began_does_not_begin(tmp_path):
  command = CommandAgent(['touch', str(tmp_path / 'begun')])
  command.kill()  # from the event loop, while a thread has taken the call up
  with pytest.raises(CommandAgentError, match='cancelled before it started'):
    command({}, 'http://127.0.0.1', 'key')
  assert not list(tmp_path.iterdir())


async def test_a_key_opens_one_session_and_only_while_it_lasts():
  context = world(agent=f'{CASES}:silent')
  manager = make_env_manager(context, **OPTIONS)
  cache = await manager.reset(EpisodeLease(0, 0, 0, 0, 0))
  terms = manager._session_limits(cache)
  keys = [
    await context.endpoint.open_session(n, cache.lease, 0, terms) for n in ('a', 'b')
  ]
  assert len(set(keys)) == 2 and min(map(len, keys)) >= 43
  assert context.endpoint.url.startswith('http://127.0.0.1:')
  from tests.rollout.agent_cases import say

  await asyncio.to_thread(say, context.endpoint.url, keys[0], 'hi')
  seats = [context.endpoint.close_session(key) for key in keys]
  assert [len(seat.session.replies) for seat in seats] == [1, 0]
  with pytest.raises(OSError, match='401'):
    await asyncio.to_thread(say, context.endpoint.url, keys[0], 'hi')
  await context.close()


async def test_a_key_neither_reaches_nor_rewards_another_session():
  context = world(says('ab' + END), agent=f'{CASES}:silent')
  manager = make_env_manager(context, **OPTIONS)
  cache = await manager.reset(EpisodeLease(0, 0, 0, 0, 0))
  terms = manager._session_limits(cache)
  keys = [
    await context.endpoint.open_session(n, cache.lease, 0, terms) for n in ('a', 'b')
  ]
  body = {'messages': [{'role': 'user', 'content': 'hi'}]}

  async def status(key, path, content):
    headers = {'Authorization': f'Bearer {key}', 'x-session-id': 'b'}
    url = context.endpoint.url + path
    async with client.post(url, json=content, headers=headers) as response:
      return response.status

  async with aiohttp.ClientSession() as client:
    for wrong in (f'{keys[0]}/b', keys[0][:-1], keys[0] + 'x', 'a', 'b', '', '*'):
      assert await status(wrong, '/chat/completions', body) == 401
      assert await status(wrong, '/feedback', {'reward': 1.0}) == 401
    assert await status(keys[0], '/chat/completions', body) == 200
    assert await status(keys[0], '/feedback', {'reward': 1.0, 'done': False}) == 200
  first, second = (context.endpoint.close_session(key) for key in keys)
  assert len(first.session.replies) == 1 and first.reward == 1.0
  assert not second.session.replies and second.reward == 0.0
  await context.close()


async def test_a_request_that_outlives_its_session_begins_no_other():
  engine = says('ab' + END)
  context = world(engine, agent=f'{CASES}:silent')
  manager = make_env_manager(context, **OPTIONS)
  cache = await manager.reset(EpisodeLease(0, 0, 0, 0, 0))
  key = await context.endpoint.open_session(
    'a', cache.lease, 0, manager._session_limits(cache)
  )
  body = b'{"messages": [{"role": "user", "content": "hi"}]}'
  port = int(context.endpoint.url.rpartition(':')[2].partition('/')[0])
  reader, writer = await asyncio.open_connection('127.0.0.1', port)
  head = [
    'POST /v1/chat/completions HTTP/1.1',
    f'Host: 127.0.0.1\r\nAuthorization: Bearer {key}',
    f'Content-Length: {len(body)}\r\nExpect: 100-continue\r\nConnection: close',
  ]
  async with asyncio.timeout(60):
    writer.write('\r\n'.join([*head, '', '']).encode())
    assert b' 100 ' in await reader.readline()  # let in; its body is waited for
    context.endpoint.close_session(key)
    writer.write(body)
    assert b'session_over' in await reader.read()
  writer.close()
  await context.close()
  assert not engine.calls


async def test_a_worker_puts_groups_that_repeat():
  async def run():
    queue = GroupQueue(num_groups=2, group_size=2, num_env_groups=2)
    context = world(Engine(), queue, agent=f'{CASES}:branches')
    places = [(g, e) for g in range(2) for e in range(2)]
    task = asyncio.create_task(EnvWorker(context, places, OPTIONS).run({'seed': 5}))
    batches = []
    for step in range(2):
      await queue.advance_step(step)
      batches += await asyncio.wait_for(queue.get_batch(2, step), 20)
    await queue.shutdown()
    count = await asyncio.wait_for(task, 20)
    await context.close()
    assert count == queue.counts['played'] == 8
    return batches

  one, other = await run(), await run()
  assert [len(group) for group in one] == [6] * 4  # two members of three rows
  assert all(
    np.array_equal(a.tokens, b.tokens) and a.trajectory_id == b.trajectory_id
    for first, second in zip(one, other, strict=True)
    for a, b in zip(first, second, strict=True)
  )


async def test_an_attempt_given_up_ends_its_program(tmp_path):
  note = tmp_path / 'pid'

  async def started():
    async with asyncio.timeout(60):
      while not (note.exists() and note.read_text().strip()):
        await asyncio.sleep(0.02)
    return int(note.read_text())

  queue = GroupQueue(
    num_groups=1,
    group_size=1,
    num_env_groups=1,
    options=QueueOptions(episode_timeout=0.01),
  )
  context = world(says('a' + END), queue, command=f'{PROGRAM} hang {note}')
  worker = EnvWorker(context, [(0, 0)], {**OPTIONS, 'timeouts': Timeouts(step=0)})
  task = asyncio.create_task(worker.run({'seed': 5}))
  await queue.advance_step(0)
  first = await started()
  note.unlink()
  assert queue.expire_leases() == 1
  await asyncio.to_thread(wait_for_end, first)
  second = await started()  # it is played again
  task.cancel()
  await asyncio.gather(task, return_exceptions=True)
  await asyncio.to_thread(wait_for_end, second)
  context.pool.close()


@pytest.mark.parametrize(
  'config, words',
  [
    ({}, 'set either agent'),
    ({'agent': f'{CASES}:good', 'command': 'true'}, 'not both'),
    ({'agent': f'{CASES}:god'}, "Did you mean 'good'"),
    ({'agent': f'{CASES}:good(turn=1)'}, "Did you mean 'turns'"),
    ({'agent': f'{CASES}:say'}, "no argument for agents 'text'"),
    ({'command': 'no-such-program-at-all'}, 'no program'),
    ({'command': '"'}, 'quotation'),
    ({'agent': f'{CASES}:good', 'grader': 'exakt'}, "Did you mean 'exact'"),
  ],
)
def test_what_cannot_be_is_said_before_the_run(config, words):
  with pytest.raises(ConfigError, match=words):
    env_factory('agent', config)


def test_templates_are_refused():
  with pytest.raises(ValueError, match='writes its own messages'):
    make_env_manager(world(agent=f'{CASES}:good'), system_template='Be good.')


async def test_openais_client_is_handed_over():
  engine = Engine()
  rows = await play(engine, agent=f'{CASES}:with_client')
  check(engine, {'s': rows})
  assert {row.stop_reason for row in rows} == {'finish'} and len(rows) == 2
