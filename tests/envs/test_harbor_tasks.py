"""Task folders that Harbor makes are verified as Harbor's own verifier does."""

import asyncio
import shutil
import tarfile
import tempfile

import pytest

from jaxrl.envs.terminal import harbor_tasks, terminal_bench_tasks
from jaxrl.options import ConfigError
from jaxrl.types import Task
from tests.calls import env_factory
from tests.envs.harbor_package import harbor
from tests.envs.swe_repos import write
from tests.marks import SANDBOXED, adapter

HARBOR = adapter('.venv-harbor')
SMALL = 'local(memory_mb=512, processes=24)'


@pytest.fixture
def make_task(tmp_path, monkeypatch):
  """Makes a task folder as `harbor init` does, and writes what its author would."""
  scratch = tmp_path / 'scratch'
  scratch.mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(scratch))

  def make(script, settings=(), **options):
    mode = harbor('models.task.config').VerifierEnvironmentMode.SHARED
    options = {'verifier_mode': mode, 'no_pytest': True, **options}
    harbor('cli.init')._init_task('org/count', tmp_path / 'tasks', **options)
    folder = tmp_path / 'tasks' / 'count'
    write(folder, {'instruction.md': 'Write 2 to /app/count.txt.\n'})
    write(folder, {'tests/test.sh': script} if script else {})
    text = (folder / 'task.toml').read_text()
    for header, lines in dict(settings).items():
      assert f'{header}\n' in text
      text = text.replace(f'{header}\n', f'{header}\n{lines}\n')
    write(folder, {'task.toml': text})
    return folder

  return make


def begin(folder, **options):
  options = {'tasks': str(folder.parent), 'sandbox': SMALL, **options}
  env = env_factory('terminal_bench', options)()
  task = Task(seed=0, index=0, item={'question': folder.name})
  shown, _ = env.reset(seed=0, options={'task': task})
  return env, shown


class SandboxEnvironment:
  """What Harbor's verifier asks of an environment, in the sandbox of ours."""

  os = property(lambda self: harbor('models.task.config').TaskOS.LINUX)

  def __init__(self, sandbox):
    self.sandbox = sandbox
    sandbox.put('/logs/verifier', None)

  async def exec(self, command, env=None, user=None, **_):
    variables = [f'{name}={value}' for name, value in (env or {}).items()]
    result = self.sandbox.exec(['env', *variables, 'bash', '-c', command])
    outputs = {'stdout': result.stdout.decode(), 'stderr': result.stderr.decode()}
    return harbor('environments.base').ExecResult(return_code=result.code, **outputs)

  async def upload_dir(self, source_dir, target_dir):
    self.sandbox.put(str(target_dir), str(source_dir))

  async def download_dir(self, source_dir, target_dir):
    made = self.sandbox.exec(['tar', '-C', source_dir, '-cf', '-', '.'])
    with tempfile.TemporaryFile() as file:
      file.write(made.stdout)
      file.seek(0)
      with tarfile.open(fileobj=file) as archive:
        archive.extractall(target_dir, filter='data')

  def is_path_mounted(self, environment_path, host_path):
    return False


def verify(env, folder, tmp_path):
  """The rewards by Harbor's own verifier, None if it finds none."""
  shutil.rmtree(tmp_path / 'trial', ignore_errors=True)
  paths = harbor('models.trial.paths').TrialPaths(tmp_path / 'trial')
  paths.verifier_dir.mkdir(parents=True)
  verifier = harbor('verifier.verifier')
  task = harbor('models.task.task').Task(folder)
  environment = SandboxEnvironment(env._sandbox)
  errors = tuple(
    getattr(verifier, name)
    for name in (
      'RewardFileNotFoundError',
      'RewardFileEmptyError',
      'VerifierOutputParseError',
    )
  )
  try:
    made = verifier.Verifier(task, paths, environment)
    return asyncio.run(made.verify()).rewards
  except (*errors, ValueError):
    return None


SCRIPTS = {
  'share': 'echo 0.25 > /logs/verifier/reward.txt',
  'beyond one': 'echo 1.5 > /logs/verifier/reward.txt; exit 3',
  'object': 'echo \'{"reward": 0.5, "style": -1}\' > /logs/verifier/reward.json',
  'both': 'cd /logs/verifier; echo 1 >reward.txt; echo \'{"tests":true}\' >reward.json',
  'the agent': 'test "$(cat count.txt)" = 2 && echo 1 >/logs/verifier/reward.txt',
  'nothing': 'echo hello',
  'empty': ': > /logs/verifier/reward.txt',
  'words': 'echo good > /logs/verifier/reward.txt',
  'nan': 'echo nan > /logs/verifier/reward.txt',
  'text in json': 'echo \'{"reward": "1"}\' > /logs/verifier/reward.json',
  'overflow': 'echo \'{"reward": 1e309}\' > /logs/verifier/reward.json',
  'number': 'echo 1 > /logs/verifier/reward.json',
  'variables': 'echo "$SHARE" > /logs/verifier/reward.txt',
}
PYTHON = """#!/usr/bin/env python3
import pathlib
share = pathlib.Path('count.txt').read_text().count('2') / 4
pathlib.Path('/logs/verifier/reward.txt').write_text(str(share))
"""


@HARBOR
@SANDBOXED
def test_rewards_are_those_of_harbors_verifier(make_task, tmp_path, monkeypatch):
  monkeypatch.setenv('HALF', '0.5')
  scripts = {name: f'#!/bin/bash\n{script}\n' for name, script in SCRIPTS.items()}
  expected = {}
  for name, script in {**scripts, 'its own first line': PYTHON}.items():
    variables = {'[verifier.env]': 'SHARE = "${HALF}"'} if name == 'variables' else {}
    shutil.rmtree(tmp_path / 'tasks', ignore_errors=True)
    folder = make_task(script, variables)
    env, shown = begin(folder)
    assert shown.startswith('Write 2 to /app/count.txt.\n')
    env.step('```\necho 2 > count.txt\n```')
    rewards = verify(env, folder, tmp_path)
    env.kill()
    env, _ = begin(folder)
    env.step('```\necho 2 > count.txt\n```')
    _, reward, terminated, _, info = env.step('```\nsubmit\n```')
    assert terminated
    expected[name] = rewards
    if rewards is None:
      assert (reward, bool(info['columns']['failed'])) == (0, True), name
    else:
      main = rewards.get('reward', rewards.get('tests'))
      assert (reward, info['columns']['failed']) == (main, ''), name
    assert info['metrics'].get('reward/style') == (rewards or {}).get('style')
  assert [name for name, rewards in expected.items() if rewards is None] == [
    *('nothing', 'empty', 'words', 'nan', 'text in json', 'overflow', 'number')
  ]
  assert expected['variables'] == {'reward': 0.5}
  assert expected['its own first line'] == {'reward': 0.25}
  assert expected['both'] == {'tests': 1}


@HARBOR
def test_what_an_author_asks_for_is_read_as_harbor_reads_it(make_task, monkeypatch):
  monkeypatch.setenv('WHO', 'me')
  folder = make_task(
    'exit 0\n',
    {
      '[environment.env]': 'A = "${WHO}"\nB = "${NOBODY:-you}"',
      '[solution.env]': 'C = "c"',
    },
  )
  marked = '<!-- canary GUID 1 -->\n# a canary\n\nDo it.\n'
  write(folder, {'instruction.md': marked})
  task = terminal_bench_tasks.read_terminal_task(folder)
  own = harbor('models.task.task').Task(folder)
  assert task.instruction == own.instruction == 'Do it.\n'
  assert task.test_seconds == own.config.verifier.timeout_sec
  assert task.agent_seconds == own.config.agent.timeout_sec
  resolve = harbor('utils.env').resolve_env_vars
  assert (
    task.variables == resolve(own.config.environment.env) == {'A': 'me', 'B': 'you'}
  )
  assert task.solution_variables == own.config.solution.env == {'C': 'c'}


@pytest.mark.parametrize(
  'settings, words',
  [
    ('[[steps]]\nname = "a"', 'steps is not supported'),
    ('[verifier]\nuser = "grader"', 'verifier.user is not supported'),
    ('[verifier]\nenvironment_mode = "separate"', 'verifier.environment_mode is not'),
    ('[verifier]\ntimeout_sec = "long"', 'verifier.timeout_sec'),
    ('[verifier.env]\nA = "${NOBODY_HAS_IT}"', '$NOBODY_HAS_IT is not set'),
    ('[environment]\nos = "windows"', 'environment.os must be linux'),
    ('[environment]\nworkdir = "app"', 'environment.workdir'),
    ('[environment.healthcheck]\ncommand = "true"', 'environment.healthcheck'),
    ('agent = 1', 'agent must be a table'),
    ('[', 'task.toml'),
  ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path, settings, words):
  write(tmp_path, {'task.toml': settings, 'instruction.md': 'x', 'tests/test.sh': 'x'})
  with pytest.raises(ValueError) as error:
    harbor_tasks.read_harbor_settings(tmp_path)
  assert words in str(error.value)


def test_large_files_and_compose_are_refused(tmp_path):
  write(tmp_path, {'task.toml': '', 'instruction.md': 'x' * (2 << 20)})
  with pytest.raises(ValueError, match='more than'):
    harbor_tasks.read_harbor_settings(tmp_path)
  write(tmp_path, {'instruction.md': 'x', 'environment/docker-compose.yaml': ''})
  with pytest.raises(ValueError, match='only one container'):
    harbor_tasks.read_harbor_settings(tmp_path)


def test_rewards_of_several_names_need_one_called_reward():
  files = {'reward.json': b'{"a": 1, "b": 2}', 'reward.txt': b'1'}
  with pytest.raises(ValueError, match='none of its 2 rewards'):
    harbor_tasks.parse_rewards(files)
  assert harbor_tasks.parse_rewards({'reward.txt': b'1\n'}) == (1.0, {})
  with pytest.raises(ConfigError, match='tasks'):
    env_factory('terminal_bench', {'tasks': 'nowhere'})
