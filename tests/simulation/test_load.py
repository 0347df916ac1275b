"""Load and faults on a clock that jumps: each episode is accounted for, none twice."""

import asyncio

import pytest

from jaxrl.data.dataset import GlobalDataset
from jaxrl.rollout.queue.group_queue import QueueOptions
from jaxrl.rollout.thread_pool import Timeouts
from tests.calls import split_options
from tests.simulation import clock, load

CHAOS = {'hang': 0.01, 'crash': 0.02, 'garbage': 0.01, 'nan': 0.01, 'leak': 0.01}


def run(faults=None, engine_faults=None, *, drop=None, make_env=None, **options):
  """Of 250 groups of 8 at once, unless told otherwise. options: load.play's, and
  those of the queue within `queue`.
  """

  async def main():
    draws = load.Draws(0, faults or {})
    settings = {
      'num_groups': 250,
      'group_size': 8,
      'max_retries': 3,
      'max_consecutive_drops': 1000,
    }
    settings |= options.pop('queue', {})
    settings.setdefault('num_env_groups', settings['num_groups'])
    members = settings['group_size'] + settings.get('extra_samples', 0)
    book = load.Book(
      drop,
      clock=asyncio.get_running_loop().time,
      **split_options(QueueOptions, settings),
    )
    return await load.play(
      book,
      load.Engine(load.Draws(1, engine_faults or {})),
      load.Pool(draws),
      make_env or (lambda: load.Chaos(draws)),
      group_size=members,
      **options,
    ), draws

  return clock.run(main())


SMALL = {'num_groups': 16, 'group_size': 4, 'max_consecutive_drops': 100}


@pytest.mark.slow
def test_two_thousand_at_once_of_lognormal_times():
  result, _ = run(steps=range(1))
  result.check(8)
  assert [len(batch) for batch in result.batches] == [250]
  assert result.queue.most == 2000
  assert result.queue.counts['failed'] == result.queue.counts['retried'] == 0


@pytest.mark.slow
def test_two_thousand_of_which_many_hang_crash_or_return_garbage():
  wrong = {'hang': 0.005, 'crash': 0.01, 'empty': 0.01}
  result, draws = run(CHAOS, wrong, steps=range(1))
  result.check(8)
  assert [len(batch) for batch in result.batches] == [250]
  assert result.queue.most == 2000
  assert all(draws.seen[kind] > 40 for kind in CHAOS)
  assert result.queue.counts['retried'] > 300
  assert result.seconds < 1800


def test_hung_episodes_without_any_timeout_but_their_leases():
  result, draws = run(
    {'hang': 0.02},
    queue={**SMALL, 'episode_timeout': 300.0},
    timeouts=Timeouts(reset=0, step=0, generate=60),
  )
  result.check(4)
  assert result.queue.counts['timed_out'] == draws.seen['hang'] > 5
  assert result.seconds < 3 * 4 * 300


def test_surplus_members_groups_that_expire_and_a_slow_trainer():
  result, _ = run(
    CHAOS,
    queue={**SMALL, 'extra_samples': 1, 'async_ratio': 0.5, 'in_order': False},
    steps=(0, 1, 2, 4, 7, 8),
    pause=5.0,
  )
  result.check(4)
  assert result.queue.counts['surplus'] > 16 and result.queue.counts['expired']
  assert [len(batch) for batch in result.batches] == [16] * 6


def test_episodes_that_fail_for_good_leave_their_group_or_drop_it():
  for options, fewest in (({'min_group_size': 2}, 2), ({}, 4)):
    result, _ = run({'crash': 0.1}, queue={**SMALL, 'max_retries': 0, **options})
    result.check(4, fewest)
    assert result.queue.counts['failed'] > 20 and result.queue.counts['dropped']
    sizes = {len(group) for batch in result.batches for group in batch}
    assert sizes == set(range(fewest, 5))


def test_a_filter_that_drops_all_ends_in_an_error_that_says_so():
  result, _ = run(CHAOS, drop=lambda *_: True, queue=SMALL)
  result.check(4)
  assert not result.batches
  assert 'rollout.max_consecutive_drops=100' in str(result.error)
  assert 'What may help: loosen the filter' in str(result.error)
  assert 100 <= result.queue.counts['filtered'] < 120


def test_environments_that_all_crash_end_in_an_error_that_says_why():
  result, _ = run({'crash': 1.0}, queue=SMALL)
  result.check(4)
  assert not result.batches and 'the game has crashed' in str(result.error)
  assert 100 <= result.queue.counts['dropped'] < 120
  assert result.queue.counts['leased'] >= 100 * 4 * 4  # each was tried four times


def test_a_data_set_that_ends_mid_batch_gives_each_item_once():
  items = [{'question': f'q{i}', 'answer': '-'} for i in range(37)]
  for groups in (16, -1):
    result, _ = run(
      CHAOS,
      dataset=GlobalDataset(items, mode='traversal'),
      queue={**SMALL, 'num_groups': groups, 'num_env_groups': 16, 'max_retries': 30},
      steps=range(4) if groups > 0 else range(1),
    )
    result.check(4)
    sizes = [len(batch) for batch in result.batches]
    assert sizes == ([16, 16, 5, 0] if groups > 0 else [37])
    seeds = [group[0].episode_seed for batch in result.batches for group in batch]
    assert sorted(seeds) == list(range(37))
    assert result.queue.counts['ended'] > 0


def test_data_that_ends_within_a_group_drops_that_group_and_says_why():
  """An environment may say for itself that there is no more, and not all at once."""
  draws, left = load.Draws(0, {}), iter(range(30))

  class Ends(load.Chaos):
    def reset(self, *, seed, options=None):
      more = next(left, None) is not None
      return super().reset(seed=seed, options=options) if more else (None, {})

  result, _ = run(make_env=lambda: Ends(draws), queue=SMALL, steps=range(3))
  result.check(4)
  assert result.error is None
  sizes = [len(batch) for batch in result.batches]
  assert sizes[1:] == [0, 0] and 4 * sizes[0] <= 30
  counts = result.queue.counts
  assert counts['played'] == 30 and counts['dropped'] > 0
