"""Compiles a published size of every family for TPU v5p and H200, without either.

`python -m tests.launch.compiled_families [NAME …]` takes minutes for each, and needs
the compilers of `make env-targets`. The update and a decode step are compiled with one
layer of each kind, at the widths that were published, but with few experts and tokens.
"""

import dataclasses
import sys
import time

import jax

from jaxrl.models import families
from jaxrl.models.families.known_configs import KNOWN_CONFIGS
from launch.planning import engine_decode, planned_run, targets
from launch.settings import command_line
from launch.settings.resolve import resolve_settings

MACHINES = 'v5p:2x2x1', 'h200:8'
OPTIONS = (
  '--config=configs/qwen3_0_6b.py',
  '--config.model.dtype=bfloat16',
  '--config.mesh.fsdp=4',
  '--config.mesh.data=1',
  '--config.batch.max_length=512',
  '--config.batch.length_buckets=(512,)',
)


def first_of_each_family() -> list[str]:
  """Returns the name of a published model of each family that has one."""
  names: dict[str | None, str] = {}
  for name, data in KNOWN_CONFIGS.items():
    names.setdefault(families.family_name(data['model_type']), name)
  return list(names.values())


def cut_run(name: str) -> planned_run.PlannedRun:
  """Returns a run of a published model with one layer of each kind."""
  words = [*OPTIONS, f'--config.model.checkpoint={name}']
  run = planned_run.read_run(
    resolve_settings(command_line.load(command_line.parse(words)))
  )
  kinds = run.shape.layer_types or ('',) * run.shape.num_layers
  sources = {layer.kv_layer for layer in run.shape.layer_configs} - {-1}
  run = engine_decode.with_layers(
    run, sorted(sources | {kinds.index(kind) for kind in kinds})
  )
  fewer = {'router_groups': 1, 'router_top_groups': 1}
  fewer |= {'num_experts': min(16, run.shape.num_experts), 'vocab_size': 1024}
  return dataclasses.replace(run, shape=run.shape.replace(**fewer))


def compile_on(name: str, machine: str) -> str:
  """Compiles a model for a machine, and says what came of it."""
  start, devices = time.monotonic(), targets.target_devices(machine)[:4]
  try:
    run = cut_run(name)
    learner = planned_run.make_learner(run, planned_run.planned_mesh(run, devices))
    learner.trace(run.buckets[-1])[1]['train'].lower().compile()
    engine_decode.trace_decode(run, devices).lower().compile()
  except Exception as error:  # whatever a compiler raises
    return f'failed: {" ".join(str(error).split())[:300]}'
  return f'compiled in {time.monotonic() - start:.0f} s'


def main(names: list[str]) -> int:
  """Compiles models for all machines, and returns how often that failed."""
  jax.config.update('jax_platforms', 'cpu')  # where arrays are; no GPU is looked for
  failures = 0
  for name in names or first_of_each_family():
    for machine in MACHINES:
      result = compile_on(name, machine)
      failures += result.startswith('failed')
      print(name, machine, result, flush=True)
  return failures


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
