"""Plans for accelerators, compiled here."""

import pytest

from kernels import kept_softmax, token_logprobs
from launch import plan
from launch.learner import learner_factory
from launch.planning import (
  compiled_program,
  cost,
  engine_decode,
  plan_report,
  planned_run,
  rough_memory,
  targets,
)
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from tests.launch.test_planned_memory import SPARSE, built
from tests.launch.test_planning import model, small
from tests.launch.test_published_plans import SIZES, path, read
from tests.targets import TARGETS

pytestmark = TARGETS


def test_a_ready_made_config_fits_its_own_machine(capsys):
  assert plan.main(['--config=configs/qwen3_0_6b.py']) == 0
  assert 'fits, with' in capsys.readouterr().out


@pytest.mark.parametrize('name', SIZES)
def test_every_ready_made_config_lowers_for_its_own_machine(name):
  """The whole update and two layers' decode, with the kernels of that machine."""
  run, text = read(name), plan._default_topology(path(name))
  devices = targets.target_devices(text)
  learner = planned_run.make_learner(run, planned_run.planned_mesh(run, devices))
  programs = dict(learner.trace(run.buckets[-1])[1])
  programs['decode'] = engine_decode.trace_decode(
    engine_decode.with_layers(run, range(2)), devices
  )
  for one in programs.values():
    lowered = one.lower().as_text()
    assert ('tpu_custom_call' in lowered) != text.startswith('h200')
    assert '__gpu$' not in lowered  # no kernel is lowered through Triton


def on(text):
  target = targets.parse_target(text)
  return target, targets.target_devices(text)[:1]


@pytest.mark.parametrize('text', ['h200:1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:1x1'])
def test_a_step_of_decoding_moves_weights_and_cache_once(text):
  """What it writes into the cache lies in place, and is a row of each slot."""
  run = planned_run.read_run(
    resolve_settings(
      command_line.load(command_line.parse(['--config=configs/qwen3_0_6b.py']))
    )
  )
  target, devices = on(text)
  run = engine_decode.with_layers(run, [0])
  compiled = engine_decode.compile_decode(run, target, devices)
  assert compiled.arguments <= compiled.bytes_accessed <= 1.5 * compiled.arguments


OPTIONS = {
  'narrow moments, offload': (
    "--config.optimizer.name=adamw(state_dtype='bfloat16')",
    "--config.model.remat=names(save='', offload='attention')",
  ),
  'factored moments, adapters': (
    '--config.optimizer.name=adafactor()',
    '--config.model.lora=lora(rank=4)',
  ),
  'packed experts': (
    model('qwen3_moe', head_dim=64, **SPARSE),
    '--config.batch.packing=first_fit(tokens=1024)',
  ),
}


@pytest.mark.parametrize(
  ('text', 'name'),
  [
    *(('v5e:2x2', name) for name in OPTIONS),
    ('h200:8', 'narrow moments, offload'),
    ('h200:8', 'packed experts'),
  ],
)
def test_an_update_compiles_with_what_saves_memory(text, name):
  sizes = ('--config.batch.max_length=256', model(head_dim=64))
  mesh = (
    '--config.mesh.fsdp=4',
    '--config.mesh.data=1',
  )
  run = small('--config.model.dtype=bfloat16', *sizes, *mesh, *OPTIONS[name])
  target = targets.parse_target(text)
  devices = targets.target_devices(text)[:4]
  run_cost = cost.estimate_cost(run, target, devices)
  assert run_cost.fits and run_cost.programs['train'].flops > 0


@pytest.mark.parametrize(
  ('text', 'axis'),
  [
    ('v5e:2x2', 'expert'),
    ('h200:8', 'expert'),
    ('v6e:2x2', 'context'),
    ('h200:8', 'context'),
  ],
)
def test_an_update_compiles_where_experts_or_lengths_are_split(text, axis):
  sizes = ('--config.batch.max_length=256', model(head_dim=64))
  mesh = (
    f'--config.mesh.{axis}=2',
    '--config.mesh.fsdp=2',
    '--config.mesh.data=1',
  )
  experts = model('qwen3_moe', head_dim=64, **SPARSE)
  more = (experts,) if axis == 'expert' else ()
  run = small('--config.model.dtype=bfloat16', *sizes, *mesh, *more)
  target = targets.parse_target(text)
  devices = targets.target_devices(text)[:4]
  learner = planned_run.make_learner(run, planned_run.planned_mesh(run, devices))
  _, traced = learner.trace(run.buckets[-1])
  compiled = compiled_program.compile_program('train', traced['train'], target)
  kinds = {'expert': {'all-gather', 'all-to-all'}, 'context': {'collective-permute'}}
  assert kinds[axis] & compiled.collectives.keys()


def test_a_plan_for_h200_says_which_attention_is_compiled_and_why(monkeypatch):
  run = small('--config.model.dtype=bfloat16', '--config.batch.max_length=256')
  target, devices = on('h200:1')
  # Asked again, it says the same. The second time, programs are traced, not compiled.
  for compile_program in (compiled_program.compile_program, built):
    monkeypatch.setattr(compiled_program, 'compile_program', compile_program)
    report = plan_report.make_report('small.py', run, target, devices)
    (kernel_line,) = (
      line for line in report.kernels if line.startswith('attention on gpu')
    )
    assert 'cudnn_causal (preferred)' in kernel_line


def test_a_plan_for_h200_counts_the_softmax_that_is_kept():
  """In the memory that is predicted, compiled or estimated, of an update."""
  rows, length, vocab = 16, 256, 65_536
  run = small(
    '--config.model.dtype=bfloat16',
    f'--config.batch.max_length={length}',
    model(head_dim=64, vocab_size=vocab),
  )
  target, devices = on('h200:1')
  mesh = planned_run.planned_mesh(run, devices)
  learner = planned_run.make_learner(run, mesh)
  share = token_logprobs.kept_bytes_of(0.75 * target.chip.memory)
  assert learner.model.kept_bytes == share == 48 * token_logprobs.KEPT_STEP
  shape, traced = learner.trace(run.buckets[-1])
  assert (shape.micro_rows, shape.length) == (rows, length)
  program = compiled_program.compile_program('train', traced['train'], target)
  kept, tile = 2 * rows * (length - 1) * vocab, 4 * kept_softmax.TILE_LOGITS
  assert kept + tile <= program.temporaries
  phase = learner_factory.PhaseSpec('train', run.num_rows, 1)
  plan_of_phase = rough_memory.PhasePlan(run.settings, run.shape, mesh, phase, 'gpu')
  choice = next(plan_of_phase.candidates())
  assert kept + tile <= plan_of_phase.estimate(choice, num_params=0)
