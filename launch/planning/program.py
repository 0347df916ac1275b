"""One program of a run, compiled for machines that are not here, and what it costs."""

import dataclasses
import math
import pathlib
import re
import tempfile
import time
from typing import Any

import jax
from jax.interpreters import partial_eval

from launch.planning import flops, traffic
from launch.planning.traffic import Collective
from launch.targets import NODE, Target

UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


@dataclasses.dataclass(frozen=True)
class Program:
  """What a program needs and does in one run; but for flops, of one device.

  flops: of all devices. arguments, outputs, temporaries: bytes; outputs are those that
  take no argument's place. moved: bytes to and from memory. too_large: whether the
  compiler refused it for its memory; then only flops and its temporaries are known.
  compiled: seconds it took.
  """

  name: str
  flops: float
  arguments: float
  outputs: float
  temporaries: float
  moved: float
  collectives: dict[str, Collective]
  compiled: float
  too_large: bool = False

  @property
  def memory(self) -> float:
    return self.arguments + self.outputs + self.temporaries


def build(name: str, traced: Any, target: Target, rounds: int = 1) -> Program:
  """Lowers and compiles what JAX traced. rounds: of loops that do not fix them."""
  start = time.perf_counter()
  done = flops.of(_used(traced.jaxpr), rounds)
  try:
    made, text = _compile(traced.lower(), target)
  except jax.errors.JaxRuntimeError as error:
    temporaries = _asked(str(error))
    if temporaries is None:
      raise
    spent = time.perf_counter() - start
    return Program(name, done, 0, 0, temporaries, 0, {}, spent, True)
  sizes = made.memory_analysis()
  node = NODE if target.chip.platform == 'cuda' and target.size > NODE else 0
  moved = traffic.of(text, node, rounds)
  return Program(
    name=name,
    flops=done,
    arguments=sizes.argument_size_in_bytes,
    outputs=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
    temporaries=sizes.temp_size_in_bytes,
    moved=moved.memory,
    collectives=moved.collectives,
    compiled=time.perf_counter() - start,
  )


def _used(closed: Any) -> Any:
  """What of a program its results depend on, as compilers leave it."""
  jaxpr = closed.jaxpr
  return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def _compile(lowered: Any, target: Target) -> tuple[Any, str]:
  """The program, and what it was compiled to.

  JAX cannot read back all that libtpu makes (grouped products, several collectives in
  one: an async-update of "1 operands but sees 4", in jax 0.10), and prints a stack
  trace where it cannot: there the compiler itself writes it down.
  """
  if target.chip.platform != 'tpu':
    made = lowered.compile()
    return made, made.as_text()
  with tempfile.TemporaryDirectory() as folder:
    options = {'xla_dump_to': folder, 'xla_dump_hlo_as_text': True}
    made = lowered.compile(compiler_options=options)
    (path,) = pathlib.Path(folder).rglob('*.after_optimizations.txt')
    return made, path.read_text()


def _asked(error: str) -> float | None:
  """Bytes that a program would have needed, as the compiler's refusal says."""
  if 'RESOURCE_EXHAUSTED' not in error:
    return None
  found = re.search(r'\(([\d.]+)([KMGT])\) exceeds', error)
  found = found or re.search(r'[Uu]sed ([\d.]+)([KMGT])', error)
  return float(found[1]) * UNITS[found[2]] if found else math.inf


def per_device(shapes: Any) -> float:
  """Bytes that arrays of these shapes and layouts take on each device."""
  total = 0.0
  for leaf in jax.tree.leaves(shapes):
    layout = getattr(leaf, 'sharding', None)
    shape = layout.shard_shape(leaf.shape) if layout is not None else leaf.shape
    total += math.prod(shape) * leaf.dtype.itemsize
  return total


@dataclasses.dataclass(frozen=True)
class Time:
  """Seconds of a program at the target's stated rates.

  least: all three at once. most: one after the other.
  """

  compute: float
  memory: float
  links: float

  @property
  def least(self) -> float:
    return max(self.compute, self.memory, self.links)

  @property
  def most(self) -> float:
    return self.compute + self.memory + self.links

  def __mul__(self, times: float) -> 'Time':
    return Time(self.compute * times, self.memory * times, self.links * times)


def seconds(program: Program, target: Target, devices: int, dtype: str) -> Time:
  """devices: that the program runs on. dtype: of its matrix products."""
  chip, moved = target.chip, program.collectives.values()
  # Float32 products are TF32 on these GPUs, at half of bf16's rate.
  slow = 2.0 if chip.platform == 'cuda' and dtype == 'float32' else 1.0
  far, near = sum(x.far for x in moved), sum(x.bytes - x.far for x in moved)
  links = near / chip.link + (far / chip.between if far else 0.0)
  compute = slow * program.flops / devices / chip.flops
  return Time(compute, program.moved / chip.memory_rate, links)
