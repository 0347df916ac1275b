"""A run's folder: its record, who may use it, what may change in it."""

import json
import pathlib
import re
import subprocess
import sys
import time

import pytest

from jaxrl.options import ConfigError
from launch.logging import workdir as workdir_module
from launch.logging.workdir import (
  Workdir,
  default_path,
  launch_record,
  write_atomically,
)


def config(**changes):
  base = {'seed': 0, 'num_steps': 10, 'model': {'layers': 2}, 'shape': (1, 2)}
  return {**base, 'checkpoint': {'save_interval': 5}, **changes}


def record(path, config_dict):
  with_facts = Workdir(path, config_dict)
  with_facts.record(devices='1 × cpu')
  with_facts.close()
  return with_facts


def test_the_record_says_what_ran_and_how(tmp_path):
  first = record(tmp_path / 'a' / 'b', config())
  assert not first.resumed
  facts = json.loads((tmp_path / 'a' / 'b' / 'config.json').read_text())
  assert facts['config']['model'] == {'layers': 2} and facts['config']['shape'] == [
    1,
    2,
  ]
  (launch,) = facts['launches']
  assert launch['devices'] == '1 × cpu' and launch['versions']['jax']
  assert launch['command'].startswith('python ')


def test_the_same_config_resumes_and_adds_a_launch(tmp_path):
  record(tmp_path, config())
  again = record(tmp_path, config())
  assert again.resumed and again.changes == []
  assert len(json.loads((tmp_path / 'config.json').read_text())['launches']) == 2


@pytest.mark.parametrize(
  ('launch', 'day'),
  [
    ({'time': '2025-02-28T23:59:59Z'}, '2025-02-28'),
    ({'time': 'yesterday'}, None),
    ({}, None),
    (7, None),
  ],
)
def test_a_resumed_run_keeps_the_day_on_which_it_began(
  tmp_path, launch, day, monkeypatch
):
  monkeypatch.setattr(time, 'gmtime', lambda: time.struct_time((2026, 2, 1) + (0,) * 6))
  record(tmp_path, config())
  file = tmp_path / 'config.json'
  facts = json.loads(file.read_text())
  file.write_text(json.dumps({**facts, 'launches': [launch, *facts['launches']]}))
  again = Workdir(tmp_path, config())
  again.close()
  assert again.day == (day or '2026-02-01')


def test_some_keys_may_change(tmp_path):
  record(tmp_path, config())
  again = record(tmp_path, config(num_steps=20, checkpoint={'save_interval': 7}))
  assert again.changes == ['checkpoint.save_interval 5 → 7', 'num_steps 10 → 20']
  facts = json.loads((tmp_path / 'config.json').read_text())
  assert facts['config']['num_steps'] == 20


@pytest.mark.parametrize(
  'change, words',
  [
    ({'seed': 1}, 'seed 0 → 1'),
    ({'model': {'layers': 4}, 'num_steps': 30}, 'model.layers 2 → 4'),
    ({'extra': True}, r'extra \(absent\)'),
  ],
)
def test_other_keys_may_not(tmp_path, change, words):
  record(tmp_path, config())
  before = (tmp_path / 'config.json').read_text()
  with pytest.raises(ConfigError, match=words) as caught:
    Workdir(tmp_path, config(**change))
  assert 'num_steps' not in str(caught.value)
  assert (tmp_path / 'config.json').read_text() == before
  Workdir(tmp_path, config()).close()  # the lock was given back


def test_a_run_of_an_earlier_version_goes_on_without_the_keys_it_lacks(tmp_path):
  record(tmp_path, config())
  new = {'path': '', 'limit': None, 'on': False}
  assert record(tmp_path, config(dataset=new)).resumed
  record(tmp_path / 'other', config())
  with pytest.raises(ConfigError, match=r'dataset.path \(absent\) → '):
    Workdir(tmp_path / 'other', config(dataset={'path': 'rows.jsonl'}))


def test_one_process_at_a_time(tmp_path):
  first = Workdir(tmp_path, config())
  with pytest.raises(ConfigError, match='another process is running there'):
    Workdir(tmp_path, config())
  first.close()
  Workdir(tmp_path, config()).close()


def test_the_lock_goes_with_its_process(tmp_path):
  code = (
    'import os, sys\n'
    'from launch.logging.workdir import Workdir\n'
    f'w = Workdir({str(tmp_path)!r}, {{}}); os._exit(9)'
  )
  assert subprocess.run([sys.executable, '-c', code]).returncode == 9
  Workdir(tmp_path, config()).close()


def test_a_place_that_cannot_be(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ConfigError, match='cannot write there'):
    Workdir(tmp_path / 'file', config())
  (tmp_path / 'config.json').write_text('[]')
  with pytest.raises(ConfigError, match='not a record of a run'):
    Workdir(tmp_path, config())


@pytest.mark.parametrize(
  'file, algorithm, expected',
  [
    ('configs/gsm8k.py', None, 'runs/gsm8k'),
    ('configs/gsm8k.py', 'opmd', 'runs/gsm8k-opmd'),
    ('/x/gsm8k.py', 'lab/my.py:mine', 'runs/gsm8k-mine'),
  ],
)
def test_default_folder(file, algorithm, expected):
  assert default_path(file, algorithm).as_posix() == expected


def test_a_failed_write_leaves_the_old_file(tmp_path):
  path = tmp_path / 'x'
  write_atomically(path, 'old')
  with pytest.raises(UnicodeEncodeError):
    write_atomically(path, 'new\ud800')
  assert path.read_text() == 'old'


def test_outside_git_there_is_no_commit(monkeypatch, tmp_path):
  monkeypatch.setattr(
    'launch.logging.workdir.__file__', str(tmp_path / 'launch' / 'w.py')
  )
  assert launch_record()['commit'] is None


def test_the_commit_of_the_code_is_recorded():
  root = pathlib.Path(workdir_module.__file__).parents[2]
  if not (root / '.git').exists():
    pytest.skip('the code is not in a git checkout')
  assert re.fullmatch(r'[0-9a-f]{40}\+?', workdir_module.git_commit() or '')


def test_the_transport_of_weights_may_change_and_their_policy_may_not(tmp_path):
  weight_sync = {'policy': 'fixed', 'transport': 'auto'}
  record(tmp_path, config(weight_sync=weight_sync))
  changed = record(tmp_path, config(weight_sync={**weight_sync, 'transport': 'folder'}))
  assert changed.changes == ["weight_sync.transport 'auto' → 'folder'"]
  with pytest.raises(ConfigError, match=r'weight_sync\.policy'):
    Workdir(tmp_path, config(weight_sync={**weight_sync, 'policy': 'trainer'}))
