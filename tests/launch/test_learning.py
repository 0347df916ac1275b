"""The quickstart and the vision game learn; a control of shuffled rewards does not."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.launch import runs

CONTROL = 'tests.controls.shuffled:grpo_of_the_neighbour'
PROBLEMS = "kinds=('add', 'sub'), max_number=9"
TWO_KINDS = (  # of the config's four kinds of problems
  f"--config.dataset.path=generate:arithmetic({PROBLEMS}, form='worked')",
  f"--config.sft.path=generate:arithmetic({PROBLEMS}, misread_share={{'sub': 0.7}})",
)
RED_ALONE = (  # a few steps of one of the game's questions
  '--config.env.dots.weight=0',
  "--config.sft.path=generate:picture_quiz(questions='red')",
  '--config.sft.num_steps=60',
  '--config.num_steps=25',
  '--config.eval.interval=25',
  '--config.batch.num_groups=32',
  '--config.optimizer.lr_schedule=constant',
)


def accuracies(
  folder: pathlib.Path,
  *overrides: str,
  name: str = 'quickstart',
  tag: str,
  optimized: bool = True,
) -> list[float]:
  """Runs a config; held-out accuracy at each evaluation, before RL first."""
  command = [sys.executable, '-m', 'launch.train', f'--config=configs/{name}.py']
  env = {**os.environ, 'XLA_FLAGS': ''} if optimized else runs.environment()
  subprocess.run(
    [*command, f'--workdir={folder}', *overrides], cwd=runs.ROOT, env=env, check=True
  )
  mean = f'eval/{tag}/mean'
  return [row[mean] for row in runs.rows(folder) if mean in row]


@pytest.mark.slow
@pytest.mark.extended
def test_quickstart_learns_from_its_rewards_alone(tmp_path):
  """Both begin with the same supervised start, which takes most of a run.

  With two of the config's four kinds of problems, a short one is enough. They end at
  the first evaluation, by which GRPO has learned most of what it learns.
  """
  base = tmp_path / 'base'
  lessons = '--config.sft.num_steps=350', '--config.sft.batch_size=32'
  accuracies(base, *TWO_KINDS, *lessons, '--config.num_steps=0', tag='arithmetic')
  start = f'--config.model.checkpoint={base}/export', '--config.sft.num_steps=0'
  options = (*TWO_KINDS, *start, '--config.num_steps=20')
  grpo = accuracies(tmp_path / 'grpo', *options, tag='arithmetic')
  assert 0.03 <= grpo[0] <= 0.5
  assert grpo[-1] - grpo[0] >= 0.2
  options = (*options, f'--config.algorithm.advantage={CONTROL}')
  control = accuracies(tmp_path / 'control', *options, tag='arithmetic')
  assert control[0] == grpo[0]
  assert control[-1] - control[0] <= 0.05


@pytest.mark.slow
@pytest.mark.extended
def test_a_model_learns_to_look_at_pictures_it_has_not_seen(tmp_path):
  scores = accuracies(
    tmp_path / 'red', *RED_ALONE, name='vision_game', tag='red', optimized=False
  )
  assert scores[0] < 0.65  # of four squares
  assert scores[-1] - scores[0] >= 0.1


@pytest.mark.slow
def test_what_a_newcomer_runs_first_moves(tmp_path):
  accuracies(tmp_path, name='debug', tag='arithmetic', optimized=False)
  rewards = [row['reward/mean'] for row in runs.rows(tmp_path) if 'reward/mean' in row]
  assert sum(reward > 0 for reward in rewards) >= 2 and len(set(rewards)) > 1
