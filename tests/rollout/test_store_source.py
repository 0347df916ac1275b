"""Groups of a store are judged as played ones are, and waited for."""

import asyncio
import logging

import pytest

from jaxrl.data.store.experience_writer import ExperienceWriter, GroupSerializer
from jaxrl.rollout.queue.group_pipeline import (
  GroupPipeline,
  InsufficientGroupsError,
  StopRequested,
  StoreTimeoutError,
)
from jaxrl.rollout.queue.store_source import StoreGroupSource
from tests.data.store.stores import opened, reader
from tests.data.trajectory_writers.dumps import row


class Clock:
  """Time passes where someone sleeps; `then` is called each time."""

  def __init__(self, then=lambda now: None):
    self.now, self.then = 0.0, then

  def __call__(self):
    return self.now

  async def sleep(self, seconds):
    self.now += seconds
    self.then(self.now)


def write(database, groups, facts=None):
  explorer = ExperienceWriter(database, 'one', facts or {})
  for number, group in groups.items():
    explorer.add('t', number, GroupSerializer().rows(group, number))
  explorer.flush()


def attempts(number, *stops):
  return [row(number, i, stop_reason=stop) for i, stop in enumerate(stops)]


def stored(database, clock=None, drops=None, **changes):
  source, clock = reader(database), clock or Clock()
  source.begin()
  options = {
    'name': 'the store',
    'num_groups': 2,
    'group_size': 2,
    'min_samples': 2,
    'max_length': 8,
    'vocab_size': 10,
    'required_facts': {},
    'timeout': 60.0,
    'max_consecutive_drops': 4,
    'clock': clock,
    'sleep': clock.sleep,
  } | changes
  pipeline = GroupPipeline(
    drops, None, min_samples=options['min_samples'], needs_greedy=False
  )
  return StoreGroupSource(source, {'t': pipeline}, **options)


def take(groups, step=0, **options):
  return asyncio.run(groups.take(step, **options))


def test_unsound_attempts_stay_out(tmp_path):
  database, ok = opened(tmp_path), 'finish'
  groups = {
    0: attempts(0, 'env_error', ok, ok, ok),
    1: attempts(1, ok, 'abort'),
    2: attempts(2, ok, ok),
  }
  write(database, groups)
  source = stored(database)
  taken = take(source)
  assert [[r.sample_index for r in group] for group in taken] == [[1, 2], [0, 1]]
  assert [group[0].env_group for group in taken] == [0, 2]
  counts = asyncio.run(source.counts())
  assert counts == {'queue/taken': 2.0, 'queue/dropped': 1.0, 'queue/reused': 0.0}


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'max_length': 1}, 'a row has 2 tokens, but batch.max_length=1'),
    ({'vocab_size': 4}, "a token id is outside the model's 4 ids"),
    (
      {'group_size': 3, 'min_samples': 3},
      'group_size=3, or set algorithm.group_size=2',
    ),
    ({'max_staleness': 2}, 'written by the weights of step 0, but step 7'),
  ],
)
def test_what_does_not_fit_ends_the_run_when_nothing_else_comes(
  tmp_path, changes, message
):
  database = opened(tmp_path)
  write(database, {i: attempts(i, 'finish', 'finish') for i in range(9)})
  with pytest.raises(
    InsufficientGroupsError, match='4 groups in a row were dropped'
  ) as error:
    take(stored(database, **changes), step=9)
  assert message in str(error.value)


def test_filters_and_the_samplers_bound(tmp_path):
  database = opened(tmp_path)
  write(database, {i: attempts(i, 'finish', 'finish') for i in range(5)})
  source = stored(database, drops=lambda g, e, rows: rows[0].env_group == 1)
  assert [g[0].env_group for g in take(source)] == [0, 2]
  with pytest.raises(
    StoreTimeoutError, match='stale 2; the last because it has tokens written by'
  ):
    take(source, step=1, min_version=1)
  counts = asyncio.run(source.counts())
  assert (counts['queue/filtered/group_filter'], counts['queue/stale']) == (1, 2)


def test_it_waits_for_explorers_and_says_so(tmp_path, caplog):
  database = opened(tmp_path)

  def explore(now):
    number = {10.0: 0, 50.0: 1}.get(now)
    if number is not None:
      write(database, {number: attempts(number, 'finish', 'finish')})

  clock = Clock(explore)
  with caplog.at_level(logging.INFO, 'jaxrl'):
    assert len(take(stored(database, clock))) == 2
  assert clock.now == 50.0
  assert [record.getMessage() for record in caplog.records] == [
    'step 0 waits for groups, 5 s so far: the store has 0 groups, 0 of them '
    'not used up, and '
    'a step takes 2',
    'step 0 waits for groups, 35 s so far: the store has 1 groups, 1 of them '
    'not used up, and '
    'a step takes 2',
  ]


def test_it_says_why_it_waits_although_there_are_groups(tmp_path, caplog):
  database = opened(tmp_path)
  write(database, {0: attempts(0, 'finish', 'finish')})
  with caplog.at_level(logging.INFO, 'jaxrl'), pytest.raises(StoreTimeoutError):
    take(stored(database, Clock(), group_size=3, min_samples=3))
  first = caplog.records[0].getMessage()
  assert first.startswith('step 0 waits for groups, 5 s') and 'group_size=3' in first


def test_after_the_longest_wait_what_is_left_is_learned_from(tmp_path):
  database, clock = opened(tmp_path), Clock()
  write(database, {0: attempts(0, 'finish', 'finish')})
  source = stored(database, clock)
  assert len(take(source)) == 1 and 60 <= clock.now < 62
  with pytest.raises(
    StoreTimeoutError, match='step 1: no new group in the store for 60 s'
  ):
    take(source, step=1)
  assert clock.now < 124


def test_ctrl_c_is_heard_while_waiting(tmp_path):
  with pytest.raises(StopRequested):
    take(stored(opened(tmp_path), stop_requested=lambda: True))


def test_explorers_with_other_settings_are_refused(tmp_path):
  database = opened(tmp_path)
  write(database, {0: attempts(0, 'finish', 'finish')}, {'temperature': 0.5})
  wanted = {'temperature': (1.0, 'rollout.temperature'), 'formulation of u': ('a', '')}
  with pytest.raises(ValueError, match=r'temperature 0\.5, but this run has 1\.0'):
    take(stored(database, required_facts=wanted))
