"""Computes the memory traffic and the communication of a compiled program.

The compiler's own analysis counts the body of a loop once. This module counts it as
often as it runs.
"""

import dataclasses
import math
import re
from collections.abc import Iterable

import numpy as np

from launch.planning import hlo
from launch.planning.hlo import Computation, HloInstruction, HloModule

KINDS = (
  'all-reduce',
  'all-gather',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
)
FREE = (
  *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all'),
  *('partition-id', 'replica-id', 'iota', 'opt-barrier', 'async-done', 'async-update'),
)
CALLS = ('call', 'conditional', 'async-start')
SLICES = ('dynamic-slice', 'slice', 'gather')
UPDATES = {'dynamic-update-slice': 1, 'scatter': -1}  # which operand is written


@dataclasses.dataclass
class Collective:
  """Sums up all collectives of one kind.

  Attributes:
    count: How often they run.
    bytes: Bytes that a device sends in all of them together.
    inter_node_bytes: The part of these bytes whose device group spans several nodes.
  """

  count: int = 0
  bytes: float = 0.0
  inter_node_bytes: float = 0.0


@dataclasses.dataclass
class Traffic:
  """Adds up what one device transfers in one run of a program.

  Attributes:
    module: The program.
    node_size: Number of devices that share fast links; 0 if all do.
    memory: Bytes read from and written to memory.
    collectives: Collectives by kind.
    fused_collectives: Collectives that run beside products and therefore appear in
      several fusions: kind, count, bytes and inter-node bytes by channel.
  """

  module: HloModule
  node_size: int = 0
  memory: float = 0.0
  collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)
  fused_collectives: dict[str, tuple[str, int, float, float]] = dataclasses.field(
    default_factory=dict
  )

  def add_computation(self, computation: Computation, times: int = 1) -> None:
    """Adds what a computation transfers that runs so many times."""
    for instruction in computation.values():
      if instruction.op == 'while':
        trip_count = hlo.trip_count(self.module, computation, instruction)
        body = self.module.called(instruction, 'body')
        self.add_computation(body, times * trip_count)
        continue
      self.add_computation(self._run_once(instruction), times)
      self._add_collectives(computation, instruction, times)
      if instruction.op not in (*FREE, *CALLS):
        self.memory += times * self._bytes_accessed(computation, instruction)

  def add_collective(self, kind: str, count: int, sent: float, far: float) -> None:
    """Adds a collective: its kind, how often it runs, its bytes, and those far."""
    entry = self.collectives.setdefault(kind, Collective())
    entry.count += count
    entry.bytes += sent
    entry.inter_node_bytes += far

  def _run_once(self, instruction: HloInstruction) -> Computation:
    """Returns the computation that an instruction runs once; {} for none."""
    if instruction.op in ('call', 'async-start'):
      names = ('to_apply', 'calls')
    elif instruction.op == 'conditional':
      branches = re.search(r'branch_computations=\{([^}]*)\}', instruction.attributes)
      if branches:
        name = branches[1].split(',')[0].strip(' %')
        return self.module.computations.get(name, {})
      names = ('true_computation',)
    else:
      return {}
    called = (self.module.called(instruction, name) for name in names)
    return next(filter(None, called), {})

  def _add_collectives(
    self,
    computation: Computation,
    instruction: HloInstruction,
    times: int,
    *,
    fused: bool = False,
  ) -> None:
    if instruction.op == 'fusion':  # which may hold a collective, on TPU
      inner = self.module.called(instruction)
      for part in inner.values():
        self._add_collectives(inner, part, times, fused=True)
      return
    kind = instruction.op.removesuffix('-done')
    if kind not in KINDS:
      return
    is_done = instruction.op.endswith('-done')
    start = computation[instruction.operands[0]] if is_done else instruction
    group = first_device_group(start.attributes)
    size = len(group)
    share = (size - 1) / max(size, 1)
    if kind == 'collective-permute':
      size, share = 2, 1.0
    output_bytes = hlo.num_bytes(instruction.type, hbm_only=False)
    scale = {'all-reduce': 2.0, 'reduce-scatter': float(size)}.get(kind, 1.0)
    sent = times * output_bytes * scale * share
    nodes = {member // self.node_size for member in group} if self.node_size else {0}
    collective = kind, times, sent, sent if len(nodes) > 1 else 0.0
    channel = re.search(r'channel_id=(\d+)', start.attributes)
    if fused and channel:
      known = self.fused_collectives.get(channel[1], collective)
      self.fused_collectives[channel[1]] = min(collective, known)
    else:
      self.add_collective(*collective)

  def _bytes_accessed(
    self, computation: Computation, instruction: HloInstruction
  ) -> float:
    """Returns the bytes that an instruction reads from memory and writes to it."""
    output_bytes = hlo.num_bytes(instruction.type)
    inputs = [
      computation[name].type for name in instruction.operands if name in computation
    ]
    if instruction.op == 'fusion' and (inner := self.module.called(instruction)):
      return self._fusion_bytes(inner, inputs, output_bytes)
    if instruction.op in SLICES:
      return 2 * output_bytes
    if instruction.op in UPDATES:
      return 2 * hlo.num_bytes(inputs[UPDATES[instruction.op]])
    if instruction.op.endswith('-done'):
      return output_bytes
    if instruction.op.endswith('-start'):
      output_bytes = 0.0
    return output_bytes + sum(map(hlo.num_bytes, inputs))

  def _fusion_bytes(
    self, inner: Computation, inputs: list[str], output_bytes: float
  ) -> float:
    """Counts a fusion's traffic; an input that it only slices counts as the slice."""
    total = 0.0
    for parameter in inner.values() if inputs else ():
      if parameter.op == 'parameter':
        whole = hlo.num_bytes(inputs[int(parameter.operand_text)])
        part = self._bytes_read(inner, parameter.name)
        total += whole if part is None else min(whole, part)
    result = _skip_bitcasts(inner, hlo.root_instruction(inner).name)
    outputs = [inner[n] for n in result.operands] if result.op == 'tuple' else [result]
    for output in outputs:
      # A value that a fusion makes itself and then updates is written as a whole.
      if (
        output.op in UPDATES
        and _skip_bitcasts(inner, output.operands[0]).op == 'parameter'
      ):
        update = inner[output.operands[UPDATES[output.op]]]
        saved = hlo.num_bytes(output.type) - hlo.num_bytes(update.type)
        output_bytes -= max(0.0, min(saved, output_bytes))
    return total + output_bytes

  def _bytes_read(
    self, inner: Computation, name: str, *, is_nested: bool = False
  ) -> float | None:
    """Returns the bytes that a fusion reads of a value of it, None for all."""
    if is_nested and hlo.root_instruction(inner).name == name:
      return None  # the fusion around it reads it
    users = [x for x in inner.values() if name in x.operands]
    return _sum_known(
      self._bytes_read_by(inner, x, name, is_nested=is_nested) for x in users
    )

  def _bytes_read_by(
    self, inner: Computation, user: HloInstruction, name: str, *, is_nested: bool
  ) -> float | None:
    """Returns the bytes that `user` reads of its operand `name`, None for all of it."""
    if user.op in SLICES and user.operands[0] == name:
      return hlo.num_bytes(user.type, hbm_only=False)
    if user.op in UPDATES and user.operands[0] == name:
      # Written in place, and the write is counted with the output. A nested fusion
      # hands what it has written to the fusion around it, which reads it.
      return None if is_nested else 0.0
    if user.op == 'bitcast':
      return self._bytes_read(inner, user.name, is_nested=is_nested)
    nested = self.module.called(user)
    if user.op != 'fusion' or not nested:
      return None
    places = {str(i) for i, operand in enumerate(user.operands) if operand == name}
    return _sum_known(
      self._bytes_read(nested, x.name, is_nested=True)
      for x in nested.values()
      if x.op == 'parameter' and x.operand_text in places
    )


def measure_traffic(text: str, node_size: int = 0, loop_rounds: int = 1) -> Traffic:
  """Computes the traffic of a program.

  Args:
    text: Text of the compiled program.
    node_size: Number of devices that share fast links; 0 if all do.
    loop_rounds: Iterations of loops whose count the text does not fix.

  Returns:
    The traffic of one device.
  """
  module = dataclasses.replace(hlo.parse_hlo(text), default_trip_count=loop_rounds)
  traffic = Traffic(module, node_size)
  traffic.add_computation(module.computations[module.entry])
  for collective in traffic.fused_collectives.values():
    traffic.add_collective(*collective)
  return traffic


def first_device_group(attributes: str) -> list[int]:
  """Returns the device numbers of a collective's first group.

  Args:
    attributes: Attributes of the HLO instruction.
  """
  pairs = re.search(r'source_target_pairs=\{\{(\d+),(\d+)\}', attributes)
  if pairs:
    return [int(pairs[1]), int(pairs[2])]
  listed = re.search(r'replica_groups=\{\{([\d,]+)\}', attributes)
  if listed:
    return [int(n) for n in listed[1].split(',')]
  iota = re.search(
    r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', attributes
  )
  if iota:
    shape, dims = (tuple(map(int, iota[i].split(','))) for i in (1, 2))
    ids = np.arange(math.prod(dims)).reshape(dims)
    if iota[3]:
      ids = ids.transpose(tuple(map(int, iota[3].split(','))))
    return ids.reshape(shape)[0].tolist()
  named = re.search(r'replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}', attributes)
  if named:
    axes = {n: int(s) for n, s in re.findall(r"'([^']+)'=(\d+)", named[1])}
    ids = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    chosen = re.findall(r"'([^']+)'", named[2])
    index = tuple(slice(None) if n in chosen else 0 for n in axes)
    return np.ravel(ids[index]).tolist()
  return [0]


def _skip_bitcasts(inner: Computation, name: str) -> HloInstruction:
  """Returns the instruction that a chain of bitcasts starts from."""
  while inner[name].op == 'bitcast':
    name = inner[name].operands[0]
  return inner[name]


def _sum_known(parts: Iterable[float | None]) -> float | None:
  """Sums numbers of bytes; None if one of them is."""
  known = list(parts)
  return None if None in known else sum(part or 0.0 for part in known)
