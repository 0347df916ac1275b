"""Plans for accelerators, compiled here."""

import pytest

from launch import config as configs
from launch import plan, targets
from launch.planning import abstract, cost, decode, program, report
from tests.launch.test_handover import EXPERTS
from tests.launch.test_planning import small
from tests.launch.test_published_plans import SIZES, path, read
from tests.targets import TARGETS

pytestmark = TARGETS


def test_a_ready_made_config_fits_its_own_machine(capsys):
  options = ['--config=configs/qwen3_1_7b.py', '--topology=v5e:4x4']
  assert plan.main(options) == 0
  assert 'fits, with' in capsys.readouterr().out


@pytest.mark.parametrize('name', SIZES)
def test_every_ready_made_config_lowers_for_its_own_machine(name):
  """The whole update and two layers' decode, with the kernels of that machine."""
  run, text = read(name), plan._own(path(name))
  devices = targets.topology(text)
  learner = abstract.make_learner(run, abstract.mesh_of(run.config, devices))
  programs = dict(learner.traced(run.buckets[-1])[1])
  engine = decode.engine_of(run)
  programs['decode'] = decode.trace(decode.shorter(run, 2), engine, devices)
  kernel = '__gpu$' if text.startswith('h200') else 'tpu_custom_call'
  for one in programs.values():
    assert kernel in one.lower().as_text()


def on(text):
  target = targets.parse(text)
  return target, targets.topology(text)[:1]


@pytest.mark.parametrize('text', ['h200:1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:1x1'])
def test_a_step_of_decoding_moves_weights_and_cache_once(text):
  """What it writes into the cache lies in place, and is a row of each slot."""
  run = abstract.read(configs.load(configs.parse(['--config=configs/qwen3_0_6b.py'])))
  target, devices = on(text)
  run = decode.shorter(run, 1)
  made = decode.build(run, decode.engine_of(run), target, devices)
  assert made.arguments <= made.moved <= 1.5 * made.arguments


OPTIONS = {
  'narrow moments, offload': (
    "--config.optimizer.kind=adamw(moments='bfloat16')",
    "--config.model.remat=names(save='', offload='attention')",
  ),
  'factored moments, adapters': (
    '--config.optimizer.kind=adafactor()',
    '--config.model.lora=lora(rank=4)',
  ),
  'packed experts': (EXPERTS, '--config.batch.packing=first_fit(tokens=1024)'),
}


@pytest.mark.parametrize('text', ['v5e:2x2', 'h200:8'])
@pytest.mark.parametrize('name', OPTIONS)
def test_an_update_compiles_with_what_saves_memory(text, name):
  sizes = ('--config.batch.max_length=256', '--config.model.random.head_dim=64')
  mesh = ('--config.mesh.fsdp=4', '--config.mesh.data=1')
  run = small('--config.model.dtype=bfloat16', *sizes, *mesh, *OPTIONS[name])
  target = targets.parse(text)
  devices = targets.topology(text)[:4]
  found = cost.of(run, target, devices, engine=decode.engine_of(run))
  assert found.fits and found.programs['train'].flops > 0


@pytest.mark.parametrize('text', ['v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'h200:8'])
@pytest.mark.parametrize('axis', ['expert', 'context'])
def test_an_update_compiles_where_experts_or_lengths_are_split(text, axis):
  sizes = ('--config.batch.max_length=256', '--config.model.random.head_dim=64')
  mesh = (f'--config.mesh.{axis}=2', '--config.mesh.fsdp=2', '--config.mesh.data=1')
  more = (EXPERTS,) if axis == 'expert' else ()
  run = small('--config.model.dtype=bfloat16', *sizes, *mesh, *more)
  target = targets.parse(text)
  devices = targets.topology(text)[:4]
  learner = abstract.make_learner(run, abstract.mesh_of(run.config, devices))
  _, traced = learner.traced(run.buckets[-1])
  made = program.build('train', traced['train'], target)
  kinds = {'expert': {'all-gather', 'all-to-all'}, 'context': {'collective-permute'}}
  assert kinds[axis] & made.collectives.keys()


def test_a_plan_for_h200_says_which_attention_is_compiled_and_why(capsys):
  """There is no cuDNN here, which goes first where it is installed."""
  run = small('--config.model.dtype=bfloat16', '--config.batch.max_length=256')
  target, devices = on('h200:1')
  for _ in range(2):  # as often as it is asked for
    made = report.make('small.py', run, target, devices)
    (told,) = (line for line in made.kernels if line.startswith('attention on gpu'))
    assert 'triton (cudnn' in told
