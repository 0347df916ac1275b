"""Resolving a config: unknown keys are refused, and texts mean what they say."""

import pytest

from configs import debug
from jaxrl.options import ConfigError
from jaxrl.training.parallelism.mesh import MeshOptions
from launch.settings.resolve import resolve_settings


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda c: c.update(foo=1), "config: no key 'foo'"),
    (lambda c: c['dataset'].update(pth=1), r"config\.dataset: no key 'pth'.*'path'"),
    (lambda c: c['optimizer'].update(foo=1), r"config\.optimizer: no key 'foo'"),
    (lambda c: c['weight_sync'].update(foo=1), r"config\.weight_sync: no key 'foo'"),
    (lambda c: c['env']['arithmetic'].update(foo=1), r"env\.arithmetic: no key 'foo'"),
    (lambda c: c.update(batch=1), r'config\.batch=1 must be a section'),
  ],
)
def test_a_key_that_nothing_reads_is_refused(change, message):
  data = debug.get_config().to_dict()
  change(data)
  with pytest.raises(ConfigError, match=message):
    resolve_settings(data)


def test_an_axis_that_takes_all_devices_leaves_one_replica():
  assert (MeshOptions(fsdp=-1).data, MeshOptions(fsdp=-1).fsdp) == (1, -1)
  assert (MeshOptions(fsdp=2).data, MeshOptions().data) == (-1, -1)
  with pytest.raises(ConfigError, match='fsdp=0: must be at least 1'):
    MeshOptions(fsdp=0)
  with pytest.raises(ConfigError, match='only one axis can be -1, and fsdp is'):
    MeshOptions(tensor=-1, fsdp=-1)


@pytest.mark.parametrize(
  'key',
  [
    'model.random',
    'model.lora',
    'batch.packing',
    'rollout.engine',
    'rollout.staleness_policy',
    'weight_sync.policy',
    'weight_sync.transport',
    'cluster.placement',
    'optimizer.name',
    'dataset.curriculum',
  ],
)
def test_a_text_that_cannot_be_read_is_answered_with_its_key(key):
  config = debug.get_config()
  config.update_from_flattened_dict({key: 'name(2)'})
  with pytest.raises(ConfigError, match=f'{key}=.*options go by name'):
    resolve_settings(config)


def test_the_day_of_the_config_counts_before_that_of_the_run():
  config = debug.get_config()
  assert resolve_settings(config).chat.date is None
  begun = resolve_settings(config, day='2026-01-30').chat.date
  config.model.date = '2026-01-31'
  chosen = resolve_settings(config, day='2026-01-30').chat.date
  assert (str(begun), str(chosen)) == ('2026-01-30', '2026-01-31')
  config.model.date = 'today'
  with pytest.raises(ConfigError, match=r'model\.date=today: not a day'):
    resolve_settings(config)


def test_a_wrong_random_model_is_refused_beside_a_checkpoint():
  config = debug.get_config()
  config.model.update(checkpoint='folder', random='qwen3(num_layer=2)')
  with pytest.raises(ConfigError, match="no option 'num_layer'"):
    resolve_settings(config)


def test_builders_get_none_for_a_call_that_is_not_set(tmp_path):
  file = tmp_path / 'own.py'
  file.write_text("""
from jaxrl.algorithms.presets.grpo import grpo
from jaxrl.component_calls import ComponentCall

def mine(*, extra: ComponentCall | None = None, more: tuple[ComponentCall, ...] = ()):
  assert extra is None and more == (), (extra, more)
  return grpo()
""")
  resolve_settings(debug.get_config(f'{file}:mine'))
