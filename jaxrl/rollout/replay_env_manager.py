"""ReplayEnvManager plays games that come again, and goes on from earlier episodes.

A game's task is the seed of its environment, so that a finite set of tasks is a finite
set of seeds. A prefix is the first turns of an earlier episode of the same task: the
environment is reset as it was then and stepped with the same replies, so that its state
is a true one. The replies are context for the episode that goes on from there, and are
not trained on. The queue chooses each episode's prefix: see `PrefixGroupQueue`.
"""

from typing import Any

import numpy as np

from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.env_manager import EnvContext, EnvManager
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.types import Completion, Trajectory

# Key in the extras of a sample's last row until the queue takes it: what it played.
PLAYED_KEY = 'played_turns'


class ReplayEnvManager(EnvManager):
  """Plays tasks that come again, from their start or from a prefix that is replayed."""

  def __init__(
    self,
    context: EnvContext,
    group_id: int = 0,
    env_id: int = 0,
    *,
    num_seeds: int = 0,
    replays: bool = False,
    **options: Any,
  ):
    """Creates a manager.

    Args:
      context: What all environments of the tag share.
      group_id: The env group.
      env_id: The environment within the env group.
      num_seeds: Seeds that environments are reset with; 0 for one for each group.
      replays: Whether the queue is asked for prefixes, and told what was played.
      **options: As for `EnvManager`.
    """
    super().__init__(context, group_id, env_id, **options)
    self._num_seeds = num_seeds
    self._replays = replays
    self._prefix: Any = None  # of the episode that begins

  async def reset(self, lease: EpisodeLease) -> RolloutCache | None:
    """Draws the task, starts the environment and replays the prefix, if there is one.

    Args:
      lease: Which sample of which group to play.

    Returns:
      The state of the episode, or None if there are no more tasks.
    """
    self._prefix = None
    cache = await super().reset(lease)
    if cache is not None and self._prefix is not None and not cache.done:
      await self._replay(cache, self._prefix)
    return cache

  async def _draw_task(self, cache: RolloutCache) -> bool:
    """Draws the task, and asks the queue where its episode begins."""
    if not await super()._draw_task(cache):
      return False
    lease, number = cache.lease, cache.lease.env_group + cache.lease.episode_id
    if self._num_seeds:
      cache.env_seed = self._base_seed + number % self._num_seeds
    queue: Any = self.context.queue
    if self._replays and queue is not None:
      key = _task_number(cache)
      self._prefix = await maybe_await(
        queue.get_prefix(lease.env_group, lease.episode_id, key)
      )
      if self._prefix is not None:
        cache.env_seed = self._prefix.seed
    return True

  async def _replay(self, cache: RolloutCache, prefix: Any) -> None:
    """Steps the environment with the replies of an earlier episode.

    Its observations are tokenized anew: where they differ from those of the earlier
    episode, the model is shown the new ones.
    """
    num_changed = 0
    for reply, state in zip(prefix.replies, prefix.states, strict=False):
      num_changed += cache.state_hash != state
      cache.append_replayed(reply)
      await self.step(cache, _replayed_completion(reply))
      cache.turns[-1].reward = 0.0  # it is not this episode's
      if cache.done:
        if not cache.failed:
          error = (
            f'the environment ended the episode in turn {len(cache.turns)}, while '
            f'{len(prefix.replies)} turns of an earlier one were replayed in which it '
            'had not: it does not follow from its seed and the replies'
          )
          cache.terminated = False
          cache.truncate('env_error', error)
        return
    num_changed += cache.state_hash != prefix.states[len(prefix.replies)]
    cache.metrics['prefix/diverged'] = float(num_changed > 0)

  def formulate_rollouts(self, cache: RolloutCache) -> list[Trajectory]:
    """Turns a finished episode into rows, and tells the queue what was played.

    Args:
      cache: The finished episode.

    Returns:
      As `EnvManager` does.
    """
    rows = super().formulate_rollouts(cache)
    if self._replays and rows and not cache.failed:
      rows[-1].extras[PLAYED_KEY] = {
        'key': _task_number(cache),
        'seed': cache.seed if cache.env_seed is None else cache.env_seed,
        'replies': [cache.tokens[turn.start : turn.stop] for turn in cache.turns],
        'states': [turn.state_hash for turn in cache.turns],
      }
    return rows


def _task_number(cache: RolloutCache) -> int:
  """Returns what tells the episode's task from others: a row's index, or a seed."""
  index = None if cache.task is None else cache.task.index
  if index is not None:
    return index
  return cache.seed if cache.env_seed is None else cache.env_seed


def _replayed_completion(reply: list[int]) -> Completion:
  """Returns a reply as an engine would; no weights of this run wrote it just now."""
  return Completion(
    np.array(reply, np.int32),
    np.zeros(len(reply), np.float32),
    np.full(len(reply), -1, np.int32),
    'stop',
  )
