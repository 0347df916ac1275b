"""docs/keys.md: every key that it sends its readers to exists."""

import pathlib
import re

import pytest

from configs import base
from jaxrl.algorithms import registry
from jaxrl.config import to_config
from jaxrl.data.trajectory_writers.writer import DumpOptions
from launch.settings import command_line
from launch.settings.logging_settings import LoggingOptions

ROOT = pathlib.Path(base.__file__).parents[1]
PAGE = ROOT / 'docs' / 'keys.md'


def right_hand_sides():
  rows = [line for line in PAGE.read_text().splitlines() if line.startswith('| `')]
  return [row.rstrip('|').rpartition(' | ')[2] for row in rows]


def known():
  config = base.get_config()
  config.env.TAG = base.env_section('math')
  keys = {
    key.replace('env.TAG.', 'env.<tag>.') for key in command_line.dotted_keys(config)
  }
  keys |= {f'trajectory_dump.{name}' for name in to_config(DumpOptions())}
  keys |= {f'logging.{name}' for name in to_config(LoggingOptions())}
  eval_keys = command_line.dotted_keys(base.eval_set())
  keys |= {f'eval.sets.<name>.{name}' for name in eval_keys}
  for name in registry.names():
    keys |= {f'algorithm.{option}' for option in registry.builder_options(name)}
  return keys


def test_every_key_exists():
  keys, sections = known(), '|'.join(sorted({key.split('.')[0] for key in known()}))
  pattern = re.compile(rf'`((?:{sections})\.[a-z_.<>*]+)')
  mentions = [key for side in right_hand_sides() for key in pattern.findall(side)]
  assert len(mentions) > 80
  missing = {
    key
    for key in mentions
    if key not in keys
    and not key.startswith('env.<tag>.env_config')
    and not (key.endswith('.*') and any(k.startswith(key[:-1]) for k in keys))
  }
  assert not missing


@pytest.mark.parametrize('name', re.findall(r'configs/\w+\.py', PAGE.read_text()))
def test_every_config_exists(name):
  assert (ROOT / name).exists()


def test_every_page_exists():
  for page in re.findall(r'\]\((\w+\.md)\)', PAGE.read_text()):
    assert (PAGE.parent / page).exists(), page
