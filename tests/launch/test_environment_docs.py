"""The environment on a data set of docs/environments.md is run as it stands."""

import re
import shlex

import pytest

from launch import play, rollout, train
from tests.launch.runs import BARE, ROOT, rows

PAGE = ROOT / 'docs' / 'environments.md'
SECTION = PAGE.read_text().partition('## An environment that reads a data set')[2]
BLOCKS = re.findall(
  r'^```(\w+)\n(.*?)^```', SECTION.partition('\n## ')[0], re.MULTILINE | re.DOTALL
)


@pytest.fixture
def commands(tmp_path, monkeypatch):
  """The commands by module, in a folder that has the files."""
  (rows_text,) = [text for kind, text in BLOCKS if kind == 'json']
  (env_text,) = [text for _, text in BLOCKS if text.startswith('# quiz_env.py\n')]
  (tmp_path / 'quiz.jsonl').write_text(rows_text)
  (tmp_path / 'quiz_env.py').write_text(env_text)
  monkeypatch.chdir(tmp_path)
  (lines,) = [text for kind, text in BLOCKS if kind == 'sh']
  words = [shlex.split(line) for line in lines.splitlines()]
  assert all(command[:2] == ['python', '-m'] for command in words)
  return {command[2]: command[3:] for command in words}


@pytest.mark.slow
def test_its_rows_are_played_and_dumped_with_its_columns(commands, tmp_path, capsys):
  assert rollout.main([*commands['launch.rollout'], *BARE]) == 0
  capsys.readouterr()
  exec([text for kind, text in BLOCKS if kind == 'python'][1], {})
  printed = capsys.readouterr().out.splitlines()
  assert len(printed) == 8  # four rows, each twice
  topics = [line.split()[:2] for line in printed]
  assert topics == [
    [str(row), topic]
    for row, topic in enumerate(['places', 'places', 'animals', 'animals'])
    for _ in range(2)
  ]
  assert all(re.search(r" '.*' 0\.0$|\".*\" 0\.0$", line) for line in printed)


@pytest.mark.slow
def test_it_trains_and_is_evaluated_and_shown(commands, tmp_path, capsys):
  assert train.main([*commands['launch.train'], *BARE]) == 0
  eval_rows = [
    row for row in rows(tmp_path / 'runs' / 'quiz') if 'eval/quiz/tries' in row
  ]
  assert eval_rows and all(1 <= row['eval/quiz/tries'] <= 2 for row in eval_rows)
  assert all(0 <= row['eval/quiz/accuracy'] <= 1 for row in eval_rows)
  capsys.readouterr()
  assert play.main([*commands['launch.play'], *BARE]) == 0
  output = capsys.readouterr().out
  assert "'topic': '" in output and re.search(
    r'^ +topic +(places|animals)$', output, re.M
  )
