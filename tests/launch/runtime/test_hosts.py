"""A run over several hosts is the run of one process."""

import pathlib
import subprocess
import sys
import tempfile

import pytest

from tests import hosts
from tests.launch import host_runs, runs

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
