"""Each sampler's rule, on groups made by hand; and that it resumes from its state."""

import json
import pathlib

import numpy as np
import pytest

from jaxrl.options import ConfigError
from jaxrl.types import Trajectory
from tests.calls import make_sampler

SIZE = 2


def a_row(version, sample_index=0, **changes):
  return Trajectory(
    tokens=np.array([1, 2, 3, 4], np.int32),
    action_mask=np.array([False, True, True, False]),
    rollout_logprobs=np.array([0, -1, -2, 0], np.float32),
    rewards=np.zeros(4, np.float32),
    weights_version=np.array([-1, version, version + 1, -1], np.int32),
    sample_index=sample_index,
    **changes,
  )


def a_group(number, version):
  return [a_row(version, m, episode_id=number) for m in range(SIZE)]


class Files:
  """Numbered expert rows."""

  def __init__(self, batch_size):
    self.batch_size, self.taken = batch_size, 0

  async def next(self, step):
    numbers = range(self.taken, self.taken + self.batch_size)
    self.taken += self.batch_size
    return [
      [a_row(-1, env_group=1000 + i, is_expert=True, weight=0.5)] for i in numbers
    ]

  def state_dict(self):
    return {'taken': self.taken}

  def load_state_dict(self, state):
    self.taken = state['taken']


class Source:
  """Plays group after group, each with the weights of `lag` steps before."""

  def __init__(self, num_groups=4, seed=0, lag=0, count=0, max_staleness=None):
    self.max_staleness = max_staleness
    self.num_groups, self.group_size, self.seed = num_groups, SIZE, seed
    self.count, self.lag, self.played, self.stale = count, lag, 0, 0
    self.requests = []

  async def take(self, step, min_version=None):
    self.requests.append((step, min_version))
    version = step - self.lag
    if min_version is not None and version < min_version:
      self.stale, version = self.stale + 3, min_version
    first, self.played = self.played, self.played + self.count
    return [a_group(i, version) for i in range(first, self.played)]

  async def num_stale(self):
    return self.stale

  def experts(self, batch_size):
    return Files(batch_size)


def make(text, **options):
  source = Source(**options)
  sampler = make_sampler(text, source)
  source.count = sampler.groups_from_queue
  return sampler, source


def numbers(groups):
  return [group[0].episode_id for group in groups]


async def run(sampler, steps):
  return [numbers(await sampler.next(step)) for step in steps]


async def test_fifo_takes_what_is_played():
  sampler, source = make('fifo')
  assert await run(sampler, range(2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert source.requests == [(0, None), (1, None)]
  assert sampler.metrics() == {} and sampler.expert_rows == 0


async def test_staleness_bounds_versions_and_counts_what_it_drops():
  sampler, source = make('staleness(max_staleness=2)', lag=1)
  await sampler.next(5)
  assert source.requests == [(5, 3)]
  assert sampler.metrics() == {'sampler/stale_dropped': 0, 'sampler/mean_age': 1}
  source.lag = 4
  await sampler.next(6)
  assert sampler.metrics() == {'sampler/stale_dropped': 3, 'sampler/mean_age': 2}
  await sampler.next(7)
  assert sampler.metrics()['sampler/stale_dropped'] == 3


async def test_warmup_gives_expert_rows_and_then_rollouts():
  sampler, source = make('warmup(steps=2)')
  assert [sampler.plays(step) for step in range(4)] == [False, False, True, True]
  for step in range(2):
    groups = await sampler.next(step)
    assert [len(group) for group in groups] == [1] * 8
    assert [g[0].env_group for g in groups] == [1000 + 8 * step + i for i in range(8)]
    assert all(row.is_expert and row.score == 1 for (row,) in groups)
    assert all(row.rewards[2] == 1 and row.weight == 0.5 for (row,) in groups)
    assert sampler.metrics() == {'sampler/expert_rows': 8}
  assert source.requests == []
  assert numbers(await sampler.next(2)) == [0, 1, 2, 3]
  assert sampler.metrics() == {'sampler/expert_rows': 0}


async def test_experts_keep_their_own_reward_if_asked():
  sampler, _ = make('warmup(reward=None)')
  assert all(row.score == 0 for (row,) in await sampler.next(0))


@pytest.mark.parametrize(
  'share, num_groups, played, experts',
  [(0.5, 4, 2, 4), (0.25, 4, 3, 2), (0.3, 4, 2, 4), (0.1, 4, 3, 2), (0.1, 10, 9, 2)],
)
async def test_mixed_keeps_the_number_of_rows(share, num_groups, played, experts):
  """⌈ρB⌉ expert rows, whole groups of rollouts, and experts in what is left over."""
  sampler, _ = make(f'mixed(expert_share={share})', num_groups=num_groups)
  assert (sampler.groups_from_queue, sampler.expert_rows) == (played, experts)
  for step in range(3):
    groups = await sampler.next(step)
    assert [len(g) for g in groups] == [SIZE] * played + [1] * experts
    assert sum(map(len, groups)) == num_groups * SIZE
    assert [row.is_expert for g in groups for row in g] == (
      [False] * SIZE * played + [True] * experts
    )
    assert experts >= share * num_groups * SIZE
    assert sampler.metrics() == {'sampler/expert_rows': experts}


async def test_a_step_without_rollouts_is_none_for_the_mixed_sampler_either():
  sampler, source = make('mixed')
  source.count = 0
  assert await sampler.next(0) == []


async def test_replay_draws_by_version_less_decay_times_uses():
  """Two fresh groups a step; priorities by hand, decay 1.5, at most 3 uses."""
  sampler, _ = make('replay(decay=1.5, use_limit=3)')
  drawn = []
  for step in range(5):
    drawn.append(numbers(await sampler.next(step)))
  assert drawn == [
    [0, 1],  # the buffer holds no more
    [0, 1, 2, 3],  # 0 and 1 have priority −1.5
    [2, 3, 4, 5],  # 0, 1: −3; 2, 3: −.5
    [4, 5, 6, 7],  # 2, 3: −2; 4, 5: .5
    [6, 7, 8, 9],
  ]
  assert sampler.metrics() == {
    'sampler/mean_age': 0.5,
    'sampler/reused': 2,
    'sampler/buffer_size': 10,
  }


async def test_a_group_leaves_after_its_uses():
  sampler, _ = make('replay(decay=0, use_limit=2, fresh=.25)')
  assert await run(sampler, range(5)) == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]
  assert sampler.metrics()['sampler/buffer_size'] == 1


async def test_a_group_rests_between_uses():
  sampler, _ = make('replay(decay=0, cooldown=3, use_limit=2, fresh=.25)')
  assert await run(sampler, range(6)) == [[0], [1], [2], [0, 3], [1, 4], [2, 5]]


async def test_the_buffer_keeps_the_best():
  sampler, _ = make('replay(decay=0, capacity=3, use_limit=9)')
  await run(sampler, range(4))
  assert sampler.metrics()['sampler/buffer_size'] == 3
  kept = [place[0] for place in sampler.state_dict()['places']]
  assert kept == [4, 6, 7]  # the newest; among equals those that came first


async def test_noise_lets_what_decayed_come_again_and_is_a_function_of_the_seed():
  plain, _ = make('replay(decay=5)')
  usual = await run(plain, range(8))
  text = 'replay(decay=5, sigma=20.)'
  noisy = {s: await run(make(text, seed=s)[0], range(8)) for s in (0, 1)}
  assert await run(make(text, seed=0)[0], range(8)) == noisy[0]
  assert noisy[0] != noisy[1] and usual not in noisy.values()
  for drawn in noisy.values():
    assert [len(step) for step in drawn] == [2, 4, 4, 4, 4, 4, 4, 4]


async def test_what_is_past_the_bound_leaves_the_buffer():
  text = 'replay(fresh=.25, decay=0, use_limit=9)'
  free = make(text)[0]
  assert await run(free, range(5)) == [
    [0],
    [0, 1],
    [0, 1, 2],
    [0, 1, 2, 3],
    [1, 2, 3, 4],
  ]
  bound = make(text, max_staleness=1)[0]
  assert await run(bound, range(5)) == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]
  assert bound.metrics()['sampler/buffer_size'] == 2
  with pytest.raises(ValueError, match=r'cooldown=2: no group .* 1 steps'):
    make('replay(cooldown=2)', max_staleness=1)


async def test_replayed_groups_are_the_ones_that_were_played():
  sampler, _ = make('replay(fresh=.5)')
  (first, _) = await sampler.next(0)
  again = await sampler.next(1)
  assert again[0] is first


@pytest.mark.parametrize(
  'text',
  [
    'fifo',
    'staleness',
    'warmup(steps=3)',
    'mixed(expert_share=.3)',
    'replay(sigma=3., capacity=6)',
    'replay(fresh=.25, cooldown=2)',
  ],
)
@pytest.mark.parametrize('stop', [0, 1, 4])
async def test_it_goes_on_from_its_state_as_if_it_never_stopped(text, stop):
  whole, _ = make(text)
  wanted = [(await whole.next(step), whole.metrics()) for step in range(8)]
  before, source = make(text)
  for step in range(stop):
    await before.next(step)
  state = json.loads(json.dumps(before.state_dict(), allow_nan=False))
  after, second = make(text)
  after.load_state_dict(state)
  second.played = source.played
  resumed = [(await after.next(step), after.metrics()) for step in range(stop, 8)]
  for (groups, metrics), (others, more) in zip(wanted[stop:], resumed, strict=True):
    same(groups, others)
    assert metrics == more
  assert json.dumps(after.state_dict()) == json.dumps(whole.state_dict())


def same(groups, others):
  for group, other in zip(groups, others, strict=True):
    for a, b in zip(group, other, strict=True):
      assert (a.trajectory_id, a.weight, a.is_expert) == (
        b.trajectory_id,
        b.weight,
        b.is_expert,
      )
      for name in ('tokens', 'rollout_logprobs', 'rewards', 'weights_version'):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes()


@pytest.mark.parametrize(
  'text, message',
  [
    ('replai', "no sampler 'replai'. Did you mean 'replay'"),
    ('lifo', 'There are: fifo, mixed, replay, staleness, warmup'),
    ('replay(decai=1)', "no option 'decai'. Did you mean 'decay'"),
    ('replay(decay=-1)', 'decay=-1: must be at least 0'),
    ('replay(fresh=0)', 'fresh=0: must be above 0'),
    ('replay(use_limit=0)', 'use_limit=0: must be at least 1'),
    ('replay(capacity=1.5)', 'must be a whole number'),
    ('mixed(expert_share=1)', 'must be between 0 and 1'),
    ('mixed(expert_share=.9)', 'leaves 0 of 8 rows for rollouts'),
    ('warmup(steps=0)', 'steps=0: must be at least 1'),
    ('staleness(max_staleness=-1)', 'must be at least 0'),
    ('tests.data.test_samplers:Files', 'has no groups_from_queue, expert_rows'),
  ],
)
def test_what_cannot_be_is_refused(text, message):
  with pytest.raises(ValueError, match=message) as raised:
    make(text)
  assert str(raised.value).startswith(f'algorithm.sampler={text}')


OWN = """
from jaxrl.data.samplers import Sampler

class Twice(Sampler):
  def __init__(self, source, *, offset: int = 0):
    super().__init__(source)
    self.source, self.offset = source, offset

  async def next(self, step):
    groups = await self.source.take(step)
    return groups[self.offset:] + groups[self.offset:]
"""


async def test_ones_own_sampler_goes_by_its_path(tmp_path):
  file = pathlib.Path(tmp_path) / 'mine.py'
  file.write_text(OWN)
  sampler, _ = make(f'{file}:Twice(offset=2)')
  assert await run(sampler, [0]) == [[2, 3, 2, 3]]
  with pytest.raises(ConfigError, match="no option 'offsett'"):
    make(f'{file}:Twice(offsett=2)')
