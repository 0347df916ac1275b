"""Component roles refuse a component that stands in the place of another kind.

Kinds of components differ by what they read and what they return: a KL term compares
two policies and returns an array `[B, T]`, a policy loss reads log-probs of the policy
that it trains, an advantage returns `Advantages`. A built-in component is also known by
its module.
"""

import dataclasses
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.component_table import component_name
from jaxrl.functional.components import (
  call_component,
  component_info,
  fields_of,
  function_of,
  options_of,
)
from jaxrl.options import defaults
from jaxrl.types import Advantages, Algorithm

_PACKAGE = 'jaxrl.functional.'
_POLICY = ('logprobs', 'topk_logprobs')
_JUDGEMENTS = ('advantages', 'rewards', 'returns', 'values', 'pair_ids')
_OTHER_POLICIES = (
  *('ref_logprobs', 'old_logprobs', 'rollout_logprobs'),
  *('teacher_logprobs', 'teacher_topk_logprobs'),
)

_OF_KL = {'logprobs', 'mask', 'ref_logprobs', 'old_logprobs', 'rollout_logprobs'}


@dataclasses.dataclass(frozen=True)
class _Role:
  """Says how a kind of component is recognised.

  Attributes:
    what: The kind, as error messages call it.
    modules: The modules of the built-in ones.
    needs: Sets of batch fields; it reads at least one field of each.
    never: Batch fields that no such component reads.
    returns: What it returns.
  """

  what: str
  modules: tuple[str, ...]
  needs: tuple[Collection[str], ...] = ()
  never: Collection[str] = ()
  returns: str = 'losses'


_KL = {
  'modules': ('kl',),
  'needs': (_POLICY, _OTHER_POLICIES),
  'never': _JUDGEMENTS,
}
_ROLES = {
  'advantage': _Role('an advantage', ('advantages',), returns='advantages'),
  'policy_loss': _Role('a policy loss', ('losses',), (_POLICY,)),
  'kl_loss': _Role('a KL estimator', **_KL),
  'kl_penalty': _Role('a KL estimator', **_KL, returns='array'),
  'entropy_loss': _Role('an entropy term', ('entropy',), (('entropy', 'nec'),)),
  'value_loss': _Role('a value loss', ('losses',), (('values',),)),
  'correction': _Role(
    'a correction',
    ('corrections',),
    (('rollout_logprobs', 'weights_version'),),
    _POLICY,
    returns='weights',
  ),
  'kl_controller': _Role(
    'a KL controller', ('kl_controllers',), (('state', 'kl'),), returns='state'
  ),
}
_RETURNS = {
  'advantages': 'jaxrl.types.Advantages with an array [B, T]',
  'array': 'an array [B, T]',
  'losses': 'a loss a token, [B, T], or a row, [B], alone or as (loss, metrics)',
  'weights': '(weights, metrics), the weights [B, T]',
  'state': 'its next state, of the structure of the last one',
}


def role_problems(algorithm: Algorithm) -> Iterator[str]:
  """Yields a sentence for each component that is not of the kind its field holds.

  Args:
    algorithm: The algorithm.
  """
  for field, role in _ROLES.items():
    part = getattr(algorithm, field)
    if part is not None and (problem := _problem(algorithm, field, role, part)):
      yield problem


def _problem(algorithm: Algorithm, field: str, role: _Role, part: Any) -> str:
  function = function_of(part)
  where = f'{field}={getattr(function, "__name__", function)}'
  module = getattr(function, '__module__', None) or ''
  is_built_in = module.startswith(_PACKAGE)
  if is_built_in:
    module = module.removeprefix(_PACKAGE).partition('.')[0]
    if module not in role.modules:
      return f'{where} is of jaxrl.functional.{module}, and is not {role.what}'
  read = set(fields_of(function))
  if unwanted := sorted(read & set(role.never)):
    return f'{where} reads {", ".join(unwanted)}, so it is not {role.what}{_hint(read)}'
  for needed in role.needs:
    if not read & set(needed):
      names = ' or '.join(needed)
      return f'{where} does not read {names}, so it is not {role.what}{_hint(read)}'
  if field == 'policy_loss' and 'ref_logprobs' in read and read <= _OF_KL:
    return (
      f'{where} only compares the policy with a reference, so it is a KL estimator and '
      'no policy loss: give it as kl_loss'
    )
  if is_built_in:
    return ''
  state, result = _trial(algorithm, part)
  if result is _UNKNOWN or _fits(role.returns, result, state):
    return ''
  return (
    f'{where} returns {_describe(result)}; {role.what} returns {_RETURNS[role.returns]}'
  )


def _hint(read: set[str]) -> str:
  """Says what a component that reads these fields looks like."""
  if read & set(_POLICY) and read & {'advantages', 'pair_ids'}:
    return ': it looks like a policy loss'
  if 'values' in read and 'returns' in read:
    return ': it looks like a value loss'
  if {'logprobs', 'ref_logprobs'} <= read:
    return ': it looks like a KL estimator'
  if read & {'rewards'}:
    return ': it looks like an advantage'
  if read & {'entropy', 'nec'}:
    return ': it looks like an entropy term'
  return ''


_UNKNOWN = object()
_ROWS, _TOKENS, _TOP = 4, 6, 3
_BY_TOKEN = (
  *('logprobs', 'old_logprobs', 'rollout_logprobs', 'ref_logprobs'),
  *('teacher_logprobs', 'rewards', 'advantages', 'returns', 'values', 'old_values'),
  *('entropy', 'nec', 'sum_pi_squared'),
)
_BY_ROW = (
  *('group_ids', 'episode_ids', 'turn_ids', 'pair_ids', 'state_hash', 'role_ids'),
)


def _made_up_fields() -> dict[str, Any]:
  """Returns the shapes of a small batch's fields; rare ones are left out."""

  def array(dtype: object, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)

  by_token = (_ROWS, _TOKENS)
  fields = {name: array(jnp.float32, *by_token) for name in _BY_TOKEN}
  fields |= {name: array(jnp.int32, _ROWS) for name in _BY_ROW}
  for name in ('tokens', 'segment_ids', 'weights_version'):
    fields[name] = array(jnp.int32, *by_token)
  for name in ('topk_logprobs', 'teacher_topk_logprobs'):
    fields[name] = array(jnp.float32, *by_token, _TOP)
  fields['teacher_topk_ids'] = array(jnp.int32, *by_token, _TOP)
  fields |= {name: array(jnp.bool_, *by_token) for name in ('mask', 'teacher_mask')}
  fields |= {name: array(jnp.bool_, _ROWS) for name in ('expert_mask', 'greedy_mask')}
  fields['loss_weights'] = array(jnp.float32, _ROWS)
  fields |= {name: array(jnp.float32) for name in ('kl', 'num_rows')}
  return fields | {'step': array(jnp.int32)}


def _trial(algorithm: Algorithm, part: Any) -> tuple[Any, Any]:
  """Traces a component with a made-up batch.

  Returns:
    The state that it was given, and what it returned. `_UNKNOWN` in place of that if
    it cannot be told: the component reads what only a run makes, or it fails, which the
    first step then reports with its traceback.
  """
  info, results = component_info(part), [(None, _UNKNOWN)]

  def call(fields: Mapping[str, Any]) -> int:
    fields = {**fields, 'key': jax.random.key(0)}
    fields['aggregation'] = component_name(algorithm.aggregation)
    if info.init_state is not None:
      fields['state'] = info.init_state()
    if info.precompute is not None:
      accepted = inspect.signature(info.precompute).parameters.keys()
      options = defaults(function_of(part)) | options_of(part)
      chosen = {k: v for k, v in options.items() if k in accepted}
      fields |= call_component(info.precompute, fields, chosen)
    results.append((fields.get('state'), call_component(part, fields)))
    return 0

  try:
    jax.eval_shape(call, _made_up_fields())
  except Exception:
    return None, _UNKNOWN
  return results[-1]


def _fits(returns: str, result: object, state: object) -> bool:
  if returns == 'advantages':
    return isinstance(result, Advantages) and _is_array(result.advantages, 2)
  if returns == 'state':
    if state is None:  # `consistency` refuses it
      return True
    return jax.tree.structure(result) == jax.tree.structure(state)
  if returns == 'array':
    return _is_array(result, 2)
  if returns == 'losses' and not isinstance(result, tuple):
    # A reduced loss has a message of its own, in `training.train_step`.
    return _is_array(result)
  if not isinstance(result, tuple) or len(result) != 2:
    return False
  values, metrics = result
  num_axes = 2 if returns == 'weights' else None
  return _is_array(values, num_axes) and isinstance(metrics, Mapping)


def _is_array(value: Any, num_axes: int | None = None) -> bool:
  return hasattr(value, 'shape') and num_axes in (None, len(value.shape))


def _describe(value: Any) -> str:
  """Describes a value by its types and shapes."""
  if _is_array(value):
    return f'an array of shape {list(value.shape)} for a batch of {[_ROWS, _TOKENS]}'
  if isinstance(value, tuple):
    return f'a tuple of {len(value)}'
  if isinstance(value, Advantages):
    return 'Advantages'
  return 'None' if value is None else f'a {type(value).__name__}'
