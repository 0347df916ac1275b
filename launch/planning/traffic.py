"""Bytes to and from memory, and what devices send each other, of a compiled program.

The compiler's own analysis counts a loop's body once; here it counts as often as it
runs.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from launch.planning import hlo
from launch.planning.hlo import Computation, Instruction, Module

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
SLICES = ('dynamic-slice', 'slice', 'gather')
UPDATES = {'dynamic-update-slice': 1, 'scatter': -1}  # which operand is written


@dataclasses.dataclass
class Collective:
  """count: how often. bytes: that a device sends, all of them together. far: of these,
  the ones whose group is wider than a node.
  """

  count: int = 0
  bytes: float = 0.0
  far: float = 0.0


@dataclasses.dataclass
class Traffic:
  """Of one device, in one run of a program. collectives: by kind."""

  memory: float = 0.0
  collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)
  # One that runs beside products stands in each of their fusions, under one channel:
  # channel → (its kind, how often, bytes, of these far).
  hidden: dict[str, tuple[str, int, float, float]] = dataclasses.field(
    default_factory=dict
  )


def of(text: str, node: int = 0, rounds: int = 1) -> Traffic:
  """What a program, given as text, moves.

  node: devices that share fast links; 0 for all. rounds: of loops where the text does
  not fix them.
  """
  module = dataclasses.replace(hlo.parse(text), rounds=rounds)
  found = Traffic()
  _walk(module, module.computations[module.entry], 1, found, node)
  for made in found.hidden.values():
    _add(found, *made)
  return found


def _add(found: Traffic, kind: str, count: int, sent: float, far: float) -> None:
  entry = found.collectives.setdefault(kind, Collective())
  entry.count, entry.bytes, entry.far = (
    entry.count + count,
    entry.bytes + sent,
    entry.far + far,
  )


def _walk(
  module: Module, where: Computation, times: int, found: Traffic, node: int
) -> None:
  for one in where.values():
    if one.op == 'while':
      body = module.computations[one.called('body') or '']
      rounds = hlo.trip_count(module, where, one)
      _walk(module, body, times * rounds, found, node)
      continue
    for name in _inner(one):
      if name in module.computations:
        _walk(module, module.computations[name], times, found, node)
    _collect(module, where, one, times, found, node)
    if one.op not in FREE and not _is_call(one):
      found.memory += times * _moved(module, where, one)


def _is_call(one: Instruction) -> bool:
  return one.op in ('call', 'conditional', 'async-start')


def _inner(one: Instruction) -> Iterator[str]:
  """The computations that an instruction calls as such, once."""
  if one.op in ('call', 'async-start'):
    name = one.called('to_apply') or one.called('calls')
    if name:
      yield name
  elif one.op == 'conditional':
    branches = re.search(r'branch_computations=\{([^}]*)\}', one.attributes)
    if branches:
      yield branches[1].split(',')[0].strip(' %')
    elif name := one.called('true_computation'):
      yield name


def _collect(
  module: Module,
  where: Computation,
  one: Instruction,
  times: int,
  found: Traffic,
  node: int,
  *,
  fused: bool = False,
) -> None:
  if one.op == 'fusion':  # which may hold a collective, on TPU
    inner = module.computations.get(one.called('calls') or '', {})
    for part in inner.values():
      _collect(module, inner, part, times, found, node, fused=True)
    return
  kind = one.op.removesuffix('-done')
  if kind not in KINDS:
    return
  start = where[one.operands[0]] if one.op.endswith('-done') else one
  group = first_group(start.attributes)
  size = len(group)
  if kind == 'collective-permute':
    size, share = 2, 1.0
  else:
    share = (size - 1) / max(size, 1)
  out = hlo.num_bytes(one.type, slow=False)
  scale = {'all-reduce': 2.0, 'reduce-scatter': float(size)}.get(kind, 1.0)
  sent = times * out * scale * share
  wide = node and len({member // node for member in group}) > 1
  made = kind, times, sent, sent if wide else 0.0
  channel = re.search(r'channel_id=(\d+)', start.attributes)
  if fused and channel:
    found.hidden[channel[1]] = min(made, found.hidden.get(channel[1], made))
  else:
    _add(found, *made)


def first_group(attributes: str) -> list[int]:
  """The devices of a collective's first group, by number."""
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


def _moved(module: Module, where: Computation, one: Instruction) -> float:
  """Bytes that an instruction reads from memory and writes to it."""
  out = hlo.num_bytes(one.type)
  inputs = [where[name].type for name in one.operands if name in where]
  if one.op == 'fusion':
    inner = module.computations.get(one.called('calls') or '')
    if inner is not None:
      return _fused(inner, inputs, out)
  if one.op in SLICES:
    return 2 * out
  if one.op in UPDATES:
    return 2 * hlo.num_bytes(inputs[UPDATES[one.op]])
  if one.op == 'copy-done':
    return out
  if one.op.endswith('-done'):
    return out
  if one.op.endswith('-start'):
    out = 0.0
  return out + sum(map(hlo.num_bytes, inputs))


def _fused(inner: Computation, inputs: list[str], out: float) -> float:
  """A fusion reads of an input it slices the slice alone, and likewise writes."""
  total = 0.0
  for one in inner.values():
    if one.op != 'parameter':
      continue
    outer = hlo.num_bytes(inputs[int(one.inside)]) if inputs else 0.0
    if not outer:
      continue
    users = [x for x in inner.values() if one.name in x.operands]
    parts = [_part(inner, user, one.name) for user in users]
    whole = any(part is None for part in parts)
    total += outer if whole else min(outer, sum(part or 0.0 for part in parts))
  last = _unwrapped(inner, hlo.root(inner).name)
  ends = [inner[n] for n in last.operands] if last.op == 'tuple' else [last]
  for end in ends:
    # Of what a fusion makes itself and then updates, all is written.
    if end.op in UPDATES and _unwrapped(inner, end.operands[0]).op == 'parameter':
      update = inner[end.operands[UPDATES[end.op]]]
      saved = hlo.num_bytes(end.type) - hlo.num_bytes(update.type)
      out -= max(0.0, min(saved, out))
  return total + out


def _unwrapped(inner: Computation, name: str) -> Instruction:
  """What stands behind bitcasts."""
  while inner[name].op == 'bitcast':
    name = inner[name].operands[0]
  return inner[name]


def _part(inner: Computation, user: Instruction, name: str) -> float | None:
  """What `user` reads of its operand `name`; None for all of it."""
  if user.op in SLICES and user.operands[0] == name:
    return hlo.num_bytes(user.type, slow=False)
  if user.op in UPDATES and user.operands[0] == name:
    return 0.0  # written in place; the write is counted with the output
  if user.op == 'bitcast':
    more = [x for x in inner.values() if user.name in x.operands]
    parts = [_part(inner, x, user.name) for x in more]
    return None if any(p is None for p in parts) else sum(p or 0.0 for p in parts)
  return None
