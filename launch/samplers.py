"""From a config to the sampler that gives training its groups.

algorithm.sampler: a call string, see `jaxrl.data.samplers`; '' leaves the algorithm's.
expert.path: the rows that samplers mix with rollouts, in the formats of
`jaxrl.data.formats`; '' stands for sft.path, or else dataset.path.
"""

from typing import Any, Protocol

from jaxrl.algorithms import compose
from jaxrl.config import Config
from jaxrl.data import samplers, staleness
from jaxrl.data.files import FileSampler
from jaxrl.data.seeds import fold
from jaxrl.signature import ConfigError
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm, Group
from launch import files


class Played(Protocol):
  """Whoever plays groups, as `launch.rollouts.Rollouts` does."""

  async def take(self, step: int, min_version: int | None = None) -> list[Group]: ...

  async def counts(self) -> dict[str, float]: ...


class RunSource:
  """A run as samplers see it: what is played, and the rows that experts wrote."""

  def __init__(
    self, config: Config, algorithm: Algorithm, rollouts: Played, tokenizer: Any
  ):
    self._config, self._rollouts = config, rollouts
    self._tokenizer = tokenizer
    self.num_groups = config.batch.num_groups
    self.group_size = compose.rows_per_group(algorithm)
    self.seed = fold(config.seed, 'sampler')
    bound = staleness.parse(config.rollout.staleness)
    self.max_staleness: int | None = None
    if bound is not None and bound.action == 'drop':
      self.max_staleness = bound.most

  async def take(self, step: int, min_version: int | None = None) -> list[Group]:
    return await self._rollouts.take(step, min_version)

  async def num_stale(self) -> int:
    return int((await self._rollouts.counts()).get('queue/stale', 0))

  def experts(self, batch_size: int) -> FileSampler:
    return files.experts(self._config, self._tokenizer, batch_size)


def make(
  config: Config, algorithm: Algorithm, policy: Policy, rollouts: Played
) -> samplers.Sampler:
  """The sampler of a run that plays. Raises ConfigError for what does not fit."""
  source = RunSource(config, algorithm, rollouts, policy.tokenizer)
  sampler = samplers.make(algorithm.sampler, source)
  where, tags = f'--config.algorithm.sampler={algorithm.sampler}', list(config.env)
  if sampler.groups_from_queue < len(tags):
    raise ConfigError(
      f'{where} has {sampler.groups_from_queue} of {config.batch.num_groups} groups '
      f'played for each step, and each of the {len(tags)} environment tags '
      f'({", ".join(tags)}) needs one: raise --config.batch.num_groups'
    )
  if sampler.expert_rows:
    _check_experts(algorithm, where)
  return sampler


def _check_experts(algorithm: Algorithm, where: str) -> None:
  """Expert rows come without the log-probs of whoever wrote them."""
  if compose.behaviour(algorithm) == 'decoupled':
    return
  for slot in ('policy_loss', 'kl_loss'):
    part = getattr(algorithm, slot)
    if part is None:
      continue
    read = compose.columns(part)
    if 'old_logprobs' in read and 'expert_mask' not in read:
      raise ConfigError(
        f'{where} brings rows from files, which have no rollout_logprobs, and the '
        f'{slot} {compose.function_of(part).__name__} compares with them. Set '
        '--config.algorithm.behaviour=decoupled, which scores those rows too, or take '
        'an algorithm that tells expert rows apart, as mix does'
      )


def check(config: Config, algorithm: Algorithm) -> None:
  """Raises ConfigError for a call string that names no sampler, or has no effect."""
  if algorithm.schema == 'rollout':
    samplers.find(algorithm.sampler)
  elif config.algorithm.sampler:
    raise ConfigError(
      f'--config.algorithm.sampler={config.algorithm.sampler}: algorithm '
      f'{config.algorithm.name} takes all of its rows from files, in their own order'
    )
