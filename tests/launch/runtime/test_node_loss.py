"""A machine of the cluster is killed in the middle of a run, which goes on."""

import subprocess
import sys

import pytest

from tests.launch import runs

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.xdist_group('ray')]
OPTIONS = (
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
  '--config.num_steps=8',
  '--config.rollout.engine=jax(decode_steps=4)',
)
CLUSTER = ('--config.cluster.num_engines=2', '--config.cluster.num_workers=2')


def lose(victim, workdir, *options):
  """What a run says that loses a node where a `victim` lives."""
  env = runs.environment()
  command = [sys.executable, '-m', 'tests.launch.runtime.lose_a_node', victim]
  result = subprocess.run(
    [*command, str(workdir), *OPTIONS, *CLUSTER, *options],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    cwd=runs.ROOT,
    env=env,
    timeout=600,
  )
  assert result.returncode == 0, result.stdout
  return result.stdout.splitlines()


def lines(output_lines, *words):
  return [line for line in output_lines if all(word in line for word in words)]


@pytest.mark.extended
def test_it_trains_on_without_workers_and_engines_that_are_lost(tmp_path):
  """And comes to the same bits: what they played is played again."""
  output_lines = lose('RolloutWorker,EngineActor', tmp_path / 'lost')
  (killed,) = lines(output_lines, 'killed: ')
  for kind, name in (('RolloutWorker', 'RolloutWorker'), ('EngineActor', 'engine ')):
    warnings = lines(
      output_lines, f'warning: {name}', 'was lost and is being restarted'
    )
    assert bool(warnings) == (kind in killed.split())
  assert not lines(output_lines, 'goes on from its newest checkpoint')
  assert not lines(output_lines, 'train: resumes')
  runs.run(tmp_path / 'whole', *OPTIONS)
  assert runs.weights(tmp_path / 'whole') == runs.weights(tmp_path / 'lost')
  assert runs.numbers(tmp_path / 'whole') == runs.numbers(tmp_path / 'lost')


def test_it_resumes_by_itself_when_the_learner_is_lost(tmp_path):
  placed = '--config.cluster.placement=split(learners=2, devices=1)'
  output_lines = lose('LearnerActor', tmp_path, placed)
  assert lines(output_lines, 'killed: ', 'LearnerActor')
  resumes = lines(
    output_lines, 'goes on from its newest checkpoint, train ', '(resume 1 of 3)'
  )
  assert len(resumes) == 1
  assert lines(output_lines, 'train: resumes at step ')
  assert [row['step'] for row in runs.rows(tmp_path)] == list(range(8))
