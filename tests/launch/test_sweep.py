"""Which meshes a sweep compiles, in which order, and what it says of the others."""

import dataclasses
import io
import math

import jax
import pytest
from rich.console import Console

from jaxrl.models import lora
from jaxrl.options import ConfigError
from launch.planning import cost, plan_table, sweep, targets
from launch.planning.compiled_program import bytes_per_device
from tests.launch.test_planned_memory import (
  EXPERTS,
  LORA,
  SPARSE,
  learner_of,
  resident,
  whole,
)
from tests.launch.test_planning import model, small


def swept(run, target, most):
  devices = jax.devices()[: target.size]
  return sweep.sweep_meshes(run, target, devices, max_compiles=most)


def shown(mesh_sweep):
  out = io.StringIO()
  plan_table.print_sweep(mesh_sweep, Console(file=out, width=100))
  return ' '.join(out.getvalue().split())


def compiled(run, mesh, limit):
  """In the place of a mesh's cost: what it holds, by hand, is all of it."""
  memory = {'parameters': sweep.state_memory(run, mesh)}
  return cost.RunCost(mesh, 16, 16, 16, 1, {}, memory, limit, 'train')


@pytest.mark.slow
def test_what_was_left_out_is_told():
  run, target = small(), targets.parse_target('cpu:2')
  mesh_sweep = swept(run, target, 1)
  assert len(mesh_sweep.entries) == 1
  assert len(mesh_sweep.entries) + len(mesh_sweep.skipped) == len(
    list(sweep.candidate_meshes(run, target))
  )
  (entry,) = mesh_sweep.to_json()['entries']
  assert entry['fits'] and entry['total'] == mesh_sweep.entries[0].cost.total
  assert 'not compiled' in shown(mesh_sweep)


@pytest.mark.parametrize('axis', ['context', 'expert'])
def test_what_it_keeps_is_a_number(axis):
  run = small(f'--config.mesh.{axis}=-1', '--config.mesh.data=1')
  with pytest.raises(ConfigError, match=f'give {axis} a number'):
    swept(run, targets.parse_target('cpu:2'), 1)


def test_what_it_keeps_divides_the_devices():
  run = small('--config.mesh.context=3')
  with pytest.raises(ConfigError, match='context × expert, 3, does not divide the 4'):
    swept(run, targets.parse_target('cpu:4'), 1)


def test_experts_are_shared_out_where_there_are_some():
  target = targets.parse_target('cpu:4')
  dense, sparse = (
    list(sweep.candidate_meshes(small(*more), target)) for more in ((), (EXPERTS,))
  )
  assert {tuple(mesh) for mesh in dense} == {('data', 'fsdp', 'tensor')}
  assert {mesh['expert'] for mesh in sparse} == {1, 2, 4}
  for meshes, count in ((dense, 6), (sparse, 10)):
    assert len(meshes) == count and all(math.prod(x.values()) == 4 for x in meshes)


@pytest.mark.parametrize(
  'mesh', [{'data': 4}, {'data': 1, 'fsdp': 2, 'tensor': 2}, {'data': 2, 'expert': 2}]
)
@pytest.mark.parametrize(
  'more',
  [
    (),
    (LORA,),
    ('--config.algorithm.kl_coef=0.1',),
    ('--config.optimizer.name=sgd()',),
    ("--config.optimizer.name=adamw(state_dtype='bfloat16')",),
  ],
)
def test_what_is_held_by_hand_is_what_is_held(mesh, more):
  run = small(EXPERTS, *more)
  kept, learner = resident(run, **mesh), learner_of(run, **mesh)
  learned = bytes_per_device(
    lora.trainable_params(learner.model.config, learner.params)
  )
  names = ('parameters', 'optimizer state', 'reference')
  wanted = sum(kept[name] for name in names) + learned
  assert (kept['reference'] > 0) == (more == ('--config.algorithm.kl_coef=0.1',))
  assert sweep.state_memory(run, mesh) == pytest.approx(wanted, rel=1e-4)  # scalars


def test_experts_that_a_token_does_not_take_cost_no_time_but_on_a_cpu():
  takes = 'num_experts_per_token='
  runs = [small(EXPERTS.replace(f'{takes}2', f'{takes}{count}')) for count in (1, 4)]
  for name, same in (('cpu:1', True), ('h200:1', False)):
    one, four = (
      sweep.estimate_mesh(
        x, targets.parse_target(name), dict.fromkeys(sweep.AXES, 1)
      ).seconds
      for x in runs
    )
    assert (one == four) == same and one <= four


def test_what_is_frozen_is_not_summed_over_replicas():
  target, mesh = (
    targets.parse_target('h200:8'),
    dict.fromkeys(sweep.AXES[1:], 1) | {'data': 8},
  )
  whole, adapted = (sweep.estimate_mesh(small(*x), target, mesh) for x in ((), (LORA,)))
  assert adapted.seconds < whole.seconds


def test_the_state_of_adapters_is_not_thought_too_much():
  run, target = small(LORA), targets.parse_target('cpu:1')
  limit = 2 * whole(run.policy().params)
  chip = dataclasses.replace(target.chip, memory=limit)
  target = dataclasses.replace(target, chip=chip)
  mesh = {'data': 1, 'fsdp': 1, 'tensor': 1}
  assert sweep.estimate_mesh(small(), target, mesh).too_much
  assert not sweep.estimate_mesh(run, target, mesh).too_much


def test_what_holds_less_than_what_does_not_fit_is_next(monkeypatch):
  """And where nothing does, what seemed best of the others."""
  run = small(model('qwen3_moe', num_kv_heads=4, **SPARSE))
  target = targets.parse_target('cpu:4')
  holds = sorted(
    sweep.state_memory(run, one) for one in sweep.candidate_meshes(run, target)
  )
  tried = []

  def swiftest_if_it_holds_most(run, target, mesh):
    held = sweep.state_memory(run, mesh)
    return sweep.MeshHeuristic(False, -held, held)

  def estimate(run, *_, **__):
    mesh = {axis: getattr(run.settings.mesh, axis) for axis in sweep.AXES}
    tried.append(sweep.state_memory(run, mesh))
    return compiled(run, mesh, limit)

  monkeypatch.setattr(sweep, 'estimate_mesh', swiftest_if_it_holds_most)
  monkeypatch.setattr(sweep.cost, 'estimate_cost', estimate)
  distinct = sorted(set(holds), reverse=True)
  assert len(distinct) < len(holds)
  limit = distinct[2]
  mesh_sweep = swept(run, target, 4)
  assert tried[:3] == distinct[:3] and mesh_sweep.entries[0].cost.fits
  tried, limit = [], 0.0
  swept(run, target, len(holds))
  assert tried[: len(distinct)] == distinct and sorted(tried) == holds


def test_the_configs_own_mesh_is_compared(monkeypatch):
  run = small('--config.mesh.data=2', '--config.mesh.fsdp=2', '--config.mesh.tensor=2')
  monkeypatch.setattr(
    sweep.cost,
    'estimate_cost',
    lambda run, *_, **__: compiled(run, {'data': 8}, math.inf),
  )
  (entry,) = swept(run, targets.parse_target('cpu:8'), 1).entries
  assert entry.mesh == {'data': 2, 'fsdp': 2, 'tensor': 2}
  mesh_sweep = swept(
    run, targets.parse_target('cpu:4'), 1
  )  # whose devices it does not make up
  assert len(mesh_sweep.entries) == 1


def test_of_many_that_were_left_out_the_first_are_named():
  names = {f'data {i}': 'too slow' for i in range(plan_table.MAX_NAMED_MESHES + 3)}
  output = shown(sweep.MeshSweep((), names | {'tensor 64': 'heads'}))
  assert 'data 7; and 3 more: too slow' in output and 'tensor 64: heads' in output


def test_a_mesh_that_does_not_divide_the_model_is_not_compiled(monkeypatch):
  monkeypatch.setattr(
    sweep.cost,
    'estimate_cost',
    lambda run, *_, **__: compiled(run, {'data': 8}, math.inf),
  )
  run, target = (
    small(model(num_heads=2)),
    targets.parse_target('cpu:8'),
  )
  mesh_sweep = swept(run, target, 99)
  reason = mesh_sweep.skipped['tensor 8']
  assert 'mesh axis tensor=8 does not divide' in reason
