"""Reads a compiled program's text: computations, instructions, types, trip counts."""

import dataclasses
import functools
import math
import re

WIDTHS = {'pred': 1, 'token': 0, 'opaque': 0, 's4': 0.5, 'u4': 0.5}
ARRAY = re.compile(r'([a-z][a-z0-9]*)\[([\d,<=]*)\](\{[^}]*\})?')
FAST = 'S(1)'  # in a TPU array's layout: it lives on the core, not in HBM


@dataclasses.dataclass(frozen=True)
class Instruction:
  """`%name = type op(operands), attributes`."""

  name: str
  type: str
  op: str
  operands: tuple[str, ...]
  inside: str  # the parentheses' contents
  attributes: str
  root: bool

  def called(self, key: str) -> str | None:
    """The computation that an attribute names."""
    found = re.search(rf'\b{key}=%?([\w.\-]+)', self.attributes)
    return found and found[1]


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
  """computations: by name. entry: the name of the one that runs. rounds: of loops where
  the text does not fix them.
  """

  computations: dict[str, Computation]
  entry: str
  rounds: int = 1


def parse(text: str) -> Module:
  """A module from what `compiled.as_text()` gives."""
  computations: dict[str, Computation] = {}
  entry, current = '', None
  for line in text.splitlines():
    if line.startswith(('%', 'ENTRY')) and line.endswith('{'):
      head = line.removeprefix('ENTRY').strip()
      name = re.match(r'%?([\w.\-]+)', head)
      assert name is not None
      current = computations.setdefault(name[1], {})
      entry = name[1] if line.startswith('ENTRY') else entry
    elif line.startswith('}'):
      current = None
    elif current is not None and ' = ' in line:
      made = _instruction(line)
      current[made.name] = made
  return Module(computations, entry)


def _instruction(line: str) -> Instruction:
  left, _, rest = line.strip().partition(' = ')
  cut = _balanced(rest) if rest.startswith('(') else rest.index(' ')
  kind, rest = rest[:cut], rest[cut:].lstrip()
  start = rest.index('(')
  end = start + _balanced(rest[start:])
  inside = rest[start + 1 : end - 1]
  return Instruction(
    left.removeprefix('ROOT ').lstrip('%'),
    kind,
    rest[:start],
    tuple(re.findall(r'%([\w.\-]+)', inside)),
    inside,
    rest[end:],
    left.startswith('ROOT '),
  )


def _balanced(text: str) -> int:
  """Where the parenthesis that `text` begins with has been closed."""
  depth = 0
  for i, char in enumerate(text):
    depth += (char == '(') - (char == ')')
    if not depth:
      return i + 1
  return len(text)


def root(computation: Computation) -> Instruction:
  found = [x for x in computation.values() if x.root]
  return found[0] if found else list(computation.values())[-1]


@functools.lru_cache(maxsize=65536)
def num_bytes(kind: str, *, slow: bool = True) -> float:
  """Of a type, tuples included. slow: leave out what lives on a TPU's core."""
  total = 0.0
  for name, sizes, layout in ARRAY.findall(kind):
    if slow and FAST in layout:
      continue
    count = math.prod(int(n.strip('<=')) for n in sizes.split(',') if n.strip('<='))
    digits = re.search(r'\d+', name)
    width = WIDTHS.get(name, int(digits[0]) / 8 if digits else 4)
    total += count * width
  return total


def trip_count(module: Module, where: Computation, loop: Instruction) -> int:
  """Rounds of a `while`; the module's where its text does not fix them."""
  known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
  if known:
    return int(known[1])
  condition = module.computations[loop.called('condition') or '']
  body = module.computations[loop.called('body') or '']
  test = root(condition)
  if test.op != 'compare' or 'direction=LT' not in test.attributes:
    return module.rounds
  counter = condition.get(test.operands[0])
  limit = _constant(condition, test.operands[1])
  if counter is None or counter.op != 'get-tuple-element' or limit is None:
    return module.rounds
  place = re.search(r'index=(\d+)', counter.attributes)
  assert place is not None
  start = where.get(loop.operands[0])
  begin = None
  if start is not None and start.op == 'tuple':
    begin = _constant(where, start.operands[int(place[1])])
  step = _step(body, int(place[1])) or 1
  return max(1, math.ceil((limit - (begin or 0)) / step))


def _constant(computation: Computation, name: str) -> int | None:
  """The value of a whole number that does not change."""
  found = computation.get(name)
  while found is not None and found.op in ('copy', 'bitcast', 'convert'):
    found = computation.get(found.operands[0])
  if found is None or found.op != 'constant' or not found.inside.lstrip('-').isdigit():
    return None
  return int(found.inside)


def _step(body: Computation, place: int) -> int:
  """What a round adds to element `place` of the loop's tuple; 0 if it is not told."""
  out, total = root(body), 0
  if out.op != 'tuple':
    return 0
  at = body.get(out.operands[place])
  while at is not None and at.op in ('add', 'copy', 'bitcast'):
    if at.op == 'add':
      added = [_constant(body, name) for name in at.operands]
      if added[0] is None and added[1] is None:
        return 0
      which = 0 if added[0] is None else 1
      total += added[1 - which] or 0
      at = body.get(at.operands[which])
    else:
      at = body.get(at.operands[0])
  return total
