"""Topologies: what is read, what is refused, and devices of compilers that are here."""

import pytest

from jaxrl.options import ConfigError
from launch.planning import targets


@pytest.mark.parametrize(
  'text, size', [('v5p:8x8x8', 512), ('v5e:4x4', 16), ('h200:16', 16), ('cpu:1', 1)]
)
def test_sizes(text, size):
  target = targets.parse_target(text)
  assert target.size == size
  assert min(target.chip.memory, target.chip.flops, target.chip.link) > 1e9


@pytest.mark.parametrize(
  'text, word',
  [
    ('v5q:2x2', 'v5p'),
    ('v5p:4x4', 'v5p:AxBxC'),
    ('v5e', 'v5e:2x2'),
    ('h200:0', 'h200:8'),
    ('h200:12', 'multiple of 8'),
    ('h200:2x4', 'h200:N'),
  ],
)
def test_what_is_no_topology_is_refused(text, word):
  with pytest.raises(ConfigError, match=word):
    targets.parse_target(text)


def test_the_environment_is_kept_where_it_is_set():
  env = {'JAX_PLATFORMS': 'tpu', 'XLA_FLAGS': f'{targets.VIRTUAL_DEVICES_FLAG}=3'}
  targets.set_compiler_env(targets.parse_target('cpu:4'), env)
  assert env == {
    'JAX_PLATFORMS': 'tpu',
    'XLA_FLAGS': f'{targets.VIRTUAL_DEVICES_FLAG}=3',
  }
  env = {}
  targets.set_compiler_env(targets.parse_target('h200:8'), env)
  assert env == {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': targets.GPU_AUTOTUNE_FLAG}


def test_a_compiler_that_is_absent_is_named_with_its_extra(monkeypatch):
  monkeypatch.setattr(targets, 'missing_compiler', lambda target: 'libtpu')
  with pytest.raises(ConfigError, match=r'libtpu.*\.\[targets\]'):
    targets.target_devices('v6e:1x1')


def test_devices_of_this_machine():
  assert len(targets.target_devices('cpu:4')) == 4
  with pytest.raises(ConfigError, match='this process has 8'):
    targets.target_devices('cpu:9')


@pytest.mark.targets
@pytest.mark.parametrize('text', ['v5e:4x4', 'v5p:2x2x2', 'v6e:1x1', 'h200:16'])
def test_devices_of_other_machines(text):
  target = targets.parse_target(text)
  if targets.missing_compiler(target):
    pytest.skip(f'{targets.missing_compiler(target)} is not installed')
  devices = targets.target_devices(text)
  assert len(devices) == target.size
  assert devices[0].platform == {'cuda': 'gpu'}.get(target.chip.platform, 'tpu')


@pytest.mark.targets
@pytest.mark.parametrize(
  'text, known', [('v5p:3x3x3', 'v5p:4x4x4'), ('v6e:5x5', 'v6e:4x4')]
)
def test_a_slice_that_there_is_not_is_answered_with_one_that_there_is(text, known):
  if targets.missing_compiler(targets.parse_target(text)):
    pytest.skip('libtpu is not installed')
  with pytest.raises(ConfigError, match=f'hosts with 2x2 chips, as {known} is'):
    targets.target_devices(text)
  assert len(targets.target_devices(known)) == targets.parse_target(known).size
