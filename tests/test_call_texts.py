"""Call strings: how configs write components and their options."""

import pytest

from jaxrl import call_strings
from jaxrl.call_strings import ComponentCall
from jaxrl.data import row_sources
from jaxrl.options import ConfigError


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
  assert call_strings.parse_call(text) == ComponentCall(*wanted)


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
  quoted_calls = [('a', {'x': 1e5, 'y': (1, 2)}), ('m.n:C', {'z': 'p + q'})]
  assert call_strings.parse_calls(text) == tuple(
    ComponentCall(*call) for call in (quoted_calls if calls is None else calls)
  )


def test_quotes_within_quotes_and_other_separators():
  first, second = call_strings.parse_calls(r"a(x='\'+') + b")
  assert first == ComponentCall('a', {'x': "'+"}) and second == ComponentCall('b')
  assert call_strings.split_terms('a+b.json + c', ' + ') == ['a+b.json', 'c']


def test_row_sources():
  parse = row_sources.parse_row_sources
  assert parse('') == '' and parse('a+b.json') == 'a+b.json'
  call = parse('generate:arithmetic(size=.5)')
  assert call == ComponentCall('arithmetic', {'size': 0.5})
  assert str(call) == 'generate:arithmetic(size=.5)'
  assert parse('a.json + generate:b') == ('a.json', ComponentCall('b'))


def test_options_replaced_in_a_text():
  text = call_strings.with_options('first_fit(tokens=8)', tokens=9, num_parallel=1)
  assert text == 'first_fit(tokens=9, num_parallel=1)'


@pytest.mark.parametrize('text', ['a +', '+ a', 'a + + b'])
def test_a_missing_term_is_an_error(text):
  with pytest.raises(ConfigError, match='nothing on one side of'):
    call_strings.parse_calls(text)
