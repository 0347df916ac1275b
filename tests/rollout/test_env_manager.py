"""Episodes: exact tokens and masks, every stop reason, one fault costs one episode."""

import asyncio
import dataclasses
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from jaxrl.data import chat_tokenizer
from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.envs.graders.rule_graders import make_format_grader
from jaxrl.group_stats import is_truncated
from jaxrl.options import ConfigError
from jaxrl.rollout import env_manager
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.rewards.reward_pipeline import (
  GraderReward,
  RewardPipeline,
  RewardTerm,
)
from jaxrl.rollout.thread_pool import ThreadPool, Timeouts
from jaxrl.types import PromptTooLongError, Task
from tests.calls import env_factory
from tests.data.test_chat_tokenizer import make_chat
from tests.rollout.fakes import (
  END,
  BadEnv,
  EchoEnv,
  FakeChat,
  FakeEngine,
  completion,
  lease,
  play,
  world,
)


def text(tokens):
  return ''.join('|' if t == END else chr(t) for t in tokens)


async def test_tokens_masks_rewards_of_a_conversation():
  engine = FakeEngine(lambda prompt, sampling: 'ab')
  (row,) = await play(
    world(lambda: EchoEnv(turns=2), engine),
    max_steps=5,
    system_template='be brief',
    turn_template='{observation} {turn_idx}/{actions_left}',
  )
  assert text(row.tokens) == 'sbe brief|useed 7 0/5|>ab|uturn 1 1/4|>ab|'
  written = [chr(t) for t, m in zip(row.tokens, row.action_mask, strict=True) if m]
  assert written == ['a', 'b', chr(END)] * 2
  assert row.rollout_logprobs[row.action_mask].tolist() == [-1, -2, -3] * 2
  assert not row.rollout_logprobs[~row.action_mask].any()
  assert set(row.weights_version[row.action_mask]) == {3}
  assert set(row.weights_version[~row.action_mask]) == {-1}
  (where,) = np.nonzero(row.rewards)
  assert row.rewards[where].tolist() == [1, 2]
  assert [chr(row.tokens[i]) for i in where] == [chr(END)] * 2
  assert where[1] == len(row.tokens) - 1
  assert (row.stop_reason, row.score, row.episode_seed) == ('finish', 3, 7)
  assert row.metrics == {'length': 2, 'turns': 2, 'response_length': 6}
  assert row.columns == {'said': 'ab'}
  assert [m['role'] for m in row.messages] == [
    'system', 'user', 'assistant', 'user', 'assistant',
  ]  # fmt: skip
  for column in dataclasses.astuple(row)[:5]:
    assert len(column) == len(row.tokens)
  assert (row.tokens.dtype, row.rewards.dtype) == (np.int32, np.float32)


async def test_what_the_engine_wrote_is_the_next_prompt_as_it_was():
  engine = FakeEngine(lambda prompt, sampling: 'x' * (sampling.seed % 5 + 1))
  (row,) = await play(world(lambda: EchoEnv(turns=4), engine), max_steps=4)
  prompts = [prompt for _, prompt, _ in engine.requests]
  for prompt in prompts:
    assert prompt == row.tokens[: len(prompt)].tolist()


async def test_a_reply_cut_short_is_ended_before_the_next_message():
  engine = FakeEngine(lambda prompt, sampling: 'abcdef')
  (row,) = await play(
    world(lambda: EchoEnv(turns=2), engine), max_steps=3, max_tokens_per_step=3
  )
  assert text(row.tokens) == 'useed 7|>abc|uturn 1|>abc'
  assert text(row.tokens[row.action_mask]) == 'abcabc'


async def test_members_and_turns_have_seeds_of_their_own_and_repeat():
  async def seeds(member, base_seed=7):
    engine = FakeEngine()
    context = world(lambda: EchoEnv(turns=3), engine)
    await play(context, max_steps=3, member=member, base_seed=base_seed)
    return [sampling.seed for _, _, sampling in engine.requests]

  first, second = await seeds(0), await seeds(1)
  assert len({*first, *second, *await seeds(0, 8)}) == 9
  assert first == await seeds(0)
  assert await seeds(0, 0)  # 0 is a seed


@pytest.mark.parametrize(
  ('reason', 'options'),
  [('max_steps', {'max_steps': 2}), ('max_length', {'max_length': 15})],
)
async def test_episodes_that_are_cut(reason, options):
  engine = FakeEngine(lambda prompt, sampling: 'a')
  context = world(lambda: EchoEnv(turns=9), engine)
  (row,) = await play(context, **{'max_steps': 9, **options})
  assert row.stop_reason == reason
  assert not row.failed
  assert row.score > 0
  assert len(row.tokens) <= options.get('max_length', 99)
  assert len(engine.requests) <= options.get('max_steps', 9)


async def test_a_first_prompt_that_is_too_long_is_a_failure():
  engine = FakeEngine()
  (row,) = await play(world(engine=engine), max_length=5)
  assert (row.stop_reason, len(row.tokens), row.score) == ('prompt_too_long', 5, 0)
  assert row.failed and 'max_length=5 leaves none' in row.extras['error']
  assert not row.action_mask.any()
  assert engine.requests == []


class LongEnv(EchoEnv):
  """Has one observation of `unit` repeated, at the reset or after the first step."""

  def __init__(self, unit, repeats, where):
    super().__init__(turns=3)
    self.text, self.where = unit * repeats, where

  def reset(self, *, seed, options=None):
    return self.text if self.where == 'reset' else super().reset(seed=seed)[0], {}

  def step(self, action):
    observation, *rest = super().step(action)
    observation = [
      {'role': 'user', 'content': self.text},
      {'role': 'user', 'content': observation},
    ]
    return observation if self.where == 'step' else 'more', *rest


@pytest.mark.parametrize('where', ['reset', 'step'])
@pytest.mark.parametrize(
  ('unit', 'repeats'), [('Tom has 3 pens ', 4000), (' ', 60_000)]
)
async def test_a_huge_observation_ends_the_episode_as_a_long_one_does(
  where, unit, repeats, monkeypatch
):
  chat = make_chat()
  reply = [*chat.encode('7'), chat.end_id]
  engine = FakeEngine(lambda p, s: completion(reply))

  async def played(make_env=lambda: LongEnv(unit, repeats, where)):
    context = dataclasses.replace(world(make_env, engine), chat=chat)
    (row,) = await play(context, max_steps=3, max_length=200)
    return row

  cut = await played()
  reason = 'prompt_too_long' if where == 'reset' else 'max_length'
  assert (cut.stop_reason, len(cut.tokens)) == (reason, 200)
  assert sum(len(message['content']) for message in cut.messages) < 8000
  monkeypatch.setattr(env_manager, 'CHARS_PER_TOKEN', 10**6)
  monkeypatch.setattr(chat_tokenizer, 'CHARS_PER_TOKEN', 10**6)
  whole = await played()
  assert (cut.stop_reason, cut.score) == (whole.stop_reason, whole.score)
  assert cut.tokens.tolist() == whole.tokens.tolist()
  assert cut.action_mask.tolist() == whole.action_mask.tolist()
  assert sum(len(message['content']) for message in whole.messages) > 50_000


@pytest.mark.slow
@pytest.mark.parametrize('where', ['reset', 'step', 'isolated'])
def test_an_observation_of_50_mb_takes_little_memory(where):
  """Encoding all of it would take 20 GB."""
  command = [sys.executable, '-m', 'tests.rollout.huge_observations', where]
  done = subprocess.run(
    command, capture_output=True, text=True, check=True, timeout=120
  )
  reason, num_tokens, megabytes = done.stdout.split()
  wanted = 'prompt_too_long' if where == 'reset' else 'max_length'
  assert (reason, num_tokens) == (wanted, '8192')
  assert int(megabytes) < 500


async def test_a_long_observation_that_fits_is_whole():
  """Of spaces, a token has so many that a first cut would be short of tokens."""
  chat = make_chat()
  tokenizer = train_tokenizer([' ' * 100] * 9, 340)
  tokenizer.chat_template = chat.tokenizer.chat_template
  chat = ChatTokenizer(tokenizer)
  observation = ' ' * 30_000
  expected = chat.encode_prompt([{'role': 'user', 'content': observation}])
  assert len(expected) < 900 < 30_000 / 16
  engine = FakeEngine(lambda p, s: completion([chat.end_id]))
  context = world(lambda: LongEnv(' ', 30_000, 'reset'), engine)
  (row,) = await play(dataclasses.replace(context, chat=chat), max_length=1000)
  assert row.tokens[~row.action_mask].tolist() == expected
  assert row.messages[0]['content'] == observation


async def test_a_prompt_beyond_the_engines_window_is_a_failure():
  error = PromptTooLongError('9 tokens do not fit a window of 8')
  (row,) = await play(world(engine=FakeEngine(lambda p, s: error)))
  assert row.stop_reason == 'prompt_too_long'
  assert 'window of 8' in row.extras['error']


@pytest.mark.parametrize('kind', [ValueError, UnicodeDecodeError, ConfigError])
async def test_no_other_error_of_an_engine_is_one_of_length(kind):
  """Among them are many kinds of ValueError, such as of a wrong sampling setting."""
  args = ('utf-8', b'x', 0, 1, 'bad') if kind is UnicodeDecodeError else ('bad',)
  engine = FakeEngine(lambda p, s: kind(*args))
  (row,) = await play(world(engine=engine))
  assert row.stop_reason == 'generate_failed' and 'bad' in row.extras['error']


@pytest.mark.parametrize(
  ('fault', 'reason'),
  [
    ('reset raises', 'env_reset_failed'),
    ('reset hangs', 'env_reset_failed'),
    ('reset exits', 'env_reset_failed'),
    ('reset garbage', 'env_reset_failed'),
    ('step raises', 'env_error'),
    ('step hangs', 'env_timeout'),
    ('step exits', 'env_error'),
    ('step garbage', 'env_error'),
    ('step gives nan', 'env_error'),
    ('step gives inf', 'env_error'),
    ('step gives 1e300', 'env_error'),
    ('step gives -1e19', 'env_error'),
    ('step counts too far', 'env_error'),
  ],
)
async def test_a_broken_environment_costs_one_episode(fault, reason):
  envs = [BadEnv(fault=fault, seconds=0.5), EchoEnv()]
  pool = ThreadPool(1)
  manager = EnvManager(
    world(lambda: envs.pop(0), pool=pool), timeouts=Timeouts(reset=0.1, step=0.1)
  )
  (bad,) = await manager.play_episode(lease(), base_seed=7)
  assert (bad.stop_reason, bad.failed) == (reason, True)
  has_place = not fault.endswith('hangs')
  assert ('fakes.py, line ' in bad.extras['error']) is has_place
  assert bad.extras['error'] and not bad.rewards.any()
  (good,) = await manager.play_episode(lease(), base_seed=7)
  assert good.stop_reason == 'finish'
  pool.close()


async def test_rewards_that_only_together_are_too_large_cost_the_episode():
  class Rich(EchoEnv):
    def step(self, action):
      observation, _, *rest = super().step(action)
      return observation, 6e17, *rest

  (row,) = await play(world(lambda: Rich(turns=1)), max_steps=3)
  assert (row.stop_reason, row.score) == ('finish', pytest.approx(6e17))
  (row,) = await play(world(lambda: Rich(turns=2)), max_steps=3)
  assert (row.stop_reason, row.failed) == ('reward_failed', True)
  assert 'sum up to 1.2e+18' in row.extras['error'] and not row.rewards.any()


@pytest.mark.parametrize(
  'reply', [OSError('engine gone'), completion([]), completion([65, 66], 'abort')]
)
async def test_an_engine_that_fails_costs_one_episode(reply):
  (row,) = await play(world(engine=FakeEngine(lambda p, s: reply)), max_length=40)
  assert row.failed
  assert row.extras['error']


def test_a_long_error_keeps_its_end_which_says_where():
  cache = RolloutCache(lease(), 0)
  cache.truncate('env_error', f'KeyError: {"x" * 5000} (lab/env.py, line 3)')
  assert cache.extras['error'].startswith('KeyError: xxx')
  assert cache.extras['error'].endswith('xxx (lab/env.py, line 3)')
  assert len(cache.extras['error']) < 510


async def test_an_engine_that_hangs_is_told_to_abort():
  engine = FakeEngine(delay=30)
  (row,) = await play(world(engine=engine), timeouts=Timeouts(generate=0.05))
  assert row.stop_reason == 'generate_failed'
  assert engine.aborted == [engine.requests[0][0]]


async def test_an_interrupted_reply_goes_on_from_what_was_written():
  def reply(prompt, sampling):
    if chr(prompt[-1]) == '>':
      return completion([97, 98], 'abort', version=3)
    return completion([99, END], 'stop', version=4)

  engine = FakeEngine(reply)
  (row,) = await play(world(engine=engine), max_tokens_per_step=10)
  assert text(row.tokens[row.action_mask]) == 'abc|'
  assert row.weights_version[row.action_mask].tolist() == [3, 3, 4, 4]
  (first, prompt, one), (second, longer, two) = engine.requests
  assert longer == [*prompt, 97, 98]
  assert (one.max_tokens, two.max_tokens) == (10, 8)
  assert first != second
  assert one.seed == two.seed
  assert (one.num_generated, two.num_generated) == (
    0,
    2,
  )  # so that the second goes on as one would


async def test_tasks_come_from_the_data_set_until_it_is_traversed():
  context = world(rows=2, mode='traversal')
  manager = EnvManager(context)
  for episode_id in range(2):
    (row,) = await manager.play_episode(lease(episode_id=episode_id), base_seed=7)
    assert f'q{episode_id}' in text(row.tokens)
  assert await manager.play_episode(lease(episode_id=2), base_seed=7) is None


async def test_an_environment_may_end_the_data_itself():
  class Over(EchoEnv):
    def reset(self, *, seed, options=None):
      return None, {}

  assert await play(world(Over)) is None


async def test_environment_code_never_runs_on_the_event_loop():
  idents = set()

  class Watched(EchoEnv):
    def reset(self, *, seed, options=None):
      idents.add(threading.get_ident())
      return super().reset(seed=seed, options=options)

    def step(self, action):
      idents.add(threading.get_ident())
      return super().step(action)

  await play(world(Watched))
  assert idents
  assert threading.get_ident() not in idents


async def test_a_cancelled_attempt_tells_the_engine_and_gets_a_new_environment():
  envs, engine = [], FakeEngine(delay=30)

  def make():
    envs.append(EchoEnv())
    return envs[-1]

  class Queue:
    leases = [lease(), None]  # noqa: RUF012
    puts = []  # noqa: RUF012

    def get_episode_id(self, group_id, env_id):
      return self.leases.pop(0)

    def put(self, *args):
      self.puts.append(args)

  manager = EnvManager(world(make, engine, Queue()))
  loop = asyncio.create_task(manager.run_rollout_loop({'seed': 7}))
  while not engine.requests:
    await asyncio.sleep(0.01)
  manager.abort(lease(member=5))  # another's: nothing happens
  await asyncio.sleep(0.02)
  assert not loop.done()
  manager.abort(lease())
  assert await asyncio.wait_for(loop, 5) == 1
  ((group_id, episode_id, start_step, rows, env_id),) = Queue.puts
  assert (group_id, episode_id, start_step, env_id) == (0, 0, 0, 0)
  assert rows[0].stop_reason == 'abort'
  assert engine.aborted
  assert manager._env is None


def test_options_are_checked_when_it_is_made():
  context = world()
  for options in (
    {'row_format': 'steps'},
    {'turn_template': '{observaton}'},
    {'max_steps': 0},
  ):
    with pytest.raises(ValueError):
      EnvManager(context, **options)


async def test_steps_formulation_is_one_row_a_turn():
  engine = FakeEngine(lambda prompt, sampling: 'ab')
  rows = await play(
    world(lambda: EchoEnv(turns=3), engine), max_steps=3, row_format='step'
  )
  assert [row.turn for row in rows] == [0, 1, 2]
  assert [row.score for row in rows] == [1, 2, 3]
  assert len({row.trajectory_id for row in rows}) == 3
  assert len({row.extras['state_hash'] for row in rows}) == 3
  for row in rows:
    assert text(row.tokens[row.action_mask]) == 'ab|'
    assert row.action_mask[-3:].all()
    assert np.array_equal(rows[-1].tokens[: len(row.tokens)], row.tokens)


async def test_same_seed_same_episode():
  rows = [await play(world(lambda: EchoEnv(turns=2)), max_steps=2) for _ in range(2)]
  for one, other in zip(*rows, strict=True):
    for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True):
      assert np.array_equal(a, b)


def test_fake_chat_is_a_fair_stand_in():
  assert text(FakeChat().encode_prompt([{'role': 'user', 'content': 'x'}])) == 'ux|>'


async def test_a_greedy_lease_is_played_at_temperature_zero():
  engine = FakeEngine(lambda prompt, sampling: 'ab')
  context = world(lambda: EchoEnv(turns=2), engine)
  manager = EnvManager(context, temperature=0.7, max_steps=2)
  greedy_lease = lease(member=3)._replace(greedy=True)
  (greedy,) = await manager.play_episode(greedy_lease, base_seed=7)
  (sampled,) = await manager.play_episode(lease(member=1), base_seed=7)
  assert [s.temperature for _, _, s in engine.requests] == [0, 0, 0.7, 0.7]
  assert (greedy.is_greedy, greedy.sample_index) == (True, 3)
  assert not sampled.is_greedy


async def test_a_reply_that_runs_into_its_limit_is_known_as_cut_off():
  engine = FakeEngine(lambda prompt, sampling: 'a' * 9)
  (row,) = await play(world(engine=engine), max_tokens_per_step=4)
  assert row.stop_reason == 'finish' and is_truncated([row])
  (row,) = await play(world(engine=engine), max_tokens_per_step=40)
  assert not is_truncated([row])


async def test_an_environment_made_too_late_is_nobodys():
  """It hangs while it is made, and comes when another is at play in its place."""
  late, killed, envs = threading.Event(), threading.Event(), []

  class Late(EchoEnv):
    kill = killed.set

  def make():
    mine = len(envs)
    envs.append(EchoEnv(turns=2) if mine else Late())
    if not mine:
      late.wait(30)
    return envs[mine]

  def reply(prompt, sampling):
    late.set()
    assert killed.wait(30)
    return 'a'

  manager = EnvManager(
    world(make, FakeEngine(reply), pool=ThreadPool(1)),
    max_steps=2,
    timeouts=Timeouts(reset=0.05),
  )
  (failed,) = await manager.play_episode(lease(), base_seed=7)
  assert failed.stop_reason == 'env_reset_failed'
  (good,) = await manager.play_episode(lease(attempt=1), base_seed=7)
  assert good.score == 3 and manager._env is envs[1]


async def test_graders_learn_which_tag_the_prompt_opened():
  """The template opens the thought, and the reply only closes it."""
  chat = make_chat()
  chat.tokenizer.chat_template = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    '{% if add_generation_prompt %}[assistant]<think>{% endif %}'
  )
  chat = ChatTokenizer(chat.tokenizer)
  assert chat.generation_prompt == '[assistant]<think>'
  tokens = chat.tokenizer.encode('4 is even</think><answer>yes</answer>')
  engine = FakeEngine(lambda p, s: completion([*tokens, chat.end_id]))
  rewards = RewardPipeline(
    {'format': RewardTerm(GraderReward(make_format_grader(tags='think, answer')))}
  )
  make_env = env_factory('math', {'grader': "format(tags='think, answer')"})
  task = Task(seed=0, index=0, item={'question': 'Is 4 even?', 'answer': 'yes'})
  dataset = types.SimpleNamespace(get_task=lambda *_: task)
  context = world(make_env, engine)
  context = dataclasses.replace(context, chat=chat, dataset=dataset, rewards=rewards)
  (row,) = await play(context, max_length=1000)
  assert row.metrics['reward/env'] == row.metrics['reward/format'] == 1
