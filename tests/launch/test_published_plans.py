"""The configs of Qwen3's sizes: their shapes, and that each can be planned."""

import pathlib

import jax
import pytest

from launch import config as configs
from launch import plan, targets
from launch.planning import abstract, decode
from launch.planning.cost import resident

# The parameters that each model's page on huggingface.co/Qwen tells, in billions.
SIZES = {'0_6b': 0.6, '1_7b': 1.7, '8b': 8.2, '32b': 32.8, '30b_a3b': 30.5}


def path(name: str) -> str:
  return f'configs/qwen3_{name}.py'


def read(name: str):
  return abstract.read(configs.load(configs.parse([f'--config={path(name)}'])))


@pytest.mark.parametrize('name', SIZES)
def test_parameters_are_as_many_as_published(name):
  run = read(name)
  count = sum(x.size for x in jax.tree.leaves(run.policy().params))
  assert round(count / 1e9, 1) == SIZES[name]
  assert len(pathlib.Path(path(name)).read_text().splitlines()) <= 40
  targets.parse(plan._own(path(name)))


@pytest.mark.parametrize('name', SIZES)
def test_every_size_lowers_on_its_mesh(name):
  """On eight devices in the place of its own: fewer shares along fsdp."""
  run = read(name)
  with run.config.unlocked():
    fixed = run.config.mesh.tensor * run.config.mesh.get('expert', 1)
    run.config.mesh.update(data=1, fsdp=8 // fixed)
  mesh = abstract.mesh_of(run.config, jax.devices()[:8])
  learner = abstract.make_learner(run, mesh)
  _, traced = learner.traced(run.buckets[-1])
  assert traced['train'].lower().as_text().count('stablehlo.dot_general') >= 3
  held = resident(run, learner, decode.engine_of(run))
  assert held['optimizer state'] == pytest.approx(2 * held['parameters'], rel=1e-6)
