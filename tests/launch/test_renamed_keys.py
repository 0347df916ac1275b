"""Keys of earlier versions are answered with their new names."""

import json
import pathlib
import re

import pytest

from configs import base
from jaxrl.algorithms import registry
from jaxrl.call_strings import ConfigError
from jaxrl.data.trajectory_writers.writer import open_dump
from launch.logging.workdir import Workdir
from launch.settings import command_line, renamed_keys
from launch.settings.logging_settings import read_logging

DEBUG = str(pathlib.Path(base.__file__).with_name('debug.py'))


def load(*options, config=DEBUG):
  command = command_line.parse([f'--config={config}', *options])
  sections = {'logging': read_logging, 'trajectory_dump': open_dump}
  return command_line.load(command, sections)


def an_old_key(pattern):
  tag = 'num_layers' if pattern.startswith('model') else 'fsdp'
  return pattern.replace('*', 'arithmetic' if pattern.startswith('env') else tag)


@pytest.mark.parametrize('pattern', renamed_keys.RENAMED_KEYS)
def test_an_old_key_on_the_command_line(pattern):
  """The error says which key it is now, and that key exists."""
  key = an_old_key(pattern)
  with pytest.raises(ConfigError) as caught:
    load(f'--config.{key}=1')
  match = re.fullmatch(
    rf'{re.escape(key)} is now ([\w.]+): write --config\.\1=.*1.*', str(caught.value)
  )
  assert match, str(caught.value)
  if '.env_config.' not in key:
    assert match[1] in set(command_line.dotted_keys(load()))


@pytest.mark.parametrize('key', renamed_keys.REMOVED_KEYS)
def test_a_key_that_is_gone_says_what_to_do(key):
  with pytest.raises(ConfigError, match=f'{key} is no key any more: .*algorithm'):
    load(f'--config.{key}=1')


def test_merged_keys_say_how_they_are_written():
  for option, wanted in {
    'rollout.num_slots=4': '--config.rollout.max_num_seqs=4',
    'dataset.question_key=ask': "--config.dataset.keys='question=ask'",
    'model.random.num_layers=4': "--config.model.random='qwen3(hidden_size=32, "
    "num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=64, num_layers=4)'",
    'mesh.fsdp=8': "--config.mesh='fsdp=8'",
    'algorithm.filters=none': '--config.rollout.group_filter=none',
    'teacher.by_tag=a=DIR': '--config.teacher.checkpoint=a=DIR',
  }.items():
    with pytest.raises(ConfigError, match=f'write {re.escape(wanted)}$'):
      load(f'--config.{option}')


@pytest.mark.parametrize(
  ('option', 'wanted'),
  [
    ("optimizer.name=adamw(moments='bfloat16')", "adamw(state_dtype='bfloat16')"),
    ('batch.packing=first_fit(tokens=64, abreast=2)', '(tokens=64, num_parallel=2)'),
    ('rollout.engine=jax(lanes=2)', 'jax(decode_threads=2)'),
    ('algorithm.advantage=best(threshold=1)', 'best_of_group(threshold=1)'),
  ],
)
def test_old_names_in_call_strings(option, wanted):
  with pytest.raises(ConfigError) as caught:
    load(f'--config.{option}')
  assert 'is now' in str(caught.value) and str(caught.value).endswith(wanted)


@pytest.mark.parametrize(
  ('line', 'wanted'),
  [
    ('config.rollout.num_slots = 4', 'rollout.max_num_seqs'),
    ('config.rollout.update(temperature=0.5, num_slots=4)', 'rollout.max_num_seqs'),
    ('config.checkpoint.every = 4', 'checkpoint.save_interval'),
    ('config.files.keys = "prompt=ask"', 'dataset.keys'),
    ('config.dataset.update(answer_key="")', 'dataset.keys'),
    ('config.dump = ConfigDict({"path": "x"})', 'trajectory_dump.path'),
    ('config.model.random.update(\n    num_layers=2)', 'model.random'),
    ('config.model.random.num_layers = 2', 'model.random'),
    ('config.mesh.fsdp = 2', 'mesh'),
    ('config.algorithm.shapers = "clip"', 'rollout.reward_shaping'),
    ('config.env.b = base.env_section(\n    "math", share=2.0)', 'env.TAG.weight'),
  ],
)
def test_an_old_key_in_a_config_file(tmp_path, line, wanted):
  file = tmp_path / 'mine.py'
  file.write_text(
    'from ml_collections import ConfigDict\n\nfrom configs import base\n\n\n'
    'def get_config(algorithm="grpo"):\n  config = base.get_config(algorithm)\n'
    f'  {line}\n  return config\n'
  )
  with pytest.raises(ConfigError) as caught:
    load(config=file)
  error = str(caught.value)
  assert f' is now {wanted}: write --config.{wanted}=' in error
  assert error.startswith(str(file)) and '\n' not in error


def test_an_option_of_a_builder_is_no_old_key(tmp_path):
  assert load(config=f'{DEBUG}:ppo').algorithm.critic_warmup == 0
  assert load('--config.algorithm.schema=rollout', config=f'{DEBUG}:distill')
  file = tmp_path / 'mine.py'
  file.write_text(
    'from configs import base\n\n\ndef get_config(algorithm="grpo"):\n'
    '  config = base.get_config(algorithm)\n  config.algorithm.schema = "messages"\n'
    '  return config\n'
  )
  assert load(config=f'{file}:distill').algorithm.schema == 'messages'
  with pytest.raises(ConfigError, match='schema is no key any more'):
    load(config=file)


def test_old_keys_in_the_folder_of_a_run(tmp_path):
  """All of them are named at once, and nothing is written."""
  old = {
    'rollout': {'num_slots': 4, 'temperature': 1.0},
    'model': {'random': {'num_layers': 2}},
    'mesh': {'fsdp': 1},
  }
  record = json.dumps({'config': old, 'launches': []})
  (tmp_path / 'config.json').write_text(record)
  with pytest.raises(ConfigError) as caught:
    Workdir(tmp_path, load().to_dict())
  error = str(caught.value)
  for words in (
    'rollout.num_slots is now rollout.max_num_seqs',
    'model.random.num_layers is now model.random',
    'mesh.fsdp is now mesh',
    'Name another --workdir',
  ):
    assert words in error
  assert 'temperature' not in error
  assert (tmp_path / 'config.json').read_text() == record


def test_every_old_word_of_call_strings_is_looked_for():
  tables = (renamed_keys.RENAMED_CALLS, renamed_keys.RENAMED_OPTIONS)
  for words in (names for table in tables for names in table.values()):
    assert all(command_line.RENAMED_IN_CALLS.fullmatch(word) for word in words)


def test_no_old_key_is_a_key_of_today():
  known = set(command_line.dotted_keys(load()))
  assert not known & renamed_keys.RENAMED_KEYS.keys()
  options = registry.builder_options('grpo')
  assert (
    not {f'algorithm.{name}' for name in options} & renamed_keys.REMOVED_KEYS.keys()
  )
