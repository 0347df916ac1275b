"""The quickstart learns, and a control without the tie to rewards does not."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTROL = 'tests.controls.shuffled:grpo_of_the_neighbour'


def accuracies(folder: pathlib.Path, *overrides: str) -> list[float]:
  """Runs the quickstart; held-out accuracy at each evaluation, before RL first."""
  command = [sys.executable, '-m', 'launch.train', '--config=configs/quickstart.py']
  env = {**os.environ, 'XLA_FLAGS': ''}
  subprocess.run(
    [*command, f'--workdir={folder}', *overrides], cwd=ROOT, env=env, check=True
  )
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  name = 'eval/arithmetic/mean'
  return [row[name] for row in rows if row['phase'] == 'train' and name in row]


@pytest.mark.slow
def test_quickstart_learns_from_its_rewards_alone(tmp_path):
  learnt = accuracies(tmp_path / 'grpo')
  assert 0.2 <= learnt[0] <= 0.6
  assert learnt[-1] - learnt[0] >= 0.25
  control = accuracies(tmp_path / 'control', f'--config.algorithm.advantage={CONTROL}')
  assert control[0] == learnt[0]
  assert control[-1] - control[0] <= 0.05
