"""Run settings are a run's options, and what follows from several of them together.

Code below the commands takes these classes, never a `ConfigDict` and never a text that
has to be parsed.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ml_collections import ConfigDict

from jaxrl.algorithms import requirements
from jaxrl.component_calls import ComponentCall
from jaxrl.component_table import Component
from jaxrl.data.chat_tokenizer import ChatOptions
from jaxrl.data.store.store_options import ReaderOptions
from jaxrl.data.trajectory_writers.writer import DumpOptions
from jaxrl.models.exact_mode import Exact
from jaxrl.options import ConfigError, Options, error_prefix
from jaxrl.rollout.engine.engine_base import EngineTraits
from jaxrl.rollout.weights.weight_store import InProcessOptions, WeightStoreOptions
from jaxrl.run_options import EvalSetOptions, RunOptions, TagDatasetOptions
from jaxrl.types import Algorithm

if TYPE_CHECKING:
  from kernels.block_rounding import BlockFormat

TEACHER_CHECKPOINT = '--config.teacher.checkpoint'


def teacher_key(tag: str) -> str:
  """Returns the key that names the teacher of a tag; '' stands for all other tags."""
  return f'--config.teacher.by_tag.{tag}' if tag else TEACHER_CHECKPOINT


class EvalSetSettings(EvalSetOptions):
  """An evaluation set with nothing left open."""

  num_tasks: int
  group_size: int
  temperature: float
  interval: int


@dataclasses.dataclass(frozen=True)
class EngineSettings:
  """The engine that generates responses.

  Attributes:
    kind: 'jax', 'vllm', or where a user's own class is.
    own_options: The options that the call string itself gives.
    options: All options of the engine, with those that other config keys give.
    exact: How the learner computes log-probs so that they equal the engine's bit by
      bit; None where that is not asked for.
    router_replay: The learner routes tokens to the experts that the engine chose.
    traits: What the run must know about the engine's class.
    weights_format: How the engine keeps matrices in 8 bits; None for more bits.
  """

  kind: str
  own_options: Mapping[str, Any]
  options: Mapping[str, Any]
  exact: Exact | None
  router_replay: bool
  traits: EngineTraits
  weights_format: 'BlockFormat | None' = None

  @property
  def num_devices(self) -> int:
    """Devices of one engine."""
    tensor = self.own_options.get('tensor_parallel_size', 1)
    return tensor * self.own_options.get('pipeline_parallel_size', 1)


@dataclasses.dataclass(frozen=True)
class RewardTermSettings:
  """One term of the sum that `rollout.rewards` adds to an episode's reward.

  Attributes:
    name: Name of the term in metrics.
    target: 'env', 'judge', 'reward_model', a grader's name, or a function's path.
    options: The options of the target; the weight is not among them.
  """

  name: str
  weight: float
  target: str
  options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class WeightTransport:
  """How weights reach the engines.

  Attributes:
    name: Name of the transport, never 'auto'.
    options: Its options, an object of the class that `TRANSPORTS` has by this name.
  """

  name: str
  options: WeightStoreOptions = InProcessOptions()

  @property
  def direct(self) -> bool:
    """Whether the learner sends from its GPUs straight into the engines' GPUs."""
    return self.name in ('nccl', 'ipc')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementOptions(Options):
  """How learner and engines share the devices.

  Attributes:
    name: 'auto', 'split' or 'colocated'.
  """

  name: ClassVar[str]

  @property
  def sleeps(self) -> bool:
    """Whether the engine gives up its cache while the learner trains."""
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(RunOptions):
  """A run's options, and what follows from several of them together.

  Attributes:
    algorithm: The algorithm, fitted to the run.
    algorithm_name: The name that the config gives it.
    algorithm_options: The config's own options of it; '' leaves one to the algorithm.
    engine: The engine that generates responses.
    rewards: Terms added to the environment's reward; empty for none.
    transport: How weights reach the engines.
    placement: How learner and engines share the devices.
    tasks: Where the tasks of each environment tag come from.
    evaluations: Evaluation sets, by the name that their metrics have.
    chat: How conversations are written, where that is not as the checkpoint says.
    experience_store: The store whose groups the run trains on; None if it plays them.
    trajectory_dump: Where trajectories are written; None for commands that write none.
    config: The config as plain data, for records and for group filters.
  """

  algorithm: Algorithm
  algorithm_name: str
  algorithm_options: Mapping[str, Any]
  engine: EngineSettings
  rewards: tuple[RewardTermSettings, ...]
  transport: WeightTransport
  placement: PlacementOptions
  tasks: Mapping[str, TagDatasetOptions]
  evaluations: Mapping[str, EvalSetSettings]
  chat: ChatOptions
  experience_store: ReaderOptions | None
  trajectory_dump: DumpOptions | None
  config: Mapping[str, Any]

  @property
  def active_evaluations(self) -> dict[str, EvalSetSettings]:
    """The sets that are evaluated."""
    return {name: s for name, s in self.evaluations.items() if s.interval}

  @property
  def plays(self) -> bool:
    """Whether the algorithm learns from rollouts."""
    return self.algorithm.data_format == 'rollout'

  @property
  def evaluates(self) -> bool:
    """Whether the run plays evaluations."""
    return bool(self.active_evaluations)

  @property
  def training_tags(self) -> list[str]:
    """The environment tags that training plays."""
    return [tag for tag, env in self.env.items() if env.weight]

  @property
  def rows_per_sample(self) -> int:
    """The rows of a sample: one for each player, where the policy plays all of them.

    How many turns a row for each turn makes is not known, and not counted.
    """
    if not self.plays or requirements.row_format(self.algorithm) == 'step':
      return 1
    from jaxrl.envs.env_registry import num_players  # not every command plays

    played = [self.env[tag] for tag in self.training_tags]
    alone = [e for e in played if e.opponent is None and e.policy_role is None]
    return max([1, *(num_players(env.env_type, env.env_config) for env in alone)])

  def text(self, key: str) -> Any:
    """Returns what the config says under a dotted key, to quote it in a message."""
    value: Any = self.config
    for part in key.split('.'):
      value = value[part]
    return value

  def quote(self, key: str) -> str:
    """Returns a dotted key and its value as a command line would set it."""
    return f'--config.{key}={self.text(key)}'

  def refusal(self, key: str, problem: str) -> ConfigError:
    """Returns the error that says what is wrong with the value of a dotted key."""
    return ConfigError(f'{self.quote(key)}: {problem}')

  def no_effect(self, key: str, why: str) -> ConfigError:
    """Returns the error for a dotted key that changes nothing in this run."""
    return self.refusal(key, f'has no effect here: {why}')

  def task_key(self, tag: str, field: str) -> str:
    """Returns the key that sets a field of a tag's tasks, such as 'path'."""
    own_section = self.text(f'env.{tag}').get('dataset', {})
    section = f'env.{tag}.dataset' if own_section.get(field) else 'dataset'
    return f'{section}.{field}'

  def eval_task_key(self, name: str, field: str) -> str:
    """Returns the key that sets a field of an evaluation set's tasks."""
    if self.text('eval').get('sets', {}).get(name, {}).get(field):
      return f'eval.sets.{name}.{field}'
    evaluation = self.evaluations[name]
    if field == 'path' and evaluation.path:
      return 'eval.path'
    return self.task_key(evaluation.tag, field)

  def naming(self, key: str) -> contextlib.AbstractContextManager[None]:
    """Makes the errors of a block begin with a config key and its value.

    Args:
      key: The dotted key.
    """
    return error_prefix(self.quote(key))

  def env_manager_config(self, tag: str) -> ConfigDict:
    """Returns a tag's section as group filters are given it."""
    return ConfigDict(dict(self.config['env'][tag]))

  @property
  def group_filters(self) -> tuple[Component, ...]:
    """The config's filters, or else the algorithm's."""
    return _override(self.algorithm.filters, self.rollout.group_filter)

  @property
  def reward_shapers(self) -> tuple[Component, ...]:
    """The config's reward shapers, or else the algorithm's."""
    return _override(self.algorithm.shapers, self.rollout.reward_shaping)

  def response_limit(self, tag: str) -> int:
    """Returns the most tokens of one episode of a tag, all of its turns together."""
    env = self.env[tag]
    return min(self.batch.max_length, env.max_steps * env.max_tokens_per_step)


def _override(
  default: tuple[Component, ...], chosen: tuple[ComponentCall, ...]
) -> tuple[Component, ...]:
  """Returns `chosen`, or the algorithm's `default` if empty; 'none' empties both."""
  is_none = [call.name for call in chosen] == ['none']
  return () if is_none else chosen or default
