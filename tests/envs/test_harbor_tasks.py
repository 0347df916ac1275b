"""Task folders that Harbor makes are verified as Harbor's own verifier does."""

import asyncio
import io
import json
import logging
import shutil
import tarfile
import tempfile
import types

import pytest

from jaxrl.envs.sandbox.sandbox_api import SandboxError
from jaxrl.envs.terminal import harbor_artifacts, harbor_tasks, terminal_bench_tasks
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

  async def service_is_dir(self, path, **_):
    return self.sandbox.exec(['test', '-d', path]).code == 0

  async def service_download_dir(self, source_dir, target_dir, **_):
    await self.download_dir(source_dir, target_dir)

  async def service_download_dir_with_exclusions(
    self, source_dir, target_dir, exclude, **_
  ):
    patterns = [f'--exclude={pattern}' for pattern in exclude]
    made = self.sandbox.exec(['tar', *patterns, '-C', source_dir, '-cf', '-', '.'])
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
      archive.extractall(
        target_dir, filter='fully_trusted'
      )  # Harbor looks for what is unsafe

  async def service_download_file(self, source_path, target_path, **_):
    target_path.write_bytes(self.sandbox.read(source_path))

  async def empty_dirs(self, dirs, **_):
    for path in dirs:
      self.sandbox.put(str(path), None)

  async def ensure_dirs(self, dirs, **_):
    self.sandbox.exec(['mkdir', '-p', *map(str, dirs)])

  async def upload_file(self, source_path, target_path):
    self.sandbox.write(str(target_path), source_path.read_bytes())


def verify(env, folder, tmp_path):
  """The rewards by Harbor's own verifier, None if it finds none."""
  shutil.rmtree(tmp_path / 'trial', ignore_errors=True)
  paths = harbor('models.trial.paths').TrialPaths(tmp_path / 'trial')
  paths.verifier_dir.mkdir(parents=True)
  verifier = harbor('verifier.verifier')
  task = harbor('models.task.task').Task(folder)
  modes = harbor('models.task.verifier_mode')
  separate = modes.resolve_verifier_environment_definition(task.config, task.paths)
  sandbox = env._sandbox
  if separate is not None:
    handler = harbor('trial.artifact_handler').ArtifactHandler(
      artifacts=task.config.artifacts, logger=logging.getLogger('harbor')
    )
    ends = {'source_artifacts_dir': harbor_artifacts.ARTIFACTS_DIR}
    made = handler.download_artifacts(
      SandboxEnvironment(sandbox), paths.artifacts_dir, **ends
    )
    asyncio.run(made)
    sandbox.stop()
    sandbox = env._open(tmp_path / 'trial' / 'context', separate.directory, 'tests')
    ends['target_artifacts_dir'] = harbor_artifacts.ARTIFACTS_DIR
    made = handler.upload_artifacts(
      SandboxEnvironment(sandbox), paths.artifacts_dir, **ends
    )
    asyncio.run(made)
  errors = tuple(
    getattr(verifier, name)
    for name in (
      'RewardFileNotFoundError',
      'RewardFileEmptyError',
      'VerifierOutputParseError',
    )
  )
  bundled = separate is not None and separate.bundled_tests
  try:
    made = verifier.Verifier(
      task, paths, SandboxEnvironment(sandbox), skip_tests_upload=bundled
    )
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


WORK = """mkdir -p out/deep /logs/artifacts; cd out; echo 2 > count.txt
touch deep/no.log; ln -s /etc/passwd away; mkfifo pipe; printf 'echo 3' > run.sh
chmod 755 run.sh; cp run.sh /app/one.sh; echo 4 > /logs/artifacts/note
echo 5 > /app/left.txt"""
REPORT = """#!/bin/bash
cd /app; there() { test -e $1 && echo -n 1 || echo -n 0; }
cat > /logs/verifier/reward.json <<END
{"reward": $(cat out/count.txt || echo 0), "one": $(./one.sh || bash one.sh || echo 0),
 "note": $(cat /logs/artifacts/note || echo 0), "mine": $(there mine),
 "left": $(there left.txt), "log": $(there out/deep/no.log), "deep": $(there out/deep),
 "away": $(there out/away), "pipe": $(there out/pipe), "run": $(there out/run.sh),
 "dockerfile": $(there /tests/Dockerfile), "more": ${MORE:-0}}
END
"""


@HARBOR
@SANDBOXED
@pytest.mark.parametrize('own_image', [True, False])
def test_tests_in_a_sandbox_of_their_own_see_what_harbors_see(
  make_task, tmp_path, own_image
):
  """The default of `harbor init`: what the agent hands over is all they share."""
  folder = make_task(REPORT, verifier_mode=None)
  docker = folder / 'tests' / 'Dockerfile'
  assert 'environment_mode = "separate"' in (folder / 'task.toml').read_text()
  assert docker.is_file()
  if own_image:
    docker.write_text(docker.read_text() + 'ENV MORE=6\nRUN echo > /app/mine\n')
  else:
    docker.unlink()
  listed = '["/app/out", "/app/one.sh", "/app/nowhere"]'
  listed = listed.replace('"/app/out"', '{source = "/app/out", exclude = ["*.log"]}')
  text = (folder / 'task.toml').read_text()
  lines = [line for line in text.splitlines() if not line.startswith('artifacts')]
  write(folder, {'task.toml': '\n'.join([f'artifacts = {listed}', *lines])})
  found = []
  for judge in ('harbor', 'ours'):
    env, _ = begin(folder)
    env.step(f'```\n{WORK}\n```')
    if judge == 'harbor':
      found.append(verify(env, folder, tmp_path))
    else:
      _, reward, _, _, info = env.step('```\nsubmit\n```')
      others = {
        name.removeprefix('reward/'): value
        for name, value in info['metrics'].items()
        if name.startswith('reward/')
      }
      found.append({'reward': reward, **others})
    env.kill()
  assert found[0] == found[1]
  expected = {'reward': 2, 'one': 3, 'note': 4, 'left': 0, 'log': 0, 'deep': 1}
  more = (
    {'mine': 1, 'more': 6, 'dockerfile': 1} if own_image else {'mine': 0, 'more': 0}
  )
  assert expected | {'away': 0, 'pipe': 0, 'run': 1} | more | found[1] == found[1]


STEP = """#!/bin/bash
mkdir -p /logs/verifier
test -e /tests/shared && echo "$REWARDS" > /logs/verifier/reward.json
ls /tests > /app/seen; cat /app/given.txt /app/done.txt >> /app/all.txt
"""
STEPS = {  # rewards of three steps, min_reward of the first, strategy
  'mean': (
    ('{"reward": 1}', '{"reward": 0.25}', '{"reward": 0.5, "style": 3}'),
    '',
    '',
  ),
  'final': (('{"reward": 1}', '{"reward": 0.25}', '{"reward": 0.5}'), '', 'final'),
  'short': (('{"reward": 0.5}', '{"reward": 1}', '{"reward": 1}'), '0.75', ''),
  'a lost key': (('{"reward": 1}', '{"reward": 1}', '{"reward": 0}'), '{a = 0}', ''),
  'reached': (('{"reward": 1}', '{"reward": 0}', '{"reward": 0}'), '{reward = 1}', ''),
  'no reward': (('{"reward": 1}', 'none', '{"reward": 0}'), '', ''),
  'no last reward': (('{"reward": 1}', '{"reward": 1}', 'none'), '', 'final'),
}


def harbors_rewards(rewards, folder):
  """What Harbor says of a trial whose steps were graded with these rewards."""
  trial = object.__new__(harbor('trial.multi_step').MultiStepTrial)
  trial.__dict__.update(
    config=types.SimpleNamespace(
      trial_name='trial', verifier=types.SimpleNamespace(disable=False)
    ),
    task=harbor('models.task.task').Task(folder),
    logger=logging.getLogger('harbor'),
    _result=types.SimpleNamespace(step_results=[]),
  )
  result = harbor('models.trial.result')
  made = harbor('models.verifier.result').VerifierResult
  for step, found in zip(trial.task.config.steps, rewards, strict=True):
    graded = result.StepResult(step_name=step.name)
    graded.verifier_result = None if found is None else made(rewards=found)
    if found is None:
      graded.exception_info = result.ExceptionInfo.from_exception(ValueError('none'))
    trial.result.step_results.append(graded)
    if trial._should_stop_after_step(step, graded):
      break
  chosen = trial._select_multi_step_reward()
  return len(trial.result.step_results), chosen and chosen.rewards


@HARBOR
@SANDBOXED
@pytest.mark.parametrize('case', STEPS)
@pytest.mark.parametrize('mode', ['shared', 'separate', 'mixed'])
def test_steps_are_graded_one_by_one_as_by_harbor(make_task, mode, case):
  rewards, least, strategy = STEPS[case]
  folder = make_task(None, steps=3)
  text = (folder / 'task.toml').read_text()
  if strategy:
    text = f'multi_step_reward_strategy = "{strategy}"\n{text}'
  for number, reward in enumerate(rewards, start=1):
    name = f'name = "step-{number}"'
    assert name in text
    more = f'\nmin_reward = {least}' if least and number == 1 else ''
    own_mode = ('shared', 'separate')[number % 2] if mode == 'mixed' else mode
    verifier = f'verifier = {{environment_mode = "{own_mode}", timeout_sec = 9, '
    verifier += f'env = {{REWARDS = {reward!r}}}}}'
    start, _, end = text.partition(name)
    following = end.partition('\n[[')
    text = f'{start}{name}{more}\n{verifier}\n' + ''.join(following[1:])
    step = folder / 'steps' / f'step-{number}'
    shutil.rmtree(step / 'tests')
    write(
      step,
      {
        'instruction.md': f'Do {number}.\n',
        'tests/test.sh': STEP,
        'workdir/given.txt': f'given {number}\n',
        'workdir/setup.sh': 'ls -A /tests /logs/verifier >> setup.txt 2>&1; true\n',
      },
    )
  write(folder, {'task.toml': text, 'tests/shared': '', 'tests/test.sh': 'exit 1'})
  found = [None if x == 'none' else json.loads(x) for x in rewards]
  played, expected = harbors_rewards(found, folder)
  env, shown = begin(folder)
  terminated = False
  for number in range(1, played + 1):
    assert f'Do {number}.' in shown and not terminated
    env.step(f'```\necho done {number} > done.txt\n```')
    shown, reward, terminated, _, info = env.step('```\nsubmit\n```')
    if not terminated:
      assert reward == 0
      inside = env.step('```\ncat setup.txt; ls /tests; cat all.txt\n```')[0]
      assert 'test.sh' not in inside and 'shared' not in inside
      graded = ''.join(f'given {n}\ndone {n}\n' for n in range(1, number + 1))
      if mode != 'mixed':
        assert (graded in inside) == (mode == 'shared')
  assert terminated and env._sandbox is None
  name = 'reward' if expected and 'reward' in expected else ''
  assert reward == (expected[name] if expected else 0)
  assert info['metrics'].get('reward/style') == (expected or {}).get('style')
  assert bool(info['columns']['failed']) == ('no' in case)
  assert info['columns']['test_output'].count('step step-') == played


@HARBOR
@SANDBOXED
def test_a_script_that_prepares_a_step_may_fail_and_turns_may_end(make_task):
  folder = make_task(None, steps=2)
  for number in (1, 2):
    step = folder / 'steps' / f'step-{number}'
    script = '#!/bin/bash\necho 1 >/logs/verifier/reward.txt\n'
    write(step, {'instruction.md': 'Do it.', 'tests/test.sh': script})
  env, _ = begin(folder, shell='shell(turns=1)')
  _, reward, terminated, _, info = env.step('```\ntrue\n```')
  assert (reward, terminated) == (1, True)  # the second step was graded as it stands
  assert info['columns']['test_output'].count('step step-') == 2
  write(folder, {'steps/step-2/workdir/setup.sh': 'echo lost >&2; exit 3'})
  env, _ = begin(folder)
  _, reward, terminated, _, info = env.step('```\nsubmit\n```')
  assert (reward, terminated) == (1, True)
  assert 'setup of step step-2 ended with 3: lost' in info['columns']['failed']
  write(folder, {'steps/step-1/workdir/setup.sh': 'exit 4'})
  with pytest.raises(SandboxError, match='setup of step step-1 ended with 4'):
    begin(folder)


@HARBOR
@SANDBOXED
def test_health_checks_come_before_the_agent(make_task):
  """Of the sandbox, and of each step after its setup: the next ones do not begin."""
  folder = make_task(None, steps=2)
  check = 'command = "touch checked; test -e {file}"\ninterval_sec = 0\nretries = 2'
  text = (folder / 'task.toml').read_text()
  text += f'\n[environment.healthcheck]\n{check.format(file="/app")}\n'
  for number, file in ((1, 'given.txt'), (2, 'nowhere')):
    inline = f'{{{check.format(file=file)}}}'.replace('\n', ', ')
    step = f'name = "step-{number}"'
    text = text.replace(step, f'{step}\nhealthcheck = {inline}')
    script = '#!/bin/bash\necho 1 >/logs/verifier/reward.txt\n'
    write(folder / 'steps' / f'step-{number}', {'instruction.md': 'Do it.'})
    write(folder / 'steps' / f'step-{number}', {'tests/test.sh': script})
  write(folder, {'task.toml': text, 'steps/step-1/workdir/given.txt': ''})
  env, _ = begin(folder)
  assert 'checked' in env.step('```\nls\n```')[0]
  _, reward, terminated, _, info = env.step('```\nsubmit\n```')
  assert (reward, terminated) == (1, True)
  assert 'step step-2: the health check' in info['columns']['failed']
  assert 'failed 2 times, at last with exit code 1' in info['columns']['failed']
  write(folder, {'task.toml': text.replace('test -e /app', 'test -e /nowhere')})
  with pytest.raises(SandboxError, match=r'count: the health check .* failed 2 times'):
    begin(folder)


@SANDBOXED
def test_a_test_image_that_cannot_be_made_here_is_refused_at_the_start(tmp_path):
  settings = '[verifier]\nenvironment_mode = "separate"'
  files = {'task.toml': settings, 'instruction.md': 'x', 'tests/test.sh': 'x'}
  write(tmp_path / 'count', {**files, 'tests/Dockerfile': 'COPY --from=other /a /b\n'})
  with pytest.raises(ValueError, match='needs a container'):
    begin(tmp_path / 'count')


@pytest.mark.parametrize(
  'listed, words',
  [
    ('"/app"', 'must be a list'),
    ('["out"]', 'from the root'),
    ('["/a/../etc"]', 'from the root'),
    ('[{source = "/a", service = "db"}]', 'service is not supported'),
    ('[{source = "/a", mode = 1}]', 'mode is not supported'),
    ('[{source = "/a", exclude = "b"}]', 'list of patterns'),
    ('[1]', 'must be a path'),
  ],
)
def test_artifacts_that_cannot_be_handed_over_are_refused(tmp_path, listed, words):
  write(tmp_path, {'task.toml': f'artifacts = {listed}', 'instruction.md': 'x'})
  with pytest.raises(ValueError, match=words):
    harbor_tasks.read_harbor_task(tmp_path)


@SANDBOXED
def test_an_artifact_that_is_too_large_ends_the_episode(tmp_path, monkeypatch):
  monkeypatch.setattr(harbor_artifacts, 'MAX_ARTIFACT_BYTES', 1 << 16)
  settings = 'artifacts = ["/app/big"]\n[verifier]\nenvironment_mode = "separate"'
  files = {'task.toml': settings, 'instruction.md': 'x', 'tests/test.sh': 'x'}
  write(tmp_path / 'count', files)
  env, _ = begin(tmp_path / 'count')
  env.step('```\nhead -c 100000 /dev/zero > big\n```')
  with pytest.raises(SandboxError, match='/app/big reached the limit'):
    env.step('```\nsubmit\n```')
  env.kill()


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
    ('[[steps]]\nname = "../a"', "a step needs a name, and has '../a'"),
    ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"', 'two steps have the same name'),
    ('[[steps]]\nname = "a"\nmin_reward = "1"', "min_reward='1' must be numbers"),
    ('[[steps]]\nname = "a"\nhealthcheck = "x"', 'steps.healthcheck must be a table'),
    ('[[steps]]\nname = "a"\nagent = {user = "me"}', 'agent.user is not supported'),
    ('[[steps]]\nname = "a"\nartifacts = "/app"', 'artifacts must be a list'),
    ('[[steps]]\nname = "a"\nverifier = {env = 1}', 'env must be a table'),
    ('multi_step_reward_strategy = "best"', "='best': must be mean or final"),
    ('steps = 1', 'steps must be at most 64 tables'),
    ('[verifier]\nuser = "grader"', 'verifier.user is not supported'),
    ('[verifier]\nenvironment_mode = "none"', 'verifier.environment_mode is not'),
    ('[verifier.environment]\ncpus = 1', 'verifier.environment is not'),
    ('[verifier]\ntimeout_sec = "long"', 'verifier.timeout_sec'),
    ('[verifier.env]\nA = "${NOBODY_HAS_IT}"', '$NOBODY_HAS_IT is not set'),
    ('[environment]\nos = "windows"', 'environment.os must be linux'),
    ('[environment]\nworkdir = "app"', 'environment.workdir'),
    ('[environment]\nhealthcheck = {retries = 1}', 'healthcheck.command=None'),
    ('agent = 1', 'agent must be a table'),
    ('[', 'task.toml'),
  ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path, settings, words):
  write(tmp_path, {'task.toml': settings, 'instruction.md': 'x', 'tests/test.sh': 'x'})
  with pytest.raises(ValueError) as error:
    harbor_tasks.read_harbor_task(tmp_path)
  assert words in str(error.value)


def test_large_files_and_compose_are_refused(tmp_path):
  write(tmp_path, {'task.toml': '', 'instruction.md': 'x' * (2 << 20)})
  with pytest.raises(ValueError, match='more than'):
    harbor_tasks.read_harbor_task(tmp_path)
  write(tmp_path, {'instruction.md': 'x', 'environment/docker-compose.yaml': ''})
  with pytest.raises(ValueError, match='only one container'):
    harbor_tasks.read_harbor_task(tmp_path)


def test_rewards_of_several_names_need_one_called_reward():
  files = {'reward.json': b'{"a": 1, "b": 2}', 'reward.txt': b'1'}
  rewards = harbor_tasks.parse_rewards(files)
  with pytest.raises(ValueError, match='none of the 2 rewards'):
    harbor_tasks.combine_rewards([rewards], counts_last=False)
  rewards = harbor_tasks.parse_rewards({'reward.txt': b'1\n'})
  assert harbor_tasks.combine_rewards([rewards], counts_last=False) == (1.0, {})
  with pytest.raises(ConfigError, match='tasks'):
    env_factory('terminal_bench', {'tasks': 'nowhere'})
