"""Collects everything that `launch.plan` reports of a config on a machine."""

import dataclasses
import logging
import re
from collections.abc import Sequence
from typing import Any

from jaxrl.options import ConfigError
from kernels import dispatch
from launch.planning import (
  cost,
  device_budget,
  engine_decode,
  memory_choice,
  planned_run,
  suggestions,
)
from launch.planning.compiled_program import CompiledProgram
from launch.planning.cost import PublishEstimate, RunCost, StepEstimate
from launch.planning.planned_run import PlannedRun
from launch.planning.targets import Target

BATCH = ('rows', 'length', 'micro_rows')


@dataclasses.dataclass(frozen=True)
class PlanReport:
  """Holds the plan of one config on one machine.

  Attributes:
    name: Name of the config file.
    target: The machine.
    run: The run.
    cost: Memory and programs of the learner.
    step: Time of a step.
    decode: The compiled decode step, None if there is none.
    decode_error: Why there is no decode step although the run plays; else ''.
    publish: Cost of publishing the weights.
    programs: Number of programs compiled before the first step, by part.
    suggestion: The nearest change that fits, None if the run fits.
    kernels: Which kernels were chosen, and why.
  """

  name: str
  target: Target
  run: PlannedRun
  cost: RunCost
  step: StepEstimate
  decode: CompiledProgram | None
  decode_error: str
  publish: PublishEstimate
  programs: dict[str, int]
  suggestion: suggestions.Suggestion | None
  kernels: tuple[str, ...]

  @property
  def all_programs(self) -> dict[str, CompiledProgram]:
    """The programs of the learner, and the decode step."""
    return self.cost.programs | ({'decode': self.decode} if self.decode else {})

  def to_json(self) -> dict[str, Any]:
    """Returns the report as plain data for JSON."""
    least, most = self.step.step
    return {
      'config': self.name,
      'topology': self.target.name,
      'chip': dataclasses.asdict(self.target.chip),
      'model': dataclasses.asdict(self.run.shape),
      'mesh': self.cost.mesh,
      'batch': {name: getattr(self.cost, name) for name in BATCH},
      'memory': self.cost.memory
      | {name: getattr(self.cost, name) for name in ('total', 'limit', 'phase')},
      'fits': self.cost.fits,
      'change': self.suggestion and dataclasses.asdict(self.suggestion),
      'programs': {n: dataclasses.asdict(p) for n, p in self.all_programs.items()},
      'runs': self.step.runs,
      'step': {'least': least, 'most': most, 'learn': self.step.learn},
      'tokens_per_second': {'least': self.step.tokens / most}
      | {'most': self.step.tokens / least},
      'broadcast': dataclasses.asdict(self.publish),
      'compiles': self.programs,
      'kernels': list(self.kernels),
      'assumptions': list_assumptions(self),
    }


def make_report(
  name: str, run: PlannedRun, target: Target, devices: Sequence[Any]
) -> PlanReport:
  """Compiles the programs of a run and reports their costs.

  Args:
    name: Name of the config file.
    run: The run.
    target: Machine to plan for.
    devices: Devices of the target.

  Returns:
    The report.

  Raises:
    ConfigError: For settings that are not possible on this machine.
  """
  kernel_log = _KernelLogCapture()
  with kernel_log:
    run, run_cost = memory_choice.choose_for_target(run, target, devices)
    decode, decode_error = None, ''
    if run.plays:
      try:
        decode = engine_decode.compile_decode(run, target, devices)
      except ConfigError as error:
        decode_error = str(error)
    suggestion = None
    if not run_cost.fits:
      suggestion = suggestions.nearest_fitting_change(run, target, devices, run_cost)
  return PlanReport(
    name=name,
    target=target,
    run=run,
    cost=run_cost,
    step=cost.estimate_step(run, run_cost, target, decode),
    decode=decode,
    decode_error=decode_error,
    publish=cost.estimate_publish(run, target),
    programs=cost.count_programs(run, run_cost),
    suggestion=suggestion,
    kernels=tuple(dict.fromkeys(kernel_log.lines)),
  )


class _KernelLogCapture(logging.Handler):
  """Captures what the kernel selection logs while the context is active."""

  def __init__(self) -> None:
    super().__init__(logging.INFO)
    self.lines: list[str] = []
    self._log = logging.getLogger('kernels')

  def emit(self, record: logging.LogRecord) -> None:
    self.lines.append(re.sub(r'\s+', ' ', record.getMessage()))

  def __enter__(self) -> '_KernelLogCapture':
    dispatch.reset_choice_log()
    self._before = self._log.level
    self._log.setLevel(logging.INFO)
    self._log.addHandler(self)
    return self

  def __exit__(self, *_: Any) -> None:
    self._log.removeHandler(self)
    self._log.setLevel(self._before)


def list_assumptions(report: PlanReport) -> list[str]:
  """Lists the assumptions behind the figures of a report, one sentence each."""
  run, chip, run_cost = report.run, report.target.chip, report.cost
  stated = 'stated' if chip.platform != 'cpu' else 'assumed'
  lines = [
    f'{stated} rates a device: {chip.flops / 1e12:,.3g} TFLOP/s bf16, memory '
    f'{chip.memory_rate / 1e9:,.4g} GB/s, links {chip.link / 1e9:,.4g} GB/s'
    + f' ({chip.inter_node_link / 1e9:,.4g} between nodes)'
    * (chip.inter_node_link > 0),
    'least: products, memory and links wholly at once; most: one after the other; '
    'nothing reaches its stated rate quite',
    f'every row is {run_cost.length} tokens long, the longest that is allowed',
    'FLOPs are those of matrix products; bytes are what every fused operation reads '
    'and writes; loops count as often as they run',
  ]
  lines += _memory_sharing(report)
  if run_cost.num_parallel > 1:
    lines.append(
      f'{run_cost.num_parallel} micro-batches of an update are done at once, each in '
      'memory of its own; the train program is that of one after the other'
    )
  if run_cost.in_trees:
    lines.append(
      'packed rows are trees: the rows of an episode, of which each continues the one '
      'before, count as one'
    )
  if report.decode is not None:
    count, slots = run.num_engines, run.settings.rollout.max_num_seqs
    lines.append(
      f'{count} engine{"s" if count > 1 else ""} of {slots} slots, all busy, each '
      f'response {run.max_response_tokens} tokens, no prefill; attention over a full '
      'cache'
    )
    if run.shape.num_layers > engine_decode.MAX_COMPILED_LAYERS:
      lines.append('decode: compiled with one layer and with two, and extended')
    kind = run.settings.engine.kind
    if kind != 'jax':
      name = 'vLLM' if kind == 'vllm' else kind
      lines.append(
        f"decode is JaxEngine's own step, in the place of {name}'s, all of an engine's "
        'devices sharing its heads'
      )
  if run.source == planned_run.RANDOM and not run.settings.teacher.folders:
    lines.append('vocabulary as configured; one trained on few texts may stay smaller')
  if run.settings.algorithm.data_format != 'rollout':
    lines.append('rows of a batch as its number of groups has it; files may bring more')
  return lines


def _memory_sharing(report: PlanReport) -> list[str]:
  """Lists how a device's memory is shared if the learner does not have all of it."""
  run, memory = report.run, report.target.chip.memory
  budget, lines = device_budget.memory_budget(run.settings, report.target), []
  if budget.limit < memory:
    why = f': {budget.description}' if budget.description else ''
    lines.append(
      f"the limit is the learner's share of a device's {memory / 1e9:,.4g} GB, "
      f'{budget.limit / memory:.3g}{why}'
    )
  if budget.engine:
    parts = cost.engine_memory(run, 'gpu')
    sizes = ' and '.join(f'{n / 1e9:,.3g} GB of {name}' for name, n in parts.items())
    lines.append(
      f'an engine has {budget.engine / 1e9:,.4g} GB of the same device; '
      f"JaxEngine's would need {sizes}".replace("engine's weights", 'weights')
    )
  return lines
