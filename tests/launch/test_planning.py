"""Knowing before launch: what is counted, and what is told."""

import functools
import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxrl.models import moe
from jaxrl.options import ConfigError
from jaxrl.training.parallelism.expert_parallel import ExpertParallel
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from kernels import flash_attention, grouped_matmul
from kernels.attention import attention
from launch import plan
from launch.planning import (
  compiled_program,
  cost,
  device_budget,
  engine_decode,
  flops,
  hlo,
  plan_report,
  plan_table,
  planned_run,
  targets,
  traffic,
)
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from tests.marks import slow

SMALL = (
  '--config=configs/quickstart.py',
  '--config.model.random=qwen3(num_layers=2, hidden_size=32, vocab_size=64)',
  '--config.batch.max_length=16',
  '--config.batch.num_groups=2',
  '--config.rollout.max_num_seqs=4',
)


def model(family: str = 'qwen3', **sizes: int) -> str:
  """The option for the model of `SMALL` with other sizes."""
  options = {'num_layers': 2, 'hidden_size': 32, 'vocab_size': 64} | sizes
  arguments = ', '.join(f'{name}={value}' for name, value in options.items())
  return f'--config.model.random={family}({arguments})'


def small(*more: str):
  return planned_run.read_run(
    resolve_settings(command_line.load(command_line.parse([*SMALL, *more])))
  )


def loop(x, w):
  """Three products in a loop, one of them again in a loop of two."""

  def outer(x, _):
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)
    return x, None

  return jax.lax.scan(outer, x, None, length=3)[0]


def test_flops_count_a_loop_as_often_as_it_runs():
  x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
  w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
  assert flops.count_flops(jax.jit(loop).trace(x, w).jaxpr) == 6 * 2 * 8 * 16 * 16


def test_a_loop_that_is_not_fixed_counts_as_often_as_is_said():
  x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
  n = jax.ShapeDtypeStruct((), jnp.int32)

  def run(x, n):
    return jax.lax.fori_loop(0, n, lambda _, y: y @ y, x)

  traced = jax.jit(run).trace(x, n)
  text = traced.lower().compile().as_text()
  assert flops.count_flops(traced.jaxpr, 5) == 5 * 2 * 16**3
  once, often = (
    traffic.measure_traffic(text, loop_rounds=rounds).memory for rounds in (1, 5)
  )
  assert often - once >= 4 * 3 * 16 * 16 * 4  # two read, one written a round


@pytest.mark.parametrize('dot', [jax.lax.ragged_dot, grouped_matmul.grouped_dot])
def test_flops_of_grouped_products_are_those_of_each_row_once(dot):
  x = jax.ShapeDtypeStruct((40, 8), jnp.float32)
  w = jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
  sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
  slope = jax.grad(lambda x, w, n: jnp.sum(dot(x, w, n) ** 2), (0, 1))
  assert (
    flops.count_flops(jax.jit(slope).trace(x, w, sizes).jaxpr) == 3 * 2 * 40 * 8 * 16
  )


@pytest.mark.parametrize('platform', ['tpu', 'cuda'])
def test_experts_that_are_shared_out_cost_no_more(platform):
  x = jax.ShapeDtypeStruct((4, 16, 8), jnp.float32)
  chosen = jax.ShapeDtypeStruct((4, 16, 2), jnp.int32)
  weights = jax.ShapeDtypeStruct((4, 16, 2), jnp.float32)
  wide = jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
  narrow = jax.ShapeDtypeStruct((4, 16, 8), jnp.float32)

  def count(**sizes):
    devices = jax.devices()[: math.prod(sizes.values())]
    mix = ExpertParallel(make_mesh(MeshOptions(**sizes), devices=devices))
    way = moe.select_implementation(x, 'auto', platform)
    slope = jax.grad(lambda x, c, *rest: mix(way, x, c, *rest).sum(), (0, 3, 4, 5))
    return flops.count_flops(
      jax.jit(slope).trace(x, chosen, weights, wide, wide, narrow).jaxpr
    )

  one = count(data=1)
  assert count(data=1, expert=4) == count(data=2, expert=2) == one > 0


def test_flops_of_a_kernel_are_those_of_the_plain_way():
  """Its loops are as long as it finds at run time, and causal ones skip blocks."""
  q = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)
  k = jax.ShapeDtypeStruct((2, 1024, 2, 64), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

  def count(attend):
    total = lambda *x: attend(*x).astype(jnp.float32).sum()  # noqa: E731
    slope = jax.grad(total, (0, 1, 2))
    return flops.count_flops(jax.jit(slope).trace(q, k, k, ids).jaxpr)

  plain = functools.partial(attention, kernels='reference')
  assert 0.5 <= count(flash_attention.splash) / count(plain) <= 2


def test_collectives_count_a_loop_as_often_as_it_runs():
  """x is split by columns: each of the six products must bring all of it together."""
  mesh = make_mesh(MeshOptions(data=1, tensor=8))
  split, rows = (NamedSharding(mesh, P(*s)) for s in ((None, 'tensor'), ('tensor',)))
  x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=split)
  w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)
  step = jax.jit(loop, out_shardings=split)
  measured = traffic.measure_traffic(step.trace(x, w).lower().compile().as_text())
  sent = sum(one.bytes for one in measured.collectives.values())
  once = 8 * 64 * 4 * 7 / 8
  assert 6 * once <= sent <= 2.1 * 6 * once
  assert {one.count % 3 for one in measured.collectives.values()} == {0}


def test_memory_traffic_of_a_stack_is_its_slices():
  """A loop over a stack of matrices reads each once, not the stack at every round."""

  def run(x, stack):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

  x = jax.ShapeDtypeStruct((4, 256), jnp.float32)
  stack = jax.ShapeDtypeStruct((16, 256, 256), jnp.float32)
  measured = traffic.measure_traffic(
    jax.jit(run).trace(x, stack).lower().compile().as_text()
  )
  whole = 16 * 256 * 256 * 4
  assert whole <= measured.memory <= 4 * whole


# As a TPU's compiler writes it: a fusion of a product has a fusion that slices a stack.
NESTED = """
%inner (p: bf16[28,64,32], i: s32[]) -> bf16[64,32] {
  %p = bf16[28,64,32] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = bf16[1,64,32] dynamic-slice(%p, %i, %zero, %zero)
  ROOT %flat = bf16[64,32] bitcast(%cut)
}

%outer (x: bf16[8,64], p: bf16[28,64,32], i: s32[]) -> bf16[8,32] {
  %x = bf16[8,64] parameter(0)
  %p = bf16[28,64,32] parameter(1)
  %i = s32[] parameter(2)
  %w = bf16[64,32] fusion(%p, %i), kind=kLoop, calls=%inner
  ROOT %y = bf16[8,32] convolution(%x, %w), dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[8,64], p: bf16[28,64,32], i: s32[]) -> bf16[8,32] {
  %x = bf16[8,64] parameter(0)
  %p = bf16[28,64,32] parameter(1)
  %i = s32[] parameter(2)
  ROOT %y = bf16[8,32] fusion(%x, %p, %i), kind=kOutput, calls=%outer
}
"""


def test_memory_traffic_of_a_stack_is_its_slices_in_nested_fusions_too():
  scalar, read, written = 4, 2 * (8 * 64 + 64 * 32), 2 * 8 * 32
  assert traffic.measure_traffic(NESTED).memory == scalar + read + written


def test_an_instruction_of_several_lines_ends_no_computation():
  """As libtpu prints a Pallas kernel that has metadata."""
  metadata = 'frontend_attributes={kernel={\n"a":"{\\"b\\": 1}"\n}}, calls=%outer'
  text = NESTED.replace('parameter(2)\n  ROOT', f'parameter(2), {metadata}\n  ROOT')
  assert text.count('\n}}, calls') == 1
  assert traffic.measure_traffic(text).memory == traffic.measure_traffic(NESTED).memory
  module = hlo.parse_hlo(text)
  assert module.computations['main'].keys() == {'x', 'p', 'i', 'y'}
  assert module.called(module.computations['main']['i'])
  with pytest.raises(ValueError, match='inner has no ROOT'):
    hlo.parse_hlo(NESTED.replace('ROOT %flat', '%flat'))


@pytest.mark.parametrize(
  'text, group',
  [
    ('replica_groups={{0,2},{1,3}}', [0, 2]),
    ('replica_groups=[2,4]<=[8]', [0, 1, 2, 3]),
    ('replica_groups=[4,2]<=[2,4]T(1,0)', [0, 4]),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [0, 4]),
    ('source_target_pairs={{1,9},{2,3}}', [1, 9]),
  ],
)
def test_groups(text, group):
  assert traffic.first_device_group(text) == group


def test_the_programs_are_the_learners():
  """What is planned is what a learner with arrays compiles, to the byte."""
  run = small()
  mesh = make_mesh(MeshOptions(data=2), devices=jax.devices()[:2])
  planned = planned_run.make_learner(run, mesh)
  shape, traced = planned.trace(16)
  leaves = jax.tree.leaves(planned.device_arrays)
  assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
  whole = functools.partial(jnp.zeros, dtype=jnp.float32)
  params = jax.tree.map(lambda x: whole(x.shape), run.policy().params)
  real = planned_run.learner_factory.LocalLearnerFactory(
    run.settings, run.policy(), mesh, planned_run.DeviceThread('test'), None
  ).build_learner(
    planned_run.learner_factory.PhaseSpec('train', run.num_rows, 1), params
  )
  same = real.trace(16)
  assert same[0] == shape
  text = {name: one.lower().as_text() for name, one in traced.items()}
  assert text == {name: one.lower().as_text() for name, one in same[1].items()}
  held = cost.resident_memory(run, planned)
  state = [*jax.tree.leaves(real.params)]
  assert held['parameters'] == sum(np.asarray(x).nbytes for x in state)
  assert held['optimizer state'] == 2 * held['parameters'] + 4


@pytest.mark.parametrize(
  ('options', 'parts', 'numbers'),
  [
    ({'num_layers': 4}, [(0, 0)], [3]),
    slow(
      *(
        {'num_layers': 5, 'family': 'ministral', 'window': 8},
        [(0, 0), (0, 1)],
        [1, 3],
      )
    ),
  ],
)
def test_a_layer_more_of_each_kind_tells_of_all(options, parts, numbers):
  run = small(model(**options))
  target = targets.parse_target('cpu:1')

  def compiled(layers):
    traced = engine_decode.trace_decode(
      engine_decode.with_layers(run, layers), jax.devices()[:1]
    )
    return compiled_program.compile_program('decode', traced, target)

  one = compiled([0])
  others = [(n, one, compiled(part)) for n, part in zip(numbers, parts, strict=True)]
  extended = engine_decode.extrapolate_layers(one, others)
  whole = compiled(range(options['num_layers']))
  assert extended.flops == whole.flops
  assert extended.arguments == whole.arguments
  assert extended.bytes_accessed == pytest.approx(whole.bytes_accessed, rel=0.1)


@pytest.mark.slow
def test_the_nearest_change_is_compiled_and_fits():
  given = '--config.batch.num_micro_batches=1', '--config.model.remat=none'
  run, target = small(*given), targets.parse_target('cpu:1')
  devices = jax.devices()[:1]
  whole = cost.estimate_cost(run, target, devices)
  less = cost.estimate_cost(
    run.with_overrides({'batch.num_micro_batches': 2}), target, devices
  )
  assert less.total < whole.total
  limit = (less.total + whole.total) / 2
  chip = targets.dataclasses.replace(target.chip, memory=limit)
  tight = targets.dataclasses.replace(target, chip=chip)
  report = plan_report.make_report('small.py', run, tight, devices)
  assert not report.cost.fits
  assert report.suggestion is not None and report.suggestion.overrides
  assert report.suggestion.total <= limit
  out = io.StringIO()
  plan_table.print_report(report, Console(file=out, width=100))
  assert 'does not fit' in out.getvalue()
  assert str(report.suggestion) in out.getvalue()


def test_the_command_line(tmp_path, capsys):
  path = tmp_path / 'plan.json'
  assert plan.main([*SMALL, '--topology=cpu:1', f'--json={path}']) == 0
  data = json.loads(path.read_text())
  assert data['fits'] and data['memory']['total'] < data['memory']['limit']
  assert data['step']['least'] < data['step']['most']
  assert 0 < data['tokens_per_second']['least'] < data['tokens_per_second']['most']
  assert {'parameters', 'optimizer state', 'temporaries'} <= data['memory'].keys()
  assert data['programs'].keys() >= {'train', 'decode'} and data['change'] is None
  for one in (data['programs'][name] for name in ('train', 'decode')):
    assert one['flops'] > 0 and one['bytes_accessed'] > 0 and one['collectives'] == {}
  assert data['broadcast']['bytes'] > 0 and data['broadcast']['seconds'] > 0
  assert sum(data['compiles'].values()) >= 3 and data['assumptions'] and data['kernels']
  assert 'fits, with' in capsys.readouterr().out


@pytest.mark.parametrize(
  'argv, word',
  [
    (['--topology=cpu:0'], 'cpu:1'),
    (['--topology=cpu:1', '--sweep=batch'], "must be 'mesh'"),
    (['--topology=cpu:1', '--config.model.checkpoint=Qwen9'], 'neither such a folder'),
    (['--topology=cpu:1', '--config.mesh.data=3'], 'mesh'),
    ([], 'TOPOLOGY'),
    (['--topology=cpu:1', '--json=nowhere/plan.json'], 'there is no folder nowhere'),
    (['--topology=cpu:1', '--config.kernels=fast'], 'is not one of auto, reference'),
    (
      ['--topology=cpu:1', '--config.model.dtype=float8'],
      'is not one of float32, bfloat16',
    ),
    (
      ['--topology=cpu:1', '--config.model.random=qwen3(num_heads=3)'],
      'must be a multiple',
    ),
    (['--topology=cpu:1', '--config.batch.num_groups=0'], 'must be at least 1'),
    (['--topology=cpu:1', '--config.rollout.max_num_seqs=0'], 'must be at least 1'),
    (
      ['--topology=cpu:1', '--config.batch.length_buckets=(16,)'],
      'the largest must hold',
    ),
    (['--topology=cpu:1', '--config.rollout.engine=sglang'], 'There are: jax, vllm'),
    (['--topology=cpu:1', '--config.rollout.engine=jax(exacct=True)'], "'exact'"),
    (['--topology=cpu:1', '--config.cluster.placement=nonsense'], 'colocated'),
    (
      [
        '--topology=cpu:1',
        '--config.batch.packing=first_fit(share_tree=True, share_prefix=False)',
      ],
      'leave out share_prefix=False',
    ),
    (
      ['--topology=cpu:3', '--sweep=mesh', '--config.mesh.context=2'],
      'does not divide',
    ),
  ],
)
def test_mistakes_are_told_in_a_line(argv, word, capsys):
  assert plan.main(['--config=configs/quickstart.py', *argv]) == 2
  err = capsys.readouterr().err
  assert word in err and err.startswith('error: ') and err.count('\n') == 1


def test_json_has_null_for_what_no_compiler_told():
  assert plan._finite({'a': [1.0, math.inf], 'b': (math.nan, 'x')}) == {
    'a': [1.0, None],
    'b': [None, 'x'],
  }


RAY = '--config.cluster.ray=true'
VLLM = '--config.rollout.engine=vllm(gpu_memory_utilization=.3)'


@pytest.mark.parametrize(
  'machine, options, learner, engine',
  [
    ('cpu:1', [RAY], 1, 0),
    ('v5p:2x2x1', [RAY], 1, 0),
    ('h200:1', [], 0.75, 0),  # what JAX takes
    ('h200:1', ['--config.cluster.placement=colocated(memory=.8)'], 0.8, 0),
    ('h200:1', [RAY], 0.45, 0.45),
    ('h200:1', [RAY, VLLM], 0.6, 0.3),
    ('h200:2', [RAY, '--config.cluster.placement=colocated()'], 0.45, 0.45),
    ('h200:8', [RAY], 0.9, 0),
    ('h200:16', [RAY, '--config.cluster.placement=split(memory=.5)'], 0.5, 0),
  ],
)
def test_the_learner_has_the_share_that_the_run_will_give_it(
  machine, options, learner, engine
):
  target = targets.parse_target(machine)
  budget = device_budget.memory_budget(small(*options).settings, target)
  assert budget.limit == pytest.approx(learner * target.chip.memory)
  assert budget.engine == pytest.approx(engine * target.chip.memory)


def test_engines_on_the_learners_devices_take_turns_with_it():
  ahead = (RAY, '--config.rollout.async_ratio=1')
  for machine, together in (('h200:1', False), ('h200:8', True)):
    run, target = small(*ahead), targets.parse_target(machine)
    run_cost = cost.RunCost(
      {}, 16, 16, 16, 1, {'train': plain_program()}, {}, 1.0, 'train'
    )
    step = cost.estimate_step(run, run_cost, target)
    assert step.overlapped == together


def plain_program():
  return compiled_program.CompiledProgram('train', 1e12, 0, 0, 0, 1e9, {}, 0.0)


def test_devices_of_an_engine_are_those_of_all_its_stages():
  text = '--config.rollout.engine=vllm(tensor_parallel_size=2,pipeline_parallel_size=4)'
  assert small(RAY, text).settings.engine.num_devices == 8


def test_prompts_of_given_buckets_are_counted():
  run = small('--config.rollout.engine=jax(prompt_buckets=(4,8))')
  assert run.prompt_buckets == (4, 8)


def test_a_config_json_alone_is_enough(tmp_path):
  from jaxrl.models import huggingface

  run = small()
  (tmp_path / 'config.json').write_text(
    json.dumps(huggingface.config_to_hf(run.shape, 'float32'))
  )
  same = small(f'--config.model.checkpoint={tmp_path}')
  assert same.shape.replace(rope_theta=0) == run.shape.replace(
    rope_theta=0, max_position=same.shape.max_position
  )
  with pytest.raises(ConfigError, match='model_type'):
    (tmp_path / 'config.json').write_text('{}')
    small(f'--config.model.checkpoint={tmp_path}')
