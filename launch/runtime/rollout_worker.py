"""A rollout worker is an `EnvWorker` that makes its own environment context.

It is made from arguments that can be sent to another process.
"""

import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxrl.component_calls import ComponentCall
from jaxrl.data.chat_tokenizer import ChatOptions, ChatTokenizer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.envs.env_registry import (
  ISOLATED_PREFIX,
  env_factory,
  find_env,
  num_players,
)
from jaxrl.options import ConfigError, OptionValues, error_prefix
from jaxrl.rollout.env_manager import EnvContext
from jaxrl.rollout.env_worker import EnvWorker
from jaxrl.rollout.queue.group_state import EpisodeQueue
from jaxrl.rollout.thread_pool import DEFAULT_NUM_THREADS, ThreadPool
from jaxrl.types import TaskSource, TokenGenerator

if TYPE_CHECKING:
  from jaxrl.component_table import Component
  from jaxrl.rollout.opponents import Opponent
  from jaxrl.rollout.rewards.reward_pipeline import RewardPipeline


class RolloutWorker(EnvWorker):
  """Runs the environments of a tag.

  Args:
    make_context: Makes what they share, in the worker's process.
    env_ids: (group, sample) of each environment.
    options: Options of the env managers.
    manager: The user's own env manager; None for ours.
  """

  def __init__(
    self,
    make_context: Callable[[], EnvContext],
    env_ids: list[tuple[int, int]],
    options: OptionValues,
    manager: ComponentCall | None = None,
  ):
    super().__init__(make_context(), env_ids, options, manager)


def make_env_context(
  env_type: str,
  env_config: OptionValues,
  folder: pathlib.Path,
  engine: TokenGenerator,
  queue: EpisodeQueue | None,
  dataset: TaskSource | None,
  *,
  concurrency: int = DEFAULT_NUM_THREADS,
  rewards: 'RewardPipeline | None' = None,
  chat: ChatOptions | None = None,
  opponent: 'Opponent | Component | None' = None,
  policy_role: int | None = None,
) -> EnvContext:
  """Returns what the environments of a tag share.

  Args:
    env_type: Kind of the environments.
    env_config: Their options.
    folder: Where the tokenizer is.
    engine: The engine or router, or a handle.
    queue: The group queue, or a handle.
    dataset: The dataset, or a handle.
    concurrency: Number of environments that step at once.
    rewards: The reward pipeline, if rewards are not the environments' own.
    chat: How conversations are written, where that is not as the folder says.
    opponent: Who plays roles in the policy's place, or a call that names it.
    policy_role: The role that the policy plays against an opponent.

  Raises:
    ConfigError: An isolated environment type is driven by an agent, or the folder has
      no chat template that can be used.
  """
  with error_prefix(str(folder)):
    chat_tokenizer = ChatTokenizer(load_tokenizer(folder), chat)
  endpoint = None
  if getattr(find_env(env_type), 'played_by_agent', False):
    if env_type.startswith(ISOLATED_PREFIX):
      raise ConfigError(
        f'{env_type}: leave isolated: out, as an agent with command=… already '
        'runs in its own process'
      )
    # Imported here because only agents need a server.
    from jaxrl.rollout.gateway.agent_endpoint import AgentEndpoint

    endpoint = AgentEndpoint(engine, chat_tokenizer)
  players = None
  if (count := num_players(env_type, env_config)) > 1:
    # Imported here because few environments have several players.
    from jaxrl.rollout.opponents import PlayerOptions, make_opponent

    made = None if opponent is None else make_opponent(opponent, f'opponent={opponent}')
    players = PlayerOptions(count, made, policy_role)
  return EnvContext(
    make_env=env_factory(env_type, env_config),
    engine=engine,
    chat=chat_tokenizer,
    pool=ThreadPool(concurrency),
    queue=queue,
    dataset=dataset,
    rewards=rewards,
    endpoint=endpoint,
    players=players,
  )
