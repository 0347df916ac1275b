"""Whole runs by every way of sampling, and what they cannot be combined with."""

import itertools
import json
import pathlib
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.options import ConfigError
from launch.logging.metric_sinks import read_metrics
from tests.launch import runs
from tests.marks import extended

TINY = (
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
  runs.ONE_LAYER,
  '--config.optimizer.warmup_steps=0',
  '--config.num_steps=4',
)
ROWS = 16  # of a step: two groups of eight
DECOUPLED = """
import dataclasses

from jaxrl.algorithms.presets.grpo import grpo


def decoupled(*, group_size: int = 8):
  return dataclasses.replace(
    grpo(group_size=group_size), old_logprobs_source='decoupled'
  )
"""
TWO_TAGS = str(pathlib.Path(__file__).with_name('two_tags.py'))


def record(workdir, algorithm, sampler, *options, config=runs.VARIED):
  options = (*TINY, f'--config.algorithm.sampler={sampler}', *options)
  recorder = runs.record(workdir, *options, config=f'{config}:{algorithm}')
  rows = [row for _, row in recorder.metrics]
  assert len(rows) == 4
  assert all(np.isfinite(row['loss/total']) for row in rows)
  assert sum(row['compile/programs'] for row in rows[1:]) == 0
  return rows, [groups for _, _, groups, _ in recorder.played]


def column(rows, name):
  return [row.get(name) for row in rows]


@pytest.mark.slow
@pytest.mark.extended
def test_staleness_plays_again_what_is_too_old(tmp_path):
  ahead = '--config.rollout.async_ratio=1'
  rows, _ = record(tmp_path, 'grpo', 'staleness(max_staleness=0)', ahead)
  assert column(rows, 'staleness/max') == [0] * 4
  assert column(rows, 'sampler/mean_age') == [0] * 4
  assert column(rows, 'tokens/rows') == [ROWS] * 4
  assert sum(column(rows, 'sampler/stale_dropped')[1:]) > 0
  assert rows[-1]['queue/stale'] == sum(column(rows, 'sampler/stale_dropped'))


@pytest.mark.slow  # the loss that scores experts has them in every step, too
def test_mixed_has_experts_in_every_step(tmp_path):
  rows, played = record(tmp_path, 'mix', 'mixed(expert_share=.25)')
  assert column(rows, 'tokens/rows') == [ROWS] * 4
  assert column(rows, 'sampler/expert_rows') == [8] * 4  # 4, and 4 left over
  for groups in played:
    assert [len(group) for group in groups] == [8] + [1] * 8
    assert all(row.is_expert for (row,) in groups[1:])
  questions = [
    group[0].messages[-2]['content'] for groups in played for group in groups[1:]
  ]
  assert len(set(questions)) > 16
  assert rows[-1]['queue/taken'] == rows[-1]['queue/leased'] / 8 == 4


@pytest.mark.slow
def test_opmd_warms_up_on_experts(tmp_path):
  """Their advantage is their reward, so they are learned by −p/(1 + τ)."""
  export = '--config.checkpoint.export=true'
  rows, played = record(tmp_path, 'opmd', 'warmup(steps=2)', export)
  size = 2 * 2
  assert column(rows, 'sampler/expert_rows') == [size, size, 0, 0]
  assert column(rows, 'tokens/rows') == [size] * 4
  for step, (row, groups) in enumerate(zip(rows, played, strict=True)):
    assert ('reward/mean' in row) == ('mismatch/ess' in row) == (step >= 2)
    assert all(r.is_expert == (step < 2) for group in groups for r in group)
    if step < 2:
      assert row['loss/policy'] == pytest.approx(-row['policy/logprob'] / 2, rel=1e-3)
    else:
      versions = [v for g in groups for r in g for v in r.weights_version]
      assert set(versions) <= {-1, step}
  assert rows[-1]['queue/taken'] == 4  # nothing was played that was not learned from
  before = load_file(tmp_path / 'model' / 'model.safetensors')
  after = load_file(tmp_path / 'export' / 'model.safetensors')
  assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.slow
@pytest.mark.parametrize('sampler', ['mixed', 'warmup(steps=1)'])
def test_a_loss_with_a_ratio_scores_experts_too(tmp_path, sampler):
  file = tmp_path / 'decoupled.py'
  file.write_text(DECOUPLED)
  rows, _ = record(tmp_path / 'run', f'{file}:decoupled', sampler)
  assert rows[0]['sampler/expert_rows'] > 0
  assert rows[0]['policy/ratio'] == pytest.approx(1, rel=1e-4)


@pytest.mark.slow
def test_replay_learns_from_groups_again(tmp_path):
  rows, played = record(tmp_path, 'grpo', 'replay(decay=.5, use_limit=2)')
  assert column(rows, 'sampler/reused') == [0, 1, 1, 1]
  assert column(rows, 'sampler/buffer_size') == [1, 1, 1, 1]
  assert column(rows, 'sampler/mean_age') == [0, 0.5, 0.5, 0.5]
  assert column(rows, 'tokens/rows') == [8, 16, 16, 16]
  assert rows[-1]['queue/taken'] == 4
  for before, groups in itertools.pairwise(played):
    assert groups[0] is before[-1]


@pytest.mark.slow
def test_one_sampler_serves_all_tags(tmp_path):
  rows, played = record(tmp_path, 'mix', 'mixed', config=TWO_TAGS)
  for groups in played:
    tags = [group[0].tag for group in groups if not group[0].is_expert]
    assert tags == ['arithmetic', 'more']
  assert column(rows, 'sampler/expert_rows') == [16] * 4


@pytest.mark.parametrize(
  'spec, options, message',
  [
    ('grpo', ['sampler=mixed'], "an algorithm with old_logprobs_source='decoupled'"),
    ('grpo', ['sampler=replai'], "Did you mean 'replay'"),
    ('grpo', ['sampler=replay(decai=1)'], "no option 'decai'"),
    ('sft', ['sampler=replay'], 'all of its rows from files'),
    ('mix', ['sampler=mixed(expert_share=.9)'], 'leaves 1 of 16 rows'),
  ],
)
def test_what_does_not_fit_is_told_before_work(tmp_path, spec, options, message):
  flags = [f'--config.algorithm.{option}' for option in options]
  with pytest.raises(ValueError, match=message):
    runs.record(tmp_path, *TINY, *flags, config=f'{runs.VARIED}:{spec}')


def test_every_tag_needs_a_group(tmp_path):
  options = ('--config.algorithm.sampler=replay', '--config.batch.num_groups=2')
  with pytest.raises(ConfigError, match=r'1 of the 2 groups .* raise'):
    runs.record(tmp_path, *TINY, *options, config=TWO_TAGS)


RESUMED = (
  *TINY,
  '--config.num_steps=8',
  '--config.checkpoint.save_interval=1',
  '--config.checkpoint.export=true',
)


@pytest.mark.slow
@pytest.mark.parametrize(
  'algorithm, sampler',
  [
    ('grpo', 'replay(decay=.5, sigma=1., use_limit=3, capacity=4)'),
    extended('mix', 'mixed'),
  ],
)
def test_killed_it_ends_at_the_same_bits(tmp_path, algorithm, sampler):
  options = (*RESUMED, f'--config.algorithm.sampler={sampler}')
  config = f'{runs.VARIED}:{algorithm}'
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  runs.run(whole, *options, config=config)
  process = runs.spawn(killed, *options, config=config)
  while process.poll() is None and len(read_metrics(killed / 'metrics.jsonl')) < 3:
    time.sleep(0.002)
  process.kill()
  process.communicate()
  assert not (killed / 'export').exists()
  runs.run(killed, *options, config=config)
  assert runs.numbers(killed) == runs.numbers(whole)
  assert runs.weights(killed) == runs.weights(whole)
  launches = json.loads((killed / 'config.json').read_text())['launches']
  assert len(launches) == 2
