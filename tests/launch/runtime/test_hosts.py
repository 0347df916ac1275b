"""A run over several hosts is the run of one process."""

import pathlib
import subprocess
import sys
import tempfile

import pytest

from tests import hosts, postgres
from tests.launch import host_parts, host_runs, runs

pytestmark = [
  pytest.mark.slow,
  pytest.mark.ray,
  pytest.mark.xdist_group('ray'),
  pytest.mark.skipif(
    bool(reason := hosts.unsupported_reason()), reason=f'no hosts here: {reason}'
  ),
]
STEPS = 6
OPTIONS = (
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
  # At the config's 1e-2, Adam makes another rounding a thousand times larger by step 5.
  '--config.optimizer.learning_rate=1e-3',
  f'--config.num_steps={STEPS}',
  '--config.rollout.engine=jax(decode_steps=4)',
)
CLUSTER = (
  '--config.cluster.ray=true',
  '--config.cluster.host_timeout=15',
  '--config.cluster.num_engines=2',
  '--config.cluster.num_workers=3',
  '--config.cluster.placement=split(learners=2, devices=1)',
)


def train(made, workdir):
  """Trains on the hosts, driven from the first of them; what the run said."""
  run = host_runs.Run(made, workdir, *OPTIONS, *CLUSTER, config=runs.VARIED)
  return run.finish()


def start_cluster(made):
  """Starts Ray: learners on the first two hosts, and the third one for the rest."""
  hosts.start_ray(made[0])
  hosts.start_ray(made[1], made[0])
  hosts.start_ray(made[2], made[0], cpus=0)


@pytest.fixture(scope='module')
def cluster():
  """Three hosts with Ray."""
  with tempfile.TemporaryDirectory() as shared, hosts.hosts(3, shared) as made:
    start_cluster(made)
    yield made, pathlib.Path(shared)


def test_three_hosts_train_what_one_process_does(cluster, tmp_path):
  made, shared = cluster
  output = train(made, shared / 'hosts')
  assert '2 × cpu (data 2), in 2 processes' in output
  runs.run(tmp_path, *OPTIONS, host_runs.dump_to(tmp_path))
  host_runs.check_equal(tmp_path, shared / 'hosts', STEPS)


# Starts launch.view and asks it for its runs.
VIEWED = """
import subprocess, sys, urllib.request
view = subprocess.Popen(
  [sys.executable, '-u', '-m', 'launch.view', sys.argv[1]],
  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
)
url = next(line for line in view.stdout if 'http://' in line).split()[-1]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(opener.open(url + 'api/runs').read().decode())
view.kill()
"""


def test_gateway_judge_view_and_weights_in_a_folder_work_across_hosts(cluster):
  """Agents ask the gateway of their own host; the judge is on another one."""
  made, shared = cluster
  workdir, notes, agents = shared / 'parts', shared / 'asked', shared / 'agents'
  agents.mkdir()
  agent = f"{host_parts.__file__}:play(notes='{agents}')"
  judge = made[1].spawn(
    *(sys.executable, '-m', host_parts.__name__, str(notes)), stdout=subprocess.PIPE
  )
  assert judge.stdout.readline() == 'ready\n'
  url = f'http://{made[1].address}:{host_parts.JUDGE_PORT}/v1'
  run = host_runs.Run(
    made,
    workdir,
    *CLUSTER,
    f"--config.weight_sync.transport=checkpoint(folder='{shared}/weights')",
    f'--config.env.bot.env_config.agent={agent}',
    f"--config.rollout.rewards=judge(url='{url}', model='m') + env",
    config=host_parts.__file__,
  )
  run.finish()
  judge.kill()  # its server ends with its host
  judge.stdout.close()
  rows = runs.rows(workdir)
  assert [row['step'] for row in rows] == [0, 1]
  assert {path.name for path in agents.iterdir()} - {made[0].name}
  assert all(row['reward/judge'] == 0.5 for row in rows)
  assert set(notes.read_text().split()) == {made[0].address}
  assert 'parts' in made[2].run(sys.executable, '-c', VIEWED, str(shared))


@pytest.mark.skipif(
  bool(reason := postgres.unsupported_reason()), reason=f'no server: {reason}'
)
def test_an_explorer_and_a_trainer_on_two_hosts_share_a_store(cluster):
  """A server of a third host keeps the groups."""
  made, shared = cluster
  listening = postgres.server(
    5432, made[2].address, lambda argv: made[2].command(*argv)
  )
  with listening as create:
    address = create('shared')
    explore = runs.argv(
      shared / 'explorer',
      f'--config.trajectory_dump.path=experience+{address}',
      *('--config.dataset.limit=4', '--group_size=4'),
      config=runs.VARIED,
    )
    made[0].run(sys.executable, '-m', 'launch.rollout', *explore, timeout=200)
    train = runs.argv(
      shared / 'trainer',
      *('--config.eval.interval=0', '--config.sft.num_steps=0'),
      *('--config.algorithm.group_size=4', '--config.num_steps=2'),
      f"--config.dataset.experience_store=store(url='{address}', wait=5.0)",
      config=runs.VARIED,
    )
    made[1].run(sys.executable, '-m', 'launch.train', *train, timeout=200)
  assert [row['step'] for row in runs.rows(shared / 'trainer')] == [0, 1]


@pytest.mark.parametrize(
  'transport, status, words',
  [
    (
      'shared_memory',
      2,
      'this run share no memory: use object_store',
    ),
    pytest.param(
      "checkpoint(folder='/tmp/mine')",
      1,
      'has no such folder',
      marks=pytest.mark.extended,
    ),
  ],
)
def test_weights_that_cannot_reach_other_hosts_are_refused(
  cluster, transport, status, words
):
  made, shared = cluster
  option = f'--config.weight_sync.transport={transport}'
  run = host_runs.Run(
    made, shared / transport[:5], *OPTIONS, *CLUSTER, option, config=runs.VARIED
  )
  text = run.finish(status)
  assert words in text and 'Traceback' not in text
  assert not run.said('train ', ' reward ')


# Asks another host three times, over one connection.
ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9000))
start = time.monotonic()
for _ in range(3):
  connection.sendall(b'.')
  assert connection.recv(1) == b'.'
print(time.monotonic() - start)
"""
ECHO = """
import socket
listener = socket.create_server(('', 9000))
print('ready', flush=True)
while True:
  connection, _ = listener.accept()
  while data := connection.recv(1):
    connection.sendall(data)
"""


def test_a_slow_link_delays_what_a_host_sends(tmp_path):
  """The link of the other tests, whose kernel may have no module for it."""
  with hosts.hosts(2, tmp_path) as (near, far):
    command = (sys.executable, '-c', ECHO)
    with far.spawn(*command, stdout=subprocess.PIPE) as echo:
      assert echo.stdout.readline() == 'ready\n'
      ask = (sys.executable, '-c', ASK, far.address)
      if problem := far.slow_down(50, 2):
        echo.kill()
        pytest.skip(problem)
      assert float(near.run(*ask)) >= 0.15
      far.speed_up()
      near.run(*ask)
      far.cut_off()
      far.reconnect()
      near.run(*ask)
      echo.kill()


# What runs on each node in a Slurm cluster's place; a task's number is in SLURM_PROCID.
SRUN = """
import os, subprocess, sys
hosts, options = {hosts!r}, sys.argv[1:]
while options[0].startswith('--'):
  options.pop(0)
tasks = [
  subprocess.Popen([*host, *options], env={{**os.environ, 'SLURM_PROCID': str(number)}})
  for number, host in enumerate(hosts)
]
sys.exit(max(task.wait() for task in tasks))
"""
SBATCH = """
import os, sys
os.environ.update(
  SLURM_JOB_ID='4711', SLURM_JOB_NODELIST='nodes', SLURM_NNODES='2',
  SLURM_SUBMIT_DIR=os.getcwd(),
)
os.execvp('bash', ['bash', *sys.argv[1:]])
"""
SCONTROL = """
import sys
assert sys.argv[1:] == ['show', 'hostnames', 'nodes'], sys.argv
print({addresses!r}, end='')
"""


def test_the_slurm_script_runs_over_two_hosts(tmp_path):
  """With stand-ins for the programs of Slurm: each task gets a host of its own."""
  (programs := tmp_path / 'bin').mkdir()
  with hosts.hosts(2, tmp_path) as made:
    addresses = ''.join(f'{host.address}\n' for host in made)
    texts = {
      'sbatch': SBATCH,
      'scontrol': SCONTROL.format(addresses=addresses),
      'srun': SRUN.format(hosts=[host.command() for host in made]),
    }
    for name, text in texts.items():
      (programs / name).write_text(f'#!{sys.executable}{text}')
      (programs / name).chmod(0o755)
    options = [option for option in CLUSTER if 'ray=' not in option]
    argv = runs.argv(tmp_path / 'run', *OPTIONS, *options, config=runs.VARIED)
    env = {
      **runs.environment(),
      'JAX_PLATFORMS': 'cpu',
      'PATH': f'{programs}:/usr/sbin:/usr/bin:/sbin:/bin',
      'PYTHON': sys.executable,
      'RAY_START_OPTIONS': '--num-cpus=1 --object-store-memory=100000000',
    }
    result = subprocess.run(
      ['sbatch', 'examples/cluster/slurm.sh', *argv],
      cwd=runs.ROOT,
      env=env,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=host_runs.LIMIT_S,
    )
  assert result.returncode == 0, result.stdout
  assert '2 × cpu (data 2), in 2 processes' in result.stdout
  assert [row['step'] for row in runs.rows(tmp_path / 'run')] == list(range(STEPS))
