"""The files for clusters launch runs that fit there, and are as their schemas say."""

import os
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

from launch.runtime import weight_transport
from launch.runtime.placement import ClusterNode, plan_placement
from launch.settings import command_line
from launch.settings.resolve import resolve_settings

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / 'examples' / 'cluster'
PYTHON = ROOT / '.venv-cluster' / 'bin' / 'python'
KUBERAY = os.environ.get('KUBERAY_CRD')


def load(name):
  return yaml.safe_load((FOLDER / name).read_text())


def slurm():
  """The command in the script's first lines, without what makes them a comment."""
  text = (FOLDER / 'slurm.sh').read_text()
  (command,) = re.findall(r'^#   sbatch (.*?[^\\])$', text, re.M | re.S)
  nodes = [int(n) for n in re.findall(r'(?:--nodes|--gpus-per-node)=(\d+)', text)]
  return command.replace('\n#', '\n'), [ClusterNode(gpus=nodes[1])] * nodes[0]


def kuberay():
  spec = load('kuberay_rayjob.yaml')['spec']
  (workers,) = spec['rayClusterSpec']['workerGroupSpecs']
  limits = workers['template']['spec']['containers'][0]['resources']['limits']
  gpus = ClusterNode(gpus=limits['nvidia.com/gpu'])
  return spec['entrypoint'], [ClusterNode(), *[gpus] * workers['replicas']]


def jobset():
  nodes, commands = [], []
  for job in load('gke_jobset.yaml')['spec']['replicatedJobs']:
    spec = job['template']['spec']
    (host,) = spec['template']['spec']['containers']
    tpus = host['resources']['limits']['google.com/tpu']
    assert host['env'][0]['value'] == f'--resources={{"TPU":{tpus}}}'
    nodes += [ClusterNode(tpus=tpus)] * (job['replicas'] * spec['parallelism'])
    commands.append(host['command'])
  return commands[0][2], nodes


def skypilot():
  task = load('skypilot.yaml')
  gpus = int(task['resources']['accelerators'].rpartition(':')[2])
  return task['run'], [ClusterNode(gpus=gpus)] * task['num_nodes']


@pytest.mark.parametrize(
  ('read', 'learners', 'engines', 'machines'),
  [(slurm, 2, 16, 4), (kuberay, 2, 8, 3), (jobset, 4, 2, 6), (skypilot, 2, 8, 3)],
)
def test_each_launches_a_run_that_fits(read, learners, engines, machines):
  command, nodes = read()
  argv = [word for word in shlex.split(command) if word.startswith('--')]
  argv = [word.replace('$CHECKPOINT', '/shared/Qwen3-0.6B') for word in argv]
  ray = ['--config.cluster.ray=true', '--config.cluster.address=head:6379']
  parsed = command_line.parse([*argv, *ray], {'workdir': ''})
  settings = resolve_settings(command_line.load(parsed))
  placed = plan_placement(settings, nodes)
  assert (len(placed.learners), len(placed.engines)) == (learners, engines)
  with_devices = [node for node in nodes if node.gpus or node.tpus]
  assert len(with_devices) == machines
  weight_transport.check_placement(settings.transport, placed, machines)


def test_the_jobs_hosts_are_counted_and_their_head_is_named():
  jobs = load('gke_jobset.yaml')
  _, nodes = jobset()
  head = f'{jobs["metadata"]["name"]}-learner-0-0.{jobs["metadata"]["name"]}'
  for job in jobs['spec']['replicatedJobs']:
    (host,) = job['template']['spec']['template']['spec']['containers']
    words = ' '.join(host['command']).replace('\\\n', ' ').split()
    place = words.index('examples/cluster/host.sh')
    assert words[place + 2 : place + 4] == [str(len(nodes)), head]


@pytest.mark.parametrize('name', ['host.sh', 'slurm.sh'])
def test_the_scripts_are_of_bash(name):
  subprocess.run(['bash', '-n', FOLDER / name], check=True)


@pytest.mark.skipif(not PYTHON.exists(), reason='needs schemas: make env-cluster')
def test_the_files_are_as_their_schemas_say():
  command = [PYTHON, ROOT / 'tests' / 'examples' / 'cluster_schemas.py', FOLDER]
  result = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert result.returncode == 0, result.stderr
  assert result.stdout.splitlines() == [
    'SkyPilot: task, resources, storage',
    'JobSet: all that is written is in its models',
    'Kubernetes: Job learner, Job engine',
    'Kubernetes: pods of head, gpus',
  ]


def close(schema):
  """Makes a schema of Kubernetes refuse keys that it does not know."""
  for part in schema if isinstance(schema, list) else schema.values():
    if isinstance(part, dict | list):
      close(part)
  if isinstance(schema, dict) and isinstance(schema.get('properties'), dict):
    is_open = schema.get('x-kubernetes-preserve-unknown-fields', False)
    schema.setdefault('additionalProperties', is_open)


@pytest.mark.skipif(
  not KUBERAY,
  reason='no package brings the schema of a RayJob: $KUBERAY_CRD names no '
  'ray.io_rayjobs.yaml of a release of KubeRay',
)
def test_the_rayjob_is_as_kuberay_says():
  jsonschema = pytest.importorskip('jsonschema')
  versions = yaml.safe_load(pathlib.Path(KUBERAY).read_text())['spec']['versions']
  job = load('kuberay_rayjob.yaml')
  version = job['apiVersion'].rpartition('/')[2]
  (schema,) = [v['schema'] for v in versions if v['name'] == version]
  close(schema)
  validator = jsonschema.Draft202012Validator(schema['openAPIV3Schema'])
  assert [error.message for error in validator.iter_errors(job)] == []
  job['spec']['entrypoints'] = job['spec'].pop('entrypoint')
  assert len(list(validator.iter_errors(job))) == 1
