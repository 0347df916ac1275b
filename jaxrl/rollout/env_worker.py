"""EnvWorker runs many environment managers as coroutines, in one process or actor."""

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.component_calls import ComponentCall
from jaxrl.component_table import Component
from jaxrl.options import Options, OptionValues, option
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.env_manager import EnvContext, EnvManager


@dataclasses.dataclass(frozen=True)
class ReplayOptions(Options):
  """How training comes back to the tasks and the episodes of an environment tag."""

  num_seeds: int = option(
    0,
    'Seeds of a game that training plays again and again, in turn; 0 for a new one for '
    'each group.',
    low=0,
  )
  prefixes: ComponentCall | None = option(
    None,
    'What chooses turns of earlier episodes that groups of a known task go on from, '
    "such as 'prefix_sampling()'; '' for none. Evaluations never have any.",
  )


def make_env_manager(
  context: EnvContext,
  group_id: int = 0,
  env_id: int = 0,
  *,
  manager: Component | None = None,
  num_seeds: int = 0,
  replays: bool = False,
  **options: Any,
) -> Any:
  """Creates the manager for what is played: an environment or an agent.

  Args:
    context: What all environments of the tag share; has an endpoint for agents.
    group_id: The env group.
    env_id: The environment within the env group.
    manager: A user's own manager; None for ours.
    num_seeds: As for `ReplayEnvManager`.
    replays: As for `ReplayEnvManager`.
    **options: Options of `EnvManager`.

  Returns:
    The user's own manager if there is one; an `AgentEnvManager` if the context has an
    endpoint, and a `MultiPlayerEnvManager` if it has players; a `ReplayEnvManager` if
    tasks come again or episodes are replayed; else an `EnvManager`.

  Raises:
    ValueError: If the user's own class cannot be used as a manager.
  """
  if manager is not None:
    # Imported here because few runs have one.
    from jaxrl.rollout.custom_env_manager import make_custom_env_manager

    return make_custom_env_manager(manager, context, group_id, env_id, options)
  if context.players is not None:
    # Imported here because few environments have several players.
    from jaxrl.rollout.multi_player_env_manager import MultiPlayerEnvManager

    return MultiPlayerEnvManager(context, group_id, env_id, **options)
  if num_seeds or replays:
    # Imported here because few runs come back to what they played.
    from jaxrl.rollout.replay_env_manager import ReplayEnvManager

    return ReplayEnvManager(
      context, group_id, env_id, num_seeds=num_seeds, replays=replays, **options
    )
  if context.endpoint is None:
    return EnvManager(context, group_id, env_id, **options)
  # Imported here because only agents need it.
  from jaxrl.rollout.agent_env_manager import AgentEnvManager

  return AgentEnvManager(context, group_id, env_id, **options)


class EnvWorker:
  """Plays several environments at the same time.

  Attributes:
    managers: The manager of each environment, by (group_id, env_id).
  """

  def __init__(
    self,
    context: EnvContext,
    env_ids: Sequence[tuple[int, int]],
    options: OptionValues | None = None,
    manager: Component | None = None,
  ):
    """Creates a manager for each environment.

    Args:
      context: What all environments of the tag share.
      env_ids: The environments to play, as (group_id, env_id).
      options: Options of `EnvManager`.
      manager: A user's own manager; None for ours.
    """
    self._context = context
    self.managers = {
      (group_id, env_id): make_env_manager(
        context, group_id, env_id, manager=manager, **(options or {})
      )
      for group_id, env_id in env_ids
    }

  async def run(self, data: Mapping[str, int]) -> int:
    """Plays until the queue has no more leases.

    Args:
      data: Passed to `EnvManager.run_rollout_loop`.

    Returns:
      The number of episodes put into the queue.

    Raises:
      Exception: The first error of any manager.
    """
    abort_listener = asyncio.create_task(self._abort_cancelled())
    try:
      async with asyncio.TaskGroup() as group:
        loops = [manager.run_rollout_loop(data) for manager in self.managers.values()]
        tasks = [group.create_task(loop) for loop in loops]
      return sum(task.result() for task in tasks)
    except ExceptionGroup as errors:
      raise errors.exceptions[0] from None  # the others follow from the first
    finally:
      abort_listener.cancel()
      if self._context.endpoint is not None:
        await self._context.endpoint.close()

  async def _abort_cancelled(self) -> None:
    """Aborts episodes whose leases the queue took back."""
    queue: Any = self._context.queue
    position = 0
    while True:
      position, cancellations = await maybe_await(queue.wait_cancelled(position))
      for group_id, env_id, lease in cancellations:
        manager = self.managers.get((group_id, env_id))
        if manager is not None:
          manager.abort(lease)


def partition_envs(
  num_env_groups: int, group_size: int, num_workers: int
) -> list[list[tuple[int, int]]]:
  """Divides environments among workers.

  An env group stays within one worker, so that its samples share their prompt.

  Args:
    num_env_groups: Number of env groups.
    group_size: Environments per env group.
    num_workers: Number of workers.

  Returns:
    The (group_id, env_id) pairs of each worker.
  """
  partitions: list[list[tuple[int, int]]] = [[] for _ in range(num_workers)]
  for group_id, env_id in itertools.product(range(num_env_groups), range(group_size)):
    partitions[group_id % num_workers].append((group_id, env_id))
  return partitions
