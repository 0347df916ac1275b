"""Overrides, their types, and the one line that a mistake gets."""

import pytest
from ml_collections import ConfigDict

from jaxrl.config import from_config, make_section, to_config
from jaxrl.options import ConfigError
from jaxrl.run_options import DatasetOptions
from launch.settings import command_line as launch_config


def maker(
  *, tau: float = 1, clip: float | None = 0.2, n: int | None = None, k: int = 2
):
  return tau, clip, n, k


FILE = """
from ml_collections import ConfigDict
def get_config(algorithm='grpo'):
  return ConfigDict(dict(
    seed=0, num_steps=10, rate=0.5, name=algorithm, shape=(1, 2), tags=('a',),
    on=False, free=None, model=dict(hidden_size=8), optimizer=dict(warmup=3)))
"""


@pytest.fixture
def file(tmp_path):
  path = tmp_path / 'toy.py'
  path.write_text(FILE)
  return path


def load(file, *argv):
  return launch_config.load(launch_config.parse([f'--config={file}', *argv]))


@pytest.mark.parametrize(
  'spec, expected',
  [
    ('configs/x.py', ('configs/x.py', None)),
    ('configs/x.py:opmd', ('configs/x.py', 'opmd')),
    ('configs/x.py:lab.opmd2:opmd2', ('configs/x.py', 'lab.opmd2:opmd2')),
    ('configs/x.py:lab/file.py:fn', ('configs/x.py', 'lab/file.py:fn')),
    ('a.python/x.py:opmd', ('a.python/x.py', 'opmd')),
  ],
)
def test_spec_splits_at_the_first_colon_after_the_file(spec, expected):
  assert launch_config.split_spec(spec) == expected


@pytest.mark.parametrize('spec', ['configs/x', 'configs/x.py:', 'x.pyc', ''])
def test_a_spec_that_names_no_file_or_no_algorithm(spec):
  with pytest.raises(ConfigError):
    launch_config.parse([f'--config={spec}'])


@pytest.mark.parametrize(
  'key, text, expected',
  [
    ('num_steps', '20', 20),
    ('num_steps', '1e3', 1000),
    ('num_steps', '1_000', 1000),
    ('rate', '2', 2.0),
    ('rate', '-1e-3', -1e-3),
    ('on', 'true', True),
    ('on', '0', False),
    ('name', '3', '3'),
    ('shape', '(3,4)', (3, 4)),
    ('shape', '3,4,5', (3, 4, 5)),
    ('shape', '7', (7,)),
    ('tags', 'x,y', ('x', 'y')),
    ('free', '3', 3),
    ('free', 'word', 'word'),
    ('free', 'none', None),
    ('model.hidden_size', '16', 16),
  ],
)
def test_override_takes_the_type_of_the_default(file, key, text, expected):
  config = load(file, f'--config.{key}={text}')
  value = config
  for part in key.split('.'):
    value = value[part]
  assert value == expected and type(value) is type(expected)


def test_values_may_follow_after_a_space_and_flags_may_stand_bare(file):
  config = load(file, '--config.rate', '-3', '--config.on', '--config.num_steps=7')
  assert (config.rate, config.on, config.num_steps) == (-3.0, True, 7)


@pytest.mark.parametrize(
  'override, words',
  [
    ('num_stepz=3', ['num_stepz', 'did you mean --config.num_steps']),
    ('model.hiden_size=3', ['did you mean --config.model.hidden_size']),
    ('warmup=3', ['did you mean --config.optimizer.warmup']),
    ('model=3', ['is a section', '--config.model.hidden_size']),
    ('seed.x=3', ['unknown key --config.seed.x']),
    ('num_steps=1.5', ['--config.num_steps=1.5', 'whole number']),
    ('num_steps=none', ['whole number']),
    ('num_steps=inf', ['whole number']),
    ('rate=fast', ['must be a number']),
    ('rate=nan', ['must be a number']),
    ('on=maybe', ['true or false']),
    ('shape=a,b', ['whole number']),
    ('num_steps', ['a value is missing']),
  ],
)
def test_a_wrong_override_gets_one_clear_line(file, override, words):
  with pytest.raises(ConfigError) as caught:
    load(file, f'--config.{override}')
  text = str(caught.value)
  assert '\n' not in text
  for word in words:
    assert word in text


@pytest.mark.parametrize(
  'argv, word',
  [
    ([], 'no config given'),
    (['quickstart.py'], 'unexpected argument'),
    (['--confg=x.py'], 'did you mean --config'),
    (['--seed.x=1'], '--config.seed.x'),
    (['--config=x.py', '--workdir='], 'needs a value'),
  ],
)
def test_a_wrong_command_line(argv, word):
  with pytest.raises(ConfigError, match=word):
    launch_config.parse(argv, {'workdir': ''})


def test_missing_file_names_the_nearest(file):
  with pytest.raises(ConfigError, match=r'no such file; did you mean .*toy\.py'):
    load(file.with_name('toi.py'))


def test_algorithm_reaches_get_config(file):
  assert load(f'{file}:lab.mod:fn').name == 'lab.mod:fn'
  assert load(file).name == 'grpo'


@pytest.mark.parametrize(
  'text, word',
  [
    ('x = 1', 'does not define get_config'),
    ('def get_config(: pass', 'line 1: '),
    ('\nraise RuntimeError("boom")', 'line 2: RuntimeError: boom'),
    ('def get_config():\n  return nothing', 'line 2: NameError'),
    ('def get_config():\n  return {}', 'returned a dict, not a ConfigDict'),
  ],
)
def test_a_broken_config_file_says_where(file, text, word):
  file.write_text(text)
  with pytest.raises(ConfigError, match=word):
    load(file)


def test_an_algorithm_for_a_config_that_takes_none(file):
  file.write_text(
    'import ml_collections\ndef get_config():\n  return ml_collections.ConfigDict()\n'
  )
  with pytest.raises(ConfigError, match='takes no algorithm'):
    load(f'{file}:grpo')


def test_the_loaded_config_is_locked(file):
  with pytest.raises(AttributeError):
    load(file).sede = 1


def test_section_reads_a_signature():
  section = make_section(maker, k=5)
  assert section.to_dict() == {'tau': 1.0, 'clip': 0.2, 'n': None, 'k': 5}
  assert type(section.tau) is float
  config = ConfigDict({'algorithm': section})
  for key, text, expected in [
    ('tau', '2', 2.0),
    ('clip', 'none', None),
    ('n', '4', 4),
  ]:
    launch_config.override(config, f'algorithm.{key}', text)
    assert config.algorithm[key] == expected
  with pytest.raises(ConfigError, match='whole number or none'):
    launch_config.override(config, 'algorithm.n', 'x')
  with pytest.raises(ConfigError, match='whole number, not'):
    launch_config.override(config, 'algorithm.k', 'none')


def test_section_takes_further_keys_and_refuses_strangers():
  joined = make_section(maker, {'name': 'mine', 'tau': 3, 'kl_loss': ''})
  assert (joined.name, joined.tau, joined.kl_loss) == ('mine', 1.0, '')
  with pytest.raises(ConfigError, match="Did you mean 'tau'"):
    make_section(maker, taw=1)
  with pytest.raises(ConfigError, match='k'):
    make_section(maker, k='many')


def test_the_algorithm_is_chosen_after_the_colon():
  config = ConfigDict({'algorithm': {'name': 'grpo'}})
  with pytest.raises(ConfigError, match=r'--config=FILE.py:opmd'):
    launch_config.override(config, 'algorithm.name', 'opmd')


def test_several_sources_of_rows_are_one_text():
  text = 'a.jsonl + generate:arithmetic(size=3) + b.jsonl'
  options = DatasetOptions(path=text)
  assert len(options.path) == 3 and to_config(options).path == text
  assert from_config(DatasetOptions, to_config(options)) == options
  files = DatasetOptions(path='a.jsonl + b.jsonl')
  assert to_config(files).path == 'a.jsonl + b.jsonl'
