"""Calls within limits; whatever a model writes, it is answered in text."""

import json
import pathlib
import random
import threading
import time

import pytest

from jaxrl.data.tool_formats import UNKNOWN
from jaxrl.envs.tools.tool_api import ToolError, tool_schema
from jaxrl.envs.tools.toolbox import Toolbox
from tests.calls import make_tools

FILE = str(pathlib.Path(__file__).with_name('own_tools.py'))


class Echo:
  """Answers with what it is given, or breaks."""

  def __init__(self, name='echo', error=None, delay=0.0):
    self._name, self._error, self._delay = name, error, delay
    self.heard, self.closed = [], threading.Event()

  def start(self):
    return [tool_schema(self._name, '', {'x': {}}, [])]

  def call(self, name, arguments, *, seconds):
    self.heard.append((arguments, seconds))
    time.sleep(self._delay)
    if self._error:
      raise self._error
    return json.dumps(arguments, ensure_ascii=False)

  def close(self):
    self.closed.set()


def toolbox(*tools, max_calls=16, max_calls_per_turn=4, max_chars=100, seconds=60.0):
  box = Toolbox(
    tools or [Echo()],
    max_calls=max_calls,
    max_calls_per_turn=max_calls_per_turn,
    max_chars=max_chars,
    seconds=seconds,
  )
  box.start()
  return box


def written(name='echo', **arguments):
  call = {'name': name, 'arguments': arguments}
  return f'<tool_call>{json.dumps(call)}</tool_call>'


def run(box, text):
  messages, faults = box.run(UNKNOWN.parse(text)[1])
  assert {message['role'] for message in messages} <= {'tool'}
  return [message['content'] for message in messages], faults


def test_several_calls_are_answered_in_order():
  box = toolbox(Echo(), Echo('other'))
  text = written(x=1) + written('other', x=2) + '<tool_call>{' + written(x=3)
  messages, faults = box.run(UNKNOWN.parse(text)[1])
  assert [m['name'] for m in messages] == ['echo', 'other', 'unknown', 'echo']
  contents = [m['content'] for m in messages]
  assert [contents[i] for i in (0, 1, 3)] == ['{"x": 1}', '{"x": 2}', '{"x": 3}']
  assert contents[2].startswith('Error: the call cannot be read: it does not end')
  assert faults == ['unreadable']
  metrics = box.metrics
  assert metrics['tools/calls'] == 4 and metrics['tools/errors'] == 1
  assert metrics['tools/unreadable'] == 1 and metrics['tools/unknown'] == 0
  assert metrics['tools/echo/calls'] == 2 and metrics['tools/other/calls'] == 1


def test_an_unknown_tool():
  contents, faults = run(toolbox(Echo(), Echo('other')), written('ecco'))
  assert contents == ["Error: no tool 'ecco'; there are echo, other"]
  assert faults == ['unknown']


def test_calls_of_a_reply_and_of_an_episode_are_limited():
  echo = Echo()
  box = toolbox(echo, max_calls=5, max_calls_per_turn=3)
  contents, faults = run(box, written() * 4)
  assert contents[:3] == ['{}'] * 3 and faults == ['refused']
  assert contents[3] == 'Error: too many calls: at most 3 in one reply'
  contents, _ = run(box, written() * 2)
  assert contents[0] == '{}' and 'no calls are left' in contents[1]
  assert len(echo.heard) == 4
  assert box.metrics['tools/refused'] == 2
  box.start()
  assert run(box, written())[0] == ['{}']
  assert box.metrics['tools/calls'] == 1


def test_results_are_cut_in_the_middle():
  box = toolbox(max_chars=40)
  (content,), faults = run(box, written(x='a' * 50 + 'b' * 50))
  assert content.startswith('{"x": "aaa') and content.endswith('bbb"}') and not faults
  assert '[… 69 characters left out …]' in content and len(content) < 75
  assert box.metrics['tools/cut'] == 1 and box.metrics['tools/errors'] == 0


def test_the_time_of_a_reply_is_shared_by_its_calls():
  slow = Echo(delay=0.15)
  contents, faults = run(
    toolbox(slow, seconds=0.2, max_calls_per_turn=9), written() * 4
  )
  assert contents[0] == '{}' and 'must end within 0.2 s' in contents[-1]
  assert set(faults) == {'timeout'}
  lefts = [seconds for _, seconds in slow.heard]
  assert lefts == sorted(lefts, reverse=True) and max(lefts) <= 0.2


@pytest.mark.parametrize('fault', ['timeout', 'failed', 'arguments'])
def test_what_a_tool_says_is_told_and_counted(fault):
  box = toolbox(Echo(error=ToolError(fault, 'sorry')))
  assert run(box, written()) == (['Error: sorry'], [fault])
  assert box.metrics[f'tools/{fault}'] == box.metrics['tools/errors'] == 1
  assert box.metrics['tools/echo/calls'] == 0


def test_any_other_error_is_the_environments():
  with pytest.raises(KeyError):
    run(toolbox(Echo(error=KeyError('bug'))), written())


def test_half_a_letter_is_replaced_before_it_is_sent():
  (content,), _ = run(
    toolbox(), r'<tool_call>{"name": "echo", "arguments": {"x": "\ud800"}}</tool_call>'
  )
  assert content == '{"x": "?"}'


def test_half_a_letter_in_a_name_is_replaced_too():
  calls = UNKNOWN.parse(r'<tool_call>{"name": "\ud800"}</tool_call>')[1]
  assert toolbox().run(calls)[0][0]['name'] == '?'


def test_fuzz():
  """Five thousand garbled replies: as many answers as calls, each a text to encode."""
  rng = random.Random(5)
  pieces = [written(x='é'), '<tool_call>', '</tool_call>', '{"name": "echo"', '}', '"']
  pieces += ['"arguments": {"x": ', 'null', '1e999', '\\ud800', '[', ']', ',', '\x00']
  pieces += ['{"name": "echo", "arguments": {"x": "\\udc00"}}', 'NaN', '<|im_end|>']
  faults = 0
  box = toolbox(max_calls=10**6, max_calls_per_turn=3)
  for _ in range(5000):
    text = ''.join(rng.choice(pieces) for _ in range(rng.randrange(1, 14)))
    before = box.metrics['tools/calls']
    contents, _ = run(box, text)
    assert len(contents) == text.count('<tool_call>')
    assert box.metrics['tools/calls'] - before == len(contents)
    for content in contents:
      assert content.encode() and len(content) < 200
    faults += sum(content.startswith('Error: ') for content in contents)
  metrics = box.metrics
  assert metrics['tools/errors'] == faults > 1000
  assert metrics['tools/echo/calls'] > 500
  assert metrics['tools/calls'] == faults + metrics['tools/echo/calls']


def test_two_tools_of_one_name():
  with pytest.raises(ValueError, match='two tools are called'):
    toolbox(Echo(), Echo())


def test_close_reaches_all():
  tools = [Echo(), Echo('other')]
  toolbox(*tools).close()
  assert all(tool.closed.is_set() for tool in tools)


def test_tools_by_name_and_ones_own():
  shout = f"{FILE}:shout(mark='?', timeout=9.0)"
  tools = make_tools(f"python(keep=True, name='py') + {shout} + {FILE}:Counter(by=2)")
  names = [tool.start()[0]['function']['name'] for tool in tools[1:]]
  assert names == ['shout', 'count']
  assert tools[2].call('count', {}, seconds=1) == '2'


@pytest.mark.parametrize(
  'spec, words',
  [
    ('', 'name at least one'),
    ('pyton', "Did you mean 'python'"),
    ('python(timeouts=3)', "Did you mean 'timeout'"),
    ("python(timeout='3')", 'must be a number'),
    (f'{FILE}:shout(timeout="a")', 'must be a number'),
    (f'{FILE}:Counter(to=3)', "no option 'to'"),
    ("mcp(command='x', per='turn')", 'is not one of episode, environment, process'),
  ],
)
def test_wrong_specs(spec, words):
  with pytest.raises(ValueError, match=words):
    make_tools(spec)
