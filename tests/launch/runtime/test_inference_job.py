"""Under Ray, what only plays plays the same, and loses nothing with an engine."""

import json

import numpy as np
import pytest

from jaxrl.data import trajectory_codec
from launch import rollout
from tests.launch import runs
from tests.launch.runtime.test_engine_failures import mortal

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray')]
TASKS, SIZE = 10, 2
RAY = ('--config.cluster.ray=true', '--config.cluster.num_engines=2')


def played(folder, *options):
  """Plays the same tasks into `folder`; the trajectories that were kept."""
  job_options = [
    f'--config={runs.VARIED}',
    f'--workdir={folder}',
    f'--config.dataset.limit={TASKS}',
    f'--group_size={SIZE}',
    '--config.rollout.engine=jax(decode_steps=4)',
  ]
  assert rollout.main([*job_options, *options]) == 0
  lines = [
    json.loads(line)
    for file in sorted((folder / 'trajectories').iterdir())
    for line in file.read_text().splitlines()
  ]
  assert [line['task_idx'] for line in lines] == sorted(list(range(TASKS)) * SIZE)
  return [
    trajectory_codec.from_json(json.loads(line['save_content'])) for line in lines
  ]


@pytest.mark.slow
def test_no_item_is_lost_with_an_engine(ray, tmp_path, monkeypatch, capsys):
  from launch.runtime import ray_runtime

  alone = played(tmp_path / 'alone')
  mark = tmp_path / 'killed'
  monkeypatch.setattr(ray_runtime, 'EngineActor', mortal(str(mark), since=0))
  under_ray = played(tmp_path / 'ray', *RAY, '--config.cluster.num_workers=2')
  assert mark.exists()
  lines = ''.join(capsys.readouterr()).splitlines()
  # Where the last episodes end before the next look at the engines, nobody is told.
  assert sum('of 2 was lost and is being restarted' in line for line in lines) <= 1
  assert {row.trajectory_id for row in alone} == {r.trajectory_id for r in under_ray}
  same(alone, under_ray, atol=2e-5)  # what was taken up has its keys from prefill


def same(rows, others, atol):
  """The same tokens of the same weights, with the same log-probs within `atol`."""
  for row, other in zip(rows, others, strict=True):
    assert row.trajectory_id == other.trajectory_id
    for name in 'tokens action_mask rewards weights_version'.split():
      np.testing.assert_array_equal(getattr(row, name), getattr(other, name))
    np.testing.assert_allclose(row.rollout_logprobs, other.rollout_logprobs, atol=atol)
