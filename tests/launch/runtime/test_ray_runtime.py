"""Under Ray a run is the same run; what dies there is told, and nothing is left."""

import asyncio
import functools
import os
import pathlib
import re
import signal
import time

import numpy as np
import psutil
import pytest

from tests.launch import runs
from tests.launch.runtime import sockets
from tests.marks import NEEDS_COMPILER, extended, slow
from tests.processes import wait_for_end

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray')]
OPTIONS = (
  '--config.sft.num_steps=0',
  '--config.eval.num_tasks=4',
  '--config.rollout.engine=jax(decode_steps=4)',
)
RAY = ('--config.cluster.ray=true', '--config.cluster.num_workers=2')


def actors(ray):
  """The names of the actors that are alive."""
  from ray.util import state

  alive = state.list_actors(filters=[('state', '=', 'ALIVE')])
  return [actor.class_name for actor in alive]


def same(one, two):
  assert len(one.played) == len(two.played) > 0
  for (step, kind, groups, _), (step_, kind_, groups_, _) in zip(
    one.played, two.played, strict=True
  ):
    assert (step, kind, len(groups)) == (step_, kind_, len(groups_))
    rows = [row for group in groups for row in group]
    rows_ = [row for group in groups_ for row in group]
    assert [row.trajectory_id for row in rows] == [row.trajectory_id for row in rows_]
    for row, row_ in zip(rows, rows_, strict=True):
      for name in 'tokens action_mask rollout_logprobs rewards weights_version'.split():
        np.testing.assert_array_equal(getattr(row, name), getattr(row_, name))


ONE = slow(1, 'object_store')


@pytest.mark.parametrize(('engines', 'weights'), [(2, 'auto'), ONE])
def test_trajectories_and_parameters_are_those_of_one_process(
  ray, local, tmp_path, engines, weights
):
  folder, recorder = local
  count = f'--config.cluster.num_engines={engines}'
  options = (*RAY, count, f'--config.weight_sync.transport={weights}')
  under_ray = runs.record(tmp_path, *OPTIONS, *options)
  same(recorder, under_ray)
  assert runs.weights(folder) == runs.weights(tmp_path)
  assert any(row['optimizer/grad_norm'] > 0 for _, row in recorder.metrics[:-1])
  assert all(row['weights/pull_s'] > 0 for _, row in under_ray.metrics)


@NEEDS_COMPILER
def test_actors_keep_blocks_as_one_process_does(ray):
  loaded = ray.remote(lambda: 'blocks-' in pathlib.Path('/proc/self/maps').read_text())
  assert ray.get(loaded.remote())
  assert 'LD_PRELOAD' not in os.environ


def test_it_listens_on_loopback_alone(ray):
  mine = sockets.listening('gcs_server', 'raylet', '"ray::')
  assert mine and all(sockets.loopback(place) for place in mine), mine


class RolloutWorker:
  """A worker that dies once: the first to run leaves a file."""

  def __init__(self, path):
    self._path = path

  async def run(self, data):
    if not self._path.exists():
      self._path.touch()
      os._exit(1)
    while data['wait'].exists():
      await asyncio.sleep(0.05)
    return 3


@pytest.mark.slow
@pytest.mark.extended
async def test_workers_that_are_replaced_are_counted_and_measured(ray, tmp_path):
  from launch.runtime.ray_runtime import RayRuntime

  runtime = RayRuntime()  # of the cluster that is there
  (wait := tmp_path / 'wait').touch()
  worker = functools.partial(RolloutWorker, tmp_path / 'died')
  work = asyncio.ensure_future(runtime.run_worker(worker, {'wait': wait}))
  replaced, metrics = 0.0, {}
  while not replaced or 'memory/worker_gb' not in metrics:
    await asyncio.sleep(0.2)
    metrics = await runtime.metrics()
    replaced += metrics['rollout/workers_replaced']
  assert replaced == 1 and 0.01 < metrics['memory/worker_gb'] < 10
  wait.unlink()
  assert await work == 3
  assert (await runtime.metrics())['rollout/workers_replaced'] == 0
  await runtime.close()


DIES = """
import os
class Dies:
  uses_dataset = False
  def reset(self, *, seed, options=None):
    self.seed = seed
    return 'go', {}
  def step(self, action):
    if os.getpid() != TRAINER:  # The trainer tries one step before the run.
      os.kill(os.getpid(), 9)
    return None, 1.0, True, False, {}
"""


@pytest.mark.slow
def test_an_actor_that_dies_ends_the_run_with_one_line(ray, tmp_path, capsys):
  (tmp_path / 'dies.py').write_text(DIES.replace('TRAINER', str(os.getpid())))
  config = tmp_path / 'config.py'
  config.write_text(
    'from configs import base, debug\ndef get_config():\n  c = debug.get_config()\n'
    '  del c.env.arithmetic\n  c.eval.interval = 0\n'
    f'  c.env.x = base.env_section("{tmp_path}/dies.py:Dies", max_tokens_per_step=4)\n'
    '  return c\n'
  )
  options = ('--config.sft.num_steps=0', *RAY[:1])
  assert runs.main(tmp_path / 'run', *options, config=str(config)) == 1
  err = capsys.readouterr().err.strip().splitlines()
  errors = [line for line in err if line.startswith('error: ')]
  assert len(errors) == 1 and 'the Ray actor RolloutWorker has died' in errors[0]
  assert 'resumes' in errors[0]


FOUR = (*OPTIONS, '--config.num_steps=4')


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run in one process that nobody disturbs."""
  folder = tmp_path_factory.mktemp('whole')
  runs.run(folder, *FOUR)
  return folder


@pytest.mark.slow
@pytest.mark.parametrize(
  ('number', 'status', 'resumed'),
  [(signal.SIGKILL, -9, RAY), extended(signal.SIGTERM, 143, ())],
)
def test_killed_or_stopped_under_ray_it_ends_at_the_same_bits(
  whole, tmp_path, number, status, resumed
):
  """Also if it goes on in one process, which starts sooner."""
  process = runs.spawn(tmp_path, *FOUR, *RAY)
  for line in process.stdout:
    if line.startswith('train 2/4'):
      break
  os.kill(process.pid, number)
  output, _ = process.communicate(timeout=120)
  assert process.returncode == status, output
  assert 'Traceback' not in output
  steps_saved = (tmp_path / 'checkpoints' / 'train').iterdir()
  assert status < 0 or [p.name for p in steps_saved if p.name.isdigit()], output
  runs.run(tmp_path, *FOUR, *resumed)
  assert runs.weights(whole) == runs.weights(tmp_path)
  assert runs.numbers(whole) == runs.numbers(tmp_path)


@pytest.mark.slow
@pytest.mark.extended
def test_groups_are_filtered_shaped_and_drawn_as_in_one_process(ray, tmp_path):
  """DAPO with greedy baselines and a curriculum that learns, in actors."""
  options = (
    '--config.sft.num_steps=0',
    '--config.eval.interval=0',
    '--config.algorithm.group_size=6',
    '--config.algorithm.advantage=remax',
    '--config.dataset.limit=12',
    '--config.dataset.curriculum=bandit(target=0.3)',
    '--config.rollout.reward_shaping=difficulty_weights',
  )
  config = f'{runs.VARIED}:dapo'
  recorder = runs.record(tmp_path / 'local', *options, config=config)
  under_ray = runs.record(tmp_path / 'ray', *options, *RAY, config=config)
  same(recorder, under_ray)
  assert runs.weights(tmp_path / 'local') == runs.weights(tmp_path / 'ray')
  rows = [row for *_, groups, _ in recorder.played for group in groups for row in group]
  assert any(row.is_greedy for row in rows) and len({row.weight for row in rows}) > 1


def children(pid):
  """The programs of a process's children, by process id."""
  programs = {}
  for folder in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      parent = (folder / 'stat').read_text().rpartition(')')[2].split()[1]
      program = (folder / 'cmdline').read_bytes().partition(b'\0')[0]
    except OSError:
      continue
    if int(parent) == pid:
      programs[int(folder.name)] = program.decode().rpartition('/')[2]
  return programs


@pytest.mark.slow
@pytest.mark.parametrize(
  ('program', 'name'), [('raylet', 'raylet'), extended('gcs_server', 'GCS')]
)
def test_a_run_that_loses_its_ray_ends_with_one_line_and_resumes(
  tmp_path, program, name
):
  process = runs.spawn(tmp_path, *FOUR, *RAY)
  for line in process.stdout:
    if line.startswith('train 2/4'):
      break
  (victim,) = [p for p, known in children(process.pid).items() if known == program]
  os.kill(victim, signal.SIGKILL)
  output, _ = process.communicate(timeout=60)
  assert process.returncode != 0
  errors = [line for line in output.splitlines() if line.startswith('error: ')]
  assert errors == [
    f"error: Ray's {name} has died, and the run with it; "
    'the same command resumes from the last checkpoint'
  ]
  assert 'Traceback' not in output and len(output.splitlines()) < 12, output
  runs.run(tmp_path, *FOUR)
  # The last row is of the evaluation after the last step.
  assert [row['step'] for row in runs.rows(tmp_path)] == list(range(5))


def begin(folder, *options):
  """Starts a run in a process group of its own; returns it after two steps."""
  process = runs.spawn(folder, *OPTIONS, *RAY, *options, start_new_session=True)
  for line in process.stdout:
    if re.match(r'train +([2-9]|\d\d+)/', line):  # quick steps have no line each
      return process
  raise AssertionError('it never began')


def family(process):
  """The processes of a run, but for the one that watches Ray."""
  processes = psutil.Process(process.pid).children(recursive=True)
  return [one for one in processes if '-c' not in one.cmdline()]


@pytest.mark.slow
@pytest.mark.extended
def test_a_second_sigterm_under_ray_ends_it_at_once(tmp_path):
  process = begin(tmp_path, '--config.num_steps=400')
  others = family(process)
  assert len(others) > 8
  os.kill(process.pid, signal.SIGSTOP)  # so that both arrive within one step
  process.send_signal(signal.SIGINT)
  process.send_signal(signal.SIGTERM)
  process.send_signal(signal.SIGCONT)
  output, _ = process.communicate(timeout=20)
  assert process.returncode in (130, 143)
  assert 'Stopped' not in output and 'error' not in output and 'Traceback' not in output
  for one in others:
    wait_for_end(one.pid, 120)


@pytest.mark.slow
@pytest.mark.extended
def test_sigterm_to_all_processes_under_ray_is_one_line_and_the_run_resumes(tmp_path):
  """It ends Ray too, so that there may be no time for a checkpoint."""
  steps = '--config.num_steps=12'
  process = begin(tmp_path, steps)
  others = family(process)
  os.killpg(process.pid, signal.SIGTERM)
  output, _ = process.communicate(timeout=120)
  assert 'Traceback' not in output and 'failed' not in output
  errors = [line for line in output.splitlines() if line.startswith('error: ')]
  stopped = 'Stopped; the same command resumes.' in output
  assert stopped or [line.rpartition('; ')[2] for line in errors] == [
    'the same command resumes from the last checkpoint'
  ]
  for one in others:
    wait_for_end(one.pid, 120)
  runs.run(tmp_path, *OPTIONS, steps)
  assert [row['step'] for row in runs.rows(tmp_path)] == list(range(13))


@pytest.mark.slow
def test_ctrl_c_while_engines_start_ends_the_run_and_all_of_ray(tmp_path):
  process = runs.spawn(tmp_path, *OPTIONS, *RAY)
  run = psutil.Process(process.pid)
  while not (others := [p for p in run.children(True) if 'EngineActor' in p.name()]):
    assert process.poll() is None
    time.sleep(0.05)
  others = family(process)
  process.send_signal(signal.SIGINT)
  output, _ = process.communicate(timeout=240)
  assert process.returncode == 130 and 'Traceback' not in output, output
  for one in others:
    wait_for_end(one.pid, 120)


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_that_loses_all_engines_at_once_goes_on(tmp_path):
  steps = ('--config.num_steps=12', '--config.cluster.num_engines=2')
  process = begin(tmp_path, *steps)
  engines = [one for one in family(process) if 'EngineActor' in one.name()]
  assert len(engines) == 2
  for one in engines:
    one.kill()
  output, _ = process.communicate(timeout=240)
  assert process.returncode == 0 and 'Traceback' not in output, output
  assert [row['step'] for row in runs.rows(tmp_path)] == list(range(13))
  lost = [line for line in output.splitlines() if ' of 2 was lost' in line]
  assert len(lost) == 2, output
