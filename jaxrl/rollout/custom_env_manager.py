"""Custom env managers: finds a user's own manager, and checks what it does.

A manager is a class `Name(context, group_id, env_id, **options)` with the coroutine
`run_rollout_loop(data)`. The loop asks `context.queue.get_episode_id` for leases until
it returns None, plays each with the seed `data['seed'] + group_id + episode_id`, and
puts the rows of each with one `context.queue.put`. A class derived from `EnvManager`
has all of this and may override any method; any other class need not have more.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from jaxrl.component_table import Component, ComponentTable, as_call, component_name
from jaxrl.group_stats import SampleRows
from jaxrl.options import ConfigError, Keywords, OptionValues
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.env_manager import EnvContext, EnvManager, EnvManagerOptions
from jaxrl.rollout.queue.group_state import EpisodeLease, EpisodeQueue
from jaxrl.types import Trajectory

ENV_MANAGERS = ComponentTable[type[Any]]('env manager', 'env.TAG.manager')
_TOKEN_ARRAYS = ('action_mask', 'rollout_logprobs', 'rewards', 'weights_version')


def find_env_manager(
  manager: Component, where: str, *, is_agent: bool = False, has_players: bool = False
) -> tuple[type[Any], Keywords]:
  """Finds the class of a custom manager, and checks whether it follows the protocol.

  Args:
    manager: The class or where it is, and its own options.
    where: What error messages begin with, such as the config key.
    is_agent: Whether the environment is one that an agent plays.
    has_players: Whether the environment has several players.

  Returns:
    The class and its own options.

  Raises:
    ConfigError: If there is no such class, or it cannot be used as a manager.
  """
  name = component_name(manager)
  if not callable(manager) and ':' not in name:
    raise ConfigError(
      f'{where}: {name!r} is not a location: write path/file.py:Class or '
      'package.module:Class'
    )
  shared = {'tag': '', **EnvManagerOptions().as_dict()}
  if taken := sorted(shared.keys() & as_call(manager).options.keys()):
    raise ConfigError(
      f'{where}: {taken[0]!r} is an option of every manager, which the config sets by '
      'a key of its own: leave it out here'
    )
  name, cls, options = ENV_MANAGERS.find(manager, where)
  if not isinstance(cls, type):
    raise ConfigError(f'{where}: {name} is not a class')
  if not inspect.iscoroutinefunction(getattr(cls, 'run_rollout_loop', None)):
    raise ConfigError(
      f'{where}: {name} has no coroutine run_rollout_loop(data); define it with '
      'async def, or derive the class from jaxrl.rollout.env_manager.EnvManager'
    )
  try:
    inspect.signature(cls).bind(None, 0, 0, **shared, **options)
  except TypeError as error:
    raise ConfigError(
      f'{where}: {name} cannot be called as (context, group_id, env_id, **options) '
      f'with the options of EnvManager: {error}'
    ) from error
  if issubclass(cls, EnvManager):
    from jaxrl.rollout.agent_env_manager import AgentEnvManager

    if issubclass(cls, AgentEnvManager) != is_agent:
      base = 'AgentEnvManager' if is_agent else 'EnvManager'
      played = 'played by an agent' if is_agent else 'not played by an agent'
      raise ConfigError(
        f'{where}: the environment is {played}: derive {name} from {base}'
      )
    _check_players(cls, name, where, has_players)
  return cls, options


def _check_players(cls: type[Any], name: str, where: str, has_players: bool) -> None:
  """Refuses a manager derived from one of environments with more or fewer players."""
  from jaxrl.rollout.multi_player_env_manager import MultiPlayerEnvManager

  if issubclass(cls, MultiPlayerEnvManager) != has_players:
    base = 'MultiPlayerEnvManager' if has_players else 'EnvManager'
    players = 'several players' if has_players else 'one player'
    raise ConfigError(
      f'{where}: the environment has {players}: derive {name} from {base}'
    )


def make_custom_env_manager(
  manager: Component,
  context: EnvContext,
  group_id: int,
  env_id: int,
  options: OptionValues,
) -> Any:
  """Creates a custom manager.

  Args:
    manager: The class or where it is, and its own options.
    context: What all environments of the tag share.
    group_id: The env group.
    env_id: The environment within the env group.
    options: Options of `EnvManager`.

  Returns:
    A `CheckedManager` around it; the manager itself if it is derived from `EnvManager`
    and there is no queue.

  Raises:
    ConfigError: If there is no such class, or it cannot be used as a manager.
  """
  text = component_name(manager, whole=True)
  cls, own_options = find_env_manager(
    manager,
    f'env manager {text}',
    is_agent=context.endpoint is not None,
    has_players=context.players is not None,
  )
  if context.queue is None and issubclass(cls, EnvManager):  # has `play_episode`
    return cls(context, group_id, env_id, **options, **own_options)
  single = SingleLeaseQueue() if context.queue is None else None
  source = context.queue if single is None else single
  assert source is not None
  queue = CheckedQueue(source, text, options.get('tag', ''))
  own_context = dataclasses.replace(context, queue=queue)
  made = cls(own_context, group_id, env_id, **options, **own_options)
  return CheckedManager(made, context, queue, single)


class CheckedQueue:
  """Passes a custom manager's calls on to the group queue, and checks them.

  Wrong rows would otherwise be ignored or end the run without a reason: the queue takes
  None for the end of the data, and rows of another sample for late ones.
  """

  def __init__(self, queue: EpisodeQueue, manager: str, tag: str):
    """Creates the queue of one manager.

    Args:
      queue: The group queue, or a handle.
      manager: The manager, for messages.
      tag: The environment's tag, which rows must have.
    """
    self._queue = queue
    self._manager = manager
    self._tag = tag
    self._lease: EpisodeLease | None = None
    self._has_ended = False
    self._base_seed = 0

  def start(self, base_seed: int) -> None:
    """Begins to check a loop; the seeds of its episodes derive from `base_seed`."""
    self._base_seed, self._lease, self._has_ended = base_seed, None, False

  def check_ended(self) -> None:
    """Checks that the loop has not returned early.

    Raises:
      ConfigError: If the queue might still have leases.
    """
    if not self._has_ended:
      raise self._error(
        'returned from run_rollout_loop before get_episode_id had returned None'
      )

  async def get_episode_id(self, group_id: int, env_id: int) -> EpisodeLease | None:
    """Returns the next lease, as `GroupQueue.get_episode_id`.

    Raises:
      ConfigError: If the last episode has not been put.
    """
    if self._lease is not None:
      raise self._error('asked for the next episode before it had put the last one')
    lease = await maybe_await(self._queue.get_episode_id(group_id, env_id))
    self._has_ended = lease is None
    self._lease = None if lease is None else EpisodeLease(*lease)
    return self._lease

  async def put(
    self,
    group_id: int,
    episode_id: int,
    start_step: int,
    rollout: SampleRows | None,
    env_id: int,
  ) -> bool:
    """Puts the rows of the leased episode, as `GroupQueue.put`.

    Raises:
      ConfigError: If they are not the rows of that episode.
    """
    lease, self._lease = self._lease, None
    if lease is None:
      raise self._error('put an episode that it had not been given, or put it twice')
    if rollout is not None:
      self._check_rows(lease, rollout)
    return await maybe_await(
      self._queue.put(group_id, episode_id, start_step, rollout, env_id)
    )

  def _check_rows(self, lease: EpisodeLease, rollout: object) -> None:
    if not isinstance(rollout, list) or not rollout:
      kind = 'an empty list' if rollout == [] else f'a {type(rollout).__name__}'
      raise self._error(f'put {kind} in place of a list of Trajectory rows')
    wanted = {
      'env_group': lease.env_group,
      'episode_id': lease.episode_id,
      'sample_index': lease.sample_index,
      'episode_seed': self._base_seed + lease.env_group + lease.episode_id,
      'is_greedy': lease.greedy,
      'tag': self._tag,
    }
    for row in rollout:
      if not isinstance(row, Trajectory):
        raise self._error(f'put a row that is a {type(row).__name__}, not a Trajectory')
      for name, value in wanted.items():
        if getattr(row, name) != value:
          raise self._error(
            f'put a row with {name}={getattr(row, name)!r}; its lease says {value!r}'
          )
      for name in _TOKEN_ARRAYS:
        if len(getattr(row, name)) != len(row.tokens):
          raise self._error(
            f'put a row with {len(row.tokens)} tokens, but {len(getattr(row, name))} '
            f'values of {name}'
          )

  def _error(self, text: str) -> ConfigError:
    return ConfigError(f'env manager {self._manager} (tag {self._tag!r}) {text}')


class SingleLeaseQueue:
  """Gives one lease, and keeps the rows that are put for it."""

  def __init__(self):
    """Creates a queue without a lease."""
    self.lease: EpisodeLease | None = None
    self.rows: SampleRows | None = None

  async def get_episode_id(self, group_id: int, env_id: int) -> EpisodeLease | None:
    """Returns the lease once, then None."""
    lease, self.lease = self.lease, None
    return lease

  async def put(
    self,
    group_id: int,
    episode_id: int,
    start_step: int,
    rollout: SampleRows | None,
    env_id: int,
  ) -> bool:
    """Keeps the rows."""
    self.rows = rollout
    return True


class CheckedManager:
  """Runs the loop of a custom manager, for training or for single episodes.

  Attributes:
    context: What all environments of the tag share.
  """

  def __init__(
    self,
    manager: Any,
    context: EnvContext,
    queue: CheckedQueue,
    single: SingleLeaseQueue | None = None,
  ):
    """Wraps a manager.

    Args:
      manager: The manager.
      context: What all environments of the tag share.
      queue: The manager's own queue.
      single: What the queue takes its leases from, if not from the group queue.
    """
    self.context = context
    self._manager = manager
    self._queue = queue
    self._single = single

  async def run_rollout_loop(self, data: Mapping[str, int]) -> int:
    """Plays episodes until the queue has no more leases.

    Args:
      data: Passed to the manager's `run_rollout_loop`.

    Returns:
      The number of episodes, as the manager returns it.

    Raises:
      ConfigError: If the manager breaks the protocol.
    """
    self._queue.start(int(data['seed']))
    num_episodes = await self._manager.run_rollout_loop(data)
    self._queue.check_ended()
    return int(num_episodes or 0)

  def abort(self, lease: EpisodeLease) -> None:
    """Passes on that a lease was taken back; a manager may play on regardless."""
    abort = getattr(self._manager, 'abort', None)
    if abort is not None:
      abort(lease)

  async def play_episode(
    self, lease: EpisodeLease, *, base_seed: int
  ) -> SampleRows | None:
    """Plays one episode, as `EnvManager.play_episode`."""
    assert self._single is not None, 'there is a group queue'
    self._single.lease, self._single.rows = lease, None
    await self.run_rollout_loop({'seed': base_seed})
    return self._single.rows
