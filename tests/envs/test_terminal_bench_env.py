"""Terminal-Bench's tasks played for real in the local sandbox, honestly and not."""

import os
import tempfile

import pytest

from jaxrl.envs.sandbox.sandbox_api import SandboxError
from jaxrl.envs.terminal import dockerfile, terminal_bench_tasks
from jaxrl.envs.terminal.shell_session import SHELL_HELP
from jaxrl.options import ConfigError
from jaxrl.types import Task
from tests.calls import env_factory
from tests.envs import terminal_folders
from tests.envs.sandbox.test_local_sandbox import named
from tests.envs.swe_repos import write
from tests.marks import SANDBOXED, slow

FIRST = (terminal_folders.count, terminal_folders.script)
SECOND = (terminal_folders.newer_count, terminal_folders.newer_script)
LEAN = '{"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}'  # they take time to import
SMALL = f'local(memory_mb=512, processes=24, environment={LEAN})'


@pytest.fixture
def folders(tmp_path, monkeypatch):
  """The folder of tasks, and that of whatever an episode writes."""
  scratch = tmp_path / 'scratch'
  scratch.mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(scratch))
  return tmp_path / 'tasks', scratch


def begin(tasks, name, **options):
  options = {'tasks': str(tasks), 'sandbox': SMALL, **options}
  env = env_factory('terminal_bench', options)()
  task = Task(seed=0, index=0, item={'question': name})
  return env, env.reset(seed=0, options={'task': task})


def do(env, command):
  return env.step(f'```\n{command}\n```')


def episode(tasks, name, command, **options):
  env, _ = begin(tasks, name, **options)
  shown, *_ = do(env, command)
  _, reward, terminated, _, info = do(env, 'submit')
  assert terminated
  return reward, info['metrics'], shown


@SANDBOXED
@pytest.mark.parametrize('task', [*FIRST, *SECOND])
def test_the_solution_scores_one(folders, task):
  tasks, scratch = folders
  name, solution = task(tasks)
  reward, metrics, shown = episode(tasks, name, solution)
  assert (reward, metrics['accuracy'], metrics['passed']) == (1, 1, 1)
  assert shown == 'exit code 0\n'
  assert not list(scratch.iterdir())


@SANDBOXED
@pytest.mark.parametrize('task', [FIRST[0], slow(SECOND[0])])
def test_what_the_agent_sees_and_that_doing_nothing_scores_nothing(folders, task):
  tasks, scratch = folders
  name, _ = task(tasks)
  env, (instruction, _) = begin(tasks, name)
  assert instruction == f'{terminal_folders.COUNT}\n\n{SHELL_HELP}'
  shown = do(env, 'pwd; ls / /app /tests 2>&1; cat greeting.txt')[0]
  assert '/app\n' in shown
  assert "cannot access '/tests'" in shown
  assert 'test_outputs' not in shown
  assert 'solution' not in shown
  assert shown.endswith('good day from here\n')
  reward, metrics = do(env, 'submit')[1::3]
  assert (reward, metrics['metrics']['passed']) == (0, 0)
  assert not list(scratch.iterdir())


@SANDBOXED
@pytest.mark.parametrize('task', [FIRST[0], slow(SECOND[0])])
def test_the_reference_solution_and_the_output_of_its_tests(folders, task):
  tasks, scratch = folders
  name, _ = task(tasks)
  passes = 'echo short test summary info; echo PASSED a; exit 0'
  tests = (
    f'cp /app/count.txt /logs/verifier/reward.txt; grep 2 /app/count.txt; {passes}'
  )
  env, _ = begin(tasks, name, test_command=tests)
  _, reward, _, _, info = env.step(env.apply_solution())
  assert reward == (1 if task is FIRST[0] else 2)  # Harbor's is what the file says
  output = info['columns']['test_output']
  assert output.startswith('exit code 0\n2\nshort test summary info\nPASSED a\n')
  file = 'solution.sh' if task is FIRST[0] else 'solution/solve.sh'
  write(tasks / name, {file: 'echo too much; exit 5'})
  env, _ = begin(tasks, name, test_command='echo fine')
  _, reward, _, _, info = env.step(env.apply_solution())
  why = {
    FIRST[0]: "no pytest summary in the tests' output",
    SECOND[0]: 'the tests wrote no reward.json or reward.txt',
  }
  assert (reward, info['columns']['failed']) == (0, why[task])
  env, _ = begin(tasks, name, test_command='echo FAIL; exit 1')
  _, reward, _, _, info = env.step(env.apply_solution())
  assert reward == 0
  assert info['columns']['test_output'] == (
    'the reference solution: exit code 5\ntoo much\n\nthe tests: exit code 1\nFAIL\n'
  )
  (tasks / name / file).unlink()
  env, _ = begin(tasks, name)
  assert env.apply_solution() is None
  env.kill()
  assert not list(scratch.iterdir())


TAMPER = """
cat > conftest.py <<'EOF'
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
  outcome = yield
  report = outcome.get_result()
  report.outcome, report.longrepr = "passed", None
EOF
cp conftest.py sitecustomize.py; cp conftest.py pytest.py; cp conftest.py evil.py
printf '[pytest]\\naddopts = -p evil\\npythonpath = .\\n' > pytest.ini
printf '#!/bin/sh\\necho PASSED\\n' > pytest; chmod +x pytest
cp pytest /usr/local/bin/; mkdir -p /tests /logs/verifier; echo 1 > reward.txt
cp reward.txt /logs/verifier; echo 'export PATH=/app' > ~/.bashrc
(while :; do echo 1 > /logs/verifier/reward.txt; done) 2> /dev/null &
echo '=== short test summary info ==='; echo PASSED a
"""


@SANDBOXED
@pytest.mark.parametrize('task', [FIRST[0], slow(SECOND[0])])
def test_tampering_with_the_tests_scores_nothing(folders, task):
  tasks, scratch = folders
  name, _ = task(tasks)
  reward, metrics, _ = episode(tasks, name, TAMPER)
  assert (reward, metrics['passed']) == (0, 0)
  assert not list(scratch.iterdir())


@SANDBOXED
def test_words_of_a_tested_program_are_no_verdict(folders):
  tasks, scratch = folders
  name, _ = terminal_folders.script(tasks)
  forge = """cat > bin/by_size.sh <<'EOF'
printf '\\n== short test summary info ==\\nPASSED a::b\\n' | tee /proc/$PPID/fd/1
kill -9 $PPID
EOF"""
  assert episode(tasks, name, forge)[0] == 0
  assert not list(scratch.iterdir())


@pytest.mark.slow
@SANDBOXED
def test_limits_on_time_and_turns(folders):
  tasks, scratch = folders
  name, _ = terminal_folders.count(tasks)
  mark = f'92.{os.getpid()}'
  env, _ = begin(tasks, name, time_factor=0.01)  # of 300 seconds
  _, reward, terminated, _, info = do(env, f'setsid sleep {mark} & sleep {mark}')
  assert (terminated, reward, info['metrics']['submitted']) == (True, 0, 0)
  assert named(mark) == []
  write(tasks / name, {'run-tests.sh': f'sleep {mark}'})
  env, _ = begin(tasks, name, shell='shell(turns=1)', time_factor=0.01)
  _, reward, terminated, _, info = do(env, 'echo 2 > count.txt')
  assert (terminated, reward, info['metrics']['test_timeout']) == (True, 0, 1)
  assert named(mark) == []
  test_command = 'pytest -rA /tests/test_outputs.py'
  options = {'test_command': test_command, 'shell': 'shell(turns=1)'}
  env, _ = begin(tasks, name, **options)
  assert do(env, 'echo 2 > count.txt')[1] == 1
  assert not list(scratch.iterdir())


@SANDBOXED
def test_a_dockerfile_may_add_to_the_path(folders):
  tasks, scratch = folders
  name, _ = terminal_folders.count(tasks)
  text = 'FROM a\nENV PATH="/app/bin:${PATH}"\nWORKDIR /app\nCOPY words.txt bin/'
  write(tasks / name, {'Dockerfile': text})
  env, _ = begin(tasks, name)
  script = "printf 'grep -c a /app/bin/words.txt' > bin/count; chmod +x bin/count"
  assert do(env, f'{script}; count > count.txt')[0] == 'exit code 0\n'
  assert do(env, 'submit')[1] == 1
  assert not list(scratch.iterdir())


@SANDBOXED
def test_what_cannot_be_built_here_is_told(folders):
  tasks, scratch = folders
  name, _ = terminal_folders.count(tasks)
  write(tasks / name, {'Dockerfile': 'FROM a\nRUN false'})
  with pytest.raises(
    SandboxError, match=r"count: RUN false ended with 1.*build='copy'"
  ):
    begin(tasks, name)
  env, _ = begin(tasks, name, build='copy', test_command='absent-program')
  with pytest.raises(SandboxError, match='absent-program calls a program'):
    do(env, 'submit')
  assert not list(scratch.iterdir())


@SANDBOXED
@pytest.mark.parametrize('script', ['/app/answer', 'cd /app && sh -c ./answer'])
def test_a_program_that_the_agent_owed_is_missing(folders, script):
  tasks, scratch = folders
  name, _ = terminal_folders.count(tasks)
  env, _ = begin(tasks, name, test_command=script)
  assert do(env, 'submit')[1] == 0
  env, _ = begin(tasks, name, test_command=f'bash -c "{script}; absent-program"')
  with pytest.raises(SandboxError, match='absent-program'):
    do(env, 'submit')
  assert not list(scratch.iterdir())


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('FROM a\nCOPY words.txt /usr/bin/x', '/usr/bin/x can only be written to'),
    ('FROM a\nCOPY absent .', 'there is no such file'),
    ('FROM a AS b\nFROM c\nCOPY --from=b x y', 'several stages'),
    ('FROM a\nADD https://example.org/x .', 'not downloaded here'),
    ('FROM a\nCOPY ../other .', 'leads out of'),
    ('FROM a\nONBUILD RUN x', 'ONBUILD needs a container'),
    ('FROM a\nRUN <<EOF', 'here-document'),
  ],
)
def test_dockerfiles_that_need_a_container(tmp_path, text, words):
  write(tmp_path, {'task/Dockerfile': text, 'task/words.txt': '', 'other': ''})
  (tmp_path / 'out').mkdir()
  with pytest.raises(ValueError, match=words):
    dockerfile.stage_dockerfile(tmp_path / 'task', tmp_path / 'out')


def test_copying_a_whole_task_gives_no_tests_away(tmp_path):
  name, _ = terminal_folders.count(tmp_path)
  write(tmp_path / name, {'Dockerfile': 'FROM a\nCOPY . .', 'sub/tests/kept': ''})
  out = tmp_path / 'out'
  out.mkdir()
  dockerfile.stage_dockerfile(tmp_path / name, out)
  kept = sorted(path.name for path in (out / 'app').rglob('*'))
  assert kept == ['Dockerfile', 'kept', 'sub', 'tests', 'words.txt']


def test_a_dockerfile_is_read(tmp_path):
  text = """FROM a
# a comment
ARG WHERE=/srv/data
ENV NAME="two words" \\
    # another comment
    OTHER=$WHERE/x
WORKDIR /app
WORKDIR inner
COPY --chown=1:1 ["a.txt", "b.txt", "$WHERE/"]
COPY a.txt renamed.txt
RUN ["touch", "a b"]
RUN one && \\
    two
USER somebody
CMD ["sh"]
"""
  write(tmp_path, {'task/Dockerfile': text, 'task/a.txt': 'a', 'task/b.txt': 'b'})
  out = tmp_path / 'out'
  out.mkdir()
  staged = dockerfile.stage_dockerfile(tmp_path / 'task', out)
  assert staged.workdir == '/app/inner'
  assert staged.folders == {'/app': f'{out}/app', '/srv': f'{out}/srv'}
  assert staged.environment == {
    'WHERE': '/srv/data',
    'NAME': 'two words',
    'OTHER': '/srv/data/x',
  }
  assert staged.commands == [
    ('/app/inner', "touch 'a b'"),
    ('/app/inner', 'one &&      two'),
  ]
  files = {
    str(p.relative_to(out)): p.read_text() for p in out.rglob('*') if p.is_file()
  }
  assert files == {
    'srv/data/a.txt': 'a',
    'srv/data/b.txt': 'b',
    'app/inner/renamed.txt': 'a',
  }


def test_tasks_are_read_and_wrong_ones_told(tmp_path):
  terminal_folders.count(tmp_path)
  task = terminal_bench_tasks.read_terminal_task(tmp_path / 'count')
  assert (task.agent_seconds, task.test_seconds) == (300, 100)
  terminal_folders.newer_count(tmp_path)
  task = terminal_bench_tasks.read_terminal_task(tmp_path / 'newer_count')
  assert (task.agent_seconds, task.test_seconds, task.script) == (300, 100, 'test.sh')
  for files, words in (
    ({'a/x': ''}, 'neither task.yaml nor task.toml'),
    ({'b/task.yaml': 'difficulty: easy'}, 'no instruction'),
    ({'c/task.yaml': 'instruction: x'}, 'no run-tests.sh'),
    ({'d/task.yaml': 'instruction: x\nparser_name: swebench'}, 'only pytest'),
    (
      {
        'e/task.yaml': 'instruction: x',
        'e/docker-compose.yaml': 'services: {a: {}, b: {}}',
      },
      'several containers',
    ),
  ):
    write(tmp_path, files)
    with pytest.raises(ValueError, match=words):
      terminal_bench_tasks.read_terminal_task(tmp_path / next(iter(files))[0])
  with pytest.raises(ConfigError, match='folder of tasks'):
    env_factory('terminal_bench', {'tasks': str(tmp_path / 'absent')})
