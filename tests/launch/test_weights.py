"""`weight_sync.transport`, and a run whose weights go through a folder."""

import contextlib
import importlib.util
import re
import types

import jax
import numpy as np
import pytest

from configs import base
from jaxrl import model_loading
from jaxrl.models import lora
from jaxrl.options import ConfigError
from jaxrl.rollout.vllm import vllm_options
from jaxrl.rollout.weights.publisher import (
  ObjectStoreOptions,
  SharedFolderOptions,
  SharedMemoryOptions,
)
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.rollout.weights.transport import FolderTransport, SharedMemoryTransport
from launch.runtime import placement, weight_transport
from launch.settings.resolve import resolve_settings
from launch.settings.run_settings import WeightTransport
from tests.launch import runs
from tests.rollout.weights.helpers import MemoryTransport, same

OF_THE_RUN = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}


def plan(text, ray=True, lora=''):
  config = base.get_config()
  config.cluster.ray, config.weight_sync.transport = ray, text
  config.model.lora = lora
  return resolve_settings(config).transport


def test_auto_is_what_fits():
  assert plan('auto', ray=False) == plan('inprocess', ray=False)
  assert plan('auto') == plan('object_store')
  assert plan('auto').options == ObjectStoreOptions()  # so the learner's own dtype
  text = '(dtype="bfloat16")'
  assert plan('auto' + text) == plan('object_store' + text)


def test_what_is_shared_is_never_a_difference():
  options = plan('shared_memory(keep=3)').options
  assert options == SharedMemoryOptions(keep=3) and options.full_every == 1


def test_options_are_those_of_whoever_takes_them(tmp_path, monkeypatch):
  text = "object_store(dtype='bfloat16', full_every=8, patience=3, keep=1)"
  wanted = ObjectStoreOptions(dtype='bfloat16', full_every=8, patience=3, keep=1)
  assert plan(text).options == wanted
  monkeypatch.chdir(tmp_path)
  transport_plan = plan(
    "checkpoint(folder='w', durable=False, dtype='float16')", ray=False
  )
  assert transport_plan.options == SharedFolderOptions(
    folder=str(tmp_path / 'w'), durable=False, dtype='float16'
  )


REFUSED = {
  'objct_store': "Did you mean 'object_store'",
  'object_store(fullevery=3)': "no option 'fullevery'. Did you mean 'full_every'",
  'object_store(keep=0)': 'keep=0 must be at least 1',
  'object_store(keep="two")': 'must be a whole number',
  "shared_memory(dtype='bfloat8')": "Did you mean 'bfloat16'",
  "shared_memory(dtype='int8')": "no dtype 'int8'",
  'auto(keep=2)': "no option 'keep'",
  'object_store(part=1)': "no option 'part'",
  'inprocess': 'use auto or object_store',
  'checkpoint': 'needs a folder',
  'nccl(buffer_bytes=0)': 'buffer_bytes=0 must be at least 1',
  'shared_memory(full_every=2)': "no option 'full_every'",
  'ipc(keep=2)': "no option 'keep'",
  'ipc(dtype="bfloat8")': "Did you mean 'bfloat16'",
  'nccl': 'engine=jax cannot receive weights from GPU to GPU',
}


@pytest.mark.parametrize('text', REFUSED)
def test_what_cannot_be_is_refused_with_what_to_take(text):
  with pytest.raises(ConfigError) as caught:
    plan(text)
  assert REFUSED[text] in str(caught.value)
  assert str(caught.value).startswith('--config.weight_sync.transport')


@pytest.mark.parametrize('text', ['ipc', 'nccl'])
def test_from_gpu_to_gpu_the_learner_needs_what_vllm_has(text, monkeypatch, tmp_path):
  config = base.get_config()
  config.cluster.ray, config.weight_sync.transport = True, text
  config.rollout.engine = 'vllm'
  prefix = f'^--config.weight_sync.transport={text}: '
  looked = importlib.util.find_spec

  def without(name):
    return lambda module: None if module == name else here.get(module, looked(module))

  torch = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
  here = {'torch': torch, 'vllm': torch}
  monkeypatch.setattr(vllm_options, 'vllm_option_names', frozenset)
  for name in ('torch', 'vllm'):
    monkeypatch.setattr(importlib.util, 'find_spec', without(name))
    with pytest.raises(
      ConfigError, match=f"{prefix}{name} is not .* learner's own env"
    ):
      resolve_settings(config)
  monkeypatch.setattr(importlib.util, 'find_spec', without(''))
  version = tmp_path / 'version.py'
  version.write_text("__version__ = '2'\ncuda: Optional[str] = None\nhip = None\n")
  with pytest.raises(ConfigError, match=f'{prefix}torch was built without CUDA'):
    resolve_settings(config)
  version.write_text("cuda: Optional[str] = '12.8'\n")
  assert resolve_settings(config).transport.direct


@pytest.mark.parametrize(
  'text, layout, gpus, message',
  [
    ('ipc', 'colocated', [2], ''),
    ('nccl', 'split', [8], ''),
    ('nccl', 'split(learners=2, devices=2)', [4, 4], ''),
    ('ipc', 'auto', [0], 'no GPU here'),
    ('nccl', 'colocated', [1], 'use ipc'),
    ('ipc', 'split', [2], 'use nccl'),
    ('ipc', 'colocated', [2, 2], 'the 2 machines of this run cannot'),
  ],
)
def test_each_way_from_gpu_to_gpu_needs_its_placement(text, layout, gpus, message):
  config = base.get_config()
  config.cluster.update(placement=layout, ray=True, num_engines=0)
  config.rollout.engine = 'vllm'
  placed = placement.plan_placement(
    resolve_settings(config), [placement.ClusterNode(gpus=n) for n in gpus]
  )
  with (
    pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext()
  ):
    weight_transport.check_placement(WeightTransport(text), placed)
  weight_transport.check_placement(WeightTransport('object_store'), placed)


def test_shared_memory_needs_a_single_machine():
  config = base.get_config()
  config.cluster.update(ray=True, num_engines=2)
  settings = resolve_settings(config)
  nodes = [placement.ClusterNode()] * 3
  placed = placement.plan_placement(settings, nodes)
  transport = WeightTransport('shared_memory')
  weight_transport.check_placement(transport, placed)
  with pytest.raises(ConfigError, match='the 3 machines of this run share no memory'):
    weight_transport.check_placement(transport, placed, 3)


def test_without_a_learner_nobody_sends():
  config = base.get_config()
  config.cluster.update(ray=True, num_engines=0)
  alone = placement.plan_placement(
    resolve_settings(config), [placement.ClusterNode(gpus=2)], has_learner=False
  )
  with pytest.raises(ConfigError, match='no learner that could send'):
    weight_transport.check_placement(WeightTransport('nccl'), alone)


@pytest.mark.parametrize('text', ['shared_memory', 'object_store', 'nccl', 'ipc'])
def test_what_needs_other_processes_needs_ray(text):
  with pytest.raises(ConfigError, match=r'needs --config\.cluster\.ray=true.*auto'):
    plan(text, ray=False)


def test_a_transport_and_its_end_elsewhere(tmp_path):
  shared = weight_transport.open_transport(plan('shared_memory'))
  end = weight_transport.make_connector(shared)()
  assert isinstance(end, SharedMemoryTransport) and end.path == shared.path
  shared.close()
  transport_plan = plan(f"checkpoint(folder='{tmp_path}', durable=False)")
  folder = weight_transport.open_transport(transport_plan)
  end = weight_transport.make_connector(folder)()
  assert isinstance(end, FolderTransport) and end.path == folder.path == tmp_path
  assert not folder.durable and not end.durable
  store = MemoryTransport()
  assert weight_transport.open_transport(plan('object_store'), lambda: store) is store
  assert weight_transport.make_connector(store)() is store


ADAPTERS = "lora(rank=2,send='adapters')"


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('shared_memory', 'use object_store, or leave send out'),
    ('object_store(dtype="bfloat16")', "lora(base='bfloat16')"),
  ],
)
def test_not_every_way_takes_adapters(text, words):
  with pytest.raises(ConfigError, match=re.escape(words)):
    plan(text, lora=ADAPTERS)
  assert plan('object_store', lora=ADAPTERS) == plan('auto')
  assert plan(text, lora='lora()') == plan(text)  # which are merged


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_whose_adapters_go_through_a_folder(tmp_path):
  options = '--config.sft.num_steps=0 --config.num_steps=2 --config.eval.interval=0'
  through = (
    f'--config.weight_sync.transport=checkpoint(folder="{tmp_path}/w",durable=False)'
  )
  more = f'--config.model.lora={ADAPTERS}', '--config.optimizer.learning_rate=0.1'
  recorder = runs.record(tmp_path / 'run', *options.split(), through, *more)
  first, second = (row for _, row in recorder.metrics[:2])
  assert first['weights/share'] == 1 and second['weights/share'] < 0.5
  # The engine plays what was learned, else its log-probs were others.
  assert second['optimizer/grad_norm'] > 0 and second['weights/changed'] > 0
  assert second['mismatch/logprob_difference'] < 1e-5
  late = VersionReader(FolderTransport(tmp_path / 'w'))
  late.poll()
  exported = model_loading.load_model(str(tmp_path / 'run' / 'export'), **OF_THE_RUN)
  merged = lora.merge_transfer(jax.tree.map(np.array, late.params()), 'float32')
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
    *(merged, exported.params),
  )


@pytest.mark.slow
def test_a_run_through_a_folder(tmp_path):
  """Who comes later finds there what the learner ended with."""
  options = '--config.sft.num_steps=0 --config.num_steps=2 --config.eval.num_tasks=2'
  through = (
    f'--config.weight_sync.transport=checkpoint(folder="{tmp_path}/w",durable=False)'
  )
  recorder = runs.record(tmp_path / 'run', *options.split(), through)
  first, second = (row for _, row in recorder.metrics[:2])
  assert first['weights/share'] == 1 > second['weights/share'] > 0
  assert second['weights/pull_s'] > 0 and 0 < second['weights/changed'] <= 1
  late = VersionReader(FolderTransport(tmp_path / 'w'))
  assert late.poll() == 2
  exported = model_loading.load_model(str(tmp_path / 'run' / 'export'), **OF_THE_RUN)
  assert same(late.params(), exported.params)
