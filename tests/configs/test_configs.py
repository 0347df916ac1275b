"""The configs: few keys, defaults from signatures, the same after JSON."""

import inspect
import json
import pathlib

import pytest
from ml_collections import ConfigDict

from configs import base
from jaxrl.config import from_config, to_config
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.file_sampler import FileSampler
from jaxrl.options import defaults
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.thread_pool import Timeouts
from jaxrl.run_options import (
  DatasetOptions,
  EnvOptions,
  EvalOptions,
  EvalSetOptions,
  ModelOptions,
  RolloutOptions,
  RunOptions,
)
from launch.logging.workdir import Workdir, json_data
from launch.settings import command_line

FILES = sorted(
  path
  for path in pathlib.Path(base.__file__).parent.glob('*.py')
  if path.stem[0] != '_'
)


def load(path, *overrides):
  command = command_line.parse([f'--config={path}', *overrides], {})
  return command_line.load(command)


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_every_config_loads_and_is_sound(path):
  config = load(path)
  command_line.check_algorithm(config)
  assert config.is_locked
  for name in ('seed', 'num_steps', 'model', 'dataset', 'algorithm', 'batch', 'env'):
    assert name in config
  assert load(f'{path}:opmd').algorithm.name == 'opmd'


def test_options_come_back_from_a_config():
  options = RunOptions(
    model=ModelOptions(lora='lora(rank=4)', stop_token_ids=(3,)),
    dataset=DatasetOptions(path='generate:arithmetic(size=3) + rows.jsonl', limit=7),
    rollout=RolloutOptions(group_filter='reward_std(threshold=0.1) + reward_range()'),
    env={'x': EnvOptions(env_type='math', timeouts=Timeouts(step=3), stop=('a',))},
    eval=EvalOptions(sets={'hard': EvalSetOptions(tag='x', temperature=0.5)}),
  )
  assert from_config(RunOptions, to_config(options).to_dict()) == options
  assert from_config(RunOptions, to_config(RunOptions()).to_dict()) == RunOptions()


def test_a_default_is_that_of_the_class_that_takes_it():
  options = RunOptions()
  for section, source in ((options.dataset, GlobalDataset), (options.sft, FileSampler)):
    own = defaults(source)
    shared = own.keys() & section.as_dict().keys() - {'limit'}
    assert shared and all(str(getattr(section, key)) == str(own[key]) for key in shared)
  assert options.rollout.max_num_seqs == defaults(JaxEngine)['max_num_seqs']


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_a_config_comes_back_from_json(path, tmp_path):
  config = load(path)
  workdir = Workdir(tmp_path, config.to_dict())
  workdir.record()
  workdir.close()
  record = json.loads((tmp_path / 'config.json').read_text())
  assert record['config'] == json_data(config.to_dict())
  again = Workdir(tmp_path, load(path).to_dict())
  assert again.resumed and not again.changes
  again.close()


def test_get_config_is_short_and_gives_a_config_dict():
  for path in FILES:
    config = load(path)
    assert isinstance(config, ConfigDict)
  assert len(inspect.getsource(base.get_config).splitlines()) <= 60
