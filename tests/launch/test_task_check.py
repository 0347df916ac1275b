"""`launch.rollout --check`: broken tasks are found without a model, and said so."""

import json
import shlex

import pytest

from jaxrl.user_code import import_object
from launch import rollout
from tests.envs import swe_repos
from tests.launch import runs
from tests.marks import SANDBOXED

CONFIG = """
from configs import base

def get_config(algorithm='grpo'):
  config = base.get_config(algorithm)
  config.dataset.columns.update({columns!r})
  config.env.own = base.env_section({env_type!r}, max_steps=2, **{options!r})
  return config
"""
OWN = """
import threading
import time

LOCK = threading.Lock()
COUNTS = {'playing': 0, 'most': 0}


class Own:
  empty_reply = ''

  def reset(self, *, seed, options=None):
    self.item = options['task'].item
    with LOCK:
      COUNTS['playing'] += 1
      COUNTS['most'] = max(COUNTS['most'], COUNTS['playing'])
    if self.item['question'] == 'unprepared':
      raise OSError('no such image')
    return self.item['question'], {}

  def apply_solution(self):
    if self.item['question'] == 'unwritten':
      return None
    if self.item['question'] == 'unfit':
      raise ValueError('it does not apply')
    return self.item['solution']

  def step(self, action):
    time.sleep(5 if self.item['question'] == 'slow' else 0.02)
    return '', float((action or 'none') == self.item['answer']), True, False, {}

  def kill(self):
    with LOCK:
      COUNTS['playing'] -= 1
"""


def check(folder, rows, env_type, *options, columns=(), **section):
  (folder / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  text = CONFIG.format(columns=dict(columns), env_type=env_type, options=section)
  (folder / 'config.py').write_text(text)
  return rollout.main(
    [
      f'--config={folder}/config.py',
      f'--config.dataset.path={folder}/rows.jsonl',
      f'--workdir={folder}/run',
      '--check',
      *options,
    ]
  )


def results(folder):
  lines = (folder / 'run' / 'check.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def row(question, answer='right', solution='right'):
  return {'question': question, 'answer': answer, 'solution': solution}


def test_every_way_in_which_a_task_can_be_broken(tmp_path, capsys):
  (tmp_path / 'own.py').write_text(OWN)
  rows = [
    row('fine'),
    row('unprepared'),
    row('unwritten'),
    row('unfit'),
    row('wrong', solution='left'),
    row('trivial', answer='none', solution=''),
    row('slow'),
    row('last'),
  ]
  section = {'max_concurrency': 2, 'timeouts': {'reset': 20, 'step': 0.5}}
  assert check(tmp_path, rows, f'{tmp_path}/own.py:Own', **section) == 1
  output = capsys.readouterr().out
  lines = [line for line in output.splitlines() if line.startswith('own row')]
  assert len(lines) == 8
  for number, (line, words) in enumerate(
    zip(
      lines,
      (
        '(fine): ok',
        '(unprepared): broken: setup or grading fails: with the reference solution:',
        '(unwritten): unverified: it has no reference solution',
        '(unfit): broken: the reference solution fails: ',
        '(wrong): broken: the reference solution fails: the reward is 0',
        '(trivial): broken: an empty solution passes',
        '(slow): broken: setup or grading fails: with the reference solution: '
        'CallTimeoutError: no answer within 0.5 s',
        '(last): ok',
      ),
      strict=True,
    )
  ):
    assert line.startswith(f'own row {number} {words}'), line
  assert 'OSError: no such image' in lines[1] and 'own.py, line 18' in lines[1]
  assert 'ValueError: it does not apply' in lines[3]
  assert '5 of 8 tasks broken.' in output and 'ok            2' in output
  assert [result['verdict'] for result in results(tmp_path)] == [
    *('ok', 'setup_fails', 'no_solution', 'solution_fails', 'solution_fails'),
    *('empty_passes', 'setup_fails', 'ok'),
  ]
  counts = import_object(f'{tmp_path}/own.py:COUNTS')
  assert counts == {'playing': 0, 'most': 2}


def test_an_environment_in_a_process_of_its_own(tmp_path, capsys):
  (tmp_path / 'own.py').write_text(OWN)
  env_type = f'isolated:{tmp_path}/own.py:Own'
  assert check(tmp_path, [row('unfit')], env_type) == 1
  output = capsys.readouterr().out
  assert 'the reference solution fails: ' in output and 'it does not apply' in output


def test_tasks_that_are_all_fine(tmp_path, capsys):
  (tmp_path / 'own.py').write_text(OWN)
  rows = [row(str(n)) for n in range(4)]
  env_type = f'{tmp_path}/own.py:Own'
  assert check(tmp_path, rows, env_type, '--num_tasks=3') == 0
  assert '0 of 3 tasks broken.' in capsys.readouterr().out


@SANDBOXED
def test_programs(tmp_path, capsys):
  tests = [{'input': '2', 'output': '4'}]
  rows = [
    {'question': 'q', 'answer': tests, 'program': 'print(2 * int(input()))'},
    {'question': 'q', 'answer': tests, 'program': '```python\nprint(4)\n```'},
    {'question': 'q', 'answer': tests, 'program': 'import absent'},
    {'question': 'q', 'answer': [{'input': '', 'output': ''}], 'program': 'print()'},
    {'question': 'q', 'answer': '[]', 'program': ''},
  ]
  assert check(tmp_path, rows, 'code', columns={'solution': 'program'}) == 1
  verdicts = [result['verdict'] for result in results(tmp_path)]
  assert verdicts == ['ok', 'ok', 'solution_fails', 'empty_passes', 'setup_fails']
  assert "No module named 'absent'" in results(tmp_path)[2]['output']
  assert 'the task has no tests' in capsys.readouterr().out


@SANDBOXED
def test_the_command_of_the_docs_checks_repositories(tmp_path, capsys, monkeypatch):
  page = (runs.ROOT / 'docs' / 'swe.md').read_text()
  block = page.partition('## Checking the tasks\n\n```\n')[2].partition('```')[0]
  task = swe_repos.ledger(tmp_path / 'repos')
  unfit = 'diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n'
  rows = [task, {**task, 'patch': unfit}]
  (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
  words = block.replace('\\\n', '').replace('verified.jsonl', f'{tmp_path}/rows.jsonl')
  command = shlex.split(words.replace('FOLDER', f'{tmp_path}/repos'))
  assert command[:3] == ['python', '-m', 'launch.rollout']
  fixed = 'grep -q "self.balance(account) + amount" src/ledger.py'
  tests = f'{fixed} && for test in {{tests}}; do echo "PASSED $test"; done'
  monkeypatch.chdir(runs.ROOT)
  options = [
    f'--workdir={tmp_path}/run',
    f'--config.env.swe.env_config.test_command={tests}',
  ]
  assert rollout.main([*command[3:], *options]) == 1
  lines = capsys.readouterr().out.splitlines()
  assert lines[1] == 'swe row 0 (acme__ledger-1): ok'
  assert 'row 1 (acme__ledger-1): broken: the reference solution fails: ' in lines[2]
  assert 'git apply' in lines[2] and '.py, line' not in lines[2]


@pytest.mark.parametrize(
  'config, options, words',
  [
    (
      runs.DEBUG,
      [],
      "the tasks of --config.env.arithmetic cannot be checked, as 'math' has no",
    ),
    (runs.DEBUG, ['--group_size=2'], '--group_size=2: has no effect with --check'),
    (runs.DEBUG, ['--part_size=2'], '--part_size=2: has no effect with --check'),
    (runs.DEBUG, ['--check=maybe'], '--check=maybe: must be true or false'),
  ],
)
def test_what_cannot_be_checked(tmp_path, capsys, config, options, words):
  argv = [f'--config={config}', f'--workdir={tmp_path}', '--check', *options]
  assert rollout.main(argv) == 2
  error = capsys.readouterr().err
  assert words in error and error.count('\n') == 1
