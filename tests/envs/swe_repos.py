"""Two tiny repositories with a fault each, and tasks in SWE-bench Verified's form."""

import json
import os
import subprocess

QUIET = {'GIT_CONFIG_GLOBAL': os.devnull, 'GIT_CONFIG_NOSYSTEM': '1'}

LEDGER = {
  'setup.cfg': '[tool:pytest]\ntestpaths = tests\n',
  'conftest.py': 'import sys\nsys.path.insert(0, "src")\n',
  'src/ledger.py': '''class Ledger:
  """Amounts by account."""

  def __init__(self):
    self.accounts = {}

  def post(self, account, amount):
    self.accounts[account] = amount

  def balance(self, account):
    return self.accounts.get(account, 0)
''',
  'tests/test_ledger.py': """from ledger import Ledger


def test_an_empty_account():
  assert Ledger().balance("rent") == 0


def test_one_posting():
  ledger = Ledger()
  ledger.post("rent", 5)
  assert ledger.balance("rent") == 5
""",
}
LEDGER_FIX = {
  'src/ledger.py': LEDGER['src/ledger.py'].replace(
    'self.accounts[account] = amount',
    'self.accounts[account] = self.balance(account) + amount',
  )
}
LEDGER_TESTS = {
  'tests/test_ledger.py': LEDGER['tests/test_ledger.py']
  + """

def test_postings_add_up():
  ledger = Ledger()
  ledger.post("rent", 5)
  ledger.post("rent", 7)
  assert ledger.balance("rent") == 12
"""
}
SPANS = {
  'spans/__init__.py': '',
  'spans/merge.py': '''def merge(spans):
  """Spans that overlap or touch, as one; sorted."""
  merged = []
  for start, end in sorted(spans):
    if merged and start < merged[-1][1]:
      merged[-1] = (merged[-1][0], end)
    else:
      merged.append((start, end))
  return merged
''',
  'tests/test_apart.py': """from spans.merge import merge


def test_apart():
  assert merge([(5, 6), (1, 2)]) == [(1, 2), (5, 6)]
""",
  'tests/__init__.py': '',
  'tests/conftest.py': '',
  'pyproject.toml': '[tool.pytest.ini_options]\npythonpath = ["."]\n',
}
SPANS_FIX = {
  'spans/merge.py': SPANS['spans/merge.py']
  .replace('start < merged', 'start <= merged')
  .replace('], end)', '], max(merged[-1][1], end))')
}
SPANS_TESTS = {
  'tests/test_merge.py': """import pytest

from spans.merge import merge


class TestMerge:
  @pytest.mark.parametrize("spans", [[(1, 3), (3, 4)], [(1, 4), (2, 3)]])
  def test_one(self, spans):
    assert merge(spans) == [(1, 4)]
""",
}


def git(folder, *arguments, stdin=''):
  done = subprocess.run(
    ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', *arguments],
    cwd=folder,
    env=os.environ | QUIET,
    input=stdin,
    capture_output=True,
    text=True,
    check=True,
  )
  return done.stdout.strip()


def write(folder, files):
  for name, text in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def make(repos, name, base, fix, tests, fail_to_pass, pass_to_pass):
  """A repository with its fault and, in a later commit, the fix; its task's row."""
  folder = repos / name
  folder.mkdir(parents=True)
  git(folder, 'init', '-q')
  write(folder, base)
  git(folder, 'add', '-A')
  git(folder, 'commit', '-qm', 'as it was')
  commit = git(folder, 'rev-parse', 'HEAD')
  patches = []
  for files in (fix, tests):
    write(folder, files)
    git(folder, 'add', '-A')
    patches.append(git(folder, 'diff', '--cached', '--binary') + '\n')
    git(folder, 'commit', '-qm', 'the secret fix')
  return {
    'repo': name,
    'instance_id': f'{name.replace("/", "__")}-1',
    'base_commit': commit,
    'patch': patches[0],
    'test_patch': patches[1],
    'problem_statement': f'{name} is wrong.',
    'hints_text': '',
    'created_at': '2024-01-01T00:00:00Z',
    'version': '1.0',
    'FAIL_TO_PASS': json.dumps(fail_to_pass),
    'PASS_TO_PASS': json.dumps(pass_to_pass),
    'environment_setup_commit': commit,
    'difficulty': '<15 min fix',
  }


def ledger(repos):
  file = 'tests/test_ledger.py'
  return make(
    repos,
    'acme/ledger',
    LEDGER,
    LEDGER_FIX,
    LEDGER_TESTS,
    [f'{file}::test_postings_add_up'],
    [f'{file}::test_an_empty_account', f'{file}::test_one_posting'],
  )


def spans(repos):
  one = 'tests/test_merge.py::TestMerge::test_one'
  return make(
    repos,
    'acme/spans',
    SPANS,
    SPANS_FIX,
    SPANS_TESTS,
    [f'{one}[spans0]', f'{one}[spans1]'],
    ['tests/test_apart.py::test_apart'],
  )
