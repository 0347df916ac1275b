"""All that `launch.plan` tells of one config on one machine, as plain data."""

import dataclasses
import logging
import re
from collections.abc import Sequence
from typing import Any

from jaxrl.signature import ConfigError
from kernels import dispatch
from launch import teachers
from launch.planning import abstract, changes, cost, decode, room
from launch.planning.abstract import Run
from launch.planning.cost import Broadcast, Cost, Step
from launch.planning.decode import Engine
from launch.planning.program import Program
from launch.targets import Target


@dataclasses.dataclass(frozen=True)
class Report:
  """decode: None for what plays nothing. why: why there is none, if it plays. change:
  the nearest that fits, where this does not. kernels: what was chosen, and why.
  """

  name: str
  target: Target
  run: Run
  engine: Engine
  cost: Cost
  step: Step
  decode: Program | None
  why: str
  broadcast: Broadcast
  programs: dict[str, int]
  change: changes.Change | None
  kernels: tuple[str, ...]

  def data(self) -> dict[str, Any]:
    """For JSON."""
    made = {**self.cost.programs, **({'decode': self.decode} if self.decode else {})}
    least, most = self.step.step
    return {
      'config': self.name,
      'topology': self.target.name,
      'chip': dataclasses.asdict(self.target.chip),
      'model': dataclasses.asdict(self.run.shape),
      'mesh': self.cost.mesh,
      'batch': {'rows': self.cost.rows, 'length': self.cost.length}
      | {'micro_rows': self.cost.micro_rows},
      'memory': self.cost.memory
      | {'total': self.cost.total, 'limit': self.cost.limit, 'phase': self.cost.phase},
      'fits': self.cost.fits,
      'change': self.change and dataclasses.asdict(self.change),
      'programs': {name: dataclasses.asdict(one) for name, one in made.items()},
      'runs': self.step.runs,
      'step': {'least': least, 'most': most, 'learn': self.step.learn},
      'tokens_per_second': {'least': self.step.tokens / most}
      | {'most': self.step.tokens / least},
      'broadcast': dataclasses.asdict(self.broadcast),
      'compiles': self.programs,
      'kernels': list(self.kernels),
      'assumptions': assumptions(self),
    }


def make(name: str, run: Run, target: Target, devices: Sequence[Any]) -> Report:
  """Compiles and reports. Raises ConfigError for what cannot be on this machine."""
  heard = _Heard()
  with heard:
    engine = decode.engine_of(run)
    found = cost.of(run, target, devices, engine=engine)
    one, why = None, ''
    plays = run.algorithm.schema == 'rollout' and bool(run.config.env)
    if plays:
      try:
        one = decode.build(run, engine, target, devices)
      except ConfigError as error:
        why = str(error)
    change = None
    if not found.fits:
      change = changes.nearest(run, target, devices, engine=engine, cost=found)
  return Report(
    name=name,
    target=target,
    run=run,
    engine=engine,
    cost=found,
    step=cost.step(run, found, target, engine, one),
    decode=one,
    why=why,
    broadcast=cost.broadcast(run, target, engine),
    programs=cost.num_programs(run, found, engine, plays),
    change=change,
    kernels=tuple(dict.fromkeys(heard.lines)),
  )


class _Heard(logging.Handler):
  """Keeps what the choice of kernels logs while it is entered."""

  def __init__(self) -> None:
    super().__init__(logging.INFO)
    self.lines: list[str] = []
    self._log = logging.getLogger('kernels')

  def emit(self, record: logging.LogRecord) -> None:
    self.lines.append(re.sub(r'\s+', ' ', record.getMessage()))

  def __enter__(self) -> '_Heard':
    dispatch.tell_again()
    self._before = self._log.level
    self._log.setLevel(logging.INFO)
    self._log.addHandler(self)
    return self

  def __exit__(self, *_: Any) -> None:
    self._log.removeHandler(self)
    self._log.setLevel(self._before)


def assumptions(report: Report) -> list[str]:
  """What the figures take for granted."""
  run, chip, found = report.run, report.target.chip, report.cost
  stated = 'stated' if chip.platform != 'cpu' else 'assumed'
  told = [
    f'{stated} rates a device: {chip.flops / 1e12:,.3g} TFLOP/s bf16, memory '
    f'{chip.memory_rate / 1e9:,.4g} GB/s, links {chip.link / 1e9:,.4g} GB/s'
    + (f' ({chip.between / 1e9:,.4g} between nodes)' if chip.between else ''),
    'least: products, memory and links wholly at once; most: one after the other; '
    'nothing reaches its stated rate quite',
    f'every row is {found.length} tokens long, the longest that is allowed',
    'FLOPs are those of matrix products; bytes are what every fused operation reads '
    'and writes; loops count as often as they run',
  ]
  told += _shared(report)
  if found.abreast > 1:
    told.append(
      f'{found.abreast} micro-batches of an update are done at once, each in memory of '
      'its own; the train program is that of one after the other'
    )
  if report.decode is not None:
    count = cost.engines(run)
    told.append(
      f'{count} engine{"s" if count > 1 else ""} of {report.engine.num_slots} slots, '
      f'all busy, each response {cost.response(run)} tokens, no prefill; attention '
      'over a full cache'
    )
    if run.shape.num_layers > decode.WHOLE:
      told.append('decode: compiled with one layer and with two, and extended')
    if report.engine.kind != 'jax':
      told.append(
        "decode is JaxEngine's own step, in the place of vLLM's, all of an engine's "
        'devices sharing its heads'
      )
  if run.source == abstract.RANDOM and not teachers.folders(run.config):
    told.append('vocabulary as configured; one trained on few texts may stay smaller')
  if run.algorithm.schema != 'rollout':
    told.append('rows of a batch as its number of groups has it; files may bring more')
  return told


def _shared(report: Report) -> list[str]:
  """Who has how much of a device's memory, where it is not all the learner's."""
  run, memory = report.run, report.target.chip.memory
  own, told = room.of(run.config, report.target), []
  if own.limit < memory:
    why = f': {own.told}' if own.told else ''
    told.append(
      f"the limit is the learner's share of a device's {memory / 1e9:,.4g} GB, "
      f'{own.limit / memory:.3g}{why}'
    )
  if own.engine:
    parts = cost.engine_memory(run, report.engine, 'gpu')
    asked = ' and '.join(f'{n / 1e9:,.3g} GB of {name}' for name, n in parts.items())
    told.append(
      f"an engine has {own.engine / 1e9:,.4g} GB of the same device; JaxEngine's would "
      f'need {asked}'.replace("engine's weights", 'weights')
    )
  return told
