"""Makes learners that fit the memory that there is.

`batch.num_micro_batches=0` and `model.remat='auto'` leave the choice to the run. A
rough estimate decides for runs that are far from any limit, as most small ones are;
near it, `launch.planning.memory_choice` compiles programs. The gradient is the same,
up to rounding, whatever is chosen.
"""

import dataclasses
import json
import logging
import pathlib
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import LoadedModel
from launch.learner.learner_factory import (
  LocalLearnerFactory,
  MemoryChoice,
  PhaseSpec,
)
from launch.logging.workdir import read_json, write_atomically
from launch.planning import rough_memory
from launch.planning.rough_memory import PhasePlan, Room
from launch.settings.run_settings import RunSettings

if TYPE_CHECKING:
  from launch.learner.teacher_set import TeacherSet

CHOICES = 'memory.json'  # in the run's folder
SAFE_SHARE = 0.5  # of the memory: a rough estimate below it needs no better one

log = logging.getLogger(__name__)


def make_fitting_learners(
  settings: RunSettings,
  policy: LoadedModel,
  mesh: Mesh,
  device_thread: DeviceThread,
  teachers: 'TeacherSet | None',
  workdir: pathlib.Path | None = None,
) -> LocalLearnerFactory:
  """Returns the factory whose learners fit the memory, and which says what it chose.

  Args:
    settings: Settings of the run.
    policy: The model, whose parameters this process holds already.
    mesh: Devices of the learner.
    device_thread: The thread of the devices.
    teachers: The teachers, if the algorithm has any.
    workdir: Where choices are kept, so that a resumed run computes the same bits,
      however much memory is free by then; None keeps none.
  """
  shape, params = policy.model.config, jax.tree.leaves(policy.params)
  num_params, loaded = sum(x.size for x in params), sum(x.nbytes for x in params)
  platform = mesh.devices.flat[0].platform

  def choose(phase: PhaseSpec) -> MemoryChoice:
    plan = PhasePlan(settings, shape, mesh, phase, platform)
    room = rough_memory.read_room(mesh, loaded)
    before = None if workdir is None else read_choice(workdir, plan)
    choice = choose_roughly(plan, num_params, room, before)
    if choice is None:
      # Imported here because most small runs are far from the limit.
      from launch.planning import memory_choice

      choice = memory_choice.choose(plan, room, before)
    if before and _describe_choice(choice) != _describe_choice(before):
      log.warning(
        'before it was stopped, the run had %s, which does not fit any more: from here '
        'on its numbers are rounded differently',
        before.text,
      )
    log.info('memory (%s): %s', phase.name, choice.text)
    if workdir is not None:
      keep_choice(workdir, phase.name, choice)
    return choice

  return LocalLearnerFactory(settings, policy, mesh, device_thread, teachers, choose)


def choose_roughly(
  plan: PhasePlan, num_params: float, room: Room, before: MemoryChoice | None = None
) -> MemoryChoice | None:
  """Returns the first candidate if it surely fits, else None.

  Args:
    plan: The phase.
    num_params: Number of the model's parameters.
    room: The memory that there is.
    before: What the run chose before it was stopped, in place of the first candidate.
  """
  choice = before or next(plan.candidates())
  needed = plan.estimate(choice, num_params) + room.held
  if needed > SAFE_SHARE * room.limit:
    return None
  text = f'{choice.text}: less than {needed / 1e9:,.2g} GB of {room}'
  return dataclasses.replace(choice, text=text)


def read_choice(workdir: pathlib.Path, plan: PhasePlan) -> MemoryChoice | None:
  """Returns what a phase chose before the run was stopped.

  Args:
    workdir: The run's folder.
    plan: The phase.

  Returns:
    The choice; None if there is none that the phase's settings still allow.
  """
  kept = _read_choices(workdir).get(plan.phase.name)
  return next((c for c in plan.candidates() if _describe_choice(c) == kept), None)


def keep_choice(workdir: pathlib.Path, phase: str, choice: MemoryChoice) -> None:
  """Keeps what a phase has chosen, for `read_choice`.

  Args:
    workdir: The run's folder.
    phase: Name of the phase.
    choice: What it has chosen.
  """
  kept = _read_choices(workdir) | {phase: _describe_choice(choice)}
  write_atomically(workdir / CHOICES, json.dumps(kept, indent=2) + '\n')


def _read_choices(workdir: pathlib.Path) -> dict[str, Any]:
  kept = read_json(workdir / CHOICES)
  return kept if isinstance(kept, dict) else {}


def _describe_choice(choice: MemoryChoice) -> dict[str, Any]:
  return {'num_micro_batches': choice.num_micro_batches, 'remat': str(choice.remat)}
