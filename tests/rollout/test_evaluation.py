"""Evaluation: each item once, the same each time, failures scored 0, pass@k."""

import dataclasses
import itertools
import pathlib

import pytest

from jaxrl.data.dataset import GlobalDataset
from jaxrl.envs.math_env import MathEnv
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.evaluation import evaluate, sample_answers, summarize
from jaxrl.rollout.thread_pool import ThreadPool
from tests.rollout.fakes import BadEnv, EchoEnv, FakeEngine, row, world

SHARED = pathlib.Path(__file__).parents[3] / 'shared' / 'data'
GSM8K = SHARED / 'gsm8k' / 'test.jsonl'


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


async def run(shared, max_length=1024, **options):
  def make(i):
    return EnvManager(shared, max_length=max_length)

  return await evaluate(make, 40, tag='t', **options)


async def test_a_data_set_is_played_once_in_order():
  reports = []
  metrics, groups = await run(
    world(rows=23, mode='traversal'),
    concurrency=5,
    progress=lambda rows, total: reports.append((rows[0].episode_id, total)),
  )
  assert [g[0].messages[0]['content'] for g in groups] == [f'q{i}' for i in range(23)]
  assert metrics['eval/t/tasks'] == 23
  assert sorted(reports) == [(task, 23) for task in range(23)]


@pytest.mark.parametrize(('num_tasks', 'wanted'), [(-1, 9), (4, 4), (100, 9)])
async def test_never_more_tasks_than_items_and_each_item_once(num_tasks, wanted):
  shared = world(rows=9, mode='traversal')
  for _ in range(2):
    metrics, groups = await run(shared, num_tasks=num_tasks, concurrency=20)
    questions = [g[0].messages[0]['content'] for g in groups]
    assert questions == [f'q{i}' for i in range(wanted)]
    assert metrics['eval/t/tasks'] == wanted


@pytest.mark.skipif(not GSM8K.exists(), reason='the shared data folder is not here')
async def test_gsm8k_whole():
  data = GlobalDataset(path=str(GSM8K), mode='traversal')
  shared = world(MathEnv, FakeEngine(lambda prompt, sampling: '#### 18'))
  shared = dataclasses.replace(shared, dataset=data)
  metrics, groups = await run(shared, max_length=4096)
  assert metrics['eval/t/tasks'] == len(groups) == 1319
  wanted = [data.get_data_item(index=i) for i in range(1319)]
  questions = [group[0].messages[0]['content'] for group in groups]
  assert questions == [item['question'] for item in wanted]
  right = sum(item['answer'].endswith('#### 18') for item in wanted)
  assert right and metrics['eval/t/mean'] == pytest.approx(right / 1319)
  assert (await run(shared, max_length=4096))[0] == metrics


async def test_an_end_is_reached_though_every_task_fails():
  shared = world(lambda: BadEnv(fault='reset raises'), rows=5, mode='traversal')
  metrics, groups = await run(shared, concurrency=2)
  assert len(groups) == 5 and metrics['eval/t/stop/env_reset_failed'] == 1


async def test_each_evaluation_is_the_same():
  def contents(groups):
    return [
      (r.episode_seed, r.sample_index, r.tokens.tolist()) for g in groups for r in g
    ]

  shared = world(rows=7, mode='traversal')
  first, second, alone = [
    await run(shared, group_size=3, concurrency=c) for c in (4, 4, 1)
  ]
  assert contents(first[1]) == contents(second[1]) == contents(alone[1])
  assert first[0] == second[0] == alone[0]


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
  context = world(lambda: BadEnv(fault='step raises' if next(count) == 0 else ''))
  metrics, _ = await run(context, num_tasks=4, concurrency=1)
  assert metrics['eval/t/failed'] == 0
  context = world(lambda: BadEnv(fault='step raises'), pool=ThreadPool(2))
  metrics, groups = await run(context, num_tasks=4, concurrency=2)
  assert metrics['eval/t/mean'] == 0
  assert metrics['eval/t/stop/env_error'] == metrics['eval/t/failed'] == 1
  assert 'broken' in groups[0][0].extras['error']


async def test_several_attempts_a_task():
  shared = world(EchoEnv, rows=3, mode='traversal')
  _, groups = await run(shared, group_size=4, concurrency=3)
  assert [[r.sample_index for r in g] for g in groups] == [[0, 1, 2, 3]] * 3
  assert len({r.tokens.tobytes() for g in groups for r in g}) > 3


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


def voted(score, member, answer, **fields):
  return row(score, member, columns={'given': answer}, **fields)


def test_the_majority_by_hand():
  groups = [
    [voted(0, 0, '7'), voted(1, 1, '1/2'), voted(1, 2, '0.50'), voted(1, 3, '$.5')],
    [voted(0, 0, '3'), voted(0, 1, '3'), voted(1, 2, '8'), voted(0, 3, '')],
  ]
  assert (
    len(set(sample_answers(groups[0]))) == 2 and sample_answers(groups[1])[3] is None
  )
  metrics = summarize(groups, 'x')
  assert metrics['eval/x/majority@4'] == 1 / 2
  # Of pairs: ½ with 7, or ½ twice; of the second, 3 8 twice a tie, 8 alone once.
  assert metrics['eval/x/majority@2'] == pytest.approx(
    ((3 / 2 + 3) / 6 + (2 / 2 + 1) / 6) / 2
  )
  assert 'eval/x/majority@1' not in metrics
  assert not any('majority' in name for name in summarize([[row(1), row(1, 1)]], 'x'))


def test_passing_is_by_accuracy_where_there_is_one_and_never_by_a_failure():
  right = row(0.3, 0, metrics={'accuracy': 1.0})
  broken = row(0, 1, stop_reason='env_error', metrics={'accuracy': 1.0})
  metrics = summarize([[right, broken]], 'x')
  assert metrics['eval/x/pass@1'] == 0.5
  assert metrics['eval/x/mean'] == pytest.approx(0.15)


async def test_without_an_end_it_does_not_begin():
  with pytest.raises(ValueError, match='num_tasks'):
    await run(world())
  with pytest.raises(ValueError, match='played nothing'):
    summarize([], 'x')
