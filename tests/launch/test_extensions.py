"""Every kind of component works from one file outside the repository.

The files are those that docs/extending.md shows.
"""

import asyncio
import re
import types

import numpy as np
import pytest

from jaxrl.types import SamplingParams
from jaxrl.user_code import import_object
from tests.launch import runs

PAGE = runs.ROOT / 'docs' / 'extending.md'
FILES = dict(
  re.findall(r'```python\n# lab/(\w+\.py)\n(.*?)```', PAGE.read_text(), re.S)
)
CONFIG = """
from configs import base, debug

def get_config(algorithm='grpo'):
  config = debug.get_config(algorithm)
  config.env = {{}}
  config.env.echo = base.env_section(
    '{lab}/echo_env.py:EchoEnv', max_tokens_per_step=4, env_config={{'word': 'no'}}
  )
  config.num_steps = 2
  config.sft.num_steps = 0
  config.eval.interval = 0
  return config
"""


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
  folder = tmp_path_factory.mktemp('lab')
  for name, text in FILES.items():
    (folder / name).write_text(text)
  (folder / 'config.py').write_text(CONFIG.format(lab=folder))
  return folder


def test_the_advantage_is_that_of_each_group(lab):
  midrange = import_object(f'{lab}/midrange_advantage.py:midrange')
  # Two groups, of three episodes and of one with two rows, and a row of padding.
  rewards = np.array([[0, 1], [0, 4], [0, 2], [3, 0], [0, 2], [9, 9]], np.float32)
  mask = np.array([[0, 1], [1, 1], [0, 1], [1, 0], [0, 1], [0, 0]], bool)
  groups, episodes = np.array([0, 0, 0, 1, 1, -1]), np.array([0, 1, 2, 3, 3, -1])
  found = midrange(rewards, mask, groups, episodes, scale=2.0).advantages
  wanted = [[0, -3], [3, 3], [0, -1], [0, 0], [0, 0], [0, 0]]
  np.testing.assert_allclose(found, wanted)


@pytest.mark.slow  # its fast sibling is the run with plugins, in test_plugins
def test_one_run_with_components_of_ones_own(lab, tmp_path):
  workdir = tmp_path / 'run'
  rewards = (
    f'env(weight=0) + {lab}/length_grader.py:short(limit=1000) '
    f'+ {lab}/length_grader.py:Even(bonus=3.0, weight=0)'
  )
  status = runs.main(
    workdir,
    f'--config.rollout.engine={lab}/dice_engine.py:DiceEngine(sides=4)',
    f'--config.rollout.rewards={rewards}',
    f'--config.rollout.group_filter={lab}/parity_filter.py:DropFirst(count=2)',
    f'--config.algorithm.advantage={lab}/midrange_advantage.py:midrange(scale=2.0)',
    f'--config.algorithm.sampler={lab}/reversed_sampler.py:Reversed(note=7)',
    f'--config.logging.sinks={lab}/text_sink.py:TextSink(file="mine.txt")',
    f'--config.trajectory_dump.path={lab}/counting_writer.py:CountingWriter(suffix=".n")',
    config=str(lab / 'config.py'),
  )
  assert status == 0
  first, last = runs.rows(workdir)
  assert last['dice/tokens'] >= first['dice/tokens'] > 0  # the engine generated
  assert first['reward/short'] == 1.0  # the grader's function ran
  assert 0 <= first['reward/Even'] <= 3.0  # and its class
  assert first['queue/filtered'] == 2  # groups, dropped by the filter
  assert last['sampler/note'] == 7
  lines = (workdir / 'mine.txt').read_text().splitlines()
  assert [line.split()[:2] for line in lines if 'loss/total' in line] == [
    ['0', '0'],
    ['0', '1'],
  ]
  parts = sorted(workdir.glob('train-echo-*.n'))
  assert len(parts) == 2 and all(int(part.read_text()) > 0 for part in parts)


@pytest.mark.parametrize(
  'key, call',
  [
    ('rollout.engine', 'dice_engine.py:DiceEngine'),
    ('rollout.rewards', 'length_grader.py:short'),
    ('rollout.rewards', 'length_grader.py:Even'),
    ('rollout.group_filter', 'parity_filter.py:DropFirst'),
    ('algorithm.sampler', 'reversed_sampler.py:Reversed'),
    ('logging.sinks', 'text_sink.py:TextSink'),
    ('trajectory_dump.path', 'counting_writer.py:CountingWriter'),
  ],
)
def test_an_unknown_option_is_named_with_its_file(lab, tmp_path, capsys, key, call):
  option = f'--config.{key}={lab}/{call}(colour=1)'
  config = str(lab / 'config.py')
  assert runs.main(tmp_path / 'run', option, config=config) == 2
  message = ' '.join(capsys.readouterr().err.split())
  assert "no option 'colour'" in message and call in message


def test_a_class_without_the_methods_is_refused(lab, tmp_path, capsys):
  option = f'--config.rollout.engine={lab}/echo_env.py:EchoEnv'
  assert runs.main(tmp_path / 'run', option, config=str(lab / 'config.py')) == 2
  message = ' '.join(capsys.readouterr().err.split())
  assert 'has no' in message and 'generate' in message and 'EngineBase' in message


def test_an_engine_of_ones_own_holds_requests_while_it_is_drained(lab):
  """What `EngineBase` does for an engine that has no pause of its own."""

  async def play():
    engine = import_object(f'{lab}/dice_engine.py:DiceEngine')(
      types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=9)),
      None,
      device_thread=None,
      max_num_seqs=4,
      max_length=16,
    )
    await engine.load(0, {})
    await engine.drain()
    sampling = SamplingParams(max_tokens=3)
    held, unwanted = (
      asyncio.create_task(engine.generate(name, [1], sampling)) for name in 'ab'
    )
    await asyncio.sleep(0)
    await engine.load(1, {})
    assert not held.done()
    await engine.abort('b')
    assert (await unwanted).finish_reason == 'abort'
    await engine.resume()
    completion = await held
    assert list(completion.weights_versions) == [1, 1, 1]
    assert engine.metrics() == {'dice/tokens': 3.0}

  asyncio.run(play())


@pytest.mark.ray
def test_an_engine_of_ones_own_can_be_a_ray_actor(lab, tmp_path):
  output = runs.run(
    tmp_path / 'run',
    f'--config.rollout.engine={lab}/dice_engine.py:DiceEngine(sides=4)',
    '--config.cluster.ray=true',
    config=str(lab / 'config.py'),
  )
  assert 'Finished.' in output
  assert runs.rows(tmp_path / 'run')[0]['dice/tokens'] > 0
