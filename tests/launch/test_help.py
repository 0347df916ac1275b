"""Tests of `--help`: every key has a description, and a word filters them."""

import pathlib

import pytest

from jaxrl.config import describe_options
from jaxrl.data.trajectory_writers.writer import open_dump
from launch import train
from launch.settings import command_line
from launch.settings.logging_settings import read_logging

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / 'configs'
NAMES = sorted(
  path.name
  for path in CONFIGS.glob('*.py')
  if path.name not in ('__init__.py', 'base.py', '_qwen3.py')
)


def listed(name, word=''):
  command = command_line.parse([f'--config={CONFIGS / name}'])
  config = command_line.load(command, {'logging': read_logging, 'dump': open_dump})
  return command_line.list_keys(config, word).splitlines()


@pytest.mark.parametrize('name', NAMES)
def test_every_key_has_a_description(name):
  lines = listed(name)
  keys = [i for i, line in enumerate(lines) if line.startswith('  --config.')]
  bare = [lines[i] for i in keys if not lines[i + 1 : i + 2] or i + 1 in keys]
  assert not bare and len(keys) > 80


def test_a_word_filters_names_and_descriptions(capsys):
  lines = listed('debug.py', 'LEARNING_RATE')
  keys = [line.split('=')[0].strip() for line in lines if '--config.' in line]
  assert keys == ['--config.optimizer.learning_rate', '--config.sft.learning_rate']
  assert any('num_slots' in line for line in listed('debug.py', 'slots'))
  assert listed('debug.py', 'nonsense') == [
    "  No key and no description contains 'nonsense'."
  ]
  assert train.main([f'--config={CONFIGS / "debug.py"}', '--help=kl_coef']) == 0
  out = capsys.readouterr().out
  assert '--config.algorithm.kl_coef=' in out and '--config.seed' not in out


def test_descriptions_are_read_from_google_style_docstrings():
  def function(*, first: int = 1, second: str = ''):
    """Does something.

    Args:
      first: one thing, e.g. this. And more
        on another line.
      second: `name: value` pairs; none by default.

    Returns:
      third: not an option.
    """
    return first, second

  assert describe_options(function) == {
    'first': 'One thing, e.g. this.',
    'second': '`name: value` pairs; none by default.',
  }
