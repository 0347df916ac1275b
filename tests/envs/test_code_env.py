"""The code environment: programs are judged by hidden tests, and cannot cheat."""

import json
import os
import socket

import pytest

from jaxrl.data.rows.task_rows import TaskReader
from jaxrl.envs import env_registry
from jaxrl.envs.coding.code_env import CodeEnv
from jaxrl.envs.coding.hidden_tests import (
  outputs_match,
  read_hidden_tests,
  values_match,
)
from jaxrl.envs.reply_parsing import last_code_block
from jaxrl.envs.sandbox import local_sandbox
from jaxrl.envs.sandbox.sandbox_api import SandboxError
from jaxrl.types import Task
from tests.marks import SANDBOXED

SUMS = [{'input': f'{n}\n{n}\n', 'output': str(2 * n)} for n in range(4)]
CALLS = [
  {'function': 'twice', 'args': [[n, 'a']], 'result': [n, 'a'] * 2} for n in (1, 2)
]


def play(program, tests=SUMS, *, shown=False, **options):
  env = env_registry.env_factory('code', options)()
  item = {'question': 'Add.', 'answer': tests}
  task = Task(seed=0, index=0, item=item)
  question, _ = env.reset(seed=0, options={'task': task})
  assert question.startswith('Add.') and (question != 'Add.') == shown
  _, reward, terminated, truncated, info = env.step(
    f'So:\n```python\n{program}\n```\n.'
  )
  assert (terminated, truncated) == (True, False)
  return reward, info['columns']['verdicts'].split(', '), info['metrics']


ADD = 'print(int(input()) + int(input()))'


@SANDBOXED
def test_the_share_of_tests_passed():
  assert play(ADD) == (
    1.0,
    ['passed'] * 4,
    {'passed': 1.0, 'accuracy': 1.0, 'correct': 1.0, 'marked': 1.0, 'timeout': 0.0},
  )
  half = f'n = {ADD[6:-1]}\nprint(n if n < 4 else 0)'
  reward, verdicts, metrics = play(half)
  assert (reward, verdicts) == (0.5, ['passed', 'passed', 'wrong', 'wrong'])
  assert metrics['accuracy'] == 0
  assert play(half, all_or_nothing=True)[0] == 0
  assert play(ADD, all_or_nothing=True, reward=2.0)[0] == 2
  mixed = 'n = int(input())\nif n == 1: 1 / 0\nif n == 2: import sys; sys.exit(3)\n'
  mixed += 'if n == 3: import time; time.sleep(9)\nprint(0)'
  verdicts = play(mixed, seconds=1.5)[1]
  assert verdicts == ['passed', 'error', 'error', 'time']


@SANDBOXED
@pytest.mark.parametrize(
  'program',
  [
    'import sys\nprint(sum(map(int, sys.stdin.read().split())))',
    'import sys\nprint(sum(int(line) for line in sys.stdin.buffer))',
    'print(sum(map(int, open(0))))\nexit()',
    'import threading\n'
    f'def main(): {ADD}\n'
    "if __name__ == '__main__': threading.Thread(target=main).start()",
    'import dataclasses\n@dataclasses.dataclass\nclass Two:\n  a: int\n  b: int\n'
    'two = Two(int(input()), int(input()))\nprint(two.a + two.b, end="")',
  ],
)
def test_ways_to_read_and_write(program):
  assert play(program, SUMS[:2])[0] == 1


@SANDBOXED
def test_calls():
  plain = 'print("noise")\ndef twice(x): return tuple(x + x)'
  assert play(plain, CALLS)[0] == 1
  method = 'class Solution:\n  def twice(self, x): return x * 2\n'
  assert play(f"{method}if __name__ == '__main__': 1 / 0", CALLS)[0] == 1
  assert play('def twice(x): return x', CALLS)[1] == ['wrong', 'wrong']
  assert play('def twice(x): return {1}', CALLS)[1] == ['error', 'error']
  assert play('def thrice(x): return x', CALLS)[1] == ['error', 'error']
  apps = json.dumps({'fn_name': 'f', 'inputs': [[1, 2], [3, 4]], 'outputs': [[3], 7]})
  assert play('def f(a, b): return a + b', apps)[0] == 1


@SANDBOXED
def test_the_first_test_that_failed_is_kept_for_the_trajectory():
  def output(program, tests=SUMS):
    env = CodeEnv()
    item = {'question': '', 'answer': tests}
    env.reset(seed=0, options={'task': Task(seed=0, index=0, item=item)})
    columns = env.step(f'```\n{program}\n```')[4]['columns']
    assert columns.keys() == CodeEnv.columns.keys()
    return columns['test_output']

  assert output(ADD) == ''
  loud = 'import sys\nsys.stderr.write("x" * 300_000)\nprint(int(input()) // 0)'
  head, *_, last = output(loud).splitlines()
  assert head == 'test 0 of 4: error' and last.startswith('ZeroDivisionError')
  assert len(output(loud)) < 1200
  assert output('print(input())').splitlines() == [
    *('test 1 of 4: wrong', 'input:', '1', '1', '', 'expected:', '2', 'output:', '1'),
    *('', 'stderr:'),
  ]
  calls = output('def twice(x): return x', CALLS)
  assert '"args": [[1, "a"]]' in calls and 'expected:\n[1, "a", 1, "a"]' in calls
  # A process that it leaves behind and that floods stderr does not count as its time.
  flood = 'import os\nif os.fork(): print(1)\nelse:\n  while True: os.write(2, b"x")'
  assert output(flood, SUMS[:1]).startswith('test 0 of 1: wrong')


@SANDBOXED
def test_no_code_scores_nothing():
  env = CodeEnv()
  env.reset(
    seed=0,
    options={'task': Task(seed=0, index=0, item={'question': '', 'answer': SUMS})},
  )
  _, reward, _, _, info = env.step(f'I would write {ADD}')
  assert reward == info['metrics']['marked'] == 0
  assert info['columns']['verdicts'] == 'no code, no code, no code, no code'


@SANDBOXED
def test_one_bad_case_does_not_cost_the_others():
  bad = 'n = int(input())\nif n == 1:\n  {}\nprint(n + int(input()))'
  kill = 'import os; os.kill(os.getppid(), 9); import time; time.sleep(9)'
  memory = 'a = []\n  while True: a.append(bytearray(b"x") * (1 << 20))'
  loud = 'while True: print("x" * 9999)'
  everybody = 'import os; os.kill(-1, 9)'
  for line, verdict in (
    (kill, 'error'),
    (everybody, 'error'),
    (memory, 'memory'),
    (loud, 'output'),
  ):
    verdicts = play(bad.format(line), SUMS[:3], memory_mb=64)[1]
    assert verdicts == ['passed', verdict, 'passed'], line
  assert play('import time; time.sleep(9)', total_seconds=0.4)[1] == ['time'] * 4


@SANDBOXED
def test_many_long_outputs_that_are_each_short_enough():
  tests = [{'input': '', 'output': 'x' * 1_000_000}] * 10
  assert play('print("x" * 1_000_000)', tests)[1] == ['passed'] * 10


@SANDBOXED
def test_escapes_fail(tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('0')
  mark = f'95.{os.getpid()}'
  server = socket.create_server(('127.0.0.1', 0))
  address = server.getsockname()
  for attempt in (
    f'print(open({str(secret)!r}).read())',
    f"print(open('/proc/1/root{secret}').read())",
    f'import socket\nsocket.create_connection({address}, 1)\nprint(0)',
    'import os\nwhile True: os.fork()',
    'with open("/tmp/x", "wb") as file: file.truncate(1 << 40)\nprint(0)',
    'open("/tmp/x", "wb").write(bytes(1 << 27))\nprint(0)',
    'x = bytearray(1 << 36)\nprint(0)',
    'import os\nos.setuid(0)\nprint(0)',
  ):
    assert play(attempt, SUMS[:1], seconds=0.5, total_seconds=0.8)[0] == 0, attempt
  daemon = (
    f"import subprocess\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)"
  )
  assert play(f'{daemon}\nprint(0)', SUMS[:1])[0] == 1
  assert not [p for p in os.listdir('/proc') if p.isdigit() and mark in _words(p)]
  server.close()


def _words(pid):
  try:
    with open(f'/proc/{pid}/cmdline') as file:
      return file.read()
  except OSError:
    return ''


@SANDBOXED
def test_expected_values_do_not_enter_the_sandbox():
  answer = '7316490528'
  hunt = """
import gc, os, sys
seen = [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, str))]
frame = sys._getframe()
while frame:
  seen.append(repr(frame.f_locals) + repr(frame.f_globals))
  frame = frame.f_back
for pid in filter(str.isdigit, os.listdir('/proc')):
  for name in ('cmdline', 'environ', 'maps', 'mem'):
    try:
      seen.append(repr(open(f'/proc/{pid}/{name}', 'rb').read(1 << 20)))
    except OSError:
      pass
for folder, _, names in os.walk('/tmp'):
  seen += [open(os.path.join(folder, name), errors='replace').read() for name in names]
target = str(3658245264 * 2)
print(any(target in text for text in seen), len(seen) > 100)
"""
  tests = [{'input': answer, 'output': 'False True'}]
  assert play(hunt, tests)[1] == ['wrong']  # it finds what is there to find
  tests = [{'input': '', 'output': answer}, {'input': '', 'output': 'False True'}]
  assert play(hunt, tests)[1] == ['wrong', 'passed']


@SANDBOXED
def test_garbled_answers_harm_nobody():
  forge = """
import os
for fd in ('1', '5', '4', '6'):
  try:
    with open(f'/proc/{os.getppid()}/fd/{fd}', 'w') as file:
      file.write(%r)
  except OSError:
    pass
"""
  wrong_kinds = '{"output": 1, "code": "x", "limit": []}\n'
  for line in ('[' * 100_000 + '\n', '{}\n', wrong_kinds):
    reward, verdicts, _ = play(forge % line, SUMS[:2])
    assert reward == 0
    assert len(verdicts) == 2


def test_it_refuses_without_a_sandbox(monkeypatch):
  monkeypatch.setattr(
    local_sandbox, 'unsupported_reason', lambda *_: 'unshare is not permitted'
  )
  with pytest.raises(SandboxError, match=r'unshare is not permitted.*unsafe=True'):
    CodeEnv()
  assert play(ADD, unsafe=True)[0] == 1
  assert play('while True: pass', SUMS[:1], unsafe=True, seconds=0.2)[1] == ['time']


def test_the_last_closed_block_counts():
  assert last_code_block('```python\na\n```\nor\n```py\nb\nc\n```') == 'b\nc\n'
  assert last_code_block('```\na\n```\n```python\nb') == 'a\n'
  assert last_code_block('```python\na\n  ```  \n') == 'a\n'
  assert last_code_block('a') == last_code_block('') == last_code_block('```') == ''
  assert last_code_block('```\n' * 100_001) == ''


@pytest.mark.parametrize(
  ('output', 'right', 'same'),
  [
    ('1 2\n3\n\n', '1  2 \n3', True),
    ('1 2 3', '1 2\n3', False),
    ('0.3333333', '0.33333333', True),
    ('0.34', '0.33', False),
    ('1', '1.0', True),
    ('1.0', '1', True),
    ('1.5', '1', False),
    ('01', '1', False),
    ('9007199254740993.0', '9007199254740992', False),
    ('nan', '1.5', False),
    ('1_0.5', '10.5', False),
    ('４.2', '4.2', False),
    ('', '', True),
    ('', '0', False),
    ('YES', 'Yes', False),
  ],
)
def test_outputs(output, right, same):
  assert outputs_match(output, right) is same


@pytest.mark.parametrize(
  ('result', 'right', 'same'),
  [
    ([1, [2.0000001]], [1, [2]], True),
    (1, True, False),
    (None, 0, False),
    ({'a': 1}, {'a': 1.0}, True),
    ({'a': 1}, {'b': 1}, False),
    ('1', 1, False),
    ([1], [1, 2], False),
    (10**400, 1.5, False),
    (float('nan'), 1.0, False),
    (2**53 + 1, 2**53, False),
  ],
)
def test_values(result, right, same):
  assert values_match(result, right) is same


FUNCTIONAL = {'input': '[2, 7]\n9', 'output': '[0, 1]', 'testtype': 'functional'}


@pytest.mark.parametrize(
  ('tests', 'row'),
  [
    ({'fn_name': 'twoSum', 'inputs': ['[2, 7]\n9'], 'outputs': ['[0, 1]']}, {}),
    ({'fn_name': 'twoSum', 'inputs': [[[2, 7], 9]], 'outputs': [[0, 1]]}, {}),
    ({'fn_name': 'twoSum', 'inputs': [[[2, 7], 9]], 'outputs': [[[0, 1]]]}, {}),
    ({'fn_name': 'twoSum', 'inputs': ['[2, 7]\n9\n'], 'outputs': [[0, 1]]}, {}),
    ([{**FUNCTIONAL, 'fn_name': 'twoSum'}], {}),
    ([{**FUNCTIONAL, 'metadata': {'func_name': 'twoSum'}}], {}),
    ([FUNCTIONAL], {'metadata': '{"func_name": "twoSum"}'}),
    ([FUNCTIONAL], {'metadata': {'func_name': 'twoSum'}}),
    ([FUNCTIONAL], {'fn_name': 'twoSum'}),
    ([FUNCTIONAL], {'entry_point': 'Solution().twoSum'}),
    (
      [FUNCTIONAL],
      {
        'starter_code': 'class Solution:\n    def twoSum(self, nums, target):\n        '
      },
    ),
    ({'test_cases': [FUNCTIONAL], 'fn_name': 'twoSum'}, {}),
    ([{**FUNCTIONAL, 'input': 'nums = [2, 7], target = 9'}], {'fn_name': 'twoSum'}),
    ([{**FUNCTIONAL, 'input': '(2, 7)\n9', 'output': '(0, 1)'}], {'fn_name': 'twoSum'}),
  ],
)
def test_functional_tests_of_livecodebench(tests, row):
  for form in (tests, json.dumps(tests)):
    (case,) = read_hidden_tests(form, row)
    assert case.request == {'function': 'twoSum', 'args': [[2, 7], 9]}
    assert case.passed('[0, 1]') and not case.passed('[1, 0]')


@pytest.mark.parametrize(
  ('text', 'value'),
  [
    ('"ab"', 'ab'),
    ("'ab'", 'ab'),
    ('ab', 'ab'),
    ('True', True),
    ('None', None),
    ('1.0', 1.0),
    ('{"a": [1]}', {'a': [1]}),
    ('[[1, 2], []]', [[1, 2], []]),
  ],
)
def test_values_of_functional_tests(text, value):
  tests = {'fn_name': 'f', 'inputs': [f'{text}\n{text}'], 'outputs': [text]}
  (case,) = read_hidden_tests(tests)
  assert case.request['args'] == [value, value]
  assert case.accepted == (value,)


@SANDBOXED
def test_programs_for_livecodebench_have_its_imports():
  method = (
    'class Solution:\n  def search(self, nums: List[int], x: Optional[int]):\n'
    '    return ceil(Counter(nums)[x] / inf) + next(accumulate([0.5]))\n'
  )
  tests = {'fn_name': 'search', 'inputs': ['[1, 2]\n1'], 'outputs': ['0.50']}
  assert play(method, tests)[1] == ['passed']  # and it is not re.search
  assert play('x = 1', tests)[1] == ['error']
  printed = [{'input': '1 2\n', 'output': '3.0\n', 'testtype': 'stdin'}]
  program = 'print(reduce(lambda a, b: a + b, map(int, input().split())))'
  assert play(program, printed)[1] == ['passed']
  assert play(program, [{'input': '1 2\n', 'output': '3'}])[1] == ['error']


MBPP = {
  'text': 'Write a function to find the shared elements from two lists.',
  'code': 'def similar(a, b):\r\n  return tuple(set(a) & set(b))',
  'test_list': [
    'assert set(similar((3, 4), (4, 6))) == set((4,))',
    'assert math.isclose(len(similar((3, 4), [])), zero)',
  ],
  'test_setup_code': 'zero = 0',
  'test_imports': ['import math'],
}


@SANDBOXED
@pytest.mark.parametrize('form', ['rows', 'JSON', 'one text'])
def test_rows_of_mbpp(form):
  tests = MBPP['test_list']
  tests = {'rows': tests, 'JSON': json.dumps(tests), 'one text': '\n'.join(tests)}[form]
  env = CodeEnv()
  reader = TaskReader('question', 'answer')
  item = reader.read({**MBPP, 'test_list': tests})
  question, _ = env.reset(seed=0, options={'task': Task(seed=0, index=0, item=item)})
  assert question.startswith(MBPP['text']) and 'assert set(similar(' in question
  replies = {
    MBPP['code']: 1.0,
    'import math\nprint(similar)\n': 0.0,
    'def similar(a, b):\n  raise SystemExit(0)': 0.0,
    'def similar(a, b):\n  return [4]': 0.0 if form == 'one text' else 0.5,
  }
  for program, reward in replies.items():
    example = '```python\nfor pair in [(1, 2), (3, 4)]:\n  print(sorted(pair))\n```'
    reply = f'```python\n{program}\n```\nAn example:\n{example}'
    assert env.step(reply)[1] == reward, program
  named = {**item, 'question': 'Write similar(a, b).'}
  task = Task(seed=0, index=0, item=named)
  assert env.reset(seed=0, options={'task': task})[0] == named['question']


@SANDBOXED
def test_what_only_this_project_imports_is_no_solution():
  """Neither `gcd` of math nor a builtin counts as the reply's own function."""
  assert play('x = 1', ['assert gcd(4, 6) == 2'], shown=True)[1] == ['error']


def test_wrong_tests_are_told():
  for tests, words in (
    ([], 'no tests'),
    ('[]', 'no tests'),
    (3, 'int'),
    ([{'input': '1'}], 'test 0'),
    ({'inputs': ['1']}, 'outputs'),
    ({'inputs': ['1'], 'outputs': []}, '1 inputs but 0 outputs'),
    ([FUNCTIONAL], 'neither it nor its row names the function'),
    ([{**FUNCTIONAL, 'testtype': 'fn'}], "testtype 'fn'; use stdin or functional"),
    ({'fn_name': 'f', 'inputs': ['[1, 2'], 'outputs': ['1']}, 'neither JSON nor'),
    ({'fn_name': 'f', 'inputs': ['1'], 'outputs': ['{1']}, 'test 0: its output'),
    ({'fn_name': 'f', 'inputs': [1], 'outputs': [1]}, 'give the arguments as a list'),
    (['f(1) == 2'], 'test 0, .*, is Python without any assert'),
    (['assert f(1) ='], 'test 0, .*, is a text that is no Python'),
    (['assert f(1) == 1', {'input': '1'}], 'test 1'),
    ('f(1) == 2', 'are no JSON'),
  ):
    with pytest.raises(ValueError, match=words):
      read_hidden_tests(tests)
  lines = read_hidden_tests({'inputs': [['1', '2']], 'outputs': [['3', '4']]})[0]
  assert (lines.request, lines.accepted) == ({'input': '1\n2'}, ('3\n4',))
