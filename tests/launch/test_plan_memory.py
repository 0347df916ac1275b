"""The memory that a plan predicts is the memory that a learner takes, on the CPU."""

import functools
import io
import pathlib

import jax
import pytest
from rich.console import Console

from jaxrl.training import compiled_steps, staleness, teacher_scoring
from jaxrl.training.monitoring import CompileCounter
from jaxrl.training.parallelism import parallel_microbatches
from launch.planning import cost, plan_report, plan_table, targets
from tests.benchmarks import memory
from tests.launch import runs
from tests.launch.test_planned_memory import built, folder, learner_of, taught
from tests.launch.test_planning import small
from tests.marks import extended

SEES = (
  '--config.model.random=qwen3_vl(num_layers=2, hidden_size=32, num_heads=2, '
  'head_dim=16, intermediate_size=32, tower_layers=1, tower_width=16, tower_heads=2, '
  'tower_mlp=16, deepstack_layers=(0,), rope_sections=(4, 2, 2))'
)
LINUX = pytest.mark.skipif(
  not pathlib.Path('/proc/self/clear_refs').exists(), reason='needs Linux'
)


@pytest.mark.slow
@pytest.mark.extended
@LINUX
def test_the_peak_of_a_gigabyte_of_state_is_predicted_within_a_tenth():
  """Packed rows, two micro-batches at once."""
  result = memory.measure('abreast', runs.environment()['XLA_FLAGS'])
  assert result['state'] > 1e9
  assert result['predicted'] == pytest.approx(result['measured'], rel=0.1)


def planned(packing):
  """A run, and what it costs but for its programs."""
  run = small(f'--config.batch.packing={packing}')
  target = targets.parse_target('cpu:1')
  return run, cost.estimate_cost(run, target, jax.devices()[:1])


@pytest.fixture
def uncompiled(monkeypatch):
  stand_in = functools.partial(built, temporaries=1e6)
  monkeypatch.setattr(cost.compiled_program, 'compile_program', stand_in)


@pytest.mark.slow
def test_memory_of_micro_batches_abreast_is_counted_for_each(uncompiled):
  costs = [planned(f'first_fit(tokens=64, num_parallel={n})')[-1] for n in (1, 2, 100)]
  assert [one.num_parallel for one in costs] == [1, 2, 4]  # all four
  for part in ('gradients', 'temporaries'):
    two, four = (one.memory[part] for one in costs[1:])
    assert four == 2 * two > 0


@pytest.mark.slow
@pytest.mark.parametrize('share', [None, False])
def test_a_plan_of_single_turns_counts_the_program_of_trees(uncompiled, share):
  run = small(
    '--config=configs/quickstart.py:gigpo',
    f'--config.batch.packing=first_fit(tokens=64, share_tree={share})',
  )
  target = targets.parse_target('cpu:1')
  report = plan_report.make_report('small.py', run, target, jax.devices()[:1])
  lines = plan_report.list_assumptions(report)
  assert report.cost.in_trees == (share is None)
  assert any('packed rows are trees' in line for line in lines) == (share is None)


@pytest.mark.slow
def test_a_plan_tells_of_micro_batches_abreast(uncompiled):
  run, _ = planned('first_fit(tokens=64, num_parallel=2)')
  report = plan_report.make_report(
    'small.py', run, targets.parse_target('cpu:1'), jax.devices()[:1]
  )
  assert any('2 micro-batches' in line for line in plan_report.list_assumptions(report))


async def compiled_by(run):
  """How many programs a learner of the run compiles before its first step."""
  for cache in (
    parallel_microbatches._compile_finish,
    compiled_steps._compile_train_step,
    compiled_steps._compile_advantage_step,
    staleness._compiled,
    teacher_scoring._compile_zeros,
    teacher_scoring._compile_score,
  ):
    cache.cache_clear()
  learner = learner_of(run)
  with CompileCounter() as compiled:
    await learner.warmup()
  return compiled.count


@pytest.mark.slow
@pytest.mark.parametrize(
  ('packing', 'ways'),
  [
    extended('first_fit(tokens=64', 1),
    extended('first_fit(tokens=64', 2),
    extended('first_fit(tokens=256', 1),
    ('first_fit(tokens=256', 2),
  ],
)
async def test_programs_of_packed_rows_are_counted(uncompiled, packing, ways):
  run, planned_cost = planned(f'{packing}, num_parallel={ways})')
  counted = cost.count_programs(run, planned_cost)['learner']
  assert counted == await compiled_by(run)


async def test_programs_of_models_that_see_images_are_compiled_in_the_steps(
  uncompiled,
):
  run, target = small(SEES), targets.parse_target('cpu:1')
  report = plan_report.make_report('small.py', run, target, jax.devices()[:1])
  assert report.programs['learner'] == await compiled_by(run) == 0
  out = io.StringIO()
  plan_table.print_report(report, Console(file=out, width=300))
  num_later = report.cost.programs_per_shape
  assert num_later > 0
  assert f' (0 of the learner, 5 of the engine), and {num_later} of' in out.getvalue()


STALE = (
  '--config.algorithm.correction=tis',
  '--config.rollout.async_ratio=1',
  '--config.rollout.staleness_policy=mask(max=2)',
  '--config.batch.length_buckets=(8,16)',
)


@pytest.mark.slow
async def test_programs_for_stale_tokens_are_counted(uncompiled):
  run, target = small(*STALE), targets.parse_target('cpu:1')
  planned_cost = cost.estimate_cost(run, target, jax.devices()[:1])
  counted = cost.count_programs(run, planned_cost)['learner']
  # Of each length, the mismatch by age and the mask.
  assert planned_cost.num_small_programs == 4
  assert counted == await compiled_by(run)


async def test_a_teachers_work_is_counted(uncompiled, tmp_path):
  folder(tmp_path / 'teacher', hidden_size=48)
  run = taught(f'--config.teacher.checkpoint={tmp_path / "teacher"}')
  target = targets.parse_target('cpu:1')
  planned_cost = cost.estimate_cost(run, target, jax.devices()[:1])
  assert planned_cost.programs['teacher'].flops > 0
  counted = cost.count_programs(run, planned_cost)['learner']
  assert counted == await compiled_by(run)
  step = cost.estimate_step(run, planned_cost, target)
  chunk = learner_of(run).teachers.chunk_rows
  rows = step.runs['teacher'] * chunk
  assert planned_cost.rows <= rows < planned_cost.rows + chunk
  assert step.times['teacher'].compute > 0
