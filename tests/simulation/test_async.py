"""Asynchronous training on a simulated engine and clock: faster, bounded, never stuck.

512 episodes a step over 128 slots, lengths lognormal with the 99th percentile at ten
medians, a train step of four medians. Seconds are medians.
"""

import functools

import pytest

from tests.simulation import clock, world


@functools.cache
def run(**options):
  return clock.run(world.train(**options))


def numbers(result):
  return [group[0].env_group + group[0].episode_id for group in result.groups]


@pytest.mark.slow
def test_twice_the_synchronous_throughput_within_the_bound():
  plain = run()
  ahead = run(ratio=1.0, most=2)
  ratio = ahead.episodes_per_second / plain.episodes_per_second
  print(
    f'{len(ahead.ages):,} episodes in {ahead.seconds[-1]:.0f} against '
    f'{plain.seconds[-1]:.0f}: {ratio:.2f} ×; staleness mean '
    f'{sum(ahead.ages) / len(ahead.ages):.2f}, max {max(ahead.ages)}; '
    f'{ahead.queue.counts["stale"]} of {len(ahead.groups)} groups lost to the bound; '
    f'a swap waited {max(ahead.engine.waits):.2f}, a dispatch is {world.DISPATCH}'
  )
  assert len(plain.ages) == len(ahead.ages) >= 10_000
  assert set(plain.ages) == {0} and set(ahead.ages) == {0, 1, 2}
  assert ratio >= 2.2
  # There was something to lose, and it was little.
  assert 0 < ahead.queue.counts['stale'] < 0.05 * len(ahead.groups)
  assert max(ahead.engine.waits) <= world.DISPATCH * (1 + 1e-6)
  assert any(len(set(r.weights_version)) > 1 for group in ahead.groups for r in group)


def test_without_a_rule_the_ratio_itself_is_the_bound():
  result = run(ratio=1.0, num_steps=8)
  assert max(result.ages) == 1 and result.queue.counts['expired']


@pytest.mark.parametrize('style', ['explorer', 'trainer', 'asynchronous'])
def test_every_style_keeps_the_bound_and_plays_each_group_once(style):
  result = run(ratio=1.5, most=2, style=style, num_steps=6)
  assert 0 < max(result.ages) <= 2
  played = numbers(result)
  assert len(set(played)) == len(played) == 6 * 64
  assert max(result.engine.waits) <= world.DISPATCH * (1 + 1e-6)


def test_drained_no_sequence_has_two_versions_and_the_line_is_no_deadlock():
  result = run(ratio=2.0, most=3, style='fixed(drain=True)', num_steps=4)
  assert max(result.engine.lines) > 128
  assert all(len(set(r.weights_version)) == 1 for group in result.groups for r in group)
  assert max(result.ages) > 0


def test_a_resumed_run_repeats_no_group_and_loses_none():
  """Killed after three steps, with groups in play, whole, and taken."""
  options = {'ratio': 1.5, 'most': 9, 'style': 'trainer', 'num_groups': 16}
  first = run(num_steps=5, **options)
  state = first.states[3]
  after = clock.run(world.train(num_steps=7, start=3, state=state, **options))
  learned = numbers(first)[: 3 * 16] + numbers(after)
  assert len(learned) == len(set(learned)) == 7 * 16
  left = after.states[7]['pending']
  assert sorted(learned + left) == list(range(len(learned) + len(left)))
  assert state['pending'] and min(state['pending']) < max(numbers(first)[: 3 * 16])


def test_a_deadlock_is_found_at_once():
  async def stuck():
    import asyncio

    await asyncio.Event().wait()

  with pytest.raises(RuntimeError, match='deadlock'):
    clock.run(stuck())
