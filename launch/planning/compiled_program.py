"""Compiles one program of a run for a machine that is not here, and reads its costs."""

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
from launch.planning.targets import GPUS_PER_NODE, Target
from launch.planning.traffic import Collective

UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
  """Describes what one run of a program needs and does, per device except for FLOPs.

  Attributes:
    name: Name of the program.
    flops: Floating-point operations of all devices together.
    arguments: Bytes of the arguments.
    outputs: Bytes of the outputs that do not reuse an argument's memory.
    temporaries: Bytes of temporary memory.
    bytes_accessed: Bytes that are read from and written to memory.
    collectives: What a device sends to others, by kind of collective.
    compile_seconds: Time the compilation took.
    too_large: Whether the compiler rejected the program for lack of memory; then only
      `flops` and `temporaries` are known.
  """

  name: str
  flops: float = 0.0
  arguments: float = 0.0
  outputs: float = 0.0
  temporaries: float = 0.0
  bytes_accessed: float = 0.0
  collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)
  compile_seconds: float = 0.0
  too_large: bool = False


def compile_program(
  name: str, traced: Any, target: Target, loop_rounds: int = 1
) -> CompiledProgram:
  """Lowers and compiles a traced program.

  Args:
    name: Name of the program in reports.
    traced: Result of `jax.jit(f).trace(...)`.
    target: Machine to compile for.
    loop_rounds: Iterations of loops whose trip count is not fixed in the program.

  Returns:
    The program with its costs; `too_large` if a device has too little memory for it.
  """
  start = time.perf_counter()
  jaxpr = traced.jaxpr.jaxpr  # without what no result depends on, as compilers do
  live_jaxpr, *_ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  flop_count = flops.count_flops(live_jaxpr, loop_rounds)
  try:
    executable, hlo_text = _compile(traced.lower(), target)
  except jax.errors.JaxRuntimeError as error:
    temporaries = _requested_bytes(str(error))
    if temporaries is None:
      raise
    return CompiledProgram(
      name,
      flops=flop_count,
      temporaries=temporaries,
      compile_seconds=time.perf_counter() - start,
      too_large=True,
    )
  has_nodes = target.chip.platform == 'cuda' and target.size > GPUS_PER_NODE
  node_size = GPUS_PER_NODE if has_nodes else 0
  program_traffic = traffic.measure_traffic(hlo_text, node_size, loop_rounds)
  return dataclasses.replace(
    read_memory(name, executable),
    flops=flop_count,
    bytes_accessed=program_traffic.memory,
    collectives=program_traffic.collectives,
    compile_seconds=time.perf_counter() - start,
  )


def read_memory(name: str, executable: Any) -> CompiledProgram:
  """Returns the memory of a compiled program alone; its other costs are 0.

  Args:
    name: Name of the program.
    executable: The compiled program.
  """
  sizes = executable.memory_analysis()
  return CompiledProgram(
    name,
    arguments=sizes.argument_size_in_bytes,
    outputs=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
    temporaries=sizes.temp_size_in_bytes,
  )


def _compile(lowered: Any, target: Target) -> tuple[Any, str]:
  """Returns the executable and the text of its optimized HLO.

  JAX cannot read back everything that libtpu emits (grouped products, several
  collectives in one: an async-update of "1 operands but sees 4", in jax 0.10), and
  prints a stack trace where it cannot. For TPUs the compiler therefore dumps the text.
  """
  if target.chip.platform != 'tpu':
    executable = lowered.compile()
    return executable, executable.as_text()
  with tempfile.TemporaryDirectory() as folder:
    options = {'xla_dump_to': folder, 'xla_dump_hlo_as_text': True}
    executable = lowered.compile(compiler_options=options)
    (path,) = pathlib.Path(folder).rglob('*.after_optimizations.txt')
    return executable, path.read_text()


def _requested_bytes(error: str) -> float | None:
  """Reads the bytes a rejected program needed from the compiler's message."""
  if 'RESOURCE_EXHAUSTED' not in error:
    return None
  match = re.search(r'\(([\d.]+)([KMGT])\) exceeds', error)
  match = match or re.search(r'[Uu]sed ([\d.]+)([KMGT])', error)
  return float(match[1]) * UNITS[match[2]] if match else math.inf


def bytes_per_device(shapes: Any) -> float:
  """Computes the bytes that arrays take on each device.

  Args:
    shapes: Pytree of arrays or `ShapeDtypeStruct`s, with or without shardings.

  Returns:
    Bytes of one device's shards, summed over all leaves.
  """
  total = 0.0
  for leaf in jax.tree.leaves(shapes):
    layout = getattr(leaf, 'sharding', None)
    shape = layout.shard_shape(leaf.shape) if layout is not None else leaf.shape
    total += math.prod(shape) * leaf.dtype.itemsize
  return total


@dataclasses.dataclass(frozen=True)
class TimeEstimate:
  """Holds the seconds of a program at the target's stated rates.

  Attributes:
    compute: Seconds of matrix products.
    memory: Seconds of memory traffic.
    links: Seconds of communication between devices.
  """

  compute: float
  memory: float
  links: float

  @property
  def least(self) -> float:
    """Seconds if all three overlap completely."""
    return max(self.compute, self.memory, self.links)

  @property
  def most(self) -> float:
    """Seconds if all three run one after the other."""
    return self.compute + self.memory + self.links

  def __mul__(self, times: float) -> 'TimeEstimate':
    return TimeEstimate(self.compute * times, self.memory * times, self.links * times)


def estimate_time(
  program: CompiledProgram, target: Target, devices: int, dtype: str
) -> TimeEstimate:
  """Estimates the duration of one run of a program.

  Args:
    program: The compiled program.
    target: Machine whose rates apply.
    devices: Number of devices that the program runs on.
    dtype: Dtype of the matrix products.

  Returns:
    Seconds of compute, memory and links.
  """
  chip, collectives = target.chip, program.collectives.values()
  # Float32 products are TF32 on these GPUs, at half of bf16's rate.
  slowdown = 2.0 if chip.platform == 'cuda' and dtype == 'float32' else 1.0
  inter_node = sum(x.inter_node_bytes for x in collectives)
  links = sum(x.bytes - x.inter_node_bytes for x in collectives) / chip.link
  links += inter_node / chip.inter_node_link if inter_node else 0.0
  compute = slowdown * program.flops / devices / chip.flops
  return TimeEstimate(compute, program.bytes_accessed / chip.memory_rate, links)
