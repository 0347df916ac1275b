"""Runs choose micro-batches and recomputation from the memory that there is."""

import dataclasses
import types

import jax
import pytest

from jaxrl.options import ConfigError
from jaxrl.training.parallelism.mesh import single_device_mesh
from launch.learner.learner_factory import PhaseSpec
from launch.planning import memory_choice, memory_fit, planned_run
from launch.planning.rough_memory import PhasePlan, Room
from launch.runtime.host_memory import read_host_memory
from tests.launch.test_planning import small

GB = 1e9


class _Process:
  def memory_info(self):
    return types.SimpleNamespace(rss=1_000_000 * 1024)


def machine(folder, files):
  """Writes the kernel's files of a made-up machine, and reads its memory."""
  for name, text in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  memory = types.SimpleNamespace(total=64_000_000 * 1024, available=9_000_000 * 1024)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr('psutil.Process', _Process)
    patch.setattr('psutil.virtual_memory', lambda: memory)
    return read_host_memory(str(folder))


def test_without_a_cgroup_the_free_memory_counts(tmp_path):
  memory = machine(tmp_path, {})
  assert memory.limit == (9_000_000 + 1_000_000) * 1024
  assert memory.held == 1_000_000 * 1024 and memory.source == 'memory that is free here'


@pytest.mark.parametrize('cached', [0, 500_000_000])
def test_the_limit_of_a_cgroup_counts_without_what_others_use(tmp_path, cached):
  group = 'sys/fs/cgroup/job/'
  memory = machine(
    tmp_path,
    {
      'proc/self/cgroup': '0::/job\n',
      f'{group}memory.max': '4000000000\n',
      f'{group}memory.current': '2024000000\n',
      f'{group}memory.stat': f'anon 1\ninactive_file {cached}\n',
    },
  )
  # 1 GB of the cgroup is another process's, except for the files it has read.
  assert memory.limit == 4_000_000_000 - (1_000_000_000 - cached)
  assert memory.source == "the cgroup's limit"


def test_a_cgroup_above_and_one_of_version_1_count(tmp_path):
  above = machine(
    tmp_path / 'v2',
    {
      'proc/self/cgroup': '0::/slice/job\n',
      'sys/fs/cgroup/slice/job/memory.max': 'max\n',
      'sys/fs/cgroup/slice/memory.max': '3000000000\n',
    },
  )
  assert above.limit == 3e9
  first = machine(
    tmp_path / 'v1',
    {
      # A path of the host, which this container does not see.
      'proc/self/cgroup': '5:cpu:/docker/x\n4:memory:/docker/x\n0::/docker/x\n',
      'sys/fs/cgroup/memory/memory.limit_in_bytes': '2000000000\n',
      'sys/fs/cgroup/memory/memory.usage_in_bytes': '1024000000\n',
    },
  )
  assert first.limit == 2e9
  unlimited = machine(
    tmp_path / 'none',
    {
      'proc/self/cgroup': '4:memory:/\n',
      'sys/fs/cgroup/memory/memory.limit_in_bytes': '9223372036854771712\n',
    },
  )
  assert unlimited.source == 'memory that is free here'


def plan_of(*options, rows=None):
  run = small('--config.batch.num_groups=8', *options)
  phase = PhaseSpec('train', rows or run.num_rows, 1)
  return PhasePlan(run.settings, run.shape, single_device_mesh(), phase, 'cpu')


def room(limit):
  return Room(limit, 0.0, 'a test')


def names(plan):
  return [(x.num_micro_batches, x.remat.name) for x in plan.candidates()]


def test_candidates_keep_what_is_set_and_end_with_what_needs_least():
  plan = plan_of()
  found = names(plan)
  assert found[0] == (1, 'none') and found[-1][1] == 'full'
  assert plan.rows(found[-1][0]) == 1  # a row at a time
  assert names(plan_of('--config.batch.num_micro_batches=2')) == [
    (2, 'none'),
    (2, 'full'),
  ]
  kept = plan_of('--config.model.remat=dots', '--config.batch.num_micro_batches=2')
  assert names(kept) == [(2, 'dots')]
  packed = plan_of("--config.batch.packing='first_fit(tokens=64)'".replace("'", ''))
  assert names(packed) == [(1, 'none'), (1, 'full')]


def test_a_deep_model_on_a_cpu_computes_again_what_lies_between_products():
  deep = plan_of('--config.model.random=qwen3(num_layers=9)')
  assert names(deep)[0] == (1, 'products')
  on_gpu = names(dataclasses.replace(deep, platform='gpu'))
  assert on_gpu[0] == (1, 'none')
  settled = plan_of(
    '--config.model.random=qwen3(num_layers=9)', '--config.model.remat=none'
  )
  assert {remat for _, remat in names(settled)} == {'none'}


def test_far_from_the_limit_nothing_is_compiled(monkeypatch):
  plan = plan_of()
  choice = memory_fit.choose_roughly(plan, 1e4, room(100 * GB))
  assert choice is not None and choice.num_micro_batches == 1
  assert '1 micro-batch, remat none: less than' in choice.text
  assert memory_fit.choose_roughly(plan, 1e4, room(1e6)) is None


def needs(monkeypatch, fixed, per_row, full=0.25):
  """Makes phases need `fixed` bytes, and `per_row` for each row of a micro-batch."""
  compiled = []

  def measure(plan, choice):
    rows = plan.rows(choice.num_micro_batches)
    compiled.append((choice.num_micro_batches, choice.remat.name))
    share = full if choice.remat.name == 'full' else 1.0
    parts = {'parameters': fixed, 'temporaries': per_row * rows * share}
    return parts, 'the update'

  monkeypatch.setattr(memory_choice, 'measure', measure)
  return compiled


def test_the_first_candidate_that_leaves_a_reserve_is_chosen(monkeypatch):
  compiled = needs(monkeypatch, fixed=1 * GB, per_row=1 * GB)
  plan = plan_of()
  rows = plan.rows(1)
  everything = memory_choice.choose(plan, room(100 * GB))
  assert everything.num_micro_batches == 1 and everything.remat.name == 'none'
  compiled.clear()
  chosen = memory_choice.choose(plan, room((1 + rows / 4) * GB / 0.75 + 1))
  used = 1 + plan.rows(chosen.num_micro_batches) * (
    0.25 if chosen.remat.name == 'full' else 1
  )
  assert used <= 1 + rows / 4 and f'{used:.3g} GB in the update, of' in chosen.text
  assert len(compiled) < len(names(plan))  # what surely does not fit is passed over


def test_what_cannot_fit_is_refused_with_an_option_that_fits(monkeypatch):
  needs(monkeypatch, fixed=1 * GB, per_row=1 * GB)
  plan = plan_of('--config.batch.num_micro_batches=1', '--config.model.remat=none')
  with pytest.raises(ConfigError) as error:
    memory_choice.choose(plan, room(4 * GB))
  text = str(error.value)
  assert 'not enough memory: the update needs' in text and 'of 4 GB (a test)' in text
  assert 'Set --config.batch.num_micro_batches=0 --config.model.remat=auto' in text
  needs(monkeypatch, fixed=9 * GB, per_row=1 * GB)
  with pytest.raises(ConfigError, match='take a smaller model or a larger machine'):
    memory_choice.choose(plan, room(4 * GB))


def test_a_resumed_run_keeps_its_choice_as_long_as_it_fits(monkeypatch, tmp_path):
  needs(monkeypatch, fixed=1 * GB, per_row=1 * GB)
  plan = plan_of()
  assert memory_fit.read_choice(tmp_path, plan) is None
  tight, wide = room((1 + plan.rows(4) / 4) * GB / 0.75 + 1), room(1000 * GB)
  chosen = memory_choice.choose(plan, tight)
  assert chosen.num_micro_batches > 1
  memory_fit.keep_choice(tmp_path, 'train', chosen)
  before = memory_fit.read_choice(tmp_path, plan)
  for again in (
    memory_choice.choose(plan, wide, before),
    memory_fit.choose_roughly(plan, 1e4, wide, before),
  ):
    assert again is not None
    assert again.num_micro_batches == chosen.num_micro_batches
    assert again.remat == chosen.remat
  tighter = memory_choice.choose(plan, room(1.5 * GB), before)
  assert tighter.num_micro_batches > chosen.num_micro_batches
  # Settings that are changed go before.
  assert memory_fit.read_choice(tmp_path, plan_of('--config.model.remat=dots')) is None


@pytest.mark.slow
def test_a_learner_finds_the_programs_that_were_compiled_for_the_choice():
  """And the rough estimate is above what programs need, for several shapes."""
  plan = plan_of()
  choice = next(plan.candidates())
  measured = sum(memory_choice.measure(plan, choice)[0].values())
  run = planned_run.PlannedRun(plan.settings, plan.shape, '')
  num_params = sum(x.size for x in jax.tree.leaves(run.policy().params))
  assert measured < plan.estimate(choice, num_params) < 20 * measured
  from jaxrl.training.monitoring import CompileCounter

  with CompileCounter() as counter:
    memory_choice.measure(dataclasses.replace(plan), choice)
  assert counter.count == 0
