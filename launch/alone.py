"""What only plays: engines with a model's weights, here or under Ray; no learner."""

import pathlib
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl.config import Config
from jaxrl.data.seeds import base_seed
from jaxrl.dispatch import Dispatcher
from jaxrl.signature import ConfigError
from jaxrl.training.policy import Policy
from launch import build, checks, engines, off_policy
from launch.algorithm import make_algorithm
from launch.datasets import load_datasets
from launch.rollouts import Rollouts
from launch.spawn import Host, LocalHost, guarded

Make = Callable[[Host, Dispatcher], tuple[Policy, Any]]


class Alone:
  """A host, a policy, and what plays with it.

  make(host, dispatcher): the policy and what plays, an object whose `weights` are the
  service that its engines get them by. host: by default the one that `config` says.
  told: who has which devices, for people. Raises ConfigError for what cannot be.
  """

  def __init__(self, config: Config, make: Make, host: Host | None = None):
    if config.model.lora:
      raise ConfigError(
        f'--config.model.lora={config.model.lora}: no adapters are made where nothing '
        'trains: name the model with its adapters merged, '
        '--config.model.checkpoint=WORKDIR/export, and leave model.lora out '
        '(--config.model.lora=)'
      )
    self._host = host or build.make_host(config, learns=False)
    self._dispatcher = Dispatcher()
    try:
      self.policy, self.plays = make(self._host, self._dispatcher)
    except Exception as error:
      self._dispatcher.close()
      build.leave(self._host, error)
      raise
    self.told = self._host.told

  async def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
    """What `work` gives, begun once every engine has the weights; then closes all.

    Engines that are lost meanwhile are replaced. Raises what lies behind an error.
    """

    async def begun() -> Any:
      await self.plays.weights.publish(0, self.policy.params)
      return await work()

    try:
      return await guarded(self._host, begun())
    finally:
      await self.close()

  async def close(self) -> None:
    await self._host.close()
    self._dispatcher.close()


def evaluator(config: Config, workdir: pathlib.Path, host: Host | None = None) -> Alone:
  """What evaluates as training does; it `plays` by `Rollouts`.

  workdir: where a random model is left, if no checkpoint is named.
  """
  algorithm = make_algorithm(config)
  checks.settings(config, algorithm)

  def make(host: Host, dispatcher: Dispatcher) -> tuple[Policy, Rollouts]:
    data = load_datasets(config, host)  # first: it is cheap
    policy = build.make_policy(config, workdir, critic=False)
    engines.check_model(config, policy.model.config)
    own = config, policy, host, dispatcher, data
    return policy, Rollouts(*own, algorithm=algorithm)

  return Alone(config, make, host)


class Player:
  """One manager outside any queue, in this process, for `launch.play`."""

  def __init__(self, config: Config, workdir: pathlib.Path):
    if off_policy.foreign(config):  # one episode needs no other engine
      with config.unlocked():
        config.rollout.engine = 'jax'
    alone = evaluator(config, workdir, LocalHost())
    self.run, rollouts = alone.run, alone.plays
    tag = rollouts.tags[0]
    self.decode: Callable[..., str] = alone.policy.tokenizer.decode
    self.manager = rollouts.manager(tag, 'sample')
    self.base_seed = base_seed(config.seed, 'train', tag)


def player(config: Config) -> Player:
  """What plays one episode of the first tag, as training would."""
  with tempfile.TemporaryDirectory() as folder:
    return Player(config, pathlib.Path(folder))
