"""Functions as tools."""

import pathlib

import pytest

from jaxrl.envs.tools.function_tool import FunctionTool
from jaxrl.envs.tools.tool_api import ToolError

FILE = str(pathlib.Path(__file__).with_name('own_tools.py'))


def tool_of(name, timeout=60.0, **options):
  tool = FunctionTool(f'{FILE}:{name}', options, timeout=timeout)
  return lambda **arguments: tool.call(name, arguments, seconds=60.0)


def test_signature_and_docstring_are_the_schema():
  shout = FunctionTool(f'{FILE}:shout', {'mark': '?'}).start()[0]['function']
  assert shout == {
    'name': 'shout',
    'description': 'Says it aloud.\n\ntext: what to say. times: how often.',
    'parameters': {
      'type': 'object',
      'properties': {'text': {'type': 'string'}, 'times': {'type': 'integer'}},
      'required': ['text'],
    },
  }
  table = FunctionTool(f'{FILE}:table', {}).start()[0]['function']['parameters']
  assert table['properties'] == {
    'rows': {'type': 'array', 'items': {'type': 'integer'}},
    'kind': {'enum': ['sum', 'max']},
    'exact': {'type': 'boolean'},
  }


def test_results():
  assert tool_of('shout', mark='?')(text='hi', times=2) == 'HI? HI?'
  assert tool_of('table')(rows=[1, 2], kind='sum') == '{"value": 3, "exact": true}'


@pytest.mark.parametrize(
  'arguments, words',
  [
    ({}, "'text' is missing: shout takes text, times"),
    ({'text': 3}, "'text' of shout must be of type string"),
    ({'text': 'a', 'times': '2'}, 'integer'),
    ({'text': 'a', 'times': True}, 'integer'),
    ({'text': 'a', 'mark': '.'}, "no argument 'mark'"),
  ],
)
def test_wrong_arguments(arguments, words):
  with pytest.raises(ToolError, match=words) as caught:
    tool_of('shout')(**arguments)
  assert caught.value.kind == 'arguments'


def test_choices():
  with pytest.raises(ToolError, match=r"one of 'sum', 'max'"):
    tool_of('table')(rows=[], kind='min')


def test_errors_and_time():
  with pytest.raises(ToolError, match=r'^LookupError: there is none$') as caught:
    tool_of('fail')()
  assert caught.value.kind == 'failed'
  with pytest.raises(ToolError, match=r'stopped after 0\.2 s') as caught:
    tool_of('doze', timeout=0.2)(seconds=30)
  assert caught.value.kind == 'timeout'


@pytest.mark.parametrize(
  'name, options, words',
  [
    ('silent', {}, 'docstring'),
    ('many', {}, "'words'"),
    ('bound', {}, "'needed' must be set"),
    ('shout', {'marks': '?'}, "Did you mean 'mark'"),
    ('shout', {'mark': 3}, 'must be a text'),
    ('shot', {}, "Did you mean 'shout'"),
  ],
)
def test_wrong_functions_and_options(name, options, words):
  with pytest.raises(ValueError, match=words):
    FunctionTool(f'{FILE}:{name}', options)
