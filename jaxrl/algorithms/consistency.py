"""Consistency checks refuse algorithms whose components do not fit together."""

import dataclasses
from collections.abc import Collection, Iterator

from jaxrl.algorithms import component_roles, requirements
from jaxrl.functional import kl
from jaxrl.functional.components import (
  component_info,
  fields_of,
  function_of,
  is_group_relative,
)
from jaxrl.options import ConfigError, closest_match
from jaxrl.types import Algorithm, Batch, PolicyOutputs

# The batch fields that components may read; `prepare` and `precompute` make others.
BATCH_FIELDS = frozenset(
  {field.name for field in dataclasses.fields(Batch)} - {'action_mask', 'extras'}
  | {field.name for field in dataclasses.fields(PolicyOutputs)}
  | {'mask', 'old_values', 'state', 'step', 'key', 'kl', 'num_rows'}
)
# Components that may carry a state: each says what its next one is.
STATEFUL_FIELDS = ('advantage', 'kl_controller')
# Components that judge samples of the policy, so not rows from files.
ON_SAMPLES_FIELDS = ('correction', 'kl_penalty', 'kl_controller')


def validate(
  algorithm: Algorithm, where: str = 'algorithm', chosen: Collection[str] = ()
) -> None:
  """Checks that the components and settings of an algorithm fit together.

  Args:
    algorithm: The algorithm.
    where: What error messages begin with.
    chosen: Names of the settings and components that the user chose, not the builder.

  Raises:
    ConfigError: If they do not, saying which and what to do.
  """
  for problem in _problems(algorithm, chosen):
    raise ConfigError(f'{where}: {problem}')


def _problems(algorithm: Algorithm, chosen: Collection[str]) -> Iterator[str]:
  corrected = algorithm.correction is not None
  is_chosen = 'old_logprobs_source' in chosen
  if corrected and is_chosen and algorithm.old_logprobs_source == 'rollout':
    yield (
      "old_logprobs_source='rollout' starts ratios from the rollout's log-probs, which "
      'contain the mismatch already: a correction would count it twice. Leave it out, '
      "or set correction='none'"
    )
  yield from _unknown_fields(algorithm)
  yield from component_roles.role_problems(algorithm)
  if 'pair_ids' in fields_of(algorithm.policy_loss):
    yield from _pair_problems(algorithm, chosen)
  if algorithm.kl_penalty is not None and algorithm.advantage is None:
    yield (
      'kl_penalty is subtracted from rewards, and no advantage reads them: use kl_loss'
    )
  if algorithm.kl_controller is not None and not (
    algorithm.kl_loss or algorithm.kl_penalty
  ):
    yield (
      'kl_controller steers the coefficient of kl_loss or kl_penalty, and there is '
      "neither: set kl_loss='k2(coef=.001)', or a kl_coef above 0"
    )
  if algorithm.critic_warmup and algorithm.value_loss is None:
    yield (
      f'critic_warmup={algorithm.critic_warmup} trains the critic first, but there is '
      'none: an algorithm with a value_loss has one, as ppo does'
    )
  if algorithm.data_format != 'rollout':
    for field in ON_SAMPLES_FIELDS:
      if getattr(algorithm, field) is not None:
        yield (
          f'{field} judges what the policy sampled, and an algorithm that learns from '
          f'files ({algorithm.data_format}) samples nothing: leave it out'
        )
  yield from _self_teacher_problems(algorithm)
  yield from _state_problems(algorithm)


def _self_teacher_problems(algorithm: Algorithm) -> Iterator[str]:
  teacher = algorithm.self_teacher
  if teacher is None:
    return
  read = requirements.fields_read(algorithm)
  if not any(name.startswith('teacher_') for name in read):
    yield (
      'the policy is its own teacher, and no component reads what it says: leave '
      'policy_loss out, or take another algorithm'
    )
  if algorithm.data_format != 'rollout':
    yield (
      'the policy is its own teacher where it plays, and an algorithm that learns from '
      f'files ({algorithm.data_format}) plays nothing'
    )
  if teacher.params == 'ema' and 'ref_logprobs' in read:
    yield (
      "teacher_params='ema' keeps the moving average and the reference in one place: "
      "leave the KL terms out, or set teacher_params='initial'"
    )


def _pair_problems(algorithm: Algorithm, chosen: Collection[str]) -> Iterator[str]:
  name = function_of(algorithm.policy_loss).__name__
  if algorithm.batch_unit != 'pair':
    yield (
      f'{name} compares the rows of a pair, but batch_unit={algorithm.batch_unit!r} '
      "may separate them: take it from an algorithm with batch_unit='pair', as dpo is"
    )
  if 'aggregation' in chosen:
    yield (
      f'{name} is a mean over pairs: aggregation={algorithm.aggregation} has nothing '
      'to weight; leave it out'
    )
  if algorithm.correction is not None:
    yield f'{name} is one number per pair, a correction is one per token'


def _unknown_fields(algorithm: Algorithm) -> Iterator[str]:
  """Yields an error for each required batch field that nothing provides."""
  for field in (field.name for field in dataclasses.fields(algorithm)):
    part = getattr(algorithm, field)
    if not callable(part) or field in ('prepare', 'init_state', 'sampler'):
      continue
    if algorithm.prepare or component_info(part).precompute:
      continue
    for name in fields_of(part, required=True):
      if name not in BATCH_FIELDS:
        match = closest_match(name, BATCH_FIELDS)
        hint = f' Did you mean {match!r}?' if match else ''
        yield (
          f'{field}={function_of(part).__name__} reads a batch field {name!r}, which '
          f'does not exist.{hint} There are: {", ".join(sorted(BATCH_FIELDS))}. '
          'Options of a component go after a `*`'
        )


def _state_problems(algorithm: Algorithm) -> Iterator[str]:
  """Yields an error for each component whose state cannot be carried on."""
  controller = algorithm.kl_controller
  if controller is not None and component_info(controller).init_state is None:
    yield (
      f'kl_controller={function_of(controller).__name__} has no initial state: '
      'decorate it with @component(init_state=init) of jaxrl.functional.components, '
      "where init() returns {'scale': …}, the factor on the coefficient"
    )
  for field in ('policy_loss', 'kl_loss', 'kl_penalty', 'entropy_loss', 'value_loss'):
    part = getattr(algorithm, field)
    if component_info(part).init_state is not None:
      yield (
        f'{field}={function_of(part).__name__} declares an init_state; only '
        f'{" and ".join(STATEFUL_FIELDS)} carry a state'
      )


def supports_correction(algorithm: Algorithm) -> bool:
  """Returns True if a correction repairs what stale rollouts do to the policy loss."""
  on_policy = component_info(algorithm.policy_loss).on_policy
  return algorithm.data_format == 'rollout' and on_policy


def warning_messages(algorithm: Algorithm) -> Iterator[str]:
  """Yields a sentence for each thing that runs, but hardly as intended."""
  if algorithm.kl_loss is not None and function_of(algorithm.kl_loss) is kl.k1:
    yield (
      'the gradient of k1 as a loss is zero in expectation; use k2 or k3, or make it '
      "a reward penalty: kl_penalty='k1(coef=.001)'"
    )
  if algorithm.group_size == 1 and is_group_relative(algorithm.advantage):
    name = function_of(algorithm.advantage).__name__  # pyright: ignore
    yield (
      f'group_size=1 leaves {name} nothing to compare with: the advantage is the bare '
      'reward; set group_size to 2 or more'
    )
