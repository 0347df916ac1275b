"""The configs of Qwen3's sizes: their shapes, and that each can be planned."""

import pathlib

import jax
import pytest

from launch import plan
from launch.planning import planned_run, targets
from launch.planning.cost import resident_memory
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from tests.marks import slow_except

# The parameters that each model's page on huggingface.co/Qwen tells, in billions.
SIZES = {'0_6b': 0.6, '1_7b': 1.7, '8b': 8.2, '32b': 32.8, '30b_a3b': 30.5}


def path(name: str) -> str:
  return f'configs/qwen3_{name}.py'


def read(name: str):
  return planned_run.read_run(
    resolve_settings(command_line.load(command_line.parse([f'--config={path(name)}'])))
  )


@pytest.mark.parametrize('name', SIZES)
def test_parameters_are_as_many_as_published(name):
  run = read(name)
  count = sum(x.size for x in jax.tree.leaves(run.policy().params))
  assert round(count / 1e9, 1) == SIZES[name]
  assert len(pathlib.Path(path(name)).read_text().splitlines()) <= 40
  targets.parse_target(plan._default_topology(path(name)))


@pytest.mark.parametrize(
  'name',
  slow_except(('30b_a3b',), SIZES),
)
def test_every_size_lowers_on_its_mesh(name):
  """On eight devices in the place of its own: fewer shares along fsdp."""
  run = read(name)
  mesh = run.settings.mesh
  fixed = mesh.tensor * mesh.expert
  sizes = mesh.as_dict() | {'data': 1, 'fsdp': 8 // fixed}
  run = run.with_overrides({f'mesh.{axis}': size for axis, size in sizes.items()})
  mesh = planned_run.planned_mesh(run, jax.devices()[:8])
  learner = planned_run.make_learner(run, mesh)
  _, traced = learner.trace(run.buckets[-1])
  assert traced['train'].lower().as_text().count('stablehlo.dot_general') >= 3
  held = resident_memory(run, learner)
  assert held['optimizer state'] == pytest.approx(2 * held['parameters'], rel=1e-6)
