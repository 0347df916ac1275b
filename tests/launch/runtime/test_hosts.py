"""A run over several hosts is the run of one process."""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from tests import hosts
from tests.launch import runs

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
LIMIT_S = 280  # of a run


def dump_to(workdir):
  return f'--config.trajectory_dump.path={workdir}/dump'


def train(made, workdir):
  """Trains on the hosts, driven from the first of them; what the run said."""
  address = f'--config.cluster.address={made[0].address}:6379'
  options = (*OPTIONS, *CLUSTER, address, dump_to(workdir))
  argv = runs.argv(workdir, *options, config=runs.VARIED)
  env = hosts.ray_environment(runs.environment())
  command = (sys.executable, '-u', '-m', 'launch.train', *argv)
  return made[0].run(*command, timeout=LIMIT_S, env=env)


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


def played(workdir):
  """The ids of all samples that a run learned from, in order."""
  samples = []
  for path in sorted((workdir / 'dump').rglob('*.jsonl')):
    for line in path.read_text().splitlines():
      sample = json.loads(line)
      samples.append((path.name, sample['trajectory_id']))
  return samples


def equal(one, two):
  """Fails unless two runs learned the same from the same samples."""
  assert played(one) == played(two) and len(set(played(one))) == len(played(one)) > 0
  rows, rows_ = runs.numbers(one), runs.numbers(two)
  assert [row['step'] for row in rows_] == list(range(STEPS))
  for row, row_ in zip(rows, rows_, strict=True):
    for name in ('loss/total', 'optimizer/grad_norm', 'reward/mean', 'policy/entropy'):
      np.testing.assert_allclose(row[name], row_[name], rtol=1e-3, atol=1e-6)


def test_three_hosts_train_what_one_process_does(cluster, tmp_path):
  made, shared = cluster
  output = train(made, shared / 'hosts')
  assert '2 × cpu (data 2), in 2 processes' in output
  runs.run(tmp_path, *OPTIONS, dump_to(tmp_path))
  equal(tmp_path, shared / 'hosts')


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
      timeout=LIMIT_S,
    )
  assert result.returncode == 0, result.stdout
  assert '2 × cpu (data 2), in 2 processes' in result.stdout
  assert [row['step'] for row in runs.rows(tmp_path / 'run')] == list(range(STEPS))
