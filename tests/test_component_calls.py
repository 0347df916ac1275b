"""Calls and signatures: how texts name components, and how options are checked."""

import dataclasses
import pickle
from functools import partial
from typing import Literal

import pytest

from jaxrl import component_calls
from jaxrl.component_calls import ComponentCall
from jaxrl.component_table import ComponentTable, as_call, as_calls, join_calls
from jaxrl.config import describe_options, takes_options_of
from jaxrl.data import row_sources
from jaxrl.options import (
  NOT_ZERO,
  POSITIVE,
  SHARE,
  ConfigError,
  Options,
  check_options,
  closest_match,
  defaults,
  option,
  option_ranges,
)
from jaxrl.user_code import import_object


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
  size: int | str = 1,
  sizes: tuple[int, ...] = (),
  free=0.5,
):
  return clip


def test_defaults_are_the_keyword_only_parameters():
  assert list(defaults(loss)) == [
    'clip',
    'dual',
    'rounds',
    'mode',
    'on',
    'name',
    'size',
    'sizes',
    'free',
  ]
  assert defaults(loss)['clip'] == 0.2
  assert defaults(partial(loss, clip=1.0))['clip'] == 1.0


@pytest.mark.parametrize(
  'options',
  [
    {'clip': 1},
    {'clip': 0.5, 'dual': None},
    {'rounds': 3, 'mode': 'b', 'on': False, 'name': ''},
    {'size': 'max', 'sizes': [1, 2], 'free': 1},
  ],
)
def test_right_options_pass(options):
  check_options(loss, options, 'here')


@pytest.mark.parametrize(
  'options, words',
  [
    ({'clpi': 1.0}, ['here', "'clpi'", "Did you mean 'clip'?", 'dual', 'rounds']),
    ({'logprobs': 1.0}, ["no option 'logprobs'"]),
    ({'clip': 'much'}, ["here: clip='much': must be a number"]),
    ({'clip': True}, ['clip=True: must be a number']),
    ({'clip': None}, ['clip=None: must not be none; the default is 0.2']),
    ({'dual': 'x'}, ["dual='x': must be a number or none"]),
    ({'rounds': 1.5}, ['rounds=1.5: must be a whole number']),
    ({'on': 1}, ['on=1: must be true or false']),
    ({'mode': 'c'}, ["mode='c': is not one of a, b"]),
    ({'mode': None}, ['mode=None: must not be none']),
    ({'name': 3}, ['name=3: must be a text']),
    ({'size': (1,)}, ['size=(1,): must be a whole number or a text']),
    ({'sizes': [1, 'x']}, ["'x' in it must be a whole number"]),
    ({'free': 'x'}, ["free='x': must be a number"]),
  ],
)
def test_wrong_options_say_what_is_wrong_and_what_exists(options, words):
  with pytest.raises(ConfigError) as error:
    check_options(loss, options, 'here')
  for word in words:
    assert word in str(error.value)


@option_ranges(share=SHARE, divisor=NOT_ZERO, ascending=('low', 'high'))
def bounded(
  *, share: float | None = 0.5, divisor=1.0, low=0.0, high: float | str = 1.0
): ...


@pytest.mark.parametrize(
  'options', [{'share': None}, {'share': 1}, {'divisor': -1}, {'low': 2, 'high': 'max'}]
)
def test_numbers_within_declared_ranges_pass(options):
  check_options(bounded, options, 'here')


@pytest.mark.parametrize(
  'options, message',
  [
    ({'share': 1.5}, 'here: share=1.5 must be in [0, 1]'),
    ({'share': float('nan')}, 'here: share=nan must be in [0, 1]'),
    ({'divisor': 0}, 'here: divisor=0 must not be 0'),
    ({'low': 2}, 'here: low=2 must be at most high=1.0'),
    ({'high': -1}, 'here: low=0.0 must be at most high=-1'),
  ],
)
def test_a_number_outside_a_declared_range_is_refused(options, message):
  with pytest.raises(ConfigError) as error:
    check_options(bounded, options, 'here')
  assert str(error.value) == message


def test_a_derived_class_does_not_inherit_ranges():
  @option_ranges(size=POSITIVE, ascending=('size', 'most'))
  class Base:
    def __init__(self, *, size=1, most=2): ...

  class Derived(Base):
    def __init__(self, *, size=1): ...

  with pytest.raises(ConfigError, match='must be above 0'):
    check_options(Base, {'size': 0}, 'here')
  check_options(Derived, {'size': -1}, 'here')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retries(Options):
  """How often something is tried."""

  count: int = option(3, 'How often it is tried again.', low=1)
  pause: float = option(0.5, 'Seconds between two tries.')


def test_a_class_of_options_is_a_component_like_any_other():
  assert defaults(Retries) == {'count': 3, 'pause': 0.5}
  assert describe_options(Retries)['count'] == 'How often it is tried again.'
  table = ComponentTable('policy', 'retries', {'again': Retries})
  made = table.build(ComponentCall('again', {'count': 5}))
  assert made == Retries(count=5)
  for options, message in (
    ({'count': 0}, 'count=0 must be at least 1'),
    ({'count': 1.5}, 'count=1.5: must be a whole number'),
    ({'cuont': 2}, "no option 'cuont'. Did you mean 'count'"),
  ):
    with pytest.raises(ConfigError, match=message):
      table.build(ComponentCall('again', options))


def test_a_function_takes_the_options_that_it_passes_on():
  class Scorer:
    def __init__(self, model, *, pause: float = 2.0, votes: int = 1):
      """Makes a scorer.

      Args:
        model: The model.
        pause: Seconds between two votes.
        votes: How often it is asked.
      """
      self.values = model, pause, votes

  @takes_options_of(Scorer, Retries)
  def scorer(model, *, own: str = '', **options):
    """Makes a scorer.

    Args:
      model: The model.
      own: An option of its own.
      **options: Others.
    """
    return own, Scorer(model, **options).values

  assert defaults(scorer) == {'own': '', 'pause': 2.0, 'votes': 1, 'count': 3}
  notes = describe_options(scorer)
  assert notes['pause'] == 'Seconds between two votes.'
  assert notes['own'] == 'An option of its own.'
  assert notes['count'] == 'How often it is tried again.'
  assert scorer('m', votes=3) == ('', ('m', 2.0, 3))
  with pytest.raises(ConfigError, match=r'votes=.two.: must be a whole number'):
    check_options(scorer, {'votes': 'two'}, 'here')
  with pytest.raises(ConfigError, match='There are: count, own, pause, votes'):
    check_options(scorer, {'model': 'm'}, 'here')


def test_private_parameters_are_not_options():
  def component(*, size=1, _ray_trace_ctx=None):
    return size

  assert defaults(component) == {'size': 1}
  with pytest.raises(ConfigError, match='There are: size'):
    check_options(component, {'_ray_trace_ctx': None}, 'here')


def test_closest_match():
  assert closest_match('clipp', ['clip', 'tau']) == 'clip'
  assert closest_match('zzz', ['clip', 'tau']) is None


def test_resolve_modules_and_files(tmp_path):
  assert import_object('jaxrl.options:closest_match') is closest_match
  file = tmp_path / 'mine.py'
  file.write_text('def fn():\n  return 7\n')
  assert import_object(f'{file}:fn')() == 7


def test_resolve_errors_name_the_target(tmp_path):
  with pytest.raises(ConfigError, match="Did you mean 'closest_match'"):
    import_object('jaxrl.options:closest_mach')
  with pytest.raises(ConfigError, match=r"no module 'jaxrl\.nowhere'"):
    import_object('jaxrl.nowhere:fn')
  with pytest.raises(ConfigError, match='no file'):
    import_object(f'{tmp_path}/absent.py:fn')
  with pytest.raises(ConfigError, match=r'package\.module:name'):
    import_object('nothing')


def test_a_plugin_that_fails_to_import_keeps_its_own_error(tmp_path):
  file = tmp_path / 'broken.py'
  file.write_text('import a_module_that_is_not_there\n')
  with pytest.raises(ModuleNotFoundError, match='a_module_that_is_not_there'):
    import_object(f'{file}:fn')


def test_a_call_is_hashable_and_shows_as_python_writes_it():
  call = ComponentCall('clip', {'low': 0.5, 'names': ['a']})
  assert str(call) == repr(call) == "clip(low=0.5, names=['a'])"
  same = ComponentCall('clip', {'names': ['a'], 'low': 0.5}, 'clip(low=.5, …)')
  assert (call, hash(call)) == (same, hash(same))
  assert call != ComponentCall('clip') and str(ComponentCall('clip')) == 'clip'
  copy = pickle.loads(pickle.dumps(same))
  assert copy == same and str(copy) == 'clip(low=.5, …)'
  assert str(call.with_options(low=1)) == "clip(low=1, names=['a'])"


def test_a_text_with_options_is_no_call():
  with pytest.raises(ConfigError, match='only configs contain'):
    as_call('clip(low=1)')
  assert as_calls('clip') == (ComponentCall('clip'),)
  assert as_calls('') == as_calls(()) == ()


def test_a_component_is_a_call_a_name_or_a_function():
  known = {'mine': partial(loss, clip=0.1), 'there': 'jaxrl.user_code:import_object'}

  table = ComponentTable('loss', 'algorithm.loss', known)
  find = table.find
  assert find('there') == ('there', import_object, {})
  assert find(ComponentCall('mine', {'on': False}))[2] == {'on': False}
  assert find(partial(loss, clip=0.3)) == ('loss', loss, {'clip': 0.3})
  assert join_calls(['mine', partial(loss, clip=0.3)]) == ('mine + loss(clip=0.3)')
  with pytest.raises(ConfigError, match=r"algorithm\.loss: no loss 'min'.*'mine'"):
    find('min')
  with pytest.raises(ConfigError, match="loss 'mine': no option 'clap'"):
    find(ComponentCall('mine', {'clap': 1}))
  assert list(table) == ['mine', 'there'] and len(table) == 2


def test_what_a_component_refuses_is_told_with_its_option():
  def half(*, value: int = 2) -> int:
    if value % 2:
      raise ValueError(f'value={value} is odd')
    return value // 2

  table = ComponentTable('number', 'sums.number', {'half': half})
  assert table.build('half') == 1
  with pytest.raises(
    ConfigError, match=r'^sums\.number=half\(value=3\): value=3 is odd'
  ):
    table.build(ComponentCall('half', {'value': 3}))
  with pytest.raises(ConfigError, match=r"^sums\.number=hall: no number 'hall'"):
    table.build('hall')


@pytest.mark.parametrize('value', [5, None, {}, 'text', int, object()])
def test_what_is_no_class_or_function_is_told_in_one_line(value):
  with pytest.raises(ConfigError, match=r'^grader x: is .*, not a class or function$'):
    check_options(value, {}, 'grader x')


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
  assert component_calls.parse_call(text) == ComponentCall(*wanted)


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
    component_calls.parse_call(text)


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
  assert component_calls.parse_calls(text) == tuple(
    ComponentCall(*call) for call in (quoted_calls if calls is None else calls)
  )


def test_quotes_within_quotes_and_other_separators():
  first, second = component_calls.parse_calls(r"a(x='\'+') + b")
  assert first == ComponentCall('a', {'x': "'+"}) and second == ComponentCall('b')
  assert component_calls.split_terms('a+b.json + c', ' + ') == ['a+b.json', 'c']


def test_row_sources():
  parse = row_sources.parse_row_sources
  assert parse('') == '' and parse('a+b.json') == 'a+b.json'
  call = parse('generate:arithmetic(size=.5)')
  assert call == ComponentCall('arithmetic', {'size': 0.5})
  assert str(call) == 'generate:arithmetic(size=.5)'
  assert parse('a.json + generate:b') == ('a.json', ComponentCall('b'))


def test_options_replaced_in_a_text():
  call = ComponentCall.from_text('first_fit(tokens=8)')
  text = str(call.with_options(tokens=9, num_parallel=1))
  assert text == 'first_fit(tokens=9, num_parallel=1)'


@pytest.mark.parametrize('text', ['a +', '+ a', 'a + + b'])
def test_a_missing_term_is_an_error(text):
  with pytest.raises(ConfigError, match='nothing on one side of'):
    component_calls.parse_calls(text)
