"""Parses the text of a compiled program: computations, instructions and trip counts."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

TYPE_BYTES = {'pred': 1, 'token': 0, 'opaque': 0, 's4': 0.5, 'u4': 0.5}
ARRAY_TYPE = re.compile(r'([a-z][a-z0-9]*)\[([\d,<=]*)\](\{[^}]*\})?')
# What is not such a line goes on with the instruction before it.
BEGINNING = re.compile(
  r'%|ENTRY|HloModule|\s+(ROOT )?%?[\w.\-]+ = |\}(, execution_thread=.*)?$|$'
)
ON_CORE_LAYOUT = 'S(1)'  # in a TPU array's layout: it lives on the core, not in HBM


@dataclasses.dataclass(frozen=True)
class HloInstruction:
  """Holds one line `%name = type op(operands), attributes` of an HLO text.

  Attributes:
    name: Name of the result.
    type: Type of the result, with its layout.
    op: The operation, as in 'all-reduce'.
    operands: Names of the operands.
    operand_text: Text between the parentheses.
    attributes: Text after the parentheses.
    root: Whether it is the result of its computation.
  """

  name: str
  type: str
  op: str
  operands: tuple[str, ...]
  operand_text: str
  attributes: str
  root: bool


Computation = dict[str, HloInstruction]


@dataclasses.dataclass(frozen=True)
class HloModule:
  """Holds a parsed HLO module.

  Attributes:
    computations: All computations by name.
    entry: Name of the computation that runs.
    default_trip_count: Iterations of loops whose count the text does not fix.
  """

  computations: dict[str, Computation]
  entry: str
  default_trip_count: int = 1

  def called(self, instruction: HloInstruction, key: str = 'calls') -> Computation:
    """Returns the computation that an attribute names; {} if it is absent."""
    match = re.search(rf'\b{key}=%?([\w.\-]+)', instruction.attributes)
    return self.computations.get(match[1], {}) if match else {}


def parse_hlo(text: str) -> HloModule:
  """Parses the text of a module, as `compiled.as_text()` returns it.

  Raises:
    ValueError: A computation has no result, so that a part of it was not understood.
  """
  computations: dict[str, Computation] = {}
  entry, current = '', None
  for line in _logical_lines(text):
    if line.startswith(('%', 'ENTRY')) and line.endswith('{'):
      head = line.removeprefix('ENTRY').strip()
      name = re.match(r'%?([\w.\-]+)', head)
      assert name is not None
      current = computations.setdefault(name[1], {})
      entry = name[1] if line.startswith('ENTRY') else entry
    elif line.startswith('}'):
      current = None
    elif current is not None and ' = ' in line:
      instruction = _parse_instruction(line)
      current[instruction.name] = instruction
  for name, computation in computations.items():
    if not any(instruction.root for instruction in computation.values()):
      raise ValueError(f'the compiled computation {name} has no ROOT')
  return HloModule(computations, entry)


def _logical_lines(text: str) -> Iterator[str]:
  """Yields lines, those of an instruction joined: a kernel's metadata has several."""
  joined = ''
  for line in text.splitlines():
    if BEGINNING.match(line):
      yield joined
      joined = line
    else:
      joined += line
  yield joined


def _parse_instruction(line: str) -> HloInstruction:
  left, _, rest = line.strip().partition(' = ')
  cut = _closing_index(rest) if rest.startswith('(') else rest.index(' ')
  kind, rest = rest[:cut], rest[cut:].lstrip()
  start = rest.index('(')
  end = start + _closing_index(rest[start:])
  inside = rest[start + 1 : end - 1]
  return HloInstruction(
    left.removeprefix('ROOT ').lstrip('%'),
    kind,
    rest[:start],
    tuple(re.findall(r'%([\w.\-]+)', inside)),
    inside,
    rest[end:],
    left.startswith('ROOT '),
  )


def _closing_index(text: str) -> int:
  """Returns the index after the parenthesis that closes the first one of `text`."""
  depth = 0
  for i, char in enumerate(text):
    depth += (char == '(') - (char == ')')
    if not depth:
      return i + 1
  return len(text)


def root_instruction(computation: Computation) -> HloInstruction:
  """Returns the instruction whose result the computation returns."""
  return next(x for x in computation.values() if x.root)


@functools.lru_cache(maxsize=65536)
def num_bytes(kind: str, *, hbm_only: bool = True) -> float:
  """Computes the size of a type, tuples included.

  Args:
    kind: Text of the type.
    hbm_only: Whether to skip arrays that live in a TPU core's own memory.

  Returns:
    The size in bytes.
  """
  total = 0.0
  for name, sizes, layout in ARRAY_TYPE.findall(kind):
    if hbm_only and ON_CORE_LAYOUT in layout:
      continue
    count = math.prod(int(n.strip('<=')) for n in sizes.split(',') if n.strip('<='))
    digits = re.search(r'\d+', name)
    width = TYPE_BYTES.get(name, int(digits[0]) / 8 if digits else 4)
    total += count * width
  return total


def trip_count(
  module: HloModule, computation: Computation, loop: HloInstruction
) -> int:
  """Returns the iterations of a `while` loop.

  Args:
    module: The module of the loop.
    computation: The computation that contains the loop.
    loop: The `while` instruction.

  Returns:
    The trip count; the module's default where the text does not fix it.
  """
  match = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
  if match:
    return int(match[1])
  condition, body = (module.called(loop, key) for key in ('condition', 'body'))
  test = root_instruction(condition)
  if test.op != 'compare' or 'direction=LT' not in test.attributes:
    return module.default_trip_count
  counter = condition.get(test.operands[0])
  limit = _constant_value(condition, test.operands[1])
  if counter is None or counter.op != 'get-tuple-element' or limit is None:
    return module.default_trip_count
  counter_index = re.search(r'index=(\d+)', counter.attributes)
  assert counter_index is not None
  start = computation.get(loop.operands[0])
  begin = None
  if start is not None and start.op == 'tuple':
    begin = _constant_value(computation, start.operands[int(counter_index[1])])
  step = _counter_step(body, int(counter_index[1])) or 1
  return max(1, math.ceil((limit - (begin or 0)) / step))


def _constant_value(computation: Computation, name: str) -> int | None:
  """Returns the value of an integer constant, None for everything else."""
  instruction = computation.get(name)
  while instruction is not None and instruction.op in ('copy', 'bitcast', 'convert'):
    instruction = computation.get(instruction.operands[0])
  if (
    instruction is None
    or instruction.op != 'constant'
    or not instruction.operand_text.lstrip('-').isdigit()
  ):
    return None
  return int(instruction.operand_text)


def _counter_step(body: Computation, counter_index: int) -> int:
  """Returns what an iteration adds to one element of the loop's tuple, 0 if unknown."""
  out, total = root_instruction(body), 0
  if out.op != 'tuple':
    return 0
  instruction = body.get(out.operands[counter_index])
  while instruction is not None and instruction.op in ('add', 'copy', 'bitcast'):
    if instruction.op == 'add':
      constants = [_constant_value(body, name) for name in instruction.operands]
      if constants[0] is None and constants[1] is None:
        return 0
      operand_index = 0 if constants[0] is None else 1
      total += constants[1 - operand_index] or 0
      instruction = body.get(instruction.operands[operand_index])
    else:
      instruction = body.get(instruction.operands[0])
  return total
