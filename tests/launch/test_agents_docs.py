"""The example of docs/agents.md is run as it stands, at its smallest."""

import re

import pytest

from launch import evaluate, play, rollout
from tests.launch.runs import BARE, ROOT, main, rows

PAGE = ROOT / 'docs' / 'agents.md'
SMALL = tuple(
  f'--config.{key}={value}'
  for key, value in {
    'num_steps': 1,
    'sft.num_steps': 0,
    'batch.num_groups': 1,
    'rollout.max_num_seqs': 16,
    'model.random': 'qwen3(hidden_size=32, num_layers=1)',
    'eval.interval': 0,
    'eval.num_tasks': 2,
    'checkpoint.save_interval': 0,
  }.items()
)


@pytest.fixture
def page(tmp_path, monkeypatch):
  """The example's file in a folder of its own; the commands below it."""
  blocks = re.findall(r'^```(\w+)\n(.*?)^```', PAGE.read_text(), re.M | re.S)
  code = next(text for kind, text in blocks if kind == 'python')
  (tmp_path / 'quiz.py').write_text(code)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(ROOT))
  return [line for kind, text in blocks if kind == 'sh' for line in text.splitlines()]


@pytest.mark.slow
def test_the_example_trains_is_evaluated_and_played(page, tmp_path, capsys):
  assert page[0] == 'python -m launch.train --config=quiz.py --workdir=runs/agent_quiz'
  folder = tmp_path / 'runs' / 'agent_quiz'
  assert main(folder, *SMALL, '--config.algorithm.group_size=2', config='quiz.py') == 0
  (row,) = [row for row in rows(folder) if 'reward/mean' in row]
  assert row['tokens/action'] > 0
  words = [line.split()[3:] for line in page[1:]]
  assert evaluate.main([*words[0], *BARE, *SMALL]) == 0
  assert 'quiz' in capsys.readouterr().out
  assert rollout.main([*words[1], '--workdir=played', *BARE, *SMALL]) == 0
  (file,) = (tmp_path / 'played' / 'trajectories').rglob('*.jsonl')
  assert len(file.read_text().splitlines()) >= 2
  capsys.readouterr()
  assert play.main(['--config=quiz.py', *BARE, *SMALL]) == 0
  assert capsys.readouterr().out.count('the model wrote') == 2
