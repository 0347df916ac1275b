"""What happens to groups between playing and learning, through whole runs."""

import time

import numpy as np
import pytest

from jaxrl.group_stats import RAW_SCORE, sample_accuracies
from jaxrl.options import ConfigError
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from launch.settings.validation import validate, validate_training
from tests.launch import runs

QUICK = (
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
  '--config.checkpoint.save_interval=0',
  runs.ONE_LAYER,
)
BANDIT = "--config.dataset.curriculum=bandit(target=0.3, decay=0.9, sampling='mean')"


def trained_on(recorder):
  return [groups for _, kind, groups, _ in recorder.played if kind == 'train']


def algorithm(*options, name='dapo'):
  command = command_line.parse([f'--config={runs.VARIED}:{name}', *options])
  config = command_line.load(command)
  settings = resolve_settings(config)
  validate(settings)
  validate_training(settings)
  return settings.algorithm


@pytest.mark.slow
def test_dapo_from_its_name(tmp_path):
  recorder = runs.record(
    tmp_path,
    *QUICK,
    '--config.algorithm.group_size=6',
    '--config.seed=2',
    config=f'{runs.VARIED}:dapo',
  )
  rows = [row for _, row in recorder.metrics if 'loss/total' in row]
  assert len(rows) == 3
  filtered = 0
  for row, groups in zip(rows, trained_on(recorder), strict=True):
    assert len(groups) == 2
    for group in groups:
      right = sample_accuracies(group) >= 1
      assert right.any() and not right.all()
      for attempt in group:
        penalty = attempt.score - attempt.metrics[RAW_SCORE]
        over = attempt.action_mask.sum() - 0.8 * 16
        assert penalty == pytest.approx(-np.clip(over / 3.2, 0, 1), abs=1e-6)
    scores = [a.metrics[RAW_SCORE] for group in groups for a in group]
    assert row['reward/mean'] == pytest.approx(np.mean(scores))
    shaped = [a.score for group in groups for a in group]
    assert row['reward/shaped_mean'] == pytest.approx(np.mean(shaped))
    filtered = row.get('queue/filtered', 0)
  assert filtered > 0


@pytest.mark.slow
def test_remax_plays_one_greedy_attempt_a_task(tmp_path):
  options = ('--config.algorithm.group_size=2', '--config.rollout.temperature=0.9')
  recorder = runs.record(tmp_path, *QUICK, *options, config=f'{runs.VARIED}:remax')
  rows = [row for _, row in recorder.metrics if 'loss/total' in row]
  assert len(rows) == 3
  for (_, _, groups, advantages), row in zip(recorder.played, rows, strict=True):
    rows_of_advantages = iter(np.asarray(advantages))
    greedy = []
    for group in groups:
      assert [a.is_greedy for a in group] == [False, False, True]
      greedy.append(group[-1].score)
      for attempt, values in zip(group, rows_of_advantages, strict=False):
        values = values[: len(attempt.tokens)][attempt.action_mask]
        if attempt.is_greedy:
          assert not values.any()
    sampled = [a.score for group in groups for a in group if not a.is_greedy]
    assert row['reward/mean'] == pytest.approx(np.mean(sampled))
    assert row['reward/greedy_mean'] == pytest.approx(np.mean(greedy))
    assert row['mismatch/logprob_difference'] < 1e-3  # none of them greedy
    assert row['compile/programs'] == 0 or row is not rows[-1]
  assert any(row['advantage/std'] > 0 for row in rows)


@pytest.mark.slow
def test_a_greedy_member_leaves_the_sampled_ones_as_they_were(tmp_path):
  options = (*QUICK, '--config.algorithm.group_size=2', '--config.num_steps=1')
  plain = runs.record(tmp_path / 'a', *options, config=f'{runs.VARIED}:rloo')
  more = runs.record(tmp_path / 'b', *options, config=f'{runs.VARIED}:remax')
  for one, other in zip(trained_on(plain)[0], trained_on(more)[0], strict=True):
    assert len(other) == len(one) + 1
    for a, b in zip(one, other[:-1], strict=True):
      assert a.trajectory_id == b.trajectory_id
      assert a.tokens.tolist() == b.tokens.tolist()
      assert a.rollout_logprobs.tolist() == b.rollout_logprobs.tolist()


def test_filters_and_shapers_of_the_config_replace_the_algorithms(tmp_path):
  recorder = runs.record(
    tmp_path,
    *QUICK,
    '--config.num_steps=1',
    '--config.algorithm.group_size=6',
    '--config.rollout.reward_shaping=clip(high=0.75) + reward(multiply=2) '
    '+ difficulty_weights',
    "--config.rollout.group_filter=score_range(low=0.25, of='max')",
    config=f'{runs.VARIED}:dapo',
  )
  (groups,) = trained_on(recorder)
  for group in groups:
    right = (sample_accuracies(group) >= 1).mean()
    for attempt in group:
      wanted = 2 * min(attempt.metrics[RAW_SCORE], 0.75)
      assert attempt.score == pytest.approx(wanted)
      assert attempt.weight == pytest.approx(2 - 1.5 * right)


@pytest.mark.slow
def test_a_batch_that_cannot_be_filled_says_what_to_change(tmp_path, capsys):
  options = (
    '--config.rollout.max_consecutive_drops=7',
    '--config.algorithm.group_size=2',
  )
  spec = '--config.rollout.group_filter=accuracy(right=9.0)'
  status = runs.main(tmp_path, *QUICK, *options, spec, config=f'{runs.VARIED}:dapo')
  output = ''.join(capsys.readouterr())
  assert status == 1, output
  assert 'Traceback' not in output, output
  output = ' '.join(output.split())
  for words in (
    '7 groups in a row were dropped',
    '7 for accuracy',
    '0 of 2',
    'too hard',
  ):
    assert words in output


@pytest.mark.slow
@pytest.mark.extended
def test_a_killed_run_with_a_bandit_ends_at_the_same_bits(tmp_path):
  options = (
    '--config.sft.num_steps=0',
    '--config.eval.interval=0',
    '--config.num_steps=4',
    '--config.checkpoint.export=true',
    '--config.algorithm.group_size=6',
    '--config.dataset.limit=12',
    BANDIT,
  )
  whole, folder = tmp_path / 'whole', tmp_path / 'killed'
  config = f'{runs.VARIED}:dapo'
  runs.run(whole, *options, config=config)
  process = runs.spawn(folder, *options, config=config)
  while process.poll() is None and len(runs.rows(folder)) < 2:
    time.sleep(0.02)
  process.kill()
  process.communicate()
  assert not (folder / 'export').exists()
  runs.run(folder, *options, config=config)
  assert runs.numbers(folder) == runs.numbers(whole)
  assert runs.weights(folder) == runs.weights(whole)


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    (['--config.rollout.top_p=0.9'], 'top_p=0.9.*temperature'),
    (['--config.rollout.top_k=5'], 'top_k=5.*temperature'),
    (
      ['--config.rollout.reward_shaping=overlng'],
      "rollout.reward_shaping.*mean 'overlong'",
    ),
    (['--config.rollout.group_filter=acuracy'], "group_filter.*mean 'accuracy'"),
    (['--config.rollout.group_filter=accuracy(rite=1)'], 'group_filter.*right'),
    (['--config.algorithm.group_size=1'], 'drops every group of 1'),
    (
      ['--config.rollout.max_consecutive_drops=0'],
      'max_consecutive_drops=0: must be at least 1',
    ),
    (['--config.dataset.curriculum=bandit()', 'sft'], 'curriculum.*has no effect'),
  ],
)
def test_wrong_settings(options, words):
  name = options.pop() if options[-1] == 'sft' else 'dapo'
  with pytest.raises(ConfigError, match=words):
    algorithm(*options, name=name)


def test_dr_grpo_divides_by_the_runs_limit():
  drgrpo = algorithm(name='drgrpo')
  assert str(drgrpo.aggregation) == 'sequence_mean_token_sum_norm(length=16)'
  drgrpo = algorithm('--config.algorithm.length=77', name='drgrpo')
  assert str(drgrpo.aggregation) == 'sequence_mean_token_sum_norm(length=77.0)'
  drgrpo = algorithm('--config.batch.max_length=12', name='drgrpo')
  assert str(drgrpo.aggregation) == 'sequence_mean_token_sum_norm(length=12)'
