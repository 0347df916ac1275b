"""Whole asynchronous runs: bounded, corrected, and evaluated on one version."""

import numpy as np
import pytest

from jaxrl.training import monitoring
from tests.launch import runs

OPTIONS = (
  '--config.sft.num_steps=0',
  '--config.num_steps=4',
  '--config.eval.interval=2',
  '--config.eval.num_tasks=4',
  '--config.checkpoint.save_interval=0',
  '--config.checkpoint.export=false',
  '--config.rollout.async_ratio=1',
)


def record(folder, *options):
  recorder = runs.record(folder, *OPTIONS, *options)
  trained = [row for _, row in recorder.metrics if 'loss/total' in row]
  assert len(trained) == 4
  return recorder, trained


def versions(groups):
  rows = [row for group in groups for row in group]
  written = [row.weights_version[row.action_mask] for row in rows]
  return set(np.concatenate(written).tolist())


@pytest.mark.slow
def test_fully_asynchronous_it_keeps_the_bound_and_evaluates_one_version(tmp_path):
  recorder, trained = record(
    tmp_path,
    '--config.weight_sync.policy=asynchronous',
    '--config.rollout.staleness_policy=drop',
  )
  assert 0 < max(row['staleness/max'] for row in trained) <= 2
  stale = [row for row in trained if row['staleness/share']]
  assert all(row['mismatch/stale'] > 0 for row in stale)
  assert all(0 <= row['correction/ess'] <= 1 + 1e-6 for row in trained)
  assert any(row['correction/ess'] > 0 for row in trained)  # 0 where all was dropped
  evaluated = [(s, groups) for s, kind, groups, _ in recorder.played if kind == 'eval']
  assert [step for step, _ in evaluated] == [0, 2, 4]
  for step, groups in evaluated:
    assert versions(groups) == {step}


@pytest.mark.slow
@pytest.mark.parametrize(
  'style', ['fixed(interval=2)', 'fixed(drain=True)', 'explorer', 'trainer']
)
def test_every_style_with_old_tokens_masked(tmp_path, style, monkeypatch):
  # So low a limit leaves some styles nothing to learn from, which ends a run.
  monkeypatch.setattr(monitoring, 'MAX_IDLE_STEPS', 99)
  recorder, trained = record(
    tmp_path,
    f'--config.weight_sync.policy={style}',
    '--config.rollout.staleness_policy=mask(max=0)',
  )
  assert max(row['staleness/masked'] for row in trained) > 0
  for step, kind, groups, _ in recorder.played:
    assert kind != 'eval' or versions(groups) == {step}
