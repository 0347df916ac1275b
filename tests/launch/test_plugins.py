"""`--config.plugins=FOLDER`: own algorithms and parts, from the command line."""

import numpy as np
import pytest

from jaxrl.component_calls import parse_calls
from jaxrl.data.row_sources import load_rows, parse_row_sources
from jaxrl.envs.tools.toolbox import make_tools
from jaxrl.options import ConfigError
from launch.report.open_sinks import SINKS
from launch.settings import command_line, plugins
from launch.settings.component_kinds import KINDS, load_component
from launch.settings.resolve import resolve_settings
from tests.algorithms.test_plugins import LOSSES, WHOLE
from tests.launch import runs
from tests.launch.test_bad_input import refused
from tests.launch.test_extensions import FILES


@pytest.fixture
def folder(tmp_path):
  place = tmp_path / 'plugins'
  place.mkdir()
  (place / 'my_losses.py').write_text(LOSSES)
  (place / 'whole.py').write_text(WHOLE)
  return place


@pytest.mark.slow
def test_a_run_with_ones_own_algorithm_and_loss(folder, tmp_path):
  """The algorithm by its bare name, a loss by its own, an advantage by dotted path."""
  options = (
    f'--config.plugins={folder}',
    '--config.algorithm.policy_loss=steep(slope=3.0)',
    f'--config.algorithm.advantage={folder}/whole.py:halved(share=.25)',
    '--config.num_steps=1',
    '--config.sft.num_steps=0',
    '--config.eval.interval=0',
  )
  workdir = tmp_path / 'run'
  assert runs.main(workdir, *options, config=f'{runs.DEBUG}:whole') == 0
  (row,) = runs.rows(workdir)
  assert np.isfinite(row['loss/policy']) and 'loss/kl' in row


def test_a_config_holds_full_names(folder):
  command = command_line.parse(
    [
      f'--config={runs.DEBUG}:other',
      f'--config.plugins={folder}',
      '--config.algorithm.kl_loss=cubic(coef=.5)',
    ]
  )
  config = command_line.load(command)
  command_line.check_algorithm(config)
  assert config.algorithm.name == f'{folder}/whole.py:other'
  assert config.algorithm.kl_loss == f'{folder}/whole.py:cubic(coef=.5)'


@pytest.mark.slow
def test_a_plugin_that_fails_to_import_stops_the_run(folder, tmp_path):
  """With its own traceback and a status that is not 0, before anything is made."""
  (folder / 'broken.py').write_text('import math\nlimit = math.sqrt(-1)\n')
  workdir = tmp_path / 'run'
  option = f'--config.plugins={folder}'
  output = runs.run(workdir, option, config=runs.DEBUG, status=2)
  assert f'File "{folder}/broken.py", line 2' in output
  assert 'ValueError' in output and 'Traceback' in output
  assert not workdir.exists()


def test_a_plugin_that_python_cannot_read_is_one_line_with_its_place(
  folder, tmp_path, capsys
):
  (folder / 'broken.py').write_text('fine = 1\ndef f(:\n')
  error = refused(tmp_path, capsys, f'--config.plugins={folder}')
  assert f'{folder}/broken.py, line 2: invalid syntax: def f(:' in error


def test_a_config_file_may_name_the_folder(folder, tmp_path):
  (tmp_path / 'mine.py').write_text(
    'from configs import base\n'
    'def get_config(algorithm="grpo"):\n'
    '  config = base.get_config(algorithm)\n'
    f'  config.plugins = {str(folder)!r}\n'
    '  config.algorithm.policy_loss = "steep"\n'
    '  return config\n'
  )
  config = command_line.load(command_line.parse([f'--config={tmp_path}/mine.py']))
  assert config.algorithm.policy_loss == f'{folder}/my_losses.py:steep'


CONFIG = """
from configs import base, debug

def get_config(algorithm='grpo'):
  config = debug.get_config(algorithm)
  config.env = {}
  config.env.echo = base.env_section(
    'EchoEnv', max_tokens_per_step=4, env_config={'word': 'no'}
  )
  config.num_steps = 2
  config.sft.num_steps = 0
  config.eval.interval = 0
  return config
"""
OTHERS = '''
import dataclasses

from jaxrl.data.curricula import SequentialCurriculum
from jaxrl.models.families.qwen3 import QWEN3


def soften(group, *, factor: float = 0.5) -> list:
  for row in group:
    row.rewards = row.rewards * factor
  return group


def never(group) -> bool:
  return False


class Backwards(SequentialCurriculum):
  pass


def shout(text: str, *, mark: str = '!') -> str:
  """Says it louder."""
  return text.upper() + mark


class Counter:
  """Counts its calls."""

  def start(self):
    return []

  def call(self, name, arguments, *, seconds):
    return ''

  def close(self):
    pass


def my_rows(split: str, *, size: int = 4) -> list:
  """Returns questions about numbers."""
  return [{'question': f'{split} {i}', 'answer': str(i)} for i in range(size)]


async def play(task: dict, client, *, rounds: int = 1):
  """Plays for a while."""


QWEN4 = dataclasses.replace(QWEN3, model_type='qwen4')
_hidden = QWEN4
'''


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
  place = tmp_path_factory.mktemp('lab')
  for name, text in FILES.items():
    (place / name).write_text(text)
  (place / 'others.py').write_text(OTHERS)
  return place


def test_every_kind_is_recognised(lab):
  names_by_kind = plugins.read(str(lab)).names
  # A part of an algorithm is found under each kind of them; its place says which it is.
  parts = {'policy_loss', 'kl_loss', 'kl_penalty', 'entropy_loss', 'value_loss'}
  parts |= {'advantage', 'correction', 'kl_controller'}
  assert {kind: set(names) for kind, names in names_by_kind.items()} == {
    **{kind: {'midrange'} for kind in parts},
    'engine': {'DiceEngine'},
    'env': {'EchoEnv'},
    'grader': {'short', 'Even'},
    'group_filter': {'DropFirst', 'never'},
    'sampler': {'Reversed'},
    'metric_sink': {'TextSink'},
    'trajectory_writer': {'CountingWriter'},
    'env_manager': {'LastTurnManager', 'SingleTurnManager'},
    'reward_shaper': {'soften'},
    'curriculum': {'Backwards'},
    'tool': {'shout', 'Counter'},
    'generator': {'my_rows'},
    'agent': {'play'},
    'model_family': {'QWEN4', 'WINDOWED'},
  }
  assert names_by_kind['engine'] == {'DiceEngine': f'{lab}/dice_engine.py:DiceEngine'}


@pytest.mark.parametrize('kind', KINDS, ids=lambda kind: kind.name)
def test_the_built_in_ones_of_a_kind_can_be_loaded(kind):
  """A user's own file would be recognised by what the built-in ones have."""
  for name, component in kind.built_in().items():
    if name != 'vllm':  # needs vLLM
      assert load_component(component) is not None


def test_one_run_with_plugins_of_every_kind(lab, tmp_path):
  (tmp_path / 'config.py').write_text(CONFIG)
  workdir = tmp_path / 'run'
  status = runs.main(
    workdir,
    f'--config.plugins={lab}',
    '--config.rollout.engine=DiceEngine(sides=4)',
    '--config.rollout.rewards=env(weight=0) + short(limit=1000) + Even(weight=0)',
    '--config.rollout.group_filter=DropFirst(count=2)',
    '--config.rollout.reward_shaping=soften(factor=.5)',
    '--config.algorithm.sampler=Reversed(note=7)',
    '--config.env.echo.manager=LastTurnManager(scale=2.0)',
    '--config.logging.sinks=TextSink(file="mine.txt")',
    '--config.trajectory_dump.path=CountingWriter(suffix=".n")',
    '--config.model.random=QWEN4(hidden_size=32, num_layers=1, head_dim=16)',
    config=str(tmp_path / 'config.py'),
  )
  assert status == 0
  first, last = runs.rows(workdir)
  assert first['dice/tokens'] > 0 and first['reward/short'] == 1.0
  assert first['queue/filtered'] == 2 and last['sampler/note'] == 7
  assert first['reward/mean'] == 2.0  # the manager doubles it
  assert (workdir / 'mine.txt').read_text() and list(workdir.glob('train-echo-*.n'))


def test_the_config_holds_the_full_names(lab, tmp_path):
  (tmp_path / 'config.py').write_text(CONFIG)
  command = command_line.parse(
    [
      f'--config={tmp_path}/config.py',
      f'--config.plugins={lab}',
      '--config.dataset.curriculum=Backwards',
      '--config.rollout.group_filter=reward_std + never',
    ]
  )
  config = command_line.load(command)
  assert config.env.echo.env_type == f'{lab}/echo_env.py:EchoEnv'
  assert config.dataset.curriculum == f'{lab}/others.py:Backwards'
  assert config.rollout.group_filter == f'reward_std + {lab}/others.py:never'
  assert config.logging.sinks == 'report + tensorboard' and len(SINKS) == 5


def load_tools(lab, *options):
  """The config of a run with tools, an agent and rows of one's own."""
  options = [f'--config={runs.ROOT}/configs/tool_use.py', *options]
  return command_line.load(command_line.parse([*options, f'--config.plugins={lab}']))


def test_tools_and_generators_by_their_names(lab):
  config = load_tools(
    lab,
    "--config.env.problems.env_config.tools=python(timeout=2.0) + shout(mark='?')",
    '--config.dataset.path=data.jsonl + generate:my_rows(size=3)',
    '--config.dataset.limit=3',
    '--config.sft.path=generate:arithmetic',
    '--config.eval.path=my_rows',
  )
  options = config.env.problems.env_config
  assert options.tools == f"python(timeout=2.0) + {lab}/others.py:shout(mark='?')"
  assert config.dataset.path == f'data.jsonl + generate:{lab}/others.py:my_rows(size=3)'
  assert config.sft.path == 'generate:arithmetic'
  assert config.eval.path == 'my_rows'  # a folder
  rows = parse_row_sources('generate:' + config.dataset.path.partition('generate:')[2])
  assert [row['answer'] for row in load_rows(rows)] == ['0', '1', '2']
  (_, tool) = make_tools(parse_calls(options.tools))
  assert tool.start()[0]['function']['name'] == 'shout'


@pytest.mark.parametrize(
  ('option', 'words'),
  [
    ('env.problems.env_config.tools=shuot', "no tool 'shuot'. Did you mean 'shout'"),
    ('dataset.path=generate:my_row', "no generator 'my_row'. Did you mean 'my_rows'"),
  ],
)
def test_an_unknown_tool_or_generator(lab, option, words):
  with pytest.raises(ConfigError, match=words):
    load_tools(lab, f'--config.{option}')


def test_an_agent_by_its_name(lab, tmp_path):
  (tmp_path / 'config.py').write_text(
    'from configs import base, debug\n'
    'def get_config():\n'
    '  config = debug.get_config()\n'
    "  config.env.own = base.env_section('agent', env_config={'command': 'true'})\n"
    '  return config\n'
  )
  option = '--config.env.own.env_config.agent=play(rounds=2)'
  command = [f'--config={tmp_path}/config.py', f'--config.plugins={lab}', option]
  config = command_line.load(command_line.parse(command))
  assert config.env.own.env_config.agent == f'{lab}/others.py:play(rounds=2)'


def test_an_unknown_name_is_answered_with_the_nearest_of_both_kinds(lab):
  option = '--config.algorithm.sampler=Reversd'
  command = command_line.parse(
    [f'--config={runs.DEBUG}', f'--config.plugins={lab}', option]
  )
  with pytest.raises(ConfigError, match=r"no sampler 'Reversd'. Did you.*fifo, mixed"):
    command_line.load(command)


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('class EchoEnv:\n  reset = step = print', r'EchoEnv.*echo_env.py:EchoEnv'),
    ('class fifo(Sampler):\n  pass', r'built-in sampler \(jaxrl/data/samplers/\w+.py'),
    ('def judge(reply, item):\n  pass', "'judge' is already the name of a term of"),
  ],
)
def test_a_name_that_is_taken_names_both_files(lab, tmp_path, text, words):
  for file in lab.glob('*.py'):
    (tmp_path / file.name).write_text(file.read_text())
  (tmp_path / 'taken.py').write_text(f'from jaxrl.data.samplers import Sampler\n{text}')
  with pytest.raises(ConfigError, match=f'taken.py: .*{words}'):
    plugins.read(str(tmp_path))


def test_a_built_in_name_stays_itself_beside_plugins(lab):
  command = command_line.parse([f'--config={runs.VARIED}', f'--config.plugins={lab}'])
  plain = command_line.load(command_line.parse([f'--config={runs.VARIED}']))
  config = command_line.load(command)
  config.unlock()
  config.plugins = ''
  assert config.to_dict() == plain.to_dict()
  resolve_settings(config)
