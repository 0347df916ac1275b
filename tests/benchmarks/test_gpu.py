"""`make bench-gpu` at toy sizes: its code runs; its figures mean nothing here."""

import json
import subprocess
import sys

import pytest

from tests.benchmarks.gpu import __main__ as gpu
from tests.benchmarks.gpu import shapes

# What a plain environment of jax, flax and optax lacks.
ABSENT = 'ray vllm torch transformers tokenizers safetensors ml_collections'.split()


def test_work_is_counted_as_by_hand():
  config = shapes.MODELS['Qwen3-1.7B']
  assert shapes.matrices(config) == pytest.approx(1.72e9, rel=0.01)
  tokens = 65_536
  flops = shapes.train_flops(config, 32, 2048)
  # Six a weight and token; attention, causal, twelve a width, layer and half a length.
  assert flops == tokens * (
    6 * shapes.matrices(config) + 12 * 28 * 16 * 128 * 2048 // 2
  )
  assert shapes.decode_bytes(config, 32, 576) == 2 * (
    shapes.matrices(config) + 32 * 576 * 28 * 2 * 8 * 128
  )


def test_tables_name_what_failed():
  cost = {'ms': 1.5, 'mib': 2048.0, 'share': 0.5}
  table = {'kernels': {'forward': cost, 'both': {'failed': 'no memory'}}}
  table |= {'tokamax': {'failed': 'ModuleNotFoundError'}}
  rows, failures = gpu.kernel_rows({'shapes': {'a': table}})
  assert rows[1] == ['a, kernels', '1.50', '2,048', '50%', '–', '–', '–']
  assert failures == ['a, kernels: no memory', 'a, tokamax: ModuleNotFoundError']
  cases = {'b': {'step_s': 0.25, 'mfu': 0.5}, 'c': {'failed': 'no memory'}}
  rows, failures = gpu.case_rows({'cases': cases})
  assert rows == [['', 'step s', 'mfu'], ['b', '0.25', '50%']]
  assert failures == ['c: no memory']


def test_aims_are_told_by_what_was_measured(capsys):
  card = {'card': 'H200', 'jax': '1', 'flax': '2', 'optax': '3'}
  train = {
    f'Qwen3-1.7B, remat {remat}, kernels {kernels}': {'mfu': mfu}
    for remat, kernels, mfu in (
      ('full', 'auto', 0.4),
      ('dots', 'auto', 0.55),
      ('full', 'reference', 0.9),
    )
  }
  decode = {
    'Qwen3-1.7B, 256 slots, kernels auto': {'share': 0.5},
    'Qwen3-0.6B, 1 slots, kernels auto': {'share': 0.9},
    'Qwen3-1.7B, 1 slots, kernels auto': {'share': 0.5},
    'Qwen3-1.7B, 32 slots, kernels auto': {'failed': 'no memory'},
  }
  kernel_costs = {'forward': {'ms': 3.0}, 'both': {'ms': 9.0}}
  naive = {'forward': {'ms': 4.0}, 'both': {'failed': 'no memory'}}
  precise = {'forward': {'ms': 2.0}, 'both': {'ms': 10.0}}
  whole = {'kernels': kernel_costs, 'naive XLA': {'failed': 'all of it'}}
  results = {
    'date': 'today',
    'train': {'cases': train, 'device': card},
    'decode': {'cases': decode, 'device': card},
    'logprobs': {
      'shapes': {
        'a': {
          'kernels': kernel_costs,
          'naive XLA': naive,
          'naive XLA, f32 logits': precise,
        },
        'b': whole,
      }
    },
    'attention': {'failed': 'took more than 1 s'},
  }
  gpu.close(results)
  output = capsys.readouterr().out
  assert 'dots, kernels auto: share of the products: 55%, aim 60%: missed' in output
  assert '256 slots, kernels auto: share of the memory: 50%, aim 65%: missed' in output
  assert '1 slots, kernels auto: share of the memory: 50%, aim 50%: reached' in output
  assert output.count('share of the memory') == 2
  assert 'a, forward: of the time of naive XLA: 0.75, aim 1: reached' in output
  assert 'a, with gradient: of the time of naive XLA, f32 logits: 0.90' in output
  assert output.count('it does not fit') == 3
  assert 'today, H200, jax 1, flax 2, optax 3' in output
  gpu.close({'date': 'today', 'train': {'failed': 'no card'}})
  assert not capsys.readouterr().out


def test_a_part_that_fails_or_takes_too_long_says_so():
  assert 'took more than' in gpu._part('train', True, 0.01)['failed']
  assert 'its own words' in gpu._part('nothing', True, 60.0)['failed']


@pytest.mark.parametrize(
  'end, why', [('exec sleep 60', 'more than 2 s'), ('exit 3', '3')]
)
def test_what_a_part_had_measured_stays(end, why, tmp_path, monkeypatch, capsys):
  part = tmp_path / 'part'
  part.write_text(f"""#!/bin/sh
echo '{{"cases": {{"a": {{"ms": 1}}}}}}'
echo '{{"cases": {{"a": {{"ms": 1}}, "b": {{"ms": 2}}}}, "flops": 1e12, "bytes": 1e9}}'
printf '{{"cases": {{"c"'
{end}
""")
  part.chmod(0o700)
  monkeypatch.setattr(sys, 'executable', str(part))
  figures = gpu._part('train', True, 2.0)
  assert (
    figures['cases'] == {'a': {'ms': 1}, 'b': {'ms': 2}} and why in figures['stopped']
  )
  gpu.show('train', figures | {'device': {'card': 'none'}})
  assert f'not measured: the rest: {figures["stopped"]}' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.extended
def test_every_part_runs_at_toy_sizes(tmp_path):
  file = tmp_path / 'gpu.json'
  command = [sys.executable, '-m', 'tests.benchmarks.gpu', '--tiny', f'--json={file}']
  subprocess.run(command, check=True)
  results = json.loads(file.read_text())
  for name in gpu.PARTS:
    part = results[name]
    assert 'failed' not in part and part['flops'] > 0 and part['bytes'] > 0
    for case in part.get('cases', {}).values():
      assert 'failed' not in case, case
    for table in part.get('shapes', {}).values():
      kernel_costs = table['kernels']
      assert kernel_costs['forward']['ms'] > 0 and kernel_costs['both']['ms'] > 0


@pytest.mark.slow
def test_a_plain_jax_environment_is_enough():
  """No import of the parts needs what jax, flax and optax do not bring."""
  code = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
import tests.benchmarks.gpu.train, tests.benchmarks.gpu.decode
import tests.benchmarks.gpu.logprobs, tests.benchmarks.gpu.attention
import tests.benchmarks.gpu.experts, tests.benchmarks.gpu.agreement
"""
  subprocess.run([sys.executable, '-c', code], check=True)
