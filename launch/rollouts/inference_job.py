"""Runs jobs that only generate: engines with a model's weights, and no learner."""

import pathlib
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl.data.seeds import base_seed
from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import LoadedModel
from jaxrl.options import ConfigError
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.types import Value
from launch.rollouts.env_datasets import load_datasets, named_training_rows
from launch.rollouts.preparation import check_run, load_policy
from launch.rollouts.rollout_scheduler import RolloutScheduler
from launch.runtime.runtime_base import Runtime, supervise_run
from launch.runtime.runtime_factory import close_and_reraise, make_runtime
from launch.settings.engine_settings import check_model
from launch.settings.resolve import override_settings
from launch.settings.run_settings import RunSettings

MakeParts = Callable[[Runtime, DeviceThread], tuple[LoadedModel, Any]]


class InferenceJob:
  """Holds a runtime, a policy, and what plays with it.

  Attributes:
    policy: The model that plays, with its tokenizer.
    plays: What plays; its `weights` bring the engines their weights.
    description: Who has which devices, for people.
  """

  def __init__(
    self, settings: RunSettings, make_parts: MakeParts, runtime: Runtime | None = None
  ):
    """Makes the parts.

    Args:
      settings: Settings of the run.
      make_parts: Returns the policy and what plays, for a runtime and a device thread.
      runtime: Where the parts are to live; None takes the one that the settings name.

    Raises:
      ConfigError: For settings that cannot be.
    """
    if settings.model.adapters:
      raise ConfigError(
        f'--config.model.lora={settings.text("model.lora")}: has no effect '
        'without training. To use trained adapters, set '
        '--config.model.checkpoint=WORKDIR/export, where they are merged, and '
        '--config.model.lora='
      )
    self._runtime = runtime or make_runtime(settings, learns=False)
    self._device_thread = DeviceThread()
    try:
      self.policy, self.plays = make_parts(self._runtime, self._device_thread)
    except Exception as error:
      self._device_thread.close()
      close_and_reraise(self._runtime, error)
      raise
    self.description = self._runtime.description

  async def run(self, work: Callable[[], Awaitable[Value]]) -> Value:
    """Gives every engine the weights, then does some work; closes everything.

    Engines that die meanwhile are replaced. Raises the root cause of an error.

    Returns:
      What the work returns.
    """

    async def publish_and_work() -> Value:
      await self.plays.weights.publish(0, self.policy.params)
      return await work()

    try:
      return await supervise_run(self._runtime, publish_and_work())
    finally:
      await self.close()

  async def close(self) -> None:
    """Closes the runtime and the device thread."""
    await self._runtime.close()
    self._device_thread.close()


def make_evaluator(
  settings: RunSettings, workdir: pathlib.Path, runtime: Runtime | None = None
) -> InferenceJob:
  """Returns a job that evaluates as training does; it `plays` by `RolloutScheduler`.

  Args:
    settings: Settings of the run.
    workdir: Where a random model is saved, if no checkpoint is named.
    runtime: Where the parts are to live; None takes the one that the settings name.

  Raises:
    ConfigError: For settings that cannot be.
  """
  check_run(settings, trains=False)

  def make_parts(
    runtime: Runtime, device_thread: DeviceThread
  ) -> tuple[LoadedModel, RolloutScheduler]:
    datasets = load_datasets(settings, runtime)  # first: they are cheap to load
    # What the model was trained on is not known, but for what a file's name says.
    datasets = datasets._replace(seen_shares=named_training_rows(settings))
    policy = load_policy(settings, workdir, critic=False)
    check_model(settings, policy.model.config)
    return policy, RolloutScheduler(settings, policy, runtime, device_thread, datasets)

  return InferenceJob(settings, make_parts, runtime)


class Player:
  """Plays one episode of the first tag, as training would, for `launch.play`.

  Its manager lives in this process, outside any queue.

  Attributes:
    run: Awaits work once the engine has its weights, see `InferenceJob.run`.
    decode: Token ids → text.
    manager: Plays episodes of the first environment tag.
    base_seed: Seed of its episode 0.
  """

  def __init__(self, settings: RunSettings):
    if settings.engine.traits.needs_ray:  # which one episode does not
      settings = override_settings(settings, {'rollout.engine': 'jax'})
    with tempfile.TemporaryDirectory() as folder:
      evaluator = make_evaluator(settings, pathlib.Path(folder), Runtime())
      rollouts: RolloutScheduler = evaluator.plays
      tag = rollouts.tags[0]
      self.manager = rollouts.manager(tag)
    self.run = evaluator.run
    self.decode: Callable[..., str] = evaluator.policy.tokenizer.decode
    if not isinstance(self.manager, EnvManager):
      raise ConfigError(
        f'--config.env.{tag}.manager={settings.env[tag].manager}: launch.play shows '
        'the turns of an EnvManager, and this class is not derived from it'
      )
    self.base_seed = base_seed(settings.seed, 'train', tag)
