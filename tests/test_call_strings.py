"""Options read off signatures: defaults, checks, call strings, dotted names."""

from functools import partial
from typing import Literal

import pytest

from jaxrl import call_strings
from jaxrl.call_strings import ConfigError


def loss(
  logprobs,
  mask,
  *,
  clip: float = 0.2,
  dual: float | None = 3.0,
  rounds: int = 2,
  mode: Literal['a', 'b'] = 'a',
  on: bool = True,
  name: str = 'x',
):
  return clip


def test_defaults_are_the_keyword_only_parameters():
  assert list(call_strings.defaults(loss)) == [
    'clip',
    'dual',
    'rounds',
    'mode',
    'on',
    'name',
  ]
  assert call_strings.defaults(loss)['clip'] == 0.2
  assert call_strings.defaults(partial(loss, clip=1.0))['clip'] == 1.0


@pytest.mark.parametrize(
  'options',
  [
    {'clip': 1},
    {'clip': 0.5, 'dual': None},
    {'rounds': 3, 'mode': 'b', 'on': False, 'name': ''},
  ],
)
def test_right_options_pass(options):
  call_strings.check_options(loss, options, 'here')


@pytest.mark.parametrize(
  'options, words',
  [
    ({'clpi': 1.0}, ['here', "'clpi'", "Did you mean 'clip'?", 'dual', 'rounds']),
    ({'logprobs': 1.0}, ["no option 'logprobs'"]),
    ({'clip': 'much'}, ["'much'", 'float']),
    ({'clip': True}, ['True', 'float']),
    ({'clip': None}, ['None', '0.2']),
    ({'rounds': 1.5}, ['1.5', 'int']),
    ({'on': 1}, ['bool']),
    ({'mode': 'c'}, ["'c'", "'a', 'b'"]),
    ({'name': 3}, ['str']),
  ],
)
def test_wrong_options_say_what_is_wrong_and_what_exists(options, words):
  with pytest.raises(ConfigError) as error:
    call_strings.check_options(loss, options, 'here')
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize(
  'text, wanted',
  [
    ('cispo', ('cispo', {})),
    ('cispo()', ('cispo', {})),
    ("cispo(clip_high=.3, mode='x')", ('cispo', {'clip_high': 0.3, 'mode': 'x'})),
    (' my.mod:fn(a=-1, b=None) ', ('my.mod:fn', {'a': -1, 'b': None})),
    ('dir/file.py:fn(a=True)', ('dir/file.py:fn', {'a': True})),
  ],
)
def test_call_strings(text, wanted):
  assert call_strings.parse_call(text) == wanted


@pytest.mark.parametrize(
  'text, words',
  [
    ('f(1)', 'by name'),
    ('f(**{})', 'by name'),
    ('f(a=open)', 'literal'),
    ("f(a=__import__('os'))", 'literal'),
    ('f(a=', 'cannot read'),
    ('f(a=1, a=2)', 'cannot read'),
    ('f()(a=1)', 'cannot read'),
    ('', 'cannot read'),
    ('a b', 'cannot read'),
  ],
)
def test_bad_call_strings_are_errors(text, words):
  with pytest.raises(ConfigError, match=words):
    call_strings.parse_call(text)


def test_private_parameters_are_not_options():
  def made(*, size=1, _ray_trace_ctx=None):
    return size

  assert call_strings.defaults(made) == {'size': 1}
  with pytest.raises(ConfigError, match='There are: size'):
    call_strings.check_options(made, {'_ray_trace_ctx': None}, 'here')


def test_closest_match():
  assert call_strings.closest_match('clipp', ['clip', 'tau']) == 'clip'
  assert call_strings.closest_match('zzz', ['clip', 'tau']) is None


def test_resolve_modules_and_files(tmp_path):
  assert (
    call_strings.resolve('jaxrl.call_strings:closest_match')
    is call_strings.closest_match
  )
  file = tmp_path / 'mine.py'
  file.write_text('def fn():\n  return 7\n')
  assert call_strings.resolve(f'{file}:fn')() == 7


def test_resolve_errors_name_the_target(tmp_path):
  with pytest.raises(ConfigError, match="Did you mean 'closest_match'"):
    call_strings.resolve('jaxrl.call_strings:closest_mach')
  with pytest.raises(ConfigError, match=r"no module 'jaxrl\.nowhere'"):
    call_strings.resolve('jaxrl.nowhere:fn')
  with pytest.raises(ConfigError, match='no file'):
    call_strings.resolve(f'{tmp_path}/absent.py:fn')
  with pytest.raises(ConfigError, match=r'package\.module:name'):
    call_strings.resolve('nothing')


def test_a_plugin_that_fails_to_import_keeps_its_own_error(tmp_path):
  file = tmp_path / 'broken.py'
  file.write_text('import a_module_that_is_not_there\n')
  with pytest.raises(ModuleNotFoundError, match='a_module_that_is_not_there'):
    call_strings.resolve(f'{file}:fn')


@pytest.mark.parametrize(
  ('text', 'calls'),
  [
    ('', []),
    ('  ', []),
    ('a', [('a', {})]),
    ('a(x=1) + b', [('a', {'x': 1}), ('b', {})]),
    ('a+b+c', [('a', {}), ('b', {}), ('c', {})]),
    ('a(x=1e+5, y=(1, 2)) + m.n:C(z="p + q")', None),
  ],
)
def test_joined_calls(text, calls):
  found = [('a', {'x': 1e5, 'y': (1, 2)}), ('m.n:C', {'z': 'p + q'})]
  assert call_strings.parse_calls(text) == (found if calls is None else calls)


def test_quotes_within_quotes_and_other_separators():
  assert call_strings.parse_calls(r"a(x='\'+') + b") == [('a', {'x': "'+"}), ('b', {})]
  assert call_strings.split('a+b.json + c', ' + ') == ['a+b.json', 'c']


@pytest.mark.parametrize('text', ['a +', '+ a', 'a + + b'])
def test_a_missing_term_is_an_error(text):
  with pytest.raises(ConfigError, match='nothing stands beside'):
    call_strings.parse_calls(text)
