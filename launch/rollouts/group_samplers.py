"""Builds the sampler that gives training its groups, for algorithms with rollouts.

`algorithm.sampler` names it, see `jaxrl.data.samplers`. Some samplers mix rollouts with
rows that an expert wrote, see `launch.rollouts.offline_data`.
"""

from typing import Any, Protocol

from jaxrl.algorithms import requirements
from jaxrl.data import samplers
from jaxrl.data.file_sampler import FileSampler
from jaxrl.data.seeds import fold_seed
from jaxrl.functional import components
from jaxrl.model_loading import LoadedModel
from jaxrl.options import ConfigError
from jaxrl.types import Algorithm, Group
from launch.rollouts import offline_data
from launch.settings.run_settings import RunSettings


class GroupProvider(Protocol):
  """Gives the groups of a step: a `RolloutScheduler` or an experience store."""

  async def take(self, step: int, min_version: int | None = None) -> list[Group]:
    """Returns the groups of a step, none with weights older than `min_version`."""
    ...

  async def counts(self) -> dict[str, float]:
    """Returns metrics of the groups by name."""
    ...


class RunSource:
  """Shows a run to its sampler: the groups it plays, and the rows experts wrote.

  Attributes:
    num_groups: Groups of a step.
    group_size: Rows of a group.
    seed: Seed of the sampler's own draws.
    max_staleness: Steps that a group may be old; None if no rule drops it for its age.
  """

  def __init__(self, settings: RunSettings, groups: GroupProvider, tokenizer: Any):
    self._settings = settings
    self._groups = groups
    self._tokenizer = tokenizer
    self.num_groups = settings.batch.num_groups
    self.group_size = requirements.rows_per_group(settings.algorithm)
    self.seed = fold_seed(settings.seed, 'sampler')
    limit = settings.rollout.staleness_limit
    self.max_staleness: int | None = None
    if limit is not None and limit.action == 'drop':
      self.max_staleness = limit.max_age

  async def take(self, step: int, min_version: int | None = None) -> list[Group]:
    """Waits for the groups of a step."""
    return await self._groups.take(step, min_version)

  async def num_stale(self) -> int:
    """Counts the groups that were dropped for their age."""
    return int((await self._groups.counts()).get('queue/stale', 0))

  def experts(self, batch_size: int) -> FileSampler:
    """Returns a sampler of expert rows."""
    return offline_data.make_expert_sampler(self._settings, self._tokenizer, batch_size)


def make_group_sampler(
  settings: RunSettings, policy: LoadedModel, groups: GroupProvider
) -> samplers.Sampler:
  """Returns the sampler of a run that plays.

  Raises:
    ConfigError: If the sampler does not fit the algorithm or the environment tags.
  """
  algorithm, tags = settings.algorithm, settings.training_tags
  source = RunSource(settings, groups, policy.tokenizer)
  sampler = samplers.make_sampler(algorithm.sampler, source)
  where = f'--config.algorithm.sampler={algorithm.sampler}'
  if sampler.groups_from_queue < len(tags):
    raise ConfigError(
      f'{where} plays {sampler.groups_from_queue} of the '
      f'{settings.batch.num_groups} groups of a step, but each of the '
      f'{len(tags)} environment tags ({", ".join(tags)}) needs at least one: '
      'raise --config.batch.num_groups'
    )
  if sampler.expert_rows:
    _check_experts(algorithm, where)
  return sampler


def _check_experts(algorithm: Algorithm, where: str) -> None:
  """Refuses expert rows, which bring no log-probs, where the algorithm needs these."""
  if requirements.old_logprobs_source(algorithm) == 'decoupled':
    return
  for slot in ('policy_loss', 'kl_loss'):
    part = getattr(algorithm, slot)
    if part is None:
      continue
    read = components.fields_of(part)
    if 'old_logprobs' in read and 'expert_mask' not in read:
      raise ConfigError(
        f'{where} mixes in rows from files, which have no rollout_logprobs, but '
        f'the {slot} {components.function_of(part).__name__} needs them. Use an '
        "algorithm with old_logprobs_source='decoupled', which computes them "
        'for those rows, or one that tells expert rows apart, such as mix'
      )
