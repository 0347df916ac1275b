"""The configs: few keys, defaults from signatures, the same after JSON."""

import inspect
import json
import pathlib

import pytest
from ml_collections import ConfigDict

from configs import base
from jaxrl.call_strings import defaults
from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.file_sampler import FileSampler
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.queue.group_queue import GroupQueue
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.training.learner import Learner
from jaxrl.training.optimizers import make_optimizer
from launch.logging.workdir import Workdir, json_data
from launch.settings import command_line as configs
from launch.settings.logging_settings import read_logging

FILES = sorted(
  path
  for path in pathlib.Path(base.__file__).parent.glob('*.py')
  if path.stem[0] != '_'
)
SOURCES = {
  'dataset': [GlobalDataset],
  'batch': [Learner],
  'optimizer': [make_optimizer],
  'rollout': [EnvManager, JaxEngine, GroupQueue, Learner],
  'checkpoint': [Checkpointer],
  'env.x': [EnvManager],
}


def load(path, *overrides):
  command = configs.parse([f'--config={path}', *overrides], {})
  return configs.load(command, {'logging': read_logging})


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_every_config_loads_and_is_sound(path):
  config = load(path)
  configs.check_algorithm(config)
  assert config.is_locked
  for name in ('seed', 'num_steps', 'model', 'dataset', 'algorithm', 'batch', 'env'):
    assert name in config
  assert load(f'{path}:opmd').algorithm.name == 'opmd'


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_at_most_a_hundred_public_keys(path):
  config = load(path)
  tags = max(len(config.env), 1)
  public_keys = [
    key
    for key in configs.dotted_keys(config)
    if not key.startswith('algorithm.') and '.env_config.' not in key
  ]
  shared = [key for key in public_keys if not key.startswith('env.')]
  assert len(shared) + (len(public_keys) - len(shared)) / tags <= 100


def test_a_default_is_the_signatures_own():
  config = base.get_config()
  config.env.x = base.env_section('math')
  assert config.env.x.row_format == 'auto'  # the launcher's word for what fits
  config.env.x.row_format = defaults(EnvManager)['row_format']
  assert (
    config.batch.num_micro_batches == 0
  )  # the launcher's word for what memory needs
  config.batch.num_micro_batches = defaults(Learner)['num_micro_batches']
  compared = 0
  for section, sources in SOURCES.items():
    node = config
    for part in section.split('.'):
      node = node[part]
    for key, value in node.items():
      signature_defaults = [
        defaults(source)[key] for source in sources if key in defaults(source)
      ]
      if signature_defaults and key != 'timeouts':  # which the launcher has as a text
        compared += 1
        # Calls are shown as texts.
        assert value in signature_defaults or value in map(str, signature_defaults), (
          f'{section}.{key}'
        )
  assert compared > 25
  assert config.sft.batch_size == defaults(FileSampler)['batch_size']
  assert config.sft.warmup_steps == defaults(make_optimizer)['warmup_steps']


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
