"""Tests of `--help`: every key has a description, and a word filters them."""

import pathlib
import re

import pytest

from jaxrl.config import describe_options
from jaxrl.data.trajectory_writers.writer import open_dump
from launch import train
from launch.settings import command_line
from launch.settings.key_listing import OPTIONAL_SECTIONS, list_keys
from launch.settings.logging_settings import read_logging

SETS_A_KEY = re.compile(r'  --config\.[\w.]+=')
CONFIGS = pathlib.Path(__file__).resolve().parents[2] / 'configs'
NAMES = sorted(
  path.name
  for path in CONFIGS.glob('*.py')
  if path.name not in ('__init__.py', 'base.py', '_qwen3.py')
)


def listed(name, word='', *options):
  command = command_line.parse([f'--config={CONFIGS / name}', *options])
  config = command_line.load(
    command, {'logging': read_logging, 'trajectory_dump': open_dump}
  )
  return list_keys(config, word).splitlines()


@pytest.mark.parametrize('name', NAMES)
def test_every_key_has_a_description(name):
  lines = listed(name)
  keys = [i for i, line in enumerate(lines) if SETS_A_KEY.match(line)]
  bare = [lines[i] for i in keys if not lines[i + 1 : i + 2] or i + 1 in keys]
  assert not bare and 60 < len(keys) <= 100
  assert all(re.search(r'  \(\w+\)$', lines[i]) for i in keys)  # its type


@pytest.mark.parametrize('name', NAMES)
def test_a_word_searches_the_keys_that_are_not_listed_too(name):
  shown, everything = listed(name), listed(name, '.')
  hidden = [line for line in shown if '.*  (' in line]
  assert len(everything) > len(shown)
  counts = {}
  for line in hidden:
    section = line.strip().removeprefix('--config.').partition('.*')[0]
    counts[section] = int(line.partition('(')[2].split()[0])
    assert f'--help={section} lists them' in line
  keys = [one for one in everything if SETS_A_KEY.match(one)]
  missing = [one for one in keys if one not in shown and '.algorithm.name=' not in one]
  for section in sorted(counts, key=len, reverse=True):  # the innermost first
    inside = [one for one in missing if one.startswith(f'  --config.{section}.')]
    assert len(inside) == counts[section]
    missing = [one for one in missing if one not in inside]
  assert not missing


def test_a_section_is_listed_where_it_is_used():
  def short(*options):
    lines = listed('debug.py:on_policy_distill', '', *options)
    hidden = [line for line in lines if '.*  (' in line]
    return {line.strip()[len('--config.') :].partition('.*')[0] for line in hidden}

  own_rows = {'env.arithmetic.dataset', 'env.arithmetic'}
  assert short() == {'cluster', 'trajectory_dump'} | own_rows
  used = '--config.cluster.ray=true', '--config.trajectory_dump.path=x'
  assert short(*used) == own_rows
  own = '--config.env.arithmetic.dataset.limit=9', '--config.env.arithmetic.manager=x'
  assert short(*used, *own) == set()
  unused = ('--config.sft.num_steps=0', '--config.eval.interval=0')
  names = {section.name for section in OPTIONAL_SECTIONS}
  assert short(*unused, '--config.dataset.path=') == own_rows | names - {'teacher'}


def test_a_word_filters_names_and_descriptions(capsys):
  lines = listed('debug.py', 'LEARNING_RATE')
  keys = [line.split('=')[0].strip() for line in lines if '--config.' in line]
  assert keys == ['--config.optimizer.learning_rate', '--config.sft.learning_rate']
  assert any('max_num_seqs' in line for line in listed('debug.py', 'num_seqs'))
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
