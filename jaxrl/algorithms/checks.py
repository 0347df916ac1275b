"""What an algorithm's parts and settings must not be together, and what is doubtful."""

import dataclasses
from collections.abc import Collection, Iterator

from jaxrl.algorithms.parts import columns, function_of, options_of
from jaxrl.functional import advantages, kl, losses, marks
from jaxrl.signature import ConfigError, defaults, nearest
from jaxrl.types import Algorithm, Batch, PolicyOutputs

# Advantages that are the bare reward where a group has one member.
GROUP_RELATIVE = frozenset(
  (
    advantages.asymre,
    advantages.clip_b,
    advantages.clip_v,
    advantages.cod,
    advantages.gigpo,
    advantages.grpo,
    advantages.grpo_distill,
    advantages.opmd,
    advantages.rec,
    advantages.rloo,
    advantages.step_wise_grpo,
  )
)
# Losses that are right only where the sampled tokens are those of the policy they start
# from. Others are off-policy by themselves, as topr, or read no log-probs that sampled.
ON_POLICY = frozenset(
  (
    losses.cispo,
    losses.gspo,
    losses.mix,
    losses.mix_chord,
    losses.ppo_clip,
    losses.sapo,
    losses.vanilla,
  )
)
# What a part may name as a column; `prepare` and marks on parts can make others.
COLUMNS = frozenset(
  {field.name for field in dataclasses.fields(Batch)} - {'action_mask', 'extras'}
  | {field.name for field in dataclasses.fields(PolicyOutputs)}
  | {'mask', 'old_values', 'state', 'step', 'key', 'kl', 'num_rows'}
)
# Slots whose parts may carry a state: each says what its next one is.
STATEFUL = ('advantage', 'kl_controller')
# Slots whose parts judge samples of the policy; rows from files are none.
OF_SAMPLES = ('correction', 'kl_penalty', 'kl_controller')


def refuse(
  algorithm: Algorithm, where: str = 'algorithm', asked: Collection[str] = ()
) -> None:
  """Raises ConfigError for parts that do not fit together.

  asked: the names of settings and parts that the user chose, not the maker.
  """
  for problem in _problems(algorithm, asked):
    raise ConfigError(f'{where}: {problem}')


def _problems(algorithm: Algorithm, asked: Collection[str]) -> Iterator[str]:
  loss = function_of(algorithm.policy_loss)
  corrected = algorithm.correction is not None
  if corrected and 'behaviour' in asked and algorithm.behaviour == 'rollout':
    yield (
      "behaviour='rollout' starts ratios from the rollout's log-probs, which hold the "
      'mismatch already: a correction would count it twice. Leave behaviour out, or '
      "set correction='none'"
    )
  yield from _strange_columns(algorithm)
  if 'pair_ids' in columns(loss):
    if algorithm.atom != 'pair':
      yield (
        f'{loss.__name__} compares the rows of a pair, but atom={algorithm.atom!r} may '
        "part them: take it from an algorithm with atom='pair', as dpo is"
      )
    if 'aggregation' in asked:
      yield (
        f'{loss.__name__} is a mean over pairs: aggregation='
        f'{algorithm.aggregation!r} has nothing to weigh; leave it out'
      )
    if corrected:
      yield f'{loss.__name__} is one number a pair, a correction is one a token'
  if algorithm.kl_penalty is not None and algorithm.advantage is None:
    yield 'kl_penalty comes off rewards, and no advantage reads them: use kl_loss'
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
  if algorithm.schema != 'rollout':
    for slot in OF_SAMPLES:
      if getattr(algorithm, slot) is not None:
        yield (
          f'{slot} goes by what the policy sampled, and with schema='
          f'{algorithm.schema!r} it samples nothing: leave it out'
        )
  yield from _without_slot(algorithm)


def _strange_columns(algorithm: Algorithm) -> Iterator[str]:
  """Columns that nothing gives, which a part cannot do without."""
  for slot in (field.name for field in dataclasses.fields(algorithm)):
    part = getattr(algorithm, slot)
    if not callable(part) or slot in ('prepare', 'init_state'):
      continue
    made = algorithm.prepare or marks.make_columns(function_of(part))
    for name in columns(part, required=True):
      if name not in COLUMNS and not made:
        near = nearest(name, COLUMNS)
        hint = f'; did you mean {near!r}?' if near else ''
        yield (
          f'{slot}={function_of(part).__name__} reads a column {name!r}, and there is '
          f'none{hint} There are: {", ".join(sorted(COLUMNS))}. Options of a part go '
          'after a `*`'
        )


def _without_slot(algorithm: Algorithm) -> Iterator[str]:
  """Parts that would carry a state and have no way to hand it on, or none to steer."""
  controller = algorithm.kl_controller
  if controller is not None and not marks.init_state(function_of(controller)):
    yield (
      f'kl_controller={function_of(controller).__name__} is not marked: put '
      '@stateful(init) from jaxrl.functional.marks above it, where init() is '
      "{'scale': …}, what the coefficient is multiplied by"
    )
  for slot in ('policy_loss', 'kl_loss', 'kl_penalty', 'entropy_loss', 'value_loss'):
    part = getattr(algorithm, slot)
    if part is not None and marks.init_state(function_of(part)):
      yield (
        f'{slot}={function_of(part).__name__} is marked stateful; only '
        f'{" and ".join(STATEFUL)} carry a state'
      )


def corrigible(algorithm: Algorithm) -> bool:
  """Whether a correction mends what stale or foreign rollouts do to its loss."""
  loss = function_of(algorithm.policy_loss)
  return algorithm.schema == 'rollout' and loss in ON_POLICY


def doubts(algorithm: Algorithm) -> Iterator[str]:
  """What runs, but hardly as meant: a sentence each."""
  if algorithm.kl_loss is not None and function_of(algorithm.kl_loss) is kl.k1:
    yield (
      'the gradient of k1 as a loss is zero in expectation; use k2 or k3, or make it '
      "a reward penalty: kl_penalty='k1(coef=.001)'"
    )
  if algorithm.group_size == 1 and _compares(algorithm):
    name = function_of(algorithm.advantage).__name__  # pyright: ignore
    yield (
      f'group_size=1 leaves {name} nothing to compare with: the advantage is the bare '
      'reward; set group_size to 2 or more'
    )


def _compares(algorithm: Algorithm) -> bool:
  """Whether the advantage sets members of a group against each other."""
  if algorithm.advantage is None:
    return False
  function = function_of(algorithm.advantage)
  options = defaults(function) | options_of(algorithm.advantage)
  chosen = [options.get(name) for name in ('mean', 'over', 'baseline')]
  return function in GROUP_RELATIVE or 'group' in chosen
