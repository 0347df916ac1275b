"""Arithmetic word problems from a seeded generator.

A problem is its kind and its numbers; names and objects only dress it. Train and
test are split by a hash of the problem, so no test problem is ever seen in training,
however it is dressed. Everything is a pure function of the seed.
"""

import operator
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

NAMES = ('Ann', 'Ben', 'Eva', 'Kim', 'Leo', 'Max', 'Mia', 'Sam', 'Tom', 'Zoe')
OBJECTS = ('pens', 'eggs', 'figs', 'nuts', 'caps', 'toys', 'keys', 'cups', 'books')
FORMS = ('worked', 'pairs', 'texts')
TEST_SHARE = 0.2  # of all problems, kept for the test split

_SIGNS = {'+': operator.add, '-': operator.sub, '*': operator.mul}
Numbers = tuple[int, ...]
Steps = list[tuple[str, int]]  # ('3+4', 7): one worked step after another


def _add(n: Numbers) -> tuple[str, Steps]:
  a, b, _ = n
  return '{name} has {a} {obj} and gets {b} more. How many now?', [(f'{a}+{b}', a + b)]


def _sub(n: Numbers) -> tuple[str, Steps]:
  a, b, _ = n
  a += b
  text = f'{{name}} has {a} {{obj}} and gives away {b}. How many are left?'
  return text, [(f'{a}-{b}', a - b)]


def _mul(n: Numbers) -> tuple[str, Steps]:
  a, b, _ = n
  return '{name} has {a} bags of {b} {obj}. How many {obj}?', [(f'{a}*{b}', a * b)]


def _add_sub(n: Numbers) -> tuple[str, Steps]:
  a, b, c = n
  c = min(c, a + b)
  text = '{name} has {a} {obj}, gets {b} more and loses {c}. How many now?'
  steps = [(f'{a}+{b}', a + b), (f'{a + b}-{c}', a + b - c)]
  return text.replace('{c}', str(c)), steps


def _sub_add(n: Numbers) -> tuple[str, Steps]:
  a, b, c = n
  a += b
  text = f'{{name}} has {a} {{obj}}, loses {b} and gets {c} more. How many now?'
  return text, [(f'{a}-{b}', a - b), (f'{a - b}+{c}', a - b + c)]


def _compare(n: Numbers) -> tuple[str, Steps]:
  a, b, _ = n
  text = '{name} has {a} {obj}. {other} has {b} more. How many in all?'
  return text, [(f'{a}+{b}', a + b), (f'{a}+{a + b}', a + a + b)]


def _mul_add(n: Numbers) -> tuple[str, Steps]:
  a, b, c = n
  text = '{name} has {a} bags of {b} {obj} and {c} more. How many {obj}?'
  return text, [(f'{a}*{b}', a * b), (f'{a * b}+{c}', a * b + c)]


def _mul_sub(n: Numbers) -> tuple[str, Steps]:
  a, b, c = n
  c = min(c, a * b)
  text = '{name} has {a} bags of {b} {obj} and loses {c}. How many now?'
  steps = [(f'{a}*{b}', a * b), (f'{a * b}-{c}', a * b - c)]
  return text.replace('{c}', str(c)), steps


KINDS: dict[str, Callable[[Numbers], tuple[str, Steps]]] = {
  'add': _add,
  'sub': _sub,
  'mul': _mul,
  'add_sub': _add_sub,
  'sub_add': _sub_add,
  'compare': _compare,
  'mul_add': _mul_add,
  'mul_sub': _mul_sub,
}


def problem(
  rng: np.random.Generator,
  *,
  kinds: Sequence[str] = tuple(KINDS),
  max_number: int = 20,
  max_factor: int = 9,
) -> dict[str, Any]:
  """Draws one problem.

  Returns question, answer (a string), solution (worked, ending in `#### answer`),
  kind, and key: what names the problem whatever its dressing. Terms lie in
  [1, max_number], factors in [2, max_factor].
  """
  kind = kinds[int(rng.integers(len(kinds)))]
  a, b, c = (int(x) for x in rng.integers(1, max_number + 1, size=3))
  if kind.startswith('mul'):
    a, b = (int(x) for x in rng.integers(2, max_factor + 1, size=2))
  template, steps = KINDS[kind]((a, b, c))
  name, other = (NAMES[int(i)] for i in rng.choice(len(NAMES), 2, replace=False))
  obj = OBJECTS[int(rng.integers(len(OBJECTS)))]
  answer = str(steps[-1][1])
  worked = '\n'.join(f'{left}={right}' for left, right in steps)
  return {
    'question': template.format(name=name, other=other, obj=obj, a=a, b=b, c=c),
    'answer': answer,
    'solution': f'{worked}\n#### {answer}',
    'kind': kind,
    'key': f'{kind}:' + ','.join(left for left, _ in steps),
  }


def misread(solution: str) -> str:
  """The worked solution of one who takes every loss for a gain: − becomes +."""
  *steps, _ = solution.split('\n')
  worked: list[str] = []
  result = ''
  for step in steps:
    left, _, right = step.split('=')[0].replace('-', '+').partition('+')
    result, left = str(int(result or left) + int(right)), result or left
    worked.append(f'{left}+{right}={result}')
  return '\n'.join([*worked, f'#### {result}'])


def mistake(solution: str) -> str:
  """The worked solution of one who takes the first sign for another and goes on."""
  *steps, _ = solution.split('\n')
  worked: list[str] = []
  before = after = ''  # the last result, and what it should have been
  for step in steps:
    left, right = step.split('=')
    a, sign, b = re.split(r'([-+*])', left)
    if worked and a == before:
      a = after
    elif worked:
      b = after
    else:
      sign = {'-': '+', '+': '-', '*': '-'}[sign]
    before, after = right, str(_SIGNS[sign](int(a), int(b)))
    worked.append(f'{a}{sign}{b}={after}')
  return '\n'.join([*worked, f'#### {after}'])


def in_test(key: str) -> bool:
  """Whether the problem named `key` belongs to the test split."""
  return zlib.crc32(key.encode()) < TEST_SHARE * 2**32


def arithmetic(
  split: str = 'train',
  *,
  size: int = 10_000,
  seed: int = 0,
  kinds: Sequence[str] = tuple(KINDS),
  max_number: int = 20,
  max_factor: int = 9,
  misread_share: Mapping[str, float] = MappingProxyType({}),
  form: str = 'worked',
) -> list[dict[str, Any]]:
  """`size` different questions of a split, a pure function of the arguments.

  misread_share: kind → the share of its worked solutions that are wrong, as those of a
  careless teacher (see `misread`); answers are right all the same. form: 'worked' has
  question, answer and solution; 'pairs' chosen, the solution, and rejected too, one
  with a mistake; 'texts' text too, the question and its solution.
  Raises ValueError for an unknown split, kind or form, and when the numbers are so few
  that `size` different questions cannot be found.
  """
  if split not in ('train', 'test'):
    raise ValueError(f"split is 'train' or 'test', not {split!r}")
  if form not in FORMS:
    raise ValueError(f'form is one of {", ".join(FORMS)}, not {form!r}')
  unknown = [kind for kind in (*kinds, *misread_share) if kind not in KINDS]
  if unknown or not kinds:
    raise ValueError(f'unknown kinds {unknown}; there are {", ".join(KINDS)}')
  rng = np.random.default_rng([seed, int(split == 'test')])
  found: dict[str, dict[str, Any]] = {}
  options = {'kinds': kinds, 'max_number': max_number, 'max_factor': max_factor}
  for _ in range(50 * size + 2000):
    if len(found) == size:
      break
    drawn = problem(rng, **options)
    if in_test(drawn['key']) == (split == 'test'):
      found.setdefault(drawn['question'], drawn)
  if len(found) < size:
    raise ValueError(
      f'only {len(found)} of {size} different {split} questions exist for kinds='
      f'{tuple(kinds)}, max_number={max_number}, max_factor={max_factor}; '
      'allow larger numbers or ask for fewer'
    )
  rows = list(found.values())
  draws = np.random.default_rng([seed, 2]).random(len(rows))
  for row, draw in zip(rows, draws, strict=True):
    if draw < misread_share.get(row['kind'], 0.0):
      row['solution'] = misread(row['solution'])
  if form == 'pairs':
    for row in rows:
      row |= {'chosen': row['solution'], 'rejected': mistake(row['solution'])}
  elif form == 'texts':
    for row in rows:
      row['text'] = f'{row["question"]}\n{row["solution"]}'
  return rows
