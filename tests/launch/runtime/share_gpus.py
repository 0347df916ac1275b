"""Trains with a learner and a vLLM engine on GPUs, which Ray alone believes in.

`PYTHONPATH=…/stand_ins python -m tests.launch.runtime.share_gpus GPUS WORKDIR
[OPTION …]`: prints each step's metrics, a line of JSON.
"""

import json
import os
import pathlib
import sys


def main():
  from jaxrl.rollout.vllm import vllm_options
  from launch.runtime import ray_runtime
  from tests.launch import runs

  gpus, workdir, *options = sys.argv[1:]
  os.environ['VLLM_LOGGING_LEVEL'] = 'ERROR'
  ray = ray_runtime._import_ray('')
  quiet = {'include_dashboard': False, 'log_to_driver': False}
  ray.init(address='local', num_gpus=int(gpus), logging_level='warning', **quiet)
  vllm_options.gpu_transfer_problem = lambda: (
    ''
  )  # it is built for CPU, and nobody asks CUDA
  recorder = runs.record(pathlib.Path(workdir), *options)
  for step, metrics in recorder.metrics:
    numbers = {name: float(value) for name, value in metrics.items()}
    print(json.dumps({'step': step, **numbers}), flush=True)
  for _, kind, groups, _ in recorder.played:
    rows = [row for group in groups for row in group]
    versions = {int(v) for row in rows for v in row.weights_version[row.action_mask]}
    print(json.dumps({'kind': kind, 'versions': sorted(versions)}), flush=True)
  ray.shutdown()


if __name__ == '__main__':
  main()
