"""Prefix sampling: true states, context that is not trained on, rates near a half."""

import asyncio
import json
import math
import zlib

import numpy as np
import pytest

from jaxrl.component_calls import parse_call
from jaxrl.rollout.env_worker import EnvWorker, make_env_manager, partition_envs
from jaxrl.rollout.queue.group_queue import QueueOptions
from jaxrl.rollout.queue.prefix_queue import PrefixGroupQueue
from jaxrl.rollout.queue.prefix_samplers import (
  GroupOutcome,
  PlayedTurns,
  Prefix,
  PrefixRatios,
  PrefixSampling,
)
from jaxrl.rollout.replay_env_manager import PLAYED_KEY
from tests.rollout.fakes import FakeChat, FakeEngine, lease, world

CHAT = FakeChat()
STEPS = 5


class Stairs:
  """Climbs one step for each `u`; anything else falls. The top is rewarded with 1.

  Attributes:
    said: What has been said since the last reset.
  """

  def __init__(self):
    self.seed, self.said, self.is_moody = None, [], False

  def reset(self, *, seed, options=None):
    self.seed, self.said = seed, []
    return f'stairs {seed}', {}

  def step(self, action):
    self.said.append(action)
    fell, is_up = action != 'u', len(self.said) == STEPS
    won = float(is_up and not fell)
    info = {'metrics': {'accuracy': won}}
    mood = ' today' if self.is_moody else ''
    return f'at {len(self.said)}{mood}', won, fell or is_up, False, info


def climbs(share):
  """Replies of a model that climbs with this probability, by the request's seed."""
  return lambda prompt, sampling: 'u' if sampling.seed % 1000 < 1000 * share else 'd'


def turns(replies, seed=7):
  """An episode of the stairs, as a manager tells of it."""
  shown = [f'stairs {seed}', *(f'at {i + 1}' for i in range(len(replies)))]
  return PlayedTurns(
    seed, [[*CHAT.encode(r), 0] for r in replies], [_hash(text) for text in shown]
  )


def _hash(text):
  return zlib.crc32(text.encode()) >> 1


def prefix_of(episode, count, kind='head_start', key=7):
  seed, replies, states = episode
  return Prefix(
    key, kind, seed, replies[:count], states[: count + 1], len(episode.replies)
  )


# ---- what is chosen


WON, LOST = turns('uuuuu'), turns('uud')


def outcome(passed, size=8, prefix=None, success=WON, failure=LOST):
  return GroupOutcome(
    7,
    prefix,
    size,
    passed,
    success if passed else None,
    failure if passed < size else None,
  )


@pytest.mark.parametrize('passed', range(9))
@pytest.mark.parametrize('length', [2, 5, 20])
def test_the_first_prefix_is_that_of_equally_hard_turns(passed, length):
  """Restated: r' turns that each pass at the measured rate's r-th root give the aim."""
  sampler = PrefixSampling(aim=0.4)
  good, bad = turns('u' * length), turns('u' * (length - 1) + 'd')
  sampler.observe(outcome(passed, success=good, failure=bad))
  chosen = sampler.choose(7)
  measured = np.float64(passed + 0.5) / 9
  kind, aim = 'head_start', 0.4
  if passed > 6:
    kind, measured, aim = 'handicap', 1 - measured, 0.6
  each_turn = measured ** (1 / length)
  left = next(r for r in np.arange(0, 99, 1e-3) if each_turn**r <= aim)
  count = length - max(1, round(left))
  # With 0 there is no success to replay, with 8 no failure.
  if passed not in (1, 7) or count < 1:
    assert chosen is None
    return
  assert chosen is not None
  assert (chosen.kind, len(chosen.replies)) == (kind, count)
  assert chosen.num_turns == length and len(chosen.states) == count + 1


def test_it_is_corrected_only_outside_of_the_band():
  sampler = PrefixSampling()
  sampler.observe(outcome(1))
  first = sampler.choose(7)
  assert first is not None and len(first.replies) == 3
  sampler.observe(outcome(3, prefix=first))
  assert sampler.choose(7) == first
  sampler.observe(outcome(0, prefix=first))  # 2 turns left, rate 1/18
  harder = sampler.choose(7)
  assert harder is not None and len(harder.replies) == 4
  assert round(2 * math.log(0.5) / math.log(0.5 / 9)) == 0  # but one turn is played
  sampler.observe(outcome(8, prefix=first))  # 2 turns left, rate 17/18: 24 turns
  assert sampler.choose(7) is None


def test_a_task_is_played_from_its_start_once_it_is_in_the_band():
  sampler = PrefixSampling()
  sampler.observe(outcome(1))
  assert sampler.choose(7) is not None and sampler.choose(8) is None
  sampler.observe(outcome(4))
  assert sampler.choose(7) is None


def test_an_old_success_helps_a_task_that_fails_now():
  sampler = PrefixSampling()
  sampler.observe(outcome(4))
  sampler.observe(outcome(0))
  chosen = sampler.choose(7)
  assert chosen is not None and chosen.kind == 'head_start'
  assert chosen.replies == turns('uuuuu').replies[:4]


def test_handicaps_can_be_left_out():
  failure = turns('uuuud')
  for handicaps in (True, False):
    sampler = PrefixSampling(handicaps=handicaps)
    sampler.observe(outcome(7, failure=failure))
    chosen = sampler.choose(7)
    assert (chosen is not None) == handicaps
  sampler = PrefixSampling()
  sampler.observe(outcome(8))  # nobody failed yet
  assert sampler.choose(7) is None


def test_what_cannot_be_played_is_forgotten():
  sampler = PrefixSampling()
  sampler.observe(outcome(1))
  chosen = sampler.choose(7)
  sampler.observe(GroupOutcome(7, chosen, 0, 0))
  assert sampler.choose(7) is None


def test_the_tasks_not_met_for_longest_are_forgotten():
  sampler = PrefixSampling(max_tasks=2)
  for key in (1, 2, 1, 3):
    sampler.observe(outcome(1)._replace(key=key))
  assert [sampler.choose(key) is not None for key in (1, 2, 3)] == [True, False, True]


def test_the_state_survives_json():
  sampler, again = PrefixSampling(), PrefixSampling()
  for passed in (1, 0):
    sampler.observe(outcome(passed)._replace(key=passed))
  again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
  assert again.choose(1) == sampler.choose(1) is not None
  for one in (sampler, again):
    one.observe(outcome(0, prefix=one.choose(1))._replace(key=1))
  assert again.choose(1) == sampler.choose(1)
  assert again.state_dict() == sampler.state_dict()


@pytest.mark.parametrize('share', [0.5, 0.7, 0.8])
def test_rates_come_near_a_half(share):
  """Groups of 8 on stairs of 12 steps, each of which passes with the same share."""
  rng, length = np.random.default_rng(0), 12
  sampler, rates = PrefixSampling(), []
  sampler.observe(outcome(1, success=turns('u' * length)))
  for _ in range(400):
    chosen = sampler.choose(7)
    count = 0 if chosen is None else len(chosen.replies)
    passed = int((rng.random((8, length - count)) < share).all(1).sum())
    rates.append(passed / 8)
    # Failures fall at the last step, so that handicaps change nothing here.
    fell = turns('u' * (length - 1) + 'd')
    if chosen is None or chosen.kind == 'head_start':
      sampler.observe(
        outcome(passed, prefix=chosen, success=turns('u' * length), failure=fell)
      )
    else:
      sampler.observe(GroupOutcome(7, None, 8, 4))
  near = np.mean([0.2 < rate < 0.8 for rate in rates])
  assert near > 0.6 and abs(np.mean(rates) - 0.5) < 0.2
  assert share**length < 0.1  # without prefixes


@pytest.mark.parametrize(
  ('passed', 'kind', 'counts'),
  [
    (0, None, None),
    (1, 'head_start', {3: 2, 5: 4, 8: 6, 20: 15}),
    (2, 'head_start', {3: 2, 5: 4, 8: 6, 20: 15}),
    *((passed, None, None) for passed in (3, 4, 5)),
    (6, 'handicap', {3: None, 5: 1, 8: 2, 20: 5}),
    (7, 'handicap', {3: None, 5: 1, 8: 2, 20: 5}),
    (8, None, None),
  ],
)
def test_the_authors_ratios_leave_or_replay_a_quarter(passed, kind, counts):
  """Of 20 turns a head start leaves 5, as in their example; one is always left."""
  for length in (3, 5, 8, 20):
    sampler = PrefixRatios()
    good, bad = turns('u' * length), turns('u' * (length - 1) + 'd')
    sampler.observe(outcome(passed, success=good, failure=bad))
    chosen, count = sampler.choose(7), counts and counts[length]
    if count is None:
      assert chosen is None
    else:
      source = good if kind == 'head_start' else bad
      assert chosen == prefix_of(source, count, kind)


def test_the_authors_prefix_serves_once_and_is_of_the_newest_group():
  sampler = PrefixRatios(remaining_cap=1)
  sampler.observe(outcome(1))
  chosen = sampler.choose(7)
  assert chosen is not None and chosen == sampler.choose(7) == prefix_of(WON, 4)
  sampler.observe(outcome(1, prefix=chosen))
  assert sampler.choose(7) is None
  sampler.observe(outcome(1))
  sampler.observe(outcome(0))  # of another, as long ago: it has no success
  assert sampler.choose(7) is None


@pytest.mark.parametrize('kind', ['head_start', 'handicap'])
@pytest.mark.parametrize('passed, sign', [(8, 1), (0, -1)])
def test_the_authors_ratios_follow_the_pass_rate_and_rest(kind, passed, sign):
  """By hand: 0.5 ± 0.025 is within 0.03 of a half, 0.5 ± 0.04875 is not."""
  sampler, seen = PrefixRatios(remaining_ratio=0.5, prefix_ratio=0.5), []
  prefix = prefix_of(WON, 2, kind)
  for _ in range(14):
    sampler.observe(outcome(passed, prefix=prefix))
    seen.append(sampler.state_dict()['control'][kind][0])
  wanted = (
    [0.5] + [0.5 + 0.05 * sign] * 6 + [0.5 + 0.1 * sign] * 6 + [0.5 + 0.15 * sign]
  )
  np.testing.assert_allclose(seen, wanted)
  for _ in range(99):
    sampler.observe(outcome(passed, prefix=prefix))
  ratio, *_ = sampler.state_dict()['control'][kind]
  assert ratio == (0.95 if sign > 0 else 0.05)
  (other,) = {'head_start', 'handicap'} - {kind}
  assert sampler.state_dict()['control'][other] == [0.5, 0.5, 0]
  fixed = PrefixRatios(adaptive=False)
  for _ in range(9):
    fixed.observe(outcome(passed, prefix=prefix))
  assert fixed.state_dict()['control'][kind][0] == 0.25


def test_the_authors_rule_survives_json():
  sampler, again = PrefixRatios(), PrefixRatios()
  for _ in range(4):
    sampler.observe(outcome(8, prefix=prefix_of(WON, 2)))
  sampler.observe(outcome(1)._replace(key=1))
  again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
  assert again.choose(1) == sampler.choose(1) is not None
  assert again.state_dict() == sampler.state_dict()


# ---- how it is replayed


class ChosenQueue:
  """Answers every question for a prefix with the same."""

  def __init__(self, prefix):
    self.prefix, self.asked = prefix, []

  async def get_prefix(self, group_id, episode_id, key):
    self.asked.append((group_id, episode_id, key))
    return self.prefix


async def play_from(prefix, env=None, reply='u', **options):
  """The rows of an episode, its environment and engine."""
  env, engine = env or Stairs(), FakeEngine(lambda prompt, sampling: reply)
  queue = ChosenQueue(prefix)
  context = world(lambda: env, engine, queue)
  options = {'max_steps': 8, 'num_seeds': 4, 'replays': True, **options}
  manager = make_env_manager(context, 0, 0, **options)
  rows = await manager.play_episode(lease(episode_id=9), base_seed=6)
  return rows, env, engine, queue


def text(tokens):
  return ''.join('|' if t == 0 else chr(t) for t in tokens)


async def test_the_environment_is_led_to_the_state_and_the_model_goes_on():
  episode = turns('uuuuu')
  (row,), env, engine, queue = await play_from(prefix_of(episode, 3))
  assert queue.asked == [(0, 9, 6 + 9 % 4)]
  assert env.seed == 7 and env.said == ['u'] * 5
  assert text(row.tokens) == ('ustairs 7|>u|uat 1|>u|uat 2|>u|uat 3|>u|uat 4|>u|')
  assert [len(prompt) for _, prompt, _ in engine.requests] == [
    text(row.tokens).index('uat 3|>') + 7,
    text(row.tokens).index('uat 4|>') + 7,
  ]
  assert text(row.tokens[row.action_mask]) == 'u|u|'
  assert not row.action_mask[: len(engine.requests[0][1])].any()
  assert set(row.weights_version[~row.action_mask]) == {-1}
  assert not row.rollout_logprobs[~row.action_mask].any()
  assert row.score == 1 and row.stop_reason == 'finish'
  assert row.metrics['turns'] == 5 and row.metrics['response_length'] == 4
  assert row.metrics['prefix/diverged'] == 0
  assert [m['content'] for m in row.messages[1::2]] == ['u'] * 5
  played = row.extras[PLAYED_KEY]
  assert PlayedTurns(*(played[k] for k in ('seed', 'replies', 'states'))) == (
    7,
    episode.replies,
    episode.states[:5],
  )
  assert row.episode_seed == 15  # samples of later visits are drawn anew


async def test_rows_of_turns_leave_out_what_was_replayed():
  rows, *_ = await play_from(prefix_of(turns('uuuuu'), 3), row_format='step')
  assert [row.turn for row in rows] == [3, 4]
  assert [text(row.tokens[row.action_mask]) for row in rows] == ['u|', 'u|']
  assert PLAYED_KEY in rows[-1].extras and PLAYED_KEY not in rows[0].extras
  (packed,), *_ = await play_from(
    prefix_of(turns('uuuuu'), 3), row_format='concatenated'
  )
  assert text(packed.tokens[packed.action_mask]) == 'u|u|'


async def test_rewards_of_replayed_turns_belong_to_no_row():
  class Paid(Stairs):
    def step(self, action):
      observation, won, *rest = super().step(action)
      return observation, won + 0.5, *rest

  (row,), *_ = await play_from(prefix_of(turns('uuuuu'), 3), Paid())
  assert row.score == 2.0 and len(np.flatnonzero(row.rewards)) == 2


async def test_an_environment_that_shows_something_else_is_counted():
  env = Stairs()
  env.is_moody = True
  (row,), *_ = await play_from(prefix_of(turns('uuuuu'), 2), env)
  assert row.metrics['prefix/diverged'] == 1
  assert 'at 1 today' in text(row.tokens)  # what it shows is what the model is shown


async def test_an_environment_that_ends_too_early_is_a_failure():
  (row,), *_ = await play_from(prefix_of(turns('udu'), 2))
  assert row.failed and row.stop_reason == 'env_error'
  assert 'ended the episode in turn 2, while 2 turns' in row.extras['error']


async def test_without_a_prefix_it_plays_as_ever():
  (row,), env, *_ = await play_from(None)
  assert env.seed == 7 and row.action_mask.sum() == 10
  assert row.extras[PLAYED_KEY]['key'] == 7
  (plain,), env, *_ = await play_from(None, replays=False)
  assert env.seed == 7 and PLAYED_KEY not in plain.extras
  np.testing.assert_array_equal(row.tokens, plain.tokens)


async def test_evaluations_have_no_queue_and_so_no_prefix():
  context = world(Stairs, FakeEngine(climbs(1)))
  manager = make_env_manager(context, num_seeds=4, replays=True, max_steps=8)
  (row,) = await manager.play_episode(lease(), base_seed=6)
  assert row.action_mask.sum() == 2 * STEPS


async def test_rows_of_a_data_set_are_told_apart_by_their_index():
  queue = ChosenQueue(None)
  context = world(Stairs, FakeEngine(climbs(1)), queue, rows=3)
  manager = make_env_manager(context, replays=True, max_steps=8)
  for episode_id in range(4):
    await manager.play_episode(lease(episode_id=episode_id), base_seed=6)
  keys = [key for *_, key in queue.asked]
  assert sorted(keys[:3]) == [0, 1, 2] and all(key in (0, 1, 2) for key in keys)


# ---- how a run uses it


def make_queue(num_groups=4, **options):
  return PrefixGroupQueue(
    prefixes='prefix_sampling',
    num_groups=num_groups,
    group_size=8,
    num_env_groups=num_groups,
    options=QueueOptions(**options),
  )


async def play_steps(queue, num_steps, first=0, share=0.6, delays=(0.0,), parts=1):
  """What the trainer gets in each step."""
  tasks = []
  for i, part in enumerate(partition_envs(queue.num_env_groups, 8, parts)):
    engine = FakeEngine(climbs(share), delays[i % len(delays)])
    worker = EnvWorker(
      world(Stairs, engine, queue),
      part,
      {'max_steps': 8, 'num_seeds': 6, 'replays': True},
    )
    tasks.append(asyncio.create_task(worker.run({'seed': 3})))
  batches = []
  for step in range(first, first + num_steps):
    await queue.advance_step(step)
    batches.append(await asyncio.wait_for(queue.get_batch(current_step=step), 20))
  state = json.loads(json.dumps(queue.state_dict()))
  await queue.shutdown()
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)
  return batches, state


def shown(batches):
  """Everything of the rows that is trained on."""
  return [
    [
      (row.trajectory_id, row.sample_index, text(row.tokens), row.action_mask.tolist())
      for row in group
    ]
    for groups in batches
    for group in groups
  ]


async def test_every_sample_of_a_group_continues_the_same_turns():
  batches, _ = await play_steps(make_queue(), 12)
  groups = [group for batch in batches for group in batch]
  shares = [[row.metrics['prefix/share'] for row in group] for group in groups]
  assert all(len(set(share)) == 1 for share in shares)
  replayed = [group for group in groups if group[0].metrics['prefix/share']]
  assert len(replayed) > len(groups) / 3
  for group in replayed:
    count = int(group[0].metrics['prefix/turns'])
    assert group[0].metrics['prefix/tokens'] == 2 * count
    begins = {row.tokens[: int(row.action_mask.argmax())].tobytes() for row in group}
    assert len(begins) == 1
    assert all(row.action_mask.sum() <= 2 * (STEPS - count) for row in group)
  assert not any(PLAYED_KEY in row.extras for group in groups for row in group)
  rates = [np.mean([row.score for row in group]) for group in replayed]
  starts = [
    np.mean([row.score for row in group])
    for group in groups
    if not group[0].metrics['prefix/share']
  ]
  assert 0.3 < np.mean(rates) < 0.7 and np.mean(starts) < 0.25


async def test_it_depends_on_no_clock():
  """Workers of different speeds, in any number, give the same rows."""
  first, state = await play_steps(make_queue(), 6)
  other, state_ = await play_steps(make_queue(), 6, parts=3, delays=(0.01, 0, 0.004))
  assert shown(first) == shown(other)
  assert state['prefixes'] == state_['prefixes']


async def test_a_resumed_queue_goes_on_as_if_nothing_had_been():
  whole, _ = await play_steps(make_queue(), 8)
  begun, state = await play_steps(make_queue(), 5)
  queue = make_queue()
  queue.load_state_dict(state)
  rest, _ = await play_steps(queue, 3, first=5)
  assert shown(begun) + shown(rest) == shown(whole)
  assert any('prefix/pass_rate' in row.metrics for row in rest[0][0])


async def test_groups_in_play_keep_their_prefix_across_a_checkpoint():
  _, state = await play_steps(make_queue(), 6)
  queue = make_queue()
  queue.load_state_dict(state)
  await queue.advance_step(6)
  keys = [3 + number % 6 for number in range(24, 28)]
  chosen = [queue.get_prefix(n, 24, key) for n, key in enumerate(keys)]
  assert any(chosen)
  again = make_queue()
  again.load_state_dict(json.loads(json.dumps(queue.state_dict())))
  # Even though the sampler has heard more in the meantime.
  again._sampler.load_state_dict({'records': []})
  assert [again.get_prefix(n, 24, key) for n, key in enumerate(keys)] == chosen


async def test_a_checkpoint_from_before_the_option_can_be_gone_on_from():
  _, state = await play_steps(make_queue(), 2)
  del state['prefixes']
  queue = make_queue()
  queue.load_state_dict(state)
  batches, _ = await play_steps(queue, 2, first=2)
  assert len(batches) == 2


async def test_curricula_hear_only_of_groups_from_the_start():
  queue = make_queue()
  batches, _ = await play_steps(queue, 12)
  groups = [group for batch in batches for group in batch]
  starts = [group for group in groups if not group[0].metrics['prefix/share']]
  assert 0 < len(starts) < len(groups)
  assert [seed for seed, *_ in queue.results()] == [g[0].episode_seed for g in starts]


async def test_filtered_groups_are_learned_from_too():
  """Groups that all fail are dropped; the next ones of these tasks get a head start."""
  queue = PrefixGroupQueue(
    lambda group_id, episode_id, group: len({row.score for row in group}) == 1,
    prefixes='prefix_sampling',
    num_groups=2,
    group_size=8,
    num_env_groups=2,
  )
  batches, _ = await play_steps(queue, 10, share=0.5)
  assert queue.counts['filtered'] > 0
  rows = [row for batch in batches for group in batch for row in group]
  assert np.mean([row.metrics['prefix/share'] for row in rows]) > 0.3


async def test_turns_that_cannot_be_replayed_any_more_are_forgotten():
  queue = make_queue(num_groups=1, max_retries=0, max_consecutive_drops=99)
  queue._sampler.observe(outcome(1))
  assert queue._sampler.choose(7) is not None
  await queue.advance_step(0)
  first = await queue.get_episode_id(0, 0)
  assert first is not None and queue.get_prefix(0, 0, 7) is not None
  for i in range(8):
    a_lease = first if i == 0 else await queue.get_episode_id(0, 0)
    assert a_lease is not None
    rows, *_ = await play_from(prefix_of(turns('ud'), 2))
    for row in rows:
      row.sample_index = a_lease.sample_index
    await queue.put(0, a_lease.episode_id, a_lease.start_step, rows, 0)
  assert queue.counts['dropped'] == 1
  await queue.advance_step(1)
  assert queue._sampler.choose(7) is None


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    ('prefix_sampling(aim=1)', 'aim=1 must be in'),
    ('prefix_sampling(low=.6)', 'low'),
    ('prefix_ratios(prefix_ratio=1)', 'prefix_ratio=1 must be in'),
    ('prefix_samplin', 'prefix_sampling'),
  ],
)
def test_wrong_options_are_named(call, message):
  with pytest.raises(ValueError, match=r'env\.TAG\.prefixes|prefix sampler') as error:
    PrefixGroupQueue(prefixes=parse_call(call))
  assert message in str(error.value)
