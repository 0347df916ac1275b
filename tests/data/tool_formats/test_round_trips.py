"""Each format reads back what it writes, and says why it cannot read the rest."""

import json
import random

import pytest

from jaxrl.data.tool_formats import TOOL_FORMATS, InvalidToolCall

FORMATS = {one.name: one for one in TOOL_FORMATS}
HELD_BY_QUOTES = {'Gemma 4': '<|"|>', 'FunctionGemma': '<escape>'}
WORDS = [
  *(
    '',
    ' ',
    'a',
    'é',
    '漢字',
    '😀',
    '\n',
    '\t',
    '"',
    "'",
    '\\',
    '\\n',
    '3',
    'null',
    'True',
  ),
  *(
    '{',
    '}',
    '[',
    ']',
    ',',
    ':',
    ';',
    '=',
    '(',
    ')',
    '<b>',
    '</tool_call>',
    '<tool_call>',
  ),
  *('[TOOL_CALLS]', '[ARGS]', '<|call|>', '<|end|>', '<|tool_call_end|>', '```', '#'),
  *(
    '<｜tool▁call▁end｜>',
    '<|END_ACTION|>',
    '</TOOLCALL>',
    '%s',
    '&amp;',
    'x = 1\n  y',
  ),
]
SCHEMA_TYPES = {str: 'string', bool: 'boolean', int: 'integer', float: 'number'}
SCHEMA_TYPES |= {list: 'array', dict: 'object', type(None): 'null'}


def make_text(rng):
  return ''.join(rng.choice(WORDS) for _ in range(rng.randrange(5)))


def make_value(rng, depth=0):
  kind = rng.randrange(9 if depth < 3 else 6)
  if kind < 2:
    return make_text(rng)
  if kind == 2:
    return rng.choice([0, -1, 7, 10**12, rng.randrange(-999, 999)])
  if kind == 3:
    return rng.choice([0.5, -2.25, 1e-9, 1e30, rng.random()])
  if kind == 4:
    return rng.choice([True, False])
  if kind == 5:
    return None
  if kind < 8:
    return [make_value(rng, depth + 1) for _ in range(rng.randrange(4))]
  return {make_key(rng): make_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def make_key(rng):
  return rng.choice(['a', 'city', 'n_2', 'Straße', 'max-size', 'x1', 'from', 'class'])


def make_call(rng):
  name = rng.choice(['get_weather', 'f', 'search.web', 'run-code', 'ünï'])
  arguments = {make_key(rng): make_value(rng) for _ in range(rng.randrange(5))}
  return {'name': name, 'arguments': arguments}


def tools_of(calls):
  """Returns schemas for calls, one a call, as their names may repeat."""
  return [
    {
      'type': 'function',
      'function': {
        'name': call['name'],
        'parameters': {
          'type': 'object',
          'properties': {
            key: {'type': SCHEMA_TYPES[type(value)]}
            for key, value in call['arguments'].items()
          },
        },
      },
    }
    for call in calls
  ]


def can_hold(tool_format, call):
  """Returns whether the format has a way to write the call's texts.

  Formats without escapes cannot hold their own markers.
  """
  text = json.dumps(call, ensure_ascii=False)
  quote = HELD_BY_QUOTES.get(tool_format.name)
  return quote is None or json.dumps(quote)[1:-1] not in text


def check_round_trips(tool_format, count, seed):
  rng = random.Random(seed)
  num_held = 0
  for _ in range(count):
    call = make_call(rng)
    if not can_hold(tool_format, call):
      continue
    num_held += 1
    text = tool_format.render([call])
    assert tool_format.parse(text, tools_of([call])) == ('', [call]), text
    assert tool_format.may_begin(text)
    if tool_format.name != 'Llama 3':
      before = 'I look.\n'
      assert tool_format.parse(before + text, tools_of([call])) == ('I look.', [call])
    other = {**make_call(rng), 'name': 'other'}
    if can_hold(tool_format, other):
      both = [call, other]
      text = tool_format.render(both)
      assert tool_format.parse(text, tools_of(both)) == ('', both), text
  assert num_held > 0.9 * count


@pytest.mark.parametrize('name', FORMATS)
def test_what_is_written_is_read_back(name):
  check_round_trips(FORMATS[name], 200, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize('name', FORMATS)
def test_ten_thousand_calls_are_read_back(name):
  check_round_trips(FORMATS[name], 10_000, seed=2)


@pytest.mark.parametrize('name', FORMATS)
def test_a_cut_call_says_so(name):
  tool_format = FORMATS[name]
  call = {'name': 'get_weather', 'arguments': {'city': 'Oslo', 'days': [1, 2]}}
  text = tool_format.render([call])
  end = text.find('2]') + 1
  content, calls = tool_format.parse(text[:end])
  assert content == '' and len(calls) == 1
  assert isinstance(calls[0], InvalidToolCall) and calls[0].reason


@pytest.mark.parametrize('name', FORMATS)
def test_text_without_a_call_is_returned_as_it_is(name):
  for text in ('', ' The answer is 4.\n', 'f(x) = {1, 2}', '[1, 2]', '{"answer": 7}'):
    assert FORMATS[name].parse(text) == (text, [])


@pytest.mark.parametrize('name', FORMATS)
def test_garbled_calls_never_raise(name):
  tool_format, rng = FORMATS[name], random.Random(3)
  for _ in range(300):
    call = make_call(rng)
    text = tool_format.render([call, make_call(rng)])
    for _ in range(3):
      at = rng.randrange(len(text) + 1)
      text = text[:at] + rng.choice([*WORDS, *tool_format.markers]) + text[at + 2 :]
    for one in tool_format.parse(text)[1]:
      if isinstance(one, InvalidToolCall):
        assert one.reason
      else:
        assert isinstance(one['name'], str) and json.dumps(one['arguments'])
