"""What a plan counts of others than the policy: engines' weights, experts, teachers."""

import dataclasses
import functools
import io
import json
import math
import shlex

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxrl.component_calls import ComponentCall
from jaxrl.device_thread import DeviceThread
from jaxrl.models import huggingface, lora
from jaxrl.options import ConfigError
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.weights.snapshots import DeviceDeltaSnapshot
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from launch.learner import learner_factory
from launch.planning import (
  cost,
  engine_decode,
  plan_report,
  planned_run,
  publish_memory,
  suggestions,
  targets,
)
from launch.planning import plan_table as tables
from launch.planning.compiled_program import CompiledProgram
from launch.settings import command_line
from launch.settings.cluster_settings import TRANSPORTS
from launch.settings.resolve import resolve_settings
from launch.settings.run_settings import WeightTransport
from tests.launch.test_planning import SMALL, model, small

LORA = "--config.model.lora=lora(rank=4, base='bfloat16')"
SPARSE = {'num_experts': 4, 'num_experts_per_token': 2, 'moe_intermediate_size': 16}
EXPERTS = model('qwen3_moe', **SPARSE)
REPLAY = '--config.rollout.engine=jax(router_replay=True)'
ON_DEVICE = (
  '--config.cluster.ray=true',
  "--config.weight_sync.transport=object_store(on_device=True, dtype='bfloat16')",
)


def whole(tree):
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def learner_of(run, **mesh):
  sizes = mesh or {'data': 1}
  devices = jax.devices()[: math.prod(sizes.values())]
  return planned_run.make_learner(run, make_mesh(MeshOptions(**sizes), devices=devices))


def resident(run, **mesh):
  return cost.resident_memory(run, learner_of(run, **mesh))


@pytest.fixture(scope='module')
def merged():
  """What a learner with arrays, on two devices, gives its engines."""

  def filled(x):
    return jnp.full(x.shape, 0.5, x.dtype)

  run, mesh = (
    small(LORA),
    make_mesh(MeshOptions(data=1, fsdp=2), devices=jax.devices()[:2]),
  )
  policy = run.policy()
  arguments = run.settings, policy, mesh, DeviceThread('test'), None
  phase = learner_factory.PhaseSpec('train', run.num_rows, 1)
  params = jax.tree.map(filled, policy.params)
  return (
    learner_factory.LocalLearnerFactory(*arguments)
    .build_learner(phase, params)
    .merged_params()
  )


def on_first(arrays):
  """Bytes on the first device."""
  first = jax.devices()[0]
  shards = (s for x in jax.tree.leaves(arrays) for s in x.addressable_shards)
  return sum(s.data.nbytes for s in shards if s.device == first)


def built(name, *_, temporaries=0.0, **__):
  """In the place of a program that is compiled."""
  return CompiledProgram(name, 1.0, 0.0, 0.0, temporaries, 1.0, {}, 0.0)


@pytest.mark.slow
def test_engines_have_merged_weights_and_no_adapters(merged):
  run = small(LORA)
  assert resident(run)["engine's weights"] == whole(merged)
  estimate = cost.estimate_publish(run, targets.parse_target('cpu:1'))
  assert estimate.bytes == whole(merged)
  assert estimate.description == 'inprocess, bfloat16 and float32'
  params = engine_decode.trace_decode(run, jax.devices()[:1]).in_avals[0][0]
  assert whole(params) == whole(merged)


def test_copies_for_engines_are_those_of_arrays(merged):
  """The merged one, and of the version before what is large enough to be kept."""
  run = small(LORA, *ON_DEVICE)
  learner = learner_of(run, data=1, fsdp=2)
  passing = publish_memory.PublishMemory(run, learner).publishing(built('merge'))
  assert passing['merged weights'] == on_first(merged)
  before = DeviceDeltaSnapshot('bfloat16')
  before.snapshot(merged)
  kept = on_first([device for device, _ in before._base.values()])
  assert publish_memory.PublishMemory(run, learner).pending() == {
    'version before': kept
  }
  assert 0 < kept < on_first(merged) / 2


@pytest.mark.slow
def test_publishing_may_be_what_takes_most(monkeypatch):
  monkeypatch.setattr(cost.compiled_program, 'compile_program', built)
  target, devices = targets.parse_target('cpu:1'), jax.devices()[:1]
  run = small(LORA)
  run_cost = cost.estimate_cost(run, target, devices)
  assert run_cost.phase == 'publish' and 'merge' in run_cost.programs
  served = whole(planned_run.served_params(run, None))
  assert run_cost.memory['merged weights'] == served
  # What the engine makes of it, beside its own.
  assert run_cost.memory['temporaries'] == served
  count = cost.count_programs(run, run_cost)['learner']
  assert count == 3
  report = plan_report.make_report('small.py', run, target, devices)
  out = io.StringIO()
  tables.print_report(report, Console(file=out, width=100))
  assert 'in publishing' in ' '.join(out.getvalue().split())
  monkeypatch.setattr(
    cost.compiled_program, 'compile_program', functools.partial(built, temporaries=1e9)
  )
  for options in ((), (LORA,)):
    run = small(*options)
    run_cost = cost.estimate_cost(run, target, devices)
    assert (run_cost.phase == 'publish') == bool(options)
    assert ('merge' in run_cost.programs) == bool(options)


def test_adapters_that_are_sent_are_not_merged_first(monkeypatch):
  monkeypatch.setattr(cost.compiled_program, 'compile_program', built)
  target, devices = targets.parse_target('cpu:1'), jax.devices()[:1]
  sent = LORA.replace(')', ", send='adapters')")
  run = small(sent, '--config.cluster.ray=true')
  run_cost, learner = (
    cost.estimate_cost(run, target, devices),
    learner_of(run),
  )
  assert 'merge' not in run_cost.programs
  assert publish_memory.PublishMemory(run, learner).publishing()[
    'temporaries'
  ] == whole(learner.params)
  estimate = cost.estimate_publish(run, target)
  assert estimate.bytes == whole(
    lora.trainable_params(run.trained_shape, learner.params)
  )
  assert estimate.description == 'object_store, adapters in float32'


def test_a_packed_run_compiles_for_its_two_shapes(monkeypatch):
  monkeypatch.setattr(cost.compiled_program, 'compile_program', built)
  run = small(
    '--config.batch.packing=first_fit(tokens=256)',
    '--config.batch.length_buckets=(8,16)',
  )
  target = targets.parse_target('cpu:1')
  run_cost = cost.estimate_cost(run, target, jax.devices()[:1])
  count = cost.count_programs(run, run_cost)['learner']
  assert run_cost.num_parallel == 1 and count == 2 * len(run_cost.programs)
  assert len(shapes := learner_of(run).warmup_shapes) == 2
  assert {shape.pack.num_parallel for shape in shapes} == {1}


@pytest.mark.parametrize(
  'name, options, copied',
  [
    ('object_store', {}, lambda sizes: 4 * sum(sizes)),
    ('checkpoint', {'dtype': 'bfloat16'}, lambda sizes: 2 * sum(sizes)),
    ('shared_memory', {'on_device': True}, lambda sizes: 4 * max(sizes)),
    ('nccl', {'dtype': 'bfloat16'}, lambda _: 256 << 20),
    ('ipc', {'buffer_bytes': 1}, lambda _: 4 * 384 * 32),  # an inner layer's kernel
  ],
)
def test_what_a_transport_copies_first(name, options, copied, monkeypatch):
  run = small()
  learner = learner_of(run, data=1, fsdp=2)
  sizes = [publish_memory._shard_size(x) for x in jax.tree.leaves(learner.params)]
  transport = WeightTransport(name, TRANSPORTS.build(ComponentCall(name, options)))
  run = dataclasses.replace(run, settings=run.settings.replace(transport=transport))
  memory = publish_memory.PublishMemory(run, learner).publishing()
  assert memory == {'gradients': 0.0, 'temporaries': copied(sizes)}


def test_only_what_learns_has_gradients(monkeypatch):
  def build(name, *_):
    return built(name, temporaries=1e9 * (name == 'train'))

  monkeypatch.setattr(cost.compiled_program, 'compile_program', build)
  run, target = small(LORA), targets.parse_target('cpu:1')
  devices = jax.devices()[:1]
  run_cost = cost.estimate_cost(run, target, devices)
  learner = learner_of(run)
  trained = whole(lora.trainable_params(learner.model.config, learner.params))
  assert 0 < trained < whole(learner.params) / 4
  assert run_cost.phase == 'train'
  assert run_cost.memory['optimizer state'] == 2 * trained + 4
  assert run_cost.memory['gradients'] == trained
  assert run_cost.memory['temporaries'] == 1e9 - trained


@pytest.mark.parametrize('sync, copies', [('fixed', 0), ('trainer', 1)])
def test_a_version_on_its_way_is_a_copy(sync, copies):
  run = small(f'--config.weight_sync.policy={sync}')
  kept = resident(run)
  assert kept.get('versions on their way', 0) == copies * kept['parameters']


def test_the_cache_holds_the_experts_that_the_engine_keeps():
  run = small(EXPERTS, REPLAY)
  engine = JaxEngine(
    run.policy().model,
    device_thread=DeviceThread('test'),
    max_num_seqs=run.settings.rollout.max_num_seqs,
    max_length=run.settings.batch.max_length,
    router_replay=True,
  )
  cache, _ = engine._model_runner.init_state()
  assert resident(run)['cache'] == whole(cache)
  assert resident(small(EXPERTS))['cache'] == whole(cache) - whole(cache['e'])
  traced = engine_decode.trace_decode(run, jax.devices()[:1])
  assert whole(traced.in_avals[0][1]) == whole(cache)


def test_the_cache_is_laid_out_for_the_machine():
  run = small('--config.model.dtype=bfloat16', model(head_dim=128))
  chunks, paged = (cost.engine_memory(run, name)['cache'] for name in ('cpu', 'tpu'))
  assert paged == 4 * chunks  # pages are of 128 positions


def test_experts_are_replayed_where_there_are_some():
  with pytest.raises(ConfigError, match='router_replay'):
    small(REPLAY)


def test_adapters_are_of_layers_that_the_model_has():
  learner = learner_of(run := small(EXPERTS, LORA))
  experts = learner.params['layers']['mlp']['experts']['gate']
  assert experts['lora_a'].shape[-3:] == (4, run.shape.hidden_size, 4)
  with pytest.raises(ConfigError, match="targets='router' needs a model with experts"):
    small(LORA.replace('rank=4', "rank=4, targets='router'"))


def folder(path, **changes):
  """A model's config.json, and the bytes of its parameters."""
  path.mkdir()
  run = small()
  shape = run.shape.replace(**changes)
  data = huggingface.config_to_hf(shape, 'float32')
  (path / 'config.json').write_text(json.dumps(data))
  return whole(run.policy(shape).params)


def taught(*more):
  config = '--config=configs/distill.py:on_policy_distill'
  return planned_run.read_run(
    resolve_settings(command_line.load(command_line.parse([config, *SMALL[1:], *more])))
  )


def test_teachers_are_counted_once_each_with_the_students_vocabulary(tmp_path):
  folder(tmp_path / 'student')
  folder(tmp_path / 'wide', hidden_size=48, vocab_size=96)
  size = folder(tmp_path / 'cut', hidden_size=48)
  wide = tmp_path / 'wide'
  named = f'--config.teacher.checkpoint={wide}'
  tagged = f'--config.teacher.by_tag.arithmetic={wide}'
  student = f'--config.model.checkpoint={tmp_path / "student"}'
  kept = resident(taught(student, named))
  assert kept['teachers'] == size
  assert resident(taught(student, named, tagged)) == kept
  assert taught(named).shape.vocab_size == 96  # made from nothing, it takes theirs
  with pytest.raises(ConfigError, match='64 rows; 96 are needed'):
    swapped = f'--config.teacher.checkpoint={tmp_path / "student"}'
    learner_of(taught(f'--config.model.checkpoint={wide}', swapped))


def test_data_may_be_the_teacher():
  run = taught('--config.teacher.checkpoint=data')
  assert resident(run)['teachers'] == 0


@pytest.mark.parametrize('params, copies', [('live', 0), ('initial', 1), ('ema', 1)])
def test_a_policy_that_teaches_itself_may_be_kept_twice(params, copies):
  words = (
    '--config=configs/debug.py:sdpo',
    *(*SMALL[1:], f'--config.algorithm.teacher_params={params}'),
    '--config.algorithm.top_k=8',
  )
  run = planned_run.read_run(
    resolve_settings(command_line.load(command_line.parse(words)))
  )
  kept = resident(run)
  assert kept['reference'] == copies * kept['parameters'] > -1
  learner = learner_of(run)
  shape, traced = learner.trace(16)
  assert any(
    name.startswith('teacher') for name in learner.teachers.trace(shape.rows, 16)
  )
  assert traced


PACKED = 'first_fit(tokens=512, share_prefix=False)'


def smaller(packing, **mesh):
  run = small(f'--config.batch.packing={packing}')
  run_cost = cost.RunCost(mesh, 16, 16, 16, 1, {}, {}, 1.0, 'train')
  return run, suggestions.smaller_micro_batches(run, run_cost)


def test_packed_micro_batches_shrink_by_tokens():
  run, changes = smaller(PACKED)
  texts = [one['batch.packing'] for one in changes]
  sizes = [256, 128, 64, 32, 16]  # one of the longest sequences has 16
  assert texts == [f'first_fit(tokens={n}, share_prefix=False)' for n in sizes]
  for overrides in (changes[0], changes[-1]):
    shape = learner_of(run.with_overrides(overrides))._batch_builder.batch_shape(16)
    assert shape.pack is not None
    assert shape.pack.rows * shape.pack.length == sizes[changes.index(overrides)]
  assert len(smaller(PACKED, data=2, fsdp=2)[1]) == len(sizes) - 2
  assert smaller('first_fit(tokens=16)')[1] == []
  assert smaller('first_fit(tokens=128, length=64)')[1] == [
    {'batch.packing': 'first_fit(tokens=64, length=64)'}
  ]
  texts = [
    one['batch.packing'] for one in smaller('first_fit(tokens=64,sequences=6)')[1]
  ]
  assert texts == [
    'first_fit(tokens=32, sequences=3)',
    'first_fit(tokens=16, sequences=1)',
  ]


def test_a_change_can_be_given_to_a_shell():
  change = suggestions.Suggestion(smaller(PACKED)[1][0], 0.0, 1, '')
  (argument,) = shlex.split(str(change))
  assert (
    small(argument).settings.text('batch.packing')
    == 'first_fit(tokens=256, share_prefix=False)'
  )


def test_candidates_of_packed_rows_hold_fewer_tokens():
  run, _ = smaller(PACKED)
  memory = {'parameters': 1.0, 'temporaries': 9.0, 'gradients': 1.0}
  run_cost = cost.RunCost({'data': 1}, 16, 16, 16, 1, {}, memory, 5.0, 'train')
  offered = list(
    suggestions.candidate_changes(run, targets.parse_target('cpu:1'), run_cost)
  )
  tokens = [one.get('batch.packing') for one in offered]
  assert tokens == [
    None,
    *(f'first_fit(tokens={n}, share_prefix=False, num_parallel=1)' for n in (256, 16)),
  ]
  run_cost = dataclasses.replace(run_cost, num_parallel=2)
  first = next(
    suggestions.candidate_changes(run, targets.parse_target('cpu:1'), run_cost)
  )
  assert first == {
    'batch.packing': 'first_fit(tokens=512, share_prefix=False, num_parallel=1)'
  }
  run_cost = dataclasses.replace(run_cost, num_parallel=1)
  for one in suggestions.candidate_changes(
    run, targets.parse_target('v5e:1x1'), run_cost
  ):
    assert 'num_parallel' not in one.get('batch.packing', '')
