"""Replies that hold a program, as models write them.

Each row is (reply, score). The tests call `twice`, which doubles each number of a list.
"""

RIGHT = 'def twice(numbers):\n    return [2 * n for n in numbers]\n'
WRONG = 'def twice(numbers):\n    return numbers\n'
METHOD = (
  'class Solution:\n    def twice(self, numbers: List[int]) -> List[int]:\n'
  '        return [2 * n for n in numbers]\n'
)
DOCSTRING = (
  'def twice(numbers):\n  """Doubles.\n\n  ```\n  twice([1])\n  ```\n  """\n'
  '  return [2 * n for n in numbers]\n'
)
EXAMPLE = 'print(twice([1, 2, 3]))  # [2, 4, 6], which is a rather long line of text\n'
RUN = (
  'numbers = [1, 2, 3]\nfor number in twice(numbers):\n    print(number, number + 1)\n'
)


def fenced(code, language='python', fence='```', indent=''):
  text = f'{fence}{language}\n{code}{fence}\n'
  return ''.join(f'{indent}{line}' for line in text.splitlines(keepends=True))


REPLIES = [
  (fenced(RIGHT), 1),
  (fenced(RIGHT, ''), 1),
  (fenced(RIGHT, 'py'), 1),
  (fenced(RIGHT, 'python3'), 1),
  (fenced(RIGHT, 'Python'), 1),
  (fenced(RIGHT, ' python'), 1),
  (fenced(RIGHT, 'python title="twice.py"'), 1),
  (fenced(RIGHT, '{.python}'), 1),
  (fenced(RIGHT, 'python', '````'), 1),
  (fenced(RIGHT, 'python', '~~~'), 1),
  (fenced(RIGHT, 'python', '~~~~~'), 1),
  (fenced(RIGHT, indent='  '), 1),
  (fenced(RIGHT, indent='   '), 1),
  ('Do this:\n\n' + fenced(RIGHT, indent='    '), 1),
  ('1. Write it:\n\n' + fenced(RIGHT, indent='   '), 1),
  ('1. Write it:\n' + fenced(RIGHT, indent='    '), 1),
  ('- Write it:\n' + fenced(RIGHT, indent='  '), 1),
  ('* First\n  * Second\n' + fenced(RIGHT, indent='    '), 1),
  (fenced(RIGHT, indent='> '), 1),
  (fenced(RIGHT).replace('\n', '\r\n'), 1),
  (fenced(RIGHT).rstrip('\n'), 1),
  (fenced(RIGHT).rstrip('\n') + '   \n', 1),
  (f'Here is the function.\n\n{fenced(RIGHT)}\nIt runs in O(n).', 1),
  (f'**Solution**\n{fenced(RIGHT)}\n**Usage**\n{fenced(EXAMPLE)}', 1),
  (f'{fenced(RIGHT)}Use it so:\n{fenced(RUN)}', 1),
  (f'{fenced(RIGHT)}It prints\n{fenced("[2, 4, 6]" * 99 + chr(10), "")}', 1),
  (f'{fenced(RIGHT)}It prints\n{fenced("[2, 4, 6]" + chr(10), "text")}', 1),
  (f'{fenced(RIGHT)}Run it:\n{fenced("python twice.py" + chr(10), "bash")}', 1),
  (f'{fenced(RIGHT)}{fenced(">>> twice([1])" + chr(10) + "[2]" + chr(10))}', 1),
  (f'{fenced("pip install numpy" + chr(10), "sh")}{fenced(RIGHT)}', 1),
  (f'First try:\n{fenced(WRONG)}That is wrong. Better:\n{fenced(RIGHT)}', 1),
  (f'First try:\n{fenced(RIGHT)}Better:\n{fenced(WRONG)}', 0),
  (f'{fenced(RIGHT)}Do not write\n{fenced("return numbers" + chr(10))}', 1),
  (fenced(DOCSTRING, 'python', '````'), 1),
  (fenced(DOCSTRING), 1),
  (fenced(DOCSTRING.replace('\n  ', '\n    ')), 1),
  (f'{fenced(DOCSTRING)}\nUse it so:\n{fenced(EXAMPLE)}', 1),
  (fenced(RIGHT + '\n' + EXAMPLE), 1),
  (fenced(RIGHT + "\nif __name__ == '__main__':\n    1 / 0\n"), 1),
  (fenced(f'from typing import List\n\n{RIGHT}'), 1),
  (fenced(RIGHT.replace('(numbers)', '(numbers: List[int]) -> List[int]')), 1),
  (fenced(METHOD), 1),
  (fenced(METHOD + '\nprint(Solution().twice([1]))\n'), 1),
  (fenced(f'import math\n\n{METHOD}'), 1),
  (fenced('twice = lambda numbers: [2 * n for n in numbers]\n'), 1),
  (fenced('def helper(n):\n    return 2 * n\n\n' + RIGHT), 1),
  (f'<think>{fenced(WRONG)}</think>\n{fenced(RIGHT)}', 1),
  (f'<think>\n{fenced(RIGHT)}</think>\n{fenced(WRONG)}', 0),
  (f'<answer>\n{fenced(RIGHT)}</answer>', 1),
  (f'<answer>{fenced(RIGHT)}</answer>', 1),
  (f'<div>\n{fenced(RIGHT)}</div>', 1),
  (RIGHT, 1),
  (f'```python\n{RIGHT}', 1),
  (f'{fenced(EXAMPLE)}\n```python\n{RIGHT}', 1),
  (fenced(WRONG), 0),
  (fenced(RIGHT.replace('twice', 'double')), 0),
  (fenced('function twice(numbers) {\n  return numbers;\n}\n', 'javascript'), 0),
  (fenced(RIGHT, 'cpp'), 1),  # what it defines counts, whatever it is called
  (fenced(RIGHT, 'tool_code'), 1),
  (fenced('def twice(numbers:\n    return\n'), 0),
  (fenced(EXAMPLE), 0),
  (fenced(''), 0),
  ('```', 0),
  ('I would double each number of the list.', 0),
  ('', 0),
  (f'`{RIGHT}`', 0),
  (fenced('def twice(numbers):\n    raise SystemExit(0)\n'), 0),
  (fenced('def twice(numbers):\n    while True: pass\n'), 0),
  (fenced('def twice(numbers):\n    print([2 * n for n in numbers])\n'), 0),
]
# Of programs that read what they are given, and print: the sum of two lines.
ADD = 'print(int(input()) + int(input()))\n'
READ = (
  'import sys\n\n\ndef main():\n    a, b = map(int, sys.stdin.read().split())\n'
  "    print(a + b)\n\n\nif __name__ == '__main__':\n    main()\n"
)
PRINTED = [
  (fenced(ADD), 1),
  (fenced(READ), 1),
  (f'{fenced(READ)}With the input\n{fenced("1" + chr(10) + "1" + chr(10), "")}', 1),
  (f'{fenced(READ)}This prints\n{fenced("2" + chr(10), "text")}', 1),
  (f'{fenced(READ)}The short form:\n{fenced("a + b" + chr(10))}', 1),
  (f'{fenced("a, b = 1, 1" + chr(10))}So in all:\n{fenced(READ)}', 1),
  (f'{fenced("echo 1 | python add.py" + chr(10), "bash")}{fenced(ADD)}', 1),
  (fenced(READ, 'tool_code'), 1),
  (ADD, 1),
  (READ, 1),
  (f'```python\n{READ}', 1),
  (f'I would write {ADD}', 0),
  ('Sorry', 0),
  (fenced('print(0)\n'), 0),
]
# HumanEval: replies that go on with the prompt, or begin anew.
PROMPT = (
  'from typing import List\n\n\ndef double(n: int) -> int:\n    """Doubles n."""\n'
  '    return 2 * n\n\n\ndef twice(numbers: List[int]) -> List[int]:\n'
  '    """Doubles each number.\n    >>> twice([1])\n    [2]\n    """\n'
)
BODY = '    return [double(n) for n in numbers]\n'
HUMANEVAL = [
  (BODY, 1),
  (f'\n{BODY}', 1),
  (BODY + '\n\nprint(twice([1]))\n', 1),
  (BODY + '\n\ndef main():\n    print(twi', 1),
  (BODY + '\n\nif __name__ == "__main__":\n    import doctest\n    doctest.te', 1),
  (BODY + '\n# Test it\nassert twice([1]', 1),
  (BODY + '```\n\nThis doubles each number.', 1),
  (BODY + '\n\nThis doubles each number.', 1),
  (BODY.strip(), 1),
  (fenced(BODY), 1),
  (fenced(BODY.strip() + '\n'), 1),
  (fenced(BODY, ''), 1),
  (fenced(PROMPT + BODY), 1),
  (PROMPT + BODY, 1),
  (f'Here it is.\n{fenced(PROMPT + BODY)}It calls `double`.', 1),
  (fenced(PROMPT.partition('\n\n\ndef double')[0] + '\n' + RIGHT), 1),
  (
    '    result = []\n    for n in numbers:\n        result.append(2 * n)\n'
    '    return result\n',
    1,
  ),
  ('    # Each number is doubled.\n' + BODY, 1),
  (BODY.replace('return', 'yield from'), 0),
  ('    pass\n', 0),
  ('    return numbers\n', 0),
  ('    return [\n', 0),
  ('def check(f):\n    pass\n', 0),
  (fenced('def check(f):\n    pass\n\n' + WRONG), 0),
]
