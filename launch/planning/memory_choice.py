"""Chooses micro-batches and rematerialization near the limit, by compiling programs.

Candidates are tried in the order of the time that they cost, and the first whose
programs fit is taken. A learner finds the programs compiled. If none fits, the error
names an option that makes the phase fit.
"""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.models.remat import RematPolicy
from jaxrl.options import ConfigError
from launch.learner import learner_factory
from launch.learner.learner_factory import MemoryChoice, PhaseSpec
from launch.planning import compiled_program, cost, planned_run
from launch.planning.cost import RunCost
from launch.planning.planned_run import PlannedRun
from launch.planning.rough_memory import PhasePlan, Room
from launch.planning.targets import Target
from launch.settings.resolve import override_settings

CHOSEN_SHARE = 0.75  # of the memory that a choice may fill, while others are left
MAX_COMPILES = 4
PHASES = {'train': 'the update', 'prepare': 'scoring', 'publish': 'publishing'}


def choose(
  plan: PhasePlan, room: Room, before: MemoryChoice | None = None
) -> MemoryChoice:
  """Chooses how a phase divides its batches and what it recomputes.

  Args:
    plan: The phase.
    room: The memory that there is.
    before: What the run chose before it was stopped; it is taken again if it fits.

  Returns:
    The choice, which fits.

  Raises:
    ConfigError: If the phase does not fit, with an option that makes it fit.
  """
  if before is not None:
    kept = _measured(plan, before, room)
    if kept.needed <= room.limit:
      return kept.choice
  found = _search(plan, room)
  if found.needed <= room.limit:
    return found.choice
  raise ConfigError(
    f'not enough memory: {found.phase} needs {found.needed / 1e9:,.3g} GB with '
    f'{found.choice.text}, of {room}. {_advice(plan, room)}'
  )


@dataclasses.dataclass(frozen=True)
class _Found:
  """Holds a candidate and the bytes that its largest program needs."""

  choice: MemoryChoice
  needed: float
  phase: str
  temporaries: float


def _measured(plan: PhasePlan, option: MemoryChoice, room: Room) -> _Found:
  parts, phase = measure(plan, option)
  needed = sum(parts.values()) + room.held
  text = f'{option.text}: {needed / 1e9:,.3g} GB in {phase}, of {room}'
  choice = option if needed > room.limit else dataclasses.replace(option, text=text)
  return _Found(choice, needed, phase, parts['temporaries'])


def _search(plan: PhasePlan, room: Room) -> _Found:
  """Returns the first candidate that leaves a reserve, or the one that needs least."""
  options = list(plan.candidates())
  slopes: dict[RematPolicy, tuple[float, float]] = {}  # bytes, and those of a row
  tried: list[_Found] = []
  for i, option in enumerate(options):
    rows, is_last = plan.rows(option.num_micro_batches), i == len(options) - 1
    fixed, per_row = slopes.get(option.remat, (0.0, 0.0))
    is_hopeless = fixed + per_row * rows > CHOSEN_SHARE * room.limit
    if not is_last and (is_hopeless or len(tried) >= MAX_COMPILES):
      continue
    found = _measured(plan, option, room)
    # A part of them does not depend on rows, so that fewer rows need at least this.
    slopes[option.remat] = found.needed - found.temporaries, found.temporaries / rows
    tried.append(found)
    if found.needed <= CHOSEN_SHARE * room.limit:
      return found
  return min(tried, key=lambda found: found.needed)


def choose_for_target(
  run: PlannedRun, target: Target, devices: Sequence[Any]
) -> tuple[PlannedRun, RunCost]:
  """Chooses for a machine that need not be here, by compiling the main phase for it.

  Args:
    run: The run.
    target: Machine to plan for.
    devices: Devices of the target.

  Returns:
    The run with what was chosen in its settings, and its cost. If nothing fits, they
    are those of the last candidate, which needs the least.

  Raises:
    ConfigError: If the mesh does not divide the model or the batch.
  """
  mesh = planned_run.planned_mesh(run, devices)
  phase = PhaseSpec('train', run.num_rows, run.settings.num_steps)
  plan = PhasePlan(run.settings, run.shape, mesh, phase, target.chip.platform)
  options = list(plan.candidates())
  if len(options) > MAX_COMPILES:
    options = [*options[: MAX_COMPILES - 1], options[-1]]
  for option in options:
    settings = learner_factory.with_choice(run.settings, option)
    chosen = dataclasses.replace(run, settings=settings)
    run_cost = cost.estimate_cost(chosen, target, devices)
    share = 1.0 if option is options[-1] else CHOSEN_SHARE
    if run_cost.fits and run_cost.total <= share * run_cost.limit:
      break
  return chosen, run_cost


def measure(plan: PhasePlan, choice: MemoryChoice) -> tuple[Mapping[str, float], str]:
  """Compiles a phase's programs for the longest rows and adds up their memory.

  Args:
    plan: The phase.
    choice: How it divides its batches, and what it recomputes.

  Returns:
    Bytes of the fullest device by part, and what runs when they are most, for people.
  """
  run = PlannedRun(plan.settings, plan.shape, plan.settings.model.checkpoint)
  learner = planned_run.make_learner(run, plan.mesh, plan.phase, choice)
  shape, executables = learner.compile(plan.length)
  programs = {
    name: compiled_program.read_memory(name, executable)
    for name, executable in executables.items()
  }
  phases = cost.phase_memory(
    run, learner, programs, shape.num_parallel, warm_start=plan.phase.name == 'sft'
  )
  phase = max(phases, key=lambda name: sum(phases[name].values()))
  return phases[phase], PHASES[phase]


def _advice(plan: PhasePlan, room: Room) -> str:
  """Returns the first change of the config that makes a phase fit, as a sentence."""
  for changes in _changes(plan):
    try:
      settings = override_settings(plan.settings, changes)
      found = _search(dataclasses.replace(plan, settings=settings), room)
    except (ConfigError, KeyError):  # the model or the algorithm has no such option
      continue
    if found.needed <= room.limit:
      text = ' '.join(
        f'--config.{key}={shlex.quote(str(value))}' for key, value in changes.items()
      )
      return f'Set {text}, with which it needs {found.needed / 1e9:,.3g} GB'
  return (
    'No option that was tried is enough (docs/memory.md lists more): take a smaller '
    'model or a larger machine'
  )


def _changes(plan: PhasePlan) -> Iterator[dict[str, Any]]:
  """Yields changes that save memory, the smallest first."""
  batch, model = plan.settings.batch, plan.settings.model
  chosen: dict[str, Any] = {}
  if batch.num_micro_batches and batch.packing is None:
    chosen['batch.num_micro_batches'] = 0
  if model.remat.name not in ('auto', 'full'):
    chosen['model.remat'] = 'auto'
  if chosen:
    yield chosen
  if plan.plays and plan.settings.rollout.max_num_seqs > 8:
    yield chosen | {'rollout.max_num_seqs': 8}
  if plan.settings.algorithm.kl_loss is not None:
    yield chosen | {'algorithm.kl_coef': 0.0}
  if batch.max_length >= 128:
    yield chosen | {'batch.max_length': batch.max_length // 2}
  if model.adapters is None:
    adapters = {'model.lora': 'lora(rank=16)'}
    yield chosen | adapters
    if batch.max_length >= 128:
      yield chosen | adapters | {'batch.max_length': batch.max_length // 2}
