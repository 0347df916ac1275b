"""Requirements derive from an algorithm's components what the framework must provide.

The signatures of the components say which batch fields they read. From these follows
what the learner must score, how episodes become rows and what state is carried from
batch to batch.
"""

import dataclasses
import functools

from jaxrl.component_table import as_call
from jaxrl.functional.components import (
  BoundComponent,
  component_info,
  fields_of,
  function_of,
  options_of,
)
from jaxrl.options import Configurable, Keywords, wanted_type
from jaxrl.types import Algorithm, PyTree

COMPONENT_FIELDS = (
  'advantage',
  'policy_loss',
  'kl_loss',
  'kl_penalty',
  'entropy_loss',
  'value_loss',
  'correction',
  'kl_controller',
)
# Batch fields that somebody must compute or play, and what that takes. Any other field
# comes with the batch.
COMPUTED_FIELDS = {
  'old_logprobs': 'old_logprobs',
  'ref_logprobs': 'ref_logprobs',
  'teacher_logprobs': 'teacher_logprobs',
  'teacher_topk_ids': 'teacher_topk',
  'teacher_topk_logprobs': 'teacher_topk',
  'topk_logprobs': 'teacher_topk',
  'values': 'values',
  'old_values': 'values',
  'entropy': 'entropy',
  'nec': 'nec',
  'sum_pi_squared': 'sum_pi_squared',
  'greedy_mask': 'greedy_mask',
}


def components_of(algorithm: Algorithm) -> dict[str, Configurable]:
  """Returns the components that an algorithm has, by field."""
  parts = {field: getattr(algorithm, field) for field in COMPONENT_FIELDS}
  return {field: part for field, part in parts.items() if part is not None}


def old_logprobs_source(algorithm: Algorithm) -> str:
  """Returns whose log-probs components get as `old_logprobs`.

  Returns:
    'rollout' or 'decoupled'; a correction implies 'decoupled'.
  """
  return algorithm.old_logprobs_source if algorithm.correction is None else 'decoupled'


@functools.lru_cache(maxsize=256)  # signatures take a millisecond to read
def fields_read(algorithm: Algorithm, *components: str) -> frozenset[str]:
  """Returns the batch fields that components read.

  Args:
    algorithm: The algorithm.
    *components: Fields of `Algorithm`, 'prepare' among them; all if there are none.

  Returns:
    Names of batch fields.
  """
  parts = components_of(algorithm)
  chosen = [
    part for field, part in parts.items() if field in components or not components
  ]
  if algorithm.prepare is not None and ('prepare' in components or not components):
    chosen.append(algorithm.prepare)
  precompute = [component_info(part).precompute for part in chosen]
  read = {name for part in (*chosen, *precompute) if part for name in fields_of(part)}
  if parts.get('correction') in chosen and not has_ratio(algorithm):
    # The correction stands in for a ratio and starts from the policy as it is.
    others = [part for part in chosen if part is not algorithm.correction]
    if not any('old_logprobs' in fields_of(part) for part in others):
      read.discard('old_logprobs')
  return frozenset(read)


def has_ratio(algorithm: Algorithm) -> bool:
  """Returns True if the policy loss reads `old_logprobs`, so has a ratio of its own."""
  return 'old_logprobs' in fields_of(algorithm.policy_loss)


def fields_read_before_update(algorithm: Algorithm) -> frozenset[str]:
  """Returns the batch fields that components read before the first update of a batch.

  There `logprobs` are those that `old_logprobs_source` names.
  """
  components = ['advantage', 'kl_penalty']
  if algorithm.kl_controller is not None:
    components += ['kl_controller', 'kl_loss']
  return fields_read(algorithm, *components)


def needs(algorithm: Algorithm) -> frozenset[str]:
  """Returns what must be scored or played for an algorithm.

  Returns:
    Mostly names of `Batch` fields: 'ref_logprobs', 'values', 'greedy_mask' …
    'old_logprobs' is among them only if their source is 'decoupled': otherwise the
    rollout's own serve. 'teacher_topk' stands for the teacher's likeliest tokens with
    their log-probs.
  """
  computed = {
    COMPUTED_FIELDS[name] for name in fields_read(algorithm) if name in COMPUTED_FIELDS
  }
  if old_logprobs_source(algorithm) != 'decoupled':
    computed.discard('old_logprobs')
  elif 'logprobs' in (
    fields_read_before_update(algorithm) | fields_read(algorithm, 'prepare')
  ):
    computed.add('old_logprobs')
  return frozenset(computed)


def rows_per_group(algorithm: Algorithm) -> int:
  """Returns the samples of each task, a greedy one included if a component reads it."""
  return algorithm.group_size + ('greedy_mask' in needs(algorithm))


def row_format(algorithm: Algorithm) -> str:
  """Returns how episodes become rows.

  Returns:
    'step', a row for each turn, if a component distinguishes turns by id; else
    'trajectory', a row for each episode.
  """
  turn_fields = {'turn_ids', 'state_hash'}
  return 'step' if fields_read(algorithm) & turn_fields else 'trajectory'


def with_length(algorithm: Algorithm, length: float) -> Algorithm:
  """Returns the algorithm with the constant that its aggregation divides by.

  Args:
    algorithm: The algorithm. One whose aggregation takes no length, or has one, is
      returned as it is.
    length: Tokens.
  """
  aggregation = as_call(algorithm.aggregation)
  takes_length = aggregation.name == 'sequence_mean_token_sum_norm'
  if not takes_length or 'length' in aggregation.options:
    return algorithm
  aggregation = aggregation.with_options(length=length)
  return dataclasses.replace(algorithm, aggregation=aggregation)


def init_state(algorithm: Algorithm) -> dict[str, PyTree]:
  """Returns the state that components carry from batch to batch, before the first.

  Returns:
    A pytree for each component that has a state, by field.
  """
  initializers = {
    field: init
    for field, part in components_of(algorithm).items()
    if (init := component_info(part).init_state)
  }
  if algorithm.init_state is not None:
    initializers['prepare'] = algorithm.init_state
  return {field: init() for field, init in initializers.items()}


def split_hparams(algorithm: Algorithm) -> tuple[Algorithm, dict[str, Keywords]]:
  """Separates numeric options from the rest, so that jit can trace them.

  Returns:
    The algorithm without its numeric options, hashable and equal by value, and a pytree
    {field: {option: number}}. `call_component(part, batch_fields, hparams[field])`
    joins the two.
  """
  static, hparams = {}, {}
  for field, part in components_of(algorithm).items():
    options, function = options_of(part), function_of(part)
    hparams[field] = {
      # 1 and 1.0 must not compile twice, so an option that is a float always is one.
      k: float(v) if wanted_type(function, k) is float else v
      for k, v in options.items()
      if _is_number(v)
    }
    rest = sorted((k, v) for k, v in options.items() if not _is_number(v))
    static[field] = BoundComponent(function, tuple(rest))
  if algorithm.prepare is not None:
    # It runs outside the components that take hparams, so it keeps its own options.
    options = tuple(sorted(options_of(algorithm.prepare).items()))
    static['prepare'] = BoundComponent(function_of(algorithm.prepare), options)
  static['old_logprobs_source'] = old_logprobs_source(algorithm)
  return dataclasses.replace(algorithm, **static), hparams


def _is_number(value: object) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)
