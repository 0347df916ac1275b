"""Validates examples/cluster with the schemas that other packages publish.

`.venv-cluster/bin/python tests/examples/cluster_schemas.py FOLDER`: SkyPilot brings its
own schemas, kubernetes-validate those of Kubernetes, and kubeflow-trainer-api models of
JobSet. No package brings the schema of a RayJob; its pods are Kubernetes' own.
"""

import json
import pathlib
import sys

import jsonschema
import kubernetes_validate
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from sky.utils import schemas

KUBERNETES = '1.34'


def check_skypilot(task):
  jsonschema.validate(task, schemas.get_task_schema())
  jsonschema.validate(task['resources'], schemas.get_resources_schema())
  for storage in task['file_mounts'].values():
    jsonschema.validate(storage, schemas.get_storage_schema())
  print('SkyPilot: task, resources, storage')


def check_contained(written, known, where='.'):
  """Fails if a model has dropped or changed something, as it does with unknown keys."""
  if isinstance(written, dict):
    for key, value in written.items():
      assert key in known, f'{where}: there is no {key}'
      check_contained(value, known[key], f'{where}/{key}')
  elif isinstance(written, list):
    for i, (value, other) in enumerate(zip(written, known, strict=True)):
      check_contained(value, other, f'{where}/{i}')
  else:
    assert written == known, f'{where}: {written!r} is read as {known!r}'


def check_jobset(jobset):
  model = JobsetV1alpha2JobSet.from_dict(jobset)
  assert model is not None
  check_contained(jobset, json.loads(model.to_json()))
  print('JobSet: all that is written is in its models')
  names = []
  for job in jobset['spec']['replicatedJobs']:
    head = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': job['name']}}
    kubernetes_validate.validate({**head, **job['template']}, KUBERNETES, strict=True)
    names.append(f'Job {job["name"]}')
  print(f'Kubernetes: {", ".join(names)}')


def check_rayjob(rayjob):
  cluster, names = rayjob['spec']['rayClusterSpec'], []
  for group in (cluster['headGroupSpec'], *cluster['workerGroupSpecs']):
    names.append(group.get('groupName', 'head'))
    pod = {'apiVersion': 'v1', 'kind': 'PodTemplate', 'metadata': {'name': names[-1]}}
    pod['template'] = group['template']
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
  print(f'Kubernetes: pods of {", ".join(names)}')


def main():
  folder = pathlib.Path(sys.argv[1])

  def load(name):
    return yaml.safe_load((folder / name).read_text())

  check_skypilot(load('skypilot.yaml'))
  check_jobset(load('gke_jobset.yaml'))
  check_rayjob(load('kuberay_rayjob.yaml'))


if __name__ == '__main__':
  main()
