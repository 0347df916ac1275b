"""Nothing is left without a restatement: no function, and no value of an option."""

import inspect
import typing

import pytest

from jaxrl.functional import (
  advantages,
  aggregation,
  corrections,
  entropy,
  kl,
  kl_controllers,
  losses,
  shaping,
)
from jaxrl.options import defaults, value_kind
from tests.functional import harness
from tests.functional.cases import ADVANTAGES, ALL, OTHERS

MODULES = (
  advantages,
  aggregation,
  kl_controllers,
  corrections,
  entropy,
  kl,
  losses,
  shaping,
)


def public(module):
  """The functions that are meant to be used, by name."""
  offered = getattr(module, '__all__', None)
  values = {name: getattr(module, name) for name in offered or vars(module)}
  return {
    name: value
    for name, value in values.items()
    if inspect.isfunction(value)
    and not name.startswith('_')
    and (offered is not None or value.__module__ == module.__name__)
  }


FUNCTIONS = {fn: name for m in MODULES for name, fn in public(m).items()}


@pytest.mark.parametrize(
  'fn', FUNCTIONS, ids=lambda fn: f'{fn.__module__}.{fn.__name__}'
)
def test_every_function_and_every_option_value_is_restated(fn):
  cases = [case for case in ALL if case.fn is fn]
  if fn.__name__ in OTHERS or fn.__name__.startswith('init_'):
    return
  assert cases, f'{fn.__name__} has no case'
  hints = typing.get_type_hints(fn)
  for option, default in defaults(fn).items():
    if option == 'row_valid':  # an array: test_aggregation
      continue
    seen = {case.options.get(option, default) for case in cases}
    choices = value_kind(hints.get(option)).choices
    if isinstance(default, bool):
      choices = (False, True)
    assert set(choices) <= seen, f'{option}: {set(choices) - seen} has no case'
    if default is None or type(None) in typing.get_args(hints.get(option)):
      assert None in seen and len(seen) > 1, f'{option}: with None, and with a number'


def test_the_batches_hold_every_awkward_case():
  """Enough of each that a function cannot pass without meeting it."""
  assert harness.BATCHES >= 200
  plain, steps = harness.stacked(), harness.stacked(True)
  masks, gap = plain['mask'], plain['logprobs'] - plain['old_logprobs']
  assert (abs(gap) > 49).sum() > 500
  empty = ~masks.any(axis=2) & (plain['episode_ids'] >= 0)
  assert empty.sum() > 200 and (plain['episode_ids'] < 0).sum() > 200
  sizes, equal = set(), 0
  for batch in harness.unstacked(plain):
    tasks = batch['group_ids'][batch['group_ids'] >= 0]
    for task in set(tasks):
      rows = batch['group_ids'] == task
      sizes.add(int(rows.sum()))
      equal += len(set(batch['rewards'][rows].sum(axis=1))) == 1 < rows.sum()
  assert {1, 2, 3, 4, 5} <= sizes and equal > 50
  assert (steps['turn_ids'] > 1).sum() > 100
  assert sum(case.steps for case in ADVANTAGES) > 15
