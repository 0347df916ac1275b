"""Whole runs: what they leave, what they say, and every kind of algorithm and part."""

import json

import numpy as np
import pytest

from tests.launch import runs

QUICK = (
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
  '--config.checkpoint.save_interval=0',
  '--config.checkpoint.export=false',
)
LAKE = """
from configs import base, debug
def get_config(algorithm='grpo'):
  c = debug.get_config(algorithm)
  c.env.lake = base.env_section(
    'frozen_lake', max_steps=3, max_tokens_per_step=4, row_format='step')
  c.env.arithmetic.max_tokens_per_step = 8
  c.batch.max_length = 256
  return c
"""


@pytest.fixture(scope='module')
def lake(tmp_path_factory):
  """A config of two environments: words and a game, the game in single steps."""
  path = tmp_path_factory.mktemp('config') / 'lake.py'
  path.write_text(LAKE)
  return str(path)


def sound(recorder, steps=3, warm=2):
  """Every step has finite numbers, and nothing compiles after the second."""
  trained = [(step, row) for step, row in recorder.metrics if 'loss/total' in row]
  assert [step for step, _ in trained] == list(range(steps))
  for step, row in trained:
    assert all(value is not None for value in row.values()), row
    assert step < warm or row['compile/programs'] == 0
    assert row['tokens/action'] > 0
  return trained


def trained_on(recorder):
  return [groups for _, kind, groups, _ in recorder.played if kind == 'train']


def test_a_run_from_start_to_end(tmp_path, capsys):
  output = runs.run(
    tmp_path,
    '--config.num_steps=4',
    '--config.logging.sinks=report',
    '--config.eval.interval=3',
    f'--config.trajectory_dump.path={tmp_path}/dump',
  )
  parts = sorted(path.name for path in (tmp_path / 'dump').iterdir())
  assert parts == [
    *(f'train-arithmetic-step{step:06d}.jsonl' for step in range(4)),
    *(f'val-arithmetic-step{step:06d}.jsonl' for step in (0, 3, 4)),
  ]
  assert 'train 4/4' in output and 'train 5/4' not in output
  for words in ('Finished.', 'report.html', 'watch it play', 'train on', 'launch.play'):
    assert words in output
  rows = runs.rows(tmp_path)
  assert [row['step'] for row in rows] == [0, 1, 2, 3, 4]
  scored = [row['step'] for row in rows if 'eval/arithmetic/mean' in row]
  assert scored == [0, 3, 4] and 'loss/total' not in rows[4]
  assert [row['step'] for row in runs.rows(tmp_path, 'sft')] == [0, 1, 2]
  shown = json.loads((tmp_path / 'samples.json').read_text())
  tokens = [
    token
    for snapshot in shown
    if (snapshot['phase'], snapshot['kind']) == ('train', 'train')
    for group in snapshot['groups']
    for member in group['members']
    for token in member['tokens']
  ]
  assert any(token[4] for token in tokens)  # advantages
  assert all((token[4] is not None) == bool(token[2]) for token in tokens)


@pytest.mark.slow
def test_advantages_belong_to_their_trajectories(tmp_path):
  recorder = runs.record(tmp_path, *QUICK, '--config.num_steps=2')
  seen = 0.0
  for _, _, groups, advantages in recorder.played:
    rows_of_advantages = iter(np.asarray(advantages))
    for group in groups:
      mean = np.mean([row.score for row in group])
      for row, values in zip(group, rows_of_advantages, strict=False):
        assert not values[len(row.tokens) :].any()
        action_advantages = values[: len(row.tokens)][row.action_mask]
        assert (np.sign(action_advantages) == np.sign(row.score - mean)).all()
        seen += abs(action_advantages).sum()
  assert seen > 0


@pytest.mark.slow
def test_a_critic_two_environments_and_all_that_is_in_parts(tmp_path, lake):
  recorder = runs.record(
    tmp_path,
    *QUICK,
    '--config.algorithm.group_size=4',
    '--config.algorithm.kl_penalty=k3(coef=0.01)',
    '--config.batch.num_minibatches=2',
    '--config.batch.num_micro_batches=2',
    '--config.batch.ppo_epochs=2',
    config=f'{lake}:ppo',
  )
  for _, row in sound(recorder):
    assert row['loss/value'] > 0 and 'kl/penalty' in row
  for groups in trained_on(recorder):
    assert [group[0].tag for group in groups] == ['arithmetic', 'lake']
    assert any(row.turn > 0 for row in groups[1])  # single steps of an episode


CASES = {
  'decoupled': ('grpo', ('--config.algorithm.correction=tis',)),
  'penalty': ('grpo', ('--config.algorithm.kl_penalty=k1(coef=0.01)',)),
  'minibatches': (
    'grpo',
    ('--config.batch.num_minibatches=2', '--config.batch.ppo_epochs=2'),
  ),
  'micro': ('grpo', ('--config.batch.num_micro_batches=2',)),
  'bfloat16': ('grpo', ('--config.model.dtype=bfloat16', '--config.model.remat=full')),
}


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_algorithms_and_parts(tmp_path, case):
  algorithm, options = CASES[case]
  recorder = runs.record(
    tmp_path, *QUICK, *options, config=f'{runs.VARIED}:{algorithm}'
  )
  sound(recorder)


@pytest.mark.slow
def test_a_reference_and_a_filter(tmp_path):
  """Groups of one score are replaced by others."""
  recorder = runs.record(
    tmp_path,
    *QUICK,
    '--config.algorithm.kl_coef=0.1',
    '--config.rollout.group_filter=reward_std()',
  )
  for step, row in sound(recorder):
    assert row['kl/reference'] > 0 or step == 0
  for groups in trained_on(recorder):
    assert all(np.std([row.score for row in group]) > 0 for group in groups)


@pytest.mark.slow
def test_supervised_learning_as_the_main_thing(tmp_path):
  recorder = runs.record(
    tmp_path, '--config.sft.num_steps=0', config=f'{runs.VARIED}:sft'
  )
  rows = sound(recorder)
  assert rows[-1][1]['loss/total'] < rows[0][1]['loss/total']
  assert [step for step, row in recorder.metrics if 'eval/arithmetic/mean' in row] == [
    0,
    2,
    3,
  ]


@pytest.mark.slow
@pytest.mark.parametrize('ratio', [1.0, 0.5])
def test_rollouts_may_run_ahead(tmp_path, ratio):
  recorder = runs.record(
    tmp_path, *QUICK, f'--config.rollout.async_ratio={ratio}', '--config.num_steps=6'
  )
  stale = [row['staleness/max'] for _, row in sound(recorder, 6)]
  assert 0 < max(stale) <= 1
