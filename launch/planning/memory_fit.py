"""Makes learners that fit the memory that there is.

`batch.num_micro_batches=0` and `model.remat='auto'` leave the choice to the run. A
rough estimate decides for runs that are far from any limit, as most small ones are;
near it, `launch.planning.memory_choice` compiles programs. The gradient is the same,
up to rounding, whatever is chosen.
"""

import dataclasses
import logging
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import LoadedModel
from launch.components.learner_factory import (
  LocalLearnerFactory,
  MemoryChoice,
  PhaseSpec,
)
from launch.planning import rough_memory
from launch.planning.rough_memory import PhasePlan, Room
from launch.settings.run_settings import RunSettings

if TYPE_CHECKING:
  from launch.components.teacher_set import TeacherSet

SAFE_SHARE = 0.5  # of the memory: a rough estimate below it needs no better one

log = logging.getLogger(__name__)


def make_fitting_learners(
  settings: RunSettings,
  policy: LoadedModel,
  mesh: Mesh,
  device_thread: DeviceThread,
  teachers: 'TeacherSet | None',
) -> LocalLearnerFactory:
  """Returns the factory whose learners fit the memory, and which says what it chose.

  Args:
    settings: settings of the run.
    policy: the model, whose parameters this process holds already.
    mesh: devices of the learner.
    device_thread: the thread of the devices.
    teachers: the teachers, if the algorithm has any.
  """
  shape, params = policy.model.config, jax.tree.leaves(policy.params)
  num_params, loaded = sum(x.size for x in params), sum(x.nbytes for x in params)
  platform = mesh.devices.flat[0].platform

  def choose(stage: PhaseSpec) -> MemoryChoice:
    plan = PhasePlan(settings, shape, mesh, stage, platform)
    room = rough_memory.read_room(mesh, loaded)
    choice = choose_roughly(plan, num_params, room)
    if choice is None:
      # Imported here because most small runs are far from the limit.
      from launch.planning import memory_choice

      choice = memory_choice.choose(plan, room)
    log.info('memory (%s): %s', stage.name, choice.text)
    return choice

  return LocalLearnerFactory(settings, policy, mesh, device_thread, teachers, choose)


def choose_roughly(
  plan: PhasePlan, num_params: float, room: Room
) -> MemoryChoice | None:
  """Returns the first candidate if it surely fits, else None.

  Args:
    plan: the phase.
    num_params: number of the model's parameters.
    room: the memory that there is.
  """
  choice = next(plan.candidates())
  needed = rough_memory.estimate(plan, choice, num_params) + room.held
  if needed > SAFE_SHARE * room.limit:
    return None
  text = f'{choice.text}: less than {needed / 1e9:,.2g} GB of {room}'
  return dataclasses.replace(choice, text=text)
