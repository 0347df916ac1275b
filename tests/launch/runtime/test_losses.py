"""What a run does about actors that are lost, with actors that only seem so."""

import asyncio
import logging

import pytest

from jaxrl.options import ConfigError
from launch.runtime import ray_runtime, runtime_base, supervision
from launch.runtime.placement_group import InsufficientResources
from launch.runtime.supervision import ActorError


def gone():
  """Ray's error. Ray is imported as a run would, which says where it may listen."""
  return ray_runtime._import_ray('').exceptions.RayActorError


class Job:
  """Ends as it is told."""

  def __init__(self, end=None, newest=('train', 3)):
    self._end, self._newest = end, newest

  async def train(self):
    if self._end is not None:
      raise self._end
    return True

  def newest_checkpoint(self):
    return self._newest


def resumed(*outcomes, **options):
  """What comes of jobs that are made in turn, and what is said meanwhile."""
  turns, messages = iter(outcomes), []

  def make():
    turn = next(turns)
    if isinstance(turn, Exception):
      raise turn
    return turn

  return runtime_base.run_with_restarts(
    make, messages.append, pause=0, **options
  ), messages


def test_a_loss_while_a_run_is_made_again_is_one_of_its_losses():
  lost = Job(ActorError('the learner, gone'))
  no_room = InsufficientResources('no room within 60 s, or elsewhere')
  unmet = RuntimeError('the learners did not meet')
  (last, finished), messages = resumed(lost, no_room, unmet, Job())
  assert finished and len(messages) == 3 and last.restarts == 3
  assert 'no room within 60 s, or elsewhere' in messages[1] and 'train 3' in messages[1]
  assert 'did not meet' in messages[2] and '(resume 3 of 3)' in messages[2]


def test_it_gives_up_but_does_not_blame_the_config():
  lost, no_room = Job(ActorError('gone')), InsufficientResources('no room')
  with pytest.raises(ActorError, match='no room'):
    resumed(lost, *[no_room] * 3, max_restarts=3)
  with pytest.raises(ConfigError):  # at the first start it is the config
    resumed(no_room, Job())
  with pytest.raises(ActorError):  # nothing to go on from
    resumed(Job(ActorError('gone'), newest=None), Job())
  with pytest.raises(ValueError):  # no loss
    resumed(Job(ValueError()), Job())


def play(errors, **options):
  """Workers that end in `errors`, then in 7; the result, and whom it forgot."""
  turns, forgotten = iter([*errors, 7]), []

  async def played(turn):
    if isinstance(turn, Exception):
      raise turn
    return turn

  def start():
    turn = next(turns)
    return turn, played(turn)

  work = supervision.run_worker_with_restart(
    start, forgotten.append, 'Worker', pause=0, **options
  )
  return asyncio.run(work), forgotten


def never_ran():
  return gone()(None, 'The actor never ran - it was cancelled before it started')


def test_a_worker_that_never_runs_is_told_of_and_not_started_for_ever(caplog):
  with caplog.at_level(logging.WARNING):
    result, forgotten = play([never_ran() for _ in range(3)], max_failed_starts=3)
  assert result == 7 and len(forgotten) == 3
  lines = [line for line in caplog.messages if 'could not be started' in line]
  assert len(lines) == 3 and '3 of at most 3 times' in lines[2]
  with pytest.raises(gone()):
    play([never_ran() for _ in range(4)], max_failed_starts=3)


def test_a_worker_whose_host_has_left_is_started_on_another():
  from ray.exceptions import ActorUnschedulableError

  errors = [ActorUnschedulableError('its node is gone')] * 3
  result, forgotten = play(errors, max_failed_starts=3)
  assert result == 7 and len(forgotten) == 3
  with pytest.raises(ActorUnschedulableError):
    play(errors, max_failed_starts=2)


def test_a_worker_that_never_ran_is_no_death():
  errors = [
    never_ran(),
    gone()(None, 'died'),
    never_ran(),
    gone()(None, 'died'),
  ]
  assert play(errors, max_failed_starts=1)[0] == 7
  with pytest.raises(gone()):
    play([*errors, gone()(None, 'died')], max_failed_starts=1)


class JaxRuntimeError(RuntimeError):
  """As JAX calls it."""


@pytest.mark.parametrize(
  'message, several, rounds',
  [
    ('INTERNAL: a peer closed the connection', True, 5),
    ('INTERNAL: a peer closed the connection', False, 2),
    ('RESOURCE_EXHAUSTED: out of memory', True, 2),
    ('INVALID_ARGUMENT: shapes differ', True, 2),
  ],
)
async def test_an_error_of_its_own_is_told_soon(message, several, rounds):
  checks, error = [], JaxRuntimeError(message)

  def actors():
    checks.append(0)
    return []

  options = {
    'several_learners': several,
    'max_checks': 5,
    'few_checks': 2,
    'timeout': 0,
  }
  assert await supervision.root_cause(error, actors, **options) is error
  assert len(checks) == rounds
