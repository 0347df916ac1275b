"""Whole runs on a device, at toy sizes, and wheels for a machine without network."""

import argparse
import json
import os
import subprocess
import sys
import zipfile

import pytest

from tests import processes
from tests.benchmarks.gpu import device_runs, offline_wheels


def test_figures_are_of_the_main_phase_without_its_first_step():
  times = [('sft', 9.0)] * 2 + [('train', s) for s in (60.0, 2.0, 1.0, 3.0)]
  rows = [
    {'phase': phase, 'time/step': s, 'memory/device_peak_gb': i}
    for i, (phase, s) in enumerate(times)
  ]
  rows[2]['time/warmup'] = 7.0
  rows.append({'phase': 'train', 'time/evaluate': 1.0, 'reward/mean': 0.5})
  assert device_runs.summary(rows) == {
    'steps': 4,
    'time/step': 2.0,
    'time/warmup': 7.0,
    'reward/mean': 0.5,
    'memory/device_peak_gb': 5,
  }
  assert device_runs.summary([]) == {'steps': 0}


def test_the_table_sets_the_peak_against_the_plan():
  found = {'steps': 20, 'memory/device_peak_gb': 30.0, 'stopped': 'took too long'}
  found['planned'] = {'topology': 'h200:1', 'gb': 40.0, 'phase': 'train', 'parts': {}}
  text = '\n'.join(device_runs.table({'qwen3': found}))
  assert 'peak / planned' in text and '0.75' in text and 'h200:1, train' in text
  assert 'stopped: took too long' in text
  failed = {'planned': {'stopped': 'exit status 2'}}
  assert 'stopped: exit status 2' in '\n'.join(device_runs.table({'qwen3': failed}))


def test_a_run_that_takes_too_long_is_ended_with_its_children(tmp_path):
  child = tmp_path / 'child'
  code = f'sleep 60 & echo $! > {child}; wait'
  problem = device_runs.call(['sh', '-c', code], tmp_path / 'log', 1.0)
  assert 'more than 1 s' in problem
  processes.wait_for_end(int(child.read_text()), seconds=30)
  assert 'exit status 3' in device_runs.call(['sh', '-c', 'exit 3'], tmp_path / 'l', 9)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize('flags', [(), ('--plan', '--topology=cpu:1')])
def test_every_run_works_at_toy_sizes(tmp_path, flags):
  line = [sys.executable, '-m', 'tests.benchmarks.gpu.device_runs', '--tiny', *flags]
  one_device = os.environ | {'XLA_FLAGS': ''}  # tests have eight
  subprocess.run([*line, f'--workdir={tmp_path}'], check=True, env=one_device)
  results = json.loads((tmp_path / 'results.json').read_text())
  assert results.keys() == device_runs.RUNS.keys()
  for figures in results.values():
    assert 'stopped' not in figures
    if flags:
      assert figures['planned']['gb'] > 0
    else:
      assert figures['steps'] == 3 and figures['time/step'] > 0


def write_wheel(folder, name, version, *requires):
  lines = ['Metadata-Version: 2.1', f'Name: {name}', f'Version: {version}']
  lines += [f'Requires-Dist: {text}' for text in requires]
  info = f'{name}-{version}.dist-info'
  with zipfile.ZipFile(folder / f'{name}-{version}-py3-none-any.whl', 'w') as file:
    file.writestr(f'{name}.py', f'VERSION = {version!r}\n' + '#' * 3000)
    file.writestr(f'{info}/METADATA', '\n'.join([*lines, '', '']))
    file.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nTag: py3-none-any\n')
    file.writestr(f'{info}/RECORD', '')


def test_wheels_are_what_a_machine_lacks(tmp_path, monkeypatch, capsys):
  index, out = tmp_path / 'index', tmp_path / 'out'
  index.mkdir()
  write_wheel(index, 'wanted', '1', 'needed<3', 'present', 'left', "old; os_name=='nt'")
  for version in ('2', '3'):
    write_wheel(index, 'needed', version, 'present>=5', 'extra-one; extra=="more"')
  for tool in ('PIP', 'UV'):
    monkeypatch.setenv(f'{tool}_FIND_LINKS', str(index))
    monkeypatch.setenv(f'{tool}_NO_INDEX', '1')
  monkeypatch.setenv('PIP_CONFIG_FILE', '/dev/null')
  monkeypatch.setenv('PIP_DISABLE_PIP_VERSION_CHECK', '1')
  machine = tmp_path / 'machine'
  machine.write_text('# its packages\nPresent==4.0+local\n')
  line = ['offline_wheels', f'--machine={machine}', '--package=wanted', f'--to={out}']
  monkeypatch.setattr(sys, 'argv', [*line, '--without=left'])
  offline_wheels.main()
  names = sorted(path.name for path in out.glob('*.whl'))
  assert names == ['needed-2-py3-none-any.whl', 'wanted-1-py3-none-any.whl']
  assert 'requires present>=5, not 4.0' in capsys.readouterr().out
  # In pieces, and back.
  wheels = sorted(out.glob('*.whl'))
  count = offline_wheels.cut(wheels, len(offline_wheels.JOIN) + 700, out / 'pieces')
  assert count > 1
  folders = [out / 'pieces' / str(i + 1) for i in range(count)]
  sizes = [sum(p.stat().st_size for p in folder.iterdir()) for folder in folders]
  assert max(sizes) <= len(offline_wheels.JOIN) + 700
  join = [sys.executable, str(folders[0] / 'join.py'), *map(str, folders)]
  subprocess.run(join, cwd=tmp_path, check=True)
  for wheel in wheels:
    assert (tmp_path / 'wheels' / wheel.name).read_bytes() == wheel.read_bytes()


def test_own_requirements_are_those_of_no_extra():
  names = ' '.join(offline_wheels.own_requirements())
  assert 'ml-collections' in names and 'pytest' not in names and 'wandb' not in names


def test_arguments_of_a_run(tmp_path):
  flags = argparse.Namespace(tiny=False, workdir=tmp_path)
  line = device_runs.command('qwen3', flags, 'train')
  assert '--config.rollout.engine=jax' in line and '--config.num_steps=20' in line
  assert f'--config.model.checkpoint={tmp_path}/qwen3-checkpoint' in line
