"""No array has the batch twice over, or the tokens: `[B, B]` and `[B, T, T]` never are.

The programs of every advantage and loss, and of their gradients, are read whole.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxrl.functional import reductions
from tests.functional import harness
from tests.functional.cases import ADVANTAGES, CORRECTIONS, KLS, LOSSES, M2PO, PAIRS
from tests.marks import slow_except

B, T = 512, 64
NAMES = ('logprobs', 'rewards', 'old_logprobs', 'teacher_logprobs', 'old_values')
TERMS = 'reward_terms', 'reward_weights'


def columns():
  """Shapes of a batch: what is traced needs no values."""
  real = jax.ShapeDtypeStruct((B, T), jnp.float32)
  ids = jax.ShapeDtypeStruct((B,), jnp.int32)
  flags = jax.ShapeDtypeStruct((B,), bool)
  one = jax.ShapeDtypeStruct((), jnp.float32)
  names = (*NAMES, 'advantages', 'rollout_logprobs', 'ref_logprobs', 'entropy', 'nec')
  names = (*names, 'sum_pi_squared')
  return {
    **dict.fromkeys(names, real),
    **dict.fromkeys(
      ('group_ids', 'episode_ids', 'turn_ids', 'state_hash', 'pair_ids', 'role_ids'),
      ids,
    ),
    **dict.fromkeys(('expert_mask', 'greedy_mask'), flags),
    **dict.fromkeys(('mask', 'step_ends'), jax.ShapeDtypeStruct((B, T), bool)),
    'term_scale': jax.ShapeDtypeStruct((B,), jnp.float32),
    'weights_version': jax.ShapeDtypeStruct((B, T), jnp.int32),
    **dict.fromkeys(TERMS, jax.ShapeDtypeStruct((B, 2), jnp.float32)),
    'step': one,
    'state': dict.fromkeys(('count', 'mean', 'square'), one)
    | {'baseline': jax.ShapeDtypeStruct((8,), jnp.float32)},
    'key': jax.ShapeDtypeStruct((2,), jnp.uint32),
  }


def equations(jaxpr):
  """Every equation, those of inner programs too."""
  for equation in jaxpr.eqns:
    yield equation
    for value in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')
    ):
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        yield from equations(inner)


def squares(fn, *args):
  """The shapes in which B or T stands twice."""
  program = jax.make_jaxpr(fn)(*args)
  shapes = {
    variable.aval.shape
    for equation in equations(program.jaxpr)
    for variable in (*equation.invars, *equation.outvars)
    if hasattr(variable.aval, 'shape')
  }
  assert len(shapes) > 1
  return {s for s in shapes if s.count(B) > 1 or s.count(T) > 1}


CASES = ADVANTAGES + LOSSES + M2PO + KLS + CORRECTIONS + PAIRS
# The first case of every function: `make test` leaves its other options out.
FIRST = list({case.name: case for case in reversed(CASES)}.values())


@pytest.mark.parametrize('case', slow_except(FIRST, CASES), ids=str)
def test_no_square_of_rows_or_tokens(case):
  inputs = columns()
  name = next(n for n in (*NAMES, *TERMS) if n in case.fn.__code__.co_varnames)

  def total(x, others):
    out = harness.call(case, {**others, name: x})
    leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.sum(leaf) for leaf in leaves)

  assert not squares(jax.value_and_grad(total), inputs.pop(name), inputs)


def test_a_square_is_found():
  """Also inside a loop: what compares every row with every other is caught."""
  x, ids = jnp.zeros(B), jnp.zeros(B, jnp.int32)

  def rank(x, ids):
    return jnp.sum((x[:, None] > x) & (ids[:, None] == ids), axis=1)

  def looped(x, ids):
    return jax.lax.scan(lambda carry, _: (rank(carry, ids) * 1.0, None), x, None, 3)

  assert squares(rank, x, ids) == {(B, B)} == squares(looped, x, ids)
  assert not squares(reductions.rank_in_group, x, ids)
