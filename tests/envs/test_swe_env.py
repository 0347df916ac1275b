"""SWE-bench's tasks played for real in the local sandbox, honestly and not."""

import dataclasses
import json
import os
import tempfile
import threading

import pytest

from jaxrl.data.dataset import GlobalDataset
from jaxrl.envs.sandbox.sandbox_api import SandboxError
from jaxrl.envs.terminal import swe_tasks, test_results
from jaxrl.envs.terminal.shell_session import SHELL_HELP, extract_command
from jaxrl.options import ConfigError
from jaxrl.types import Task
from tests.calls import env_factory, parse_call
from tests.envs import swe_repos
from tests.envs.sandbox.test_local_sandbox import named
from tests.marks import SANDBOXED
from tests.rollout.fakes import FakeEngine, play, world

LEAN = '{"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}'  # they take time to import
# The data of a hidden test: its names might be some library's, too.
SECRET = '[[(1, 3), (3, 4)], [(1, 4), (2, 3)]]'
SMALL = f'local(memory_mb=512, processes=24, environment={LEAN})'


@pytest.fixture
def folders(tmp_path, monkeypatch):
  """The folder of repositories, and that of whatever an episode writes."""
  scratch = tmp_path / 'scratch'
  scratch.mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(scratch))
  return tmp_path / 'repos', scratch


def begin(repos, row, **options):
  env = env_factory('swe', {'repos': str(repos), 'sandbox': SMALL, **options})()
  return env, env.reset(seed=0, options={'task': Task(seed=0, index=0, item=row)})


def do(env, command):
  return env.step(f'Then:\n```bash\n{command}\n```')


def episode(repos, row, command, **options):
  env, _ = begin(repos, row, **options)
  shown, *_ = do(env, command)
  _, reward, terminated, truncated, info = do(env, 'submit')
  assert (terminated, truncated) == (True, False)
  return reward, info, shown


@SANDBOXED
@pytest.mark.parametrize('repository', [swe_repos.ledger, swe_repos.spans])
def test_the_solution_scores_one_and_leaves_nothing_behind(folders, repository):
  repos, scratch = folders
  row = repository(repos)
  fix = f"git apply - <<'EOF'\n{row['patch']}EOF"
  reward, info, shown = episode(repos, row, fix)
  assert (reward, shown) == (1, 'exit code 0\n')
  assert info['metrics'] == {
    **{'commands': 1, 'invalid_actions': 0, 'submitted': 1, 'test_timeout': 0},
    **{'accuracy': 1, 'correct': 1, 'passed': 1, 'fail_to_pass': 1, 'pass_to_pass': 1},
  }
  assert not list(scratch.iterdir())


@SANDBOXED
def test_what_the_agent_sees_and_that_doing_nothing_scores_nothing(folders):
  repos, scratch = folders
  row = swe_repos.spans(repos)
  env, (question, _) = begin(repos, row)
  assert question == f'acme/spans is wrong.\n\n{SHELL_HELP}'
  shown, reward, terminated, _, _ = do(
    env, 'pwd; git log --all --oneline | wc -l; git status --short; ls tests'
  )
  assert (reward, terminated) == (0, False)
  assert shown.split()[3:5] == ['/testbed', '1']
  assert 'test_merge' not in shown
  assert SECRET in row['test_patch']
  hunt = f'grep -rlF -e "{SECRET}" -e "secret fix" /testbed /tmp'
  assert do(env, f'{hunt}; git fsck --lost-found')[0] == 'exit code 0\n'
  assert do(env, f'echo {"x" * 90}; cd /; exit 3')[0].startswith('exit code 3\nxxx')
  assert 'no command' in env.step('I am thinking.')[0]
  metrics = do(env, 'submit')[4]['metrics']
  assert (metrics['accuracy'], metrics['fail_to_pass'], metrics['pass_to_pass']) == (
    0,
    0,
    1,
  )
  assert (metrics['invalid_actions'], metrics['passed']) == (1, pytest.approx(1 / 3))
  assert not list(scratch.iterdir())


@pytest.mark.slow
@SANDBOXED
def test_hidden_tests_are_in_no_folder_of_the_machine(folders):
  repos, _ = folders
  row = swe_repos.spans(repos)
  patient = parse_call('shell(seconds=240.)')  # it searches the machine's own files
  env, _ = begin(repos, row, shell=patient)
  hunt = f'grep -rlF -e "{SECRET}" -e "secret fix" /etc /dev'
  assert do(env, f'{hunt}; true')[0] == 'exit code 0\n'
  env.kill()


@SANDBOXED
def test_the_reference_solution_and_the_output_of_its_tests(folders):
  repos, scratch = folders
  row = swe_repos.ledger(repos)
  fixed = 'grep "self.balance(account) + amount" src/ledger.py >&2'
  tests = f'{fixed} && for test in {{tests}}; do echo "PASSED $test"; done'
  for patch, reward in ((row['patch'], 1), (row['test_patch'], 0)):
    env, _ = begin(repos, row | {'patch': patch}, test_command=tests)
    _, actual_reward, terminated, _, info = env.step(env.apply_solution())
    assert (actual_reward, terminated) == (reward, True)
    output = info['columns']['test_output']
    assert output.startswith(f'exit code {1 - reward}\n')
    assert ('test_one_posting\n' in output) is (reward == 1)
  env, _ = begin(repos, row | {'patch': ''})
  assert env.apply_solution() is None
  env, _ = begin(repos, row | {'patch': 'nonsense'})
  with pytest.raises(ValueError, match='git apply'):
    env.apply_solution()
  env.kill()
  assert not list(scratch.iterdir())


@SANDBOXED
def test_long_outputs_of_tests_keep_their_end(folders):
  repos, scratch = folders
  row = swe_repos.ledger(repos)
  noise = 'seq 100000; seq 100000 >&2; echo the end; echo the last words >&2; exit 3'
  env, _ = begin(repos, row, test_command=noise)
  output = do(env, 'submit')[4]['columns']['test_output']
  assert output.startswith('exit code 3\n[')
  assert '99999\n100000\nthe end\n[' in output and output.endswith('the last words\n')
  assert len(output) < test_results.MAX_OUTPUT_CHARS + 100
  env, _ = begin(repos, row, test_command='echo on; sleep 9', test_seconds=0.3)
  output = do(env, 'submit')[4]['columns']['test_output']
  assert output == 'killed: it took more than 0 seconds\non\n'
  assert not list(scratch.iterdir())


HOOK = """cat > conftest.py <<'EOF'
import sys
sys.path.insert(0, "src")
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
  outcome = yield
  report = outcome.get_result()
  report.outcome, report.longrepr = "passed", None
EOF
"""
TAMPER = """
cp conftest.py sitecustomize.py; cp conftest.py evil.py; cp conftest.py pytest.py
printf '[tool:pytest]\\naddopts = -p evil\\npythonpath = .\\n' > setup.cfg
printf '[pytest]\\naddopts = -p evil\\npythonpath = .\\n' > pytest.ini
cp pytest.ini tox.ini
rm -rf tests; ln -s src tests
echo 'def test_postings_add_up(): pass' > src/test_ledger.py
mkdir src/__pycache__; echo x > src/__pycache__/test_ledger.cpython-311.pyc
git config core.fsmonitor 'touch /tmp/ran'; git config core.hooksPath .
echo '* filter=evil' > .gitattributes
(while :; do echo '<testsuites/>' > .report-0.xml; done) &
ln -s /etc/passwd outside; mkfifo pipe; chmod 0 pipe
"""


@SANDBOXED
def test_tampering_with_the_tests_scores_nothing(folders):
  repos, scratch = folders
  row = swe_repos.ledger(repos)
  reward, info, _ = episode(repos, row, HOOK + TAMPER)
  assert reward == 0
  assert info['columns']['failed'].split() == json.loads(row['FAIL_TO_PASS'])
  assert episode(repos, row, HOOK, protect=())[0] == 1  # it is protection that helps
  assert not list(scratch.iterdir())


@pytest.mark.slow
@SANDBOXED
def test_hanging_and_forking_commands_are_ended(folders):
  repos, scratch = folders
  mark = f'94.{os.getpid()}'
  env, _ = begin(
    repos,
    swe_repos.ledger(repos),
    shell='shell(seconds=2.0, output=60)',
    episode_seconds=50.0,
  )
  hang = f'setsid sleep {mark} & echo begun; exec sleep {mark}'
  assert do(env, hang)[0] == 'killed: it took more than 2 seconds\nbegun\n'
  bomb = f': {mark}; f() {{ f | f & }}; f; sleep {mark}'
  assert do(env, bomb)[0].startswith('killed: ')
  shown = do(env, 'seq 1000')[0]
  assert '3833 characters left out' in shown
  assert shown.startswith('exit code 0\n1\n2\n')
  assert shown.endswith('999\n1000\n')
  assert named(mark) == []
  threading.Timer(0.3, env.kill).start()
  with pytest.raises(SandboxError, match='was stopped'):
    do(env, f'sleep {mark}')
  assert named(mark) == []
  assert not list(scratch.iterdir())


@SANDBOXED
def test_a_missing_test_program_is_no_fault_of_the_agents(folders):
  repos, scratch = folders
  env, _ = begin(repos, swe_repos.ledger(repos), test_command='A=b nosetests {files}')
  with pytest.raises(SandboxError, match="no 'nosetests' to run the tests with"):
    do(env, 'submit')
  assert not list(scratch.iterdir())


@SANDBOXED
def test_the_ids_of_very_many_tests_are_given(folders):
  repos, scratch = folders
  row = swe_repos.ledger(repos)
  ids = [f'tests/test_ledger.py::test_{"x" * 90}{i}' for i in range(2000)]
  env, _ = begin(
    repos,
    row | {'PASS_TO_PASS': ids},
    test_command='for test in {tests}; do echo "PASSED $test"; done',
  )
  assert do(env, 'submit')[1] == 1
  assert not list(scratch.iterdir())


@SANDBOXED
def test_who_breaks_the_setup_scores_nothing(folders):
  repos, scratch = folders
  setup = 'test ! -e setup.sh || sh setup.sh'
  row = swe_repos.ledger(repos)
  reward, info, _ = episode(repos, row, 'echo exit 3 > setup.sh', setup=setup)
  assert (reward, info['metrics']['passed']) == (0, 0)
  assert info['columns']['test_output'].startswith('setup ended with 3')
  with pytest.raises(SandboxError, match='setup ended with 3'):
    begin(repos, row, setup='exit 3')
  assert not list(scratch.iterdir())


@SANDBOXED
async def test_an_episode_of_an_env_manager(folders):
  repos, scratch = folders
  row = swe_repos.ledger(repos)
  turns = [
    'Let me look.\n```\ncat src/ledger.py\n```',
    f"```bash\ngit apply - <<'EOF'\n{row['patch']}EOF\n```",
    '<tool_call>{"name": "submit", "arguments": {}}</tool_call>',
  ]
  replies = iter(turns)
  engine = FakeEngine(lambda prompt, sampling: next(replies))
  options = {'repos': str(repos), 'sandbox': SMALL}
  rows = GlobalDataset([row], question_key='problem_statement', answer_key='')
  made_world = world(env_factory('swe', options), engine)
  made_world = dataclasses.replace(made_world, dataset=rows)
  (rollout,) = await play(
    made_world,
    max_steps=9,
    max_length=9000,
    max_tokens_per_step=2000,
  )
  assert (rollout.stop_reason, rollout.score) == ('finish', 1)
  assert rollout.metrics['turns'] == 3
  assert 'self.accounts[account] = amount' in rollout.messages[2]['content']
  assert 'submit' in rollout.messages[0]['content']
  assert not list(scratch.iterdir())


def test_wrong_options_and_rows_are_told(tmp_path):
  for options, words in (
    ({}, 'folder of clones'),
    ({'repos': str(tmp_path), 'sandbox': 'dokcer'}, "Did you mean 'docker'"),
    ({'repos': str(tmp_path), 'sandbox': 'local(memory=1)'}, "'memory_mb'"),
    ({'repos': str(tmp_path), 'sandbox': 'local(readonly=("/no",))'}, "'/no' must be"),
    ({'repos': str(tmp_path), 'shell': 'shell(turns=0)'}, 'at least one turn'),
  ):
    with pytest.raises(ConfigError, match=words):
      env_factory('swe', options)
  with pytest.raises(ValueError, match="lacks 'repo'"):
    swe_tasks.read_swe_task({'instance_id': 'a'})
  row = {
    **dict.fromkeys(('repo', 'base_commit', 'problem_statement', 'test_patch'), ''),
    **{'instance_id': 'a-1', 'FAIL_TO_PASS': '{', 'PASS_TO_PASS': '[]'},
  }
  with pytest.raises(ValueError, match='a-1: FAIL_TO_PASS is not JSON'):
    swe_tasks.read_swe_task(row)
  with pytest.raises(ValueError, match='names no test'):
    swe_tasks.read_swe_task(row | {'FAIL_TO_PASS': []})


@pytest.mark.parametrize(
  ('reply', 'command'),
  [
    ('First\n```\nls\n```\nor\n```sh\nls -a\npwd\n```', 'ls -a\npwd\n'),
    ('```\nsubmit\n```', 'submit\n'),
    ('I say ls', ''),
    ('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>', 'ls'),
    ('<tool_call>\n{"name": "submit"}\n</tool_call>', 'submit'),
    ('```\nls\n```\n<tool_call>{"name": ["a"]}</tool_call>', 'ls\n'),
    ('<tool_call>' + '[' * 99999 + '</tool_call>', ''),
  ],
)
def test_commands_of_replies(reply, command):
  assert extract_command(reply) == command
