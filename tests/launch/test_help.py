"""Tests of `--help`: every key has a description, and a word filters them."""

import fnmatch
import pathlib
import re
import subprocess
import sys

import pytest

from jaxrl.config import describe_options
from jaxrl.options import ConfigError
from jaxrl.rollout.rewards.judge_clients import read_api_key, validate_judge_url
from launch import __main__ as commands
from launch import evaluate, plan, rollout, train
from launch.logging.error_pages import PAGES, find_page, is_refusal, print_error
from launch.settings import command_line
from launch.settings.key_listing import COMMON_KEYS, list_keys
from tests.launch import runs

SETS_A_KEY = re.compile(r'  --config\.[\w.]+=')
CONFIGS = pathlib.Path(__file__).resolve().parents[2] / 'configs'
NAMES = sorted(
  path.name
  for path in CONFIGS.glob('*.py')
  if path.name not in ('__init__.py', 'base.py', '_qwen3.py')
)


def listed(name, word='', *options):
  command = command_line.parse([f'--config={CONFIGS / name}', *options])
  config = command_line.load(command, dumps=True)
  return list_keys(config, word).splitlines()


def keys_in(lines):
  return [
    line.partition('=')[0][len('  --config.') :]
    for line in lines
    if SETS_A_KEY.match(line) and '.NAME=' not in line  # any name may be set
  ]


@pytest.mark.parametrize('name', NAMES)
def test_every_key_has_a_description(name):
  lines = listed(name, 'all')
  keys = [i for i, line in enumerate(lines) if SETS_A_KEY.match(line)]
  bare = [lines[i] for i in keys if not lines[i + 1 : i + 2] or i + 1 in keys]
  assert not bare and len(keys) > 60
  assert all(re.search(r'  \(\w+\)$', lines[i]) for i in keys)  # its type


@pytest.mark.parametrize('name', NAMES)
def test_help_lists_what_most_runs_set_and_says_how_to_see_the_rest(name):
  shown, everything = listed(name), listed(name, 'all')
  common = keys_in(shown)
  assert 25 <= len(common) <= 60 and set(common) < set(keys_in(everything))
  left = set(keys_in(listed(name, '.'))) - set(common)
  assert f'and {len(left)} more' in shown[-1] and 'algorithm.name' in left


def test_every_common_key_exists():
  keys = [*keys_in(listed('debug.py', 'all'))]
  assert [p for p in COMMON_KEYS if not fnmatch.filter(keys, p)] == []


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


def test_the_commands_are_listed(capsys):
  assert commands.main([]) == 0
  listed_commands = re.findall(
    r'python -m launch\.(\w+) +(\S.*)', capsys.readouterr().out
  )
  folder = pathlib.Path(commands.__file__).parent
  programs = {
    path.parent.name if path.stem == '__main__' else path.stem
    for path in (*folder.glob('*.py'), *folder.glob('*/__main__.py'))
    if "if __name__ == '__main__':" in path.read_text()
  }
  assert {name for name, _ in listed_commands} == programs - {'launch'}
  assert all(len(summary) < 80 for _, summary in listed_commands)
  assert commands.main(['--help']) == 0
  assert commands.main(['trian']) == 2
  assert "takes no 'trian'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize('name', commands.COMMANDS)
def test_every_command_has_help(name):
  command = [sys.executable, '-m', f'launch.{name}', '--help']
  done = subprocess.run(
    command, capture_output=True, text=True, cwd=runs.ROOT, env=runs.environment()
  )
  assert done.returncode == 0 and not done.stderr
  assert f'python -m launch.{name}' in done.stdout


@pytest.mark.parametrize(
  ('text', 'page'),
  [
    ('--config.cluster.placement=x: no such', 'docs/cluster.md'),
    ('--config.mesh.fsdp=3: must divide', 'docs/mesh.md'),
    ('raise rollout.async_ratio or batch.max_length', 'docs/mismatch.md'),
    ('config.env.lake.env_config.size: too large', 'docs/environments.md'),
    ('--benchmark=gsm8k: name the file', 'docs/benchmarks.md'),
    ("algorithm.policy_loss: no policy_loss 'cispp'", 'docs/extending.md'),
    ('--config.model.checkpoint=x: no model in x', 'docs/models.md'),
    ('--config.dataset.curriculum=x: no curriculum', 'docs/datasets.md'),
    ('eval.jsonl: line 3 is not JSON', ''),
    ('the mesh of the cluster is too small for its env', ''),
    ('--config.num_steps=x: must be a whole number', ''),
    ('no file configs/mesh.py', ''),
  ],
)
def test_an_error_names_its_page(text, page, capsys):
  assert find_page(text) == page
  print_error(ValueError(text))
  assert capsys.readouterr().err == f'error: {text}{page and f" ({page})"}\n'


def test_an_error_that_names_a_page_itself_keeps_it(capsys):
  print_error('mesh.data is wrong, see docs/plan.md')
  assert capsys.readouterr().err == 'error: mesh.data is wrong, see docs/plan.md\n'


def known_keys():
  command = command_line.parse([f'--config={CONFIGS / "debug.py"}'])
  return {
    'eval.sets',
    *command_line.dotted_keys(command_line.load(command, dumps=True)),
  }


def test_a_mistake_in_any_section_has_a_page():
  sections = {key.partition('.')[0] for key in known_keys() if '.' in key}
  pages = {
    section: {
      find_page(f'--config.{key}=x: is wrong')
      for key in known_keys()
      if key.startswith(f'{section}.')
    }
    for section in sections
  }
  assert len(pages) > 10
  # Of these, no key or not every key is explained by a page.
  assert {name for name, pages_of_keys in pages.items() if not any(pages_of_keys)} == {
    'teacher'
  }
  partly = {'rollout', 'optimizer', 'teacher'}
  assert {
    name for name, pages_of_keys in pages.items() if '' in pages_of_keys
  } == partly


def test_every_page_of_an_error_exists_and_speaks_of_its_key():
  keys = known_keys()
  flags = evaluate.FLAGS.keys() | rollout.FLAGS.keys() | plan.FLAGS.keys()
  for key, page in PAGES.items():
    assert (runs.ROOT / page).is_file(), page
    assert key.removeprefix('--').partition('.')[0] in (runs.ROOT / page).read_text()
    if key.startswith('--'):
      assert key[2:] in flags
    else:
      assert any(f'{known}.'.startswith(f'{key}.') for known in keys), key


def test_what_the_package_refuses_is_told_from_what_broke_in_it(tmp_path):
  def raised(function, *args):
    try:
      function(*args)
    except Exception as error:
      return error
    raise AssertionError('nothing was raised')

  assert is_refusal(raised(read_api_key, 'A_VARIABLE_THAT_IS_NOT_SET'))
  assert is_refusal(ConfigError('of any origin'))
  assert not is_refusal(raised(validate_judge_url, 'http://[::1'))  # of urllib
  assert not is_refusal(raised(int, 'seven'))
  assert not is_refusal(ValueError('raised nowhere'))
