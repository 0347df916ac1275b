"""Computes the memory traffic and the communication of a compiled program.

The compiler's own analysis counts the body of a loop once. This module counts it as
often as it runs.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

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
  """Holds what one device transfers in one run of a program.

  Attributes:
    memory: Bytes read from and written to memory.
    collectives: Collectives by kind.
    fused_collectives: Collectives that run beside products and therefore appear in
      several fusions: kind, count, bytes and inter-node bytes by channel.
  """

  memory: float = 0.0
  collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)
  # One that runs beside products stands in each of their fusions, under one channel:
  # channel → (its kind, how often, bytes, of these far).
  fused_collectives: dict[str, tuple[str, int, float, float]] = dataclasses.field(
    default_factory=dict
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
  traffic = Traffic()
  _walk(module, module.computations[module.entry], 1, traffic, node_size)
  for collective in traffic.fused_collectives.values():
    _add_collective(traffic, *collective)
  return traffic


def _add_collective(
  traffic: Traffic, kind: str, count: int, sent: float, inter_node_bytes: float
) -> None:
  entry = traffic.collectives.setdefault(kind, Collective())
  entry.count += count
  entry.bytes += sent
  entry.inter_node_bytes += inter_node_bytes


def _walk(
  module: HloModule,
  computation: Computation,
  times: int,
  traffic: Traffic,
  node_size: int,
) -> None:
  for instruction in computation.values():
    if instruction.op == 'while':
      body = module.computations[instruction.called_computation('body') or '']
      trip_count = hlo.trip_count(module, computation, instruction)
      _walk(module, body, times * trip_count, traffic, node_size)
      continue
    for name in _called_computations(instruction):
      if name in module.computations:
        _walk(module, module.computations[name], times, traffic, node_size)
    _collect_collectives(module, computation, instruction, times, traffic, node_size)
    if instruction.op not in (*FREE, *CALLS):
      traffic.memory += times * _bytes_accessed(module, computation, instruction)


def _called_computations(instruction: HloInstruction) -> Iterator[str]:
  """Yields the computations that an instruction runs once."""
  if instruction.op in ('call', 'async-start'):
    name = instruction.called_computation('to_apply') or instruction.called_computation(
      'calls'
    )
    if name:
      yield name
  elif instruction.op == 'conditional':
    branches = re.search(r'branch_computations=\{([^}]*)\}', instruction.attributes)
    if branches:
      yield branches[1].split(',')[0].strip(' %')
    elif name := instruction.called_computation('true_computation'):
      yield name


def _collect_collectives(
  module: HloModule,
  computation: Computation,
  instruction: HloInstruction,
  times: int,
  traffic: Traffic,
  node_size: int,
  *,
  fused: bool = False,
) -> None:
  if instruction.op == 'fusion':  # which may hold a collective, on TPU
    fused_computation = module.computations.get(
      instruction.called_computation('calls') or '', {}
    )
    for part in fused_computation.values():
      _collect_collectives(
        module, fused_computation, part, times, traffic, node_size, fused=True
      )
    return
  kind = instruction.op.removesuffix('-done')
  if kind not in KINDS:
    return
  start = (
    computation[instruction.operands[0]]
    if instruction.op.endswith('-done')
    else instruction
  )
  group = first_device_group(start.attributes)
  size = len(group)
  if kind == 'collective-permute':
    size, share = 2, 1.0
  else:
    share = (size - 1) / max(size, 1)
  output_bytes = hlo.num_bytes(instruction.type, hbm_only=False)
  scale = {'all-reduce': 2.0, 'reduce-scatter': float(size)}.get(kind, 1.0)
  bytes_sent = times * output_bytes * scale * share
  crosses_nodes = node_size and len({member // node_size for member in group}) > 1
  collective = kind, times, bytes_sent, bytes_sent if crosses_nodes else 0.0
  channel = re.search(r'channel_id=(\d+)', start.attributes)
  if fused and channel:
    traffic.fused_collectives[channel[1]] = min(
      collective, traffic.fused_collectives.get(channel[1], collective)
    )
  else:
    _add_collective(traffic, *collective)


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


def _bytes_accessed(
  module: HloModule, computation: Computation, instruction: HloInstruction
) -> float:
  """Returns the bytes that an instruction reads from memory and writes to it."""
  output_bytes = hlo.num_bytes(instruction.type)
  inputs = [
    computation[name].type for name in instruction.operands if name in computation
  ]
  if instruction.op == 'fusion':
    inner = module.computations.get(instruction.called_computation('calls') or '')
    if inner is not None:
      return _fusion_bytes(module, inner, inputs, output_bytes)
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
  module: HloModule, inner: Computation, inputs: list[str], output_bytes: float
) -> float:
  """Counts a fusion's traffic; an input that it only slices counts as the slice."""
  total = 0.0
  for parameter in inner.values():
    if parameter.op != 'parameter':
      continue
    parameter_bytes = (
      hlo.num_bytes(inputs[int(parameter.operand_text)]) if inputs else 0.0
    )
    if parameter_bytes:
      part = _bytes_read(module, inner, parameter.name)
      total += parameter_bytes if part is None else min(parameter_bytes, part)
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


def _skip_bitcasts(inner: Computation, name: str) -> HloInstruction:
  """Returns the instruction that a chain of bitcasts starts from."""
  while inner[name].op == 'bitcast':
    name = inner[name].operands[0]
  return inner[name]


def _bytes_read(
  module: HloModule, inner: Computation, name: str, *, is_nested: bool = False
) -> float | None:
  """Returns the bytes that a fusion reads of one of its values, None for all of it."""
  if is_nested and hlo.root_instruction(inner).name == name:
    return None  # the fusion around it reads it
  users = [x for x in inner.values() if name in x.operands]
  parts = [_bytes_read_by(module, inner, x, name, is_nested=is_nested) for x in users]
  return None if any(part is None for part in parts) else sum(x or 0.0 for x in parts)


def _bytes_read_by(
  module: HloModule,
  inner: Computation,
  user: HloInstruction,
  name: str,
  *,
  is_nested: bool,
) -> float | None:
  """Returns the bytes that `user` reads of its operand `name`, None for all of it."""
  if user.op in SLICES and user.operands[0] == name:
    return hlo.num_bytes(user.type, hbm_only=False)
  if user.op in UPDATES and user.operands[0] == name:
    # Written in place, and the write is counted with the output. A nested fusion hands
    # what it has written to the fusion around it, which reads it.
    return None if is_nested else 0.0
  if user.op == 'bitcast':
    return _bytes_read(module, inner, user.name, is_nested=is_nested)
  nested = module.computations.get(user.called_computation('calls') or '')
  if user.op != 'fusion' or nested is None:
    return None
  places = {str(i) for i, operand in enumerate(user.operands) if operand == name}
  parts = [
    _bytes_read(module, nested, x.name, is_nested=True)
    for x in nested.values()
    if x.op == 'parameter' and x.operand_text in places
  ]
  return None if any(part is None for part in parts) else sum(x or 0.0 for x in parts)
