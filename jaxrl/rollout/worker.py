"""EnvWorker: many environment managers as coroutines, in one process or actor."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.rollout.agents import make_manager
from jaxrl.rollout.env_manager import EnvWorld
from jaxrl.rollout.handles import settle


class EnvWorker:
  """Plays the environments `places`, pairs of (group_id, env_id).

  options: those of EnvManager.
  """

  def __init__(
    self,
    world: EnvWorld,
    places: Sequence[tuple[int, int]],
    options: Mapping[str, Any] | None = None,
  ):
    self._world = world
    self.managers = {
      (group_id, env_id): make_manager(world, group_id, env_id, **(options or {}))
      for group_id, env_id in places
    }

  async def run(self, data: Mapping[str, Any]) -> int:
    """Plays until the queue has no more; returns the number of episodes put."""
    listener = asyncio.create_task(self._listen())
    try:
      async with asyncio.TaskGroup() as group:
        loops = [m.run_rollout_loop(data) for m in self.managers.values()]
        tasks = [group.create_task(loop) for loop in loops]
      return sum(task.result() for task in tasks)
    except ExceptionGroup as errors:
      raise errors.exceptions[0] from None  # the others follow from the first
    finally:
      listener.cancel()
      if self._world.endpoint is not None:
        await self._world.endpoint.close()

  async def _listen(self) -> None:
    """Ends episodes that the queue has given up: surplus, expired or timed out."""
    after = 0
    while True:
      after, given_up = await settle(self._world.queue.wait_given_up(after))
      for group_id, env_id, lease in given_up:
        manager = self.managers.get((group_id, env_id))
        if manager is not None:
          manager.abort(lease)


def share_out(
  num_env_groups: int, group_size: int, num_workers: int
) -> list[list[tuple[int, int]]]:
  """Places for each worker; a group stays together, so that it shares its prompt."""
  places: list[list[tuple[int, int]]] = [[] for _ in range(num_workers)]
  for group_id, env_id in itertools.product(range(num_env_groups), range(group_size)):
    places[group_id % num_workers].append((group_id, env_id))
  return places
