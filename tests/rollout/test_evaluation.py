"""Evaluation: each item once, the same each time, failures scored 0, pass@k."""

import itertools
import math

import pytest

from jaxrl.rollout.call_pool import CallPool
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.evaluation import evaluate, pass_at_k, summarize
from tests.rollout.fakes import BadEnv, EchoEnv, FakeEngine, row, world


class Grader(EchoEnv):
  """Scores 1 where the reply is the last digit of the seed."""

  def reset(self, *, seed, options=None):
    self.wanted = str(seed % 10)
    return super().reset(seed=seed, options=options)

  def step(self, action):
    score = float(action[-1:] == self.wanted)
    return '', score, True, False, {'metrics': {'correct': score}}


def last_digit(prompt, sampling):
  return chr(prompt[-3])  # of 'useed 12|>'


async def run(shared, **options):
  return await evaluate(lambda i: EnvManager(shared), 40, tag='t', **options)


async def test_a_data_set_is_played_once_in_order():
  asked = []
  metrics, groups = await run(
    world(rows=23, mode='traversal'), concurrency=5, progress=asked.append
  )
  assert [g[0].messages[0]['content'] for g in groups] == [f'q{i}' for i in range(23)]
  assert metrics['eval/t/tasks'] == 23
  assert asked == list(range(1, 24))


async def test_games_have_a_fixed_list_of_seeds():
  for concurrency in (1, 7):
    shared = world(Grader, FakeEngine(last_digit))
    metrics, groups = await run(shared, num_tasks=12, concurrency=concurrency)
    assert [g[0].episode_seed for g in groups] == list(range(40, 52))
    assert metrics['eval/t/mean'] == metrics['eval/t/pass@1'] == 1
    assert metrics['eval/t/correct'] == 1
    assert metrics['eval/t/stop/finish'] == 1
    shared.pool.close()


async def test_a_failed_attempt_is_retried_then_scores_zero_with_its_reason():
  count = itertools.count()
  made = world(lambda: BadEnv(fault='step raises' if next(count) == 0 else ''))
  metrics, _ = await run(made, num_tasks=4, concurrency=1)
  assert metrics['eval/t/failed'] == 0
  made = world(lambda: BadEnv(fault='step raises'), pool=CallPool(2))
  metrics, groups = await run(made, num_tasks=4, concurrency=2)
  assert metrics['eval/t/mean'] == 0
  assert metrics['eval/t/stop/env_error'] == metrics['eval/t/failed'] == 1
  assert 'broken' in groups[0][0].extras['error']


async def test_several_attempts_a_task():
  shared = world(EchoEnv, rows=3, mode='traversal')
  _, groups = await run(shared, group_size=4, concurrency=3)
  assert [[r.member for r in g] for g in groups] == [[0, 1, 2, 3]] * 3
  assert len({r.tokens.tobytes() for g in groups for r in g}) > 3


def test_pass_at_k_is_unbiased():
  for n, passed, k in [(4, 1, 2), (8, 3, 4), (5, 0, 3), (6, 6, 2), (4, 3, 2)]:
    draws = list(itertools.combinations([1] * passed + [0] * (n - passed), k))
    expected = sum(any(d) for d in draws) / len(draws)
    assert math.isclose(pass_at_k(n, passed, k), expected)


def test_summary_by_hand():
  groups = [
    [row(1, 0), row(0, 1), row(0, 2), row(0, 3)],
    [row(1, 0), row(1, 1), row(0, 2), row(0, 3, stop_reason='env_error')],
  ]
  metrics = summarize(groups, 'x')
  assert metrics['eval/x/mean'] == 3 / 8
  assert metrics['eval/x/pass@1'] == 3 / 8
  assert metrics['eval/x/pass@2'] == pytest.approx((3 / 6 + 5 / 6) / 2)
  assert metrics['eval/x/pass@4'] == 1
  assert metrics['eval/x/failed'] == 1 / 8
  assert metrics['eval/x/stop/env_error'] == 1 / 8


async def test_without_an_end_it_does_not_begin():
  with pytest.raises(ValueError, match='num_tasks'):
    await run(world())
  with pytest.raises(ValueError, match='played nothing'):
    summarize([], 'x')
