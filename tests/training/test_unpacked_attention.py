"""Packed rows attend on a rectangle as they do among themselves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.training.batching import unpacked_attention
from jaxrl.types import PackedRows
from tests.marks import slow
from tests.models import small

LONGEST = 12


def lying(sequences, length, count):
  """Rows of sequences (packed row, tokens, tokens shared), one prompt a packed row."""
  slots = {name: np.zeros((count, length), np.int32) for name in ('ids', 'prefix')}
  slots |= {'origin': np.full((count, length), -1, np.int32)}
  slots |= {'positions': np.zeros((count, length), np.int32)}
  place = np.full((len(sequences), LONGEST), -1, np.int32)
  ends, segments, prompts = [0] * count, [0] * count, {}

  def put(b, row, times, prefix):
    segments[row] += 1
    part = row, slice(ends[row], ends[row] + len(times))
    slots['origin'][part], slots['positions'][part] = b * LONGEST + times, times
    slots['ids'][part], slots['prefix'][part] = segments[row], prefix
    ends[row] += len(times)
    return row * length + np.arange(ends[row] - len(times), ends[row])

  for b, (row, tokens, shared) in enumerate(sequences):
    if not tokens:
      continue
    if shared and row not in prompts:
      put(b, row, np.arange(shared), 0)
      prompts[row] = segments[row]
    times = np.arange(shared, tokens)
    place[b, times] = put(b, row, times, prompts[row] if shared else 0)
  tokens = np.array([tokens for _, tokens, _ in sequences])
  ids = (np.arange(LONGEST) < tokens[:, None]).astype(np.int32)
  columns = (slots[name] for name in ('origin', 'ids', 'prefix', 'positions'))
  return PackedRows(*columns, place), ids


CASES = {
  'shared': [(0, 9, 4), (0, 12, 4), (0, 5, 4), (1, 12, 0), (1, 3, 0), (0, 0, 0)],
  'two prompts': [(0, 12, 6), (0, 7, 6), (1, 10, 3), (1, 4, 3), (1, 12, 3)],
  'none shared': [(0, 11, 0), (0, 12, 0), (1, 1, 0), (1, 12, 0)],
}
BARE = [
  ('shared', True),
  slow('two prompts', True),
  slow('none shared', True),
  slow('none shared', False),
]


@pytest.mark.parametrize(('case', 'prefixes'), BARE)
def test_value_and_gradient_are_those_of_packed_rows(case, prefixes):
  rows, ids = lying(CASES[case], length=28, count=2)
  rng = np.random.default_rng(0)
  model, params = small.model_and_params()
  model = dataclasses.replace(model, kernels='reference')
  tokens = rng.integers(1, model.config.vocab_size, rows.origin.shape)
  tokens = jnp.asarray(np.where(rows.origin < 0, 0, tokens), jnp.int32)
  weights = jnp.asarray(np.where(rows.origin < 0, 0, rng.normal(size=tokens.shape)))
  if not prefixes:
    rows = dataclasses.replace(rows, prefix_ids=None)
  unpacked = unpacked_attention.unpack_rows(rows, ids)

  def total(params, unpacked):
    outputs = model.policy_outputs(
      params,
      tokens,
      rows.segment_ids,
      prefix_ids=rows.prefix_ids,
      positions=rows.positions,
      attend_with=unpacked
      and functools.partial(unpacked_attention.attend, unpacked, rows),
    )
    return (outputs.logprobs * weights).sum()

  compute = jax.jit(jax.value_and_grad(total))
  (value, gradient), (expected, wanted) = (
    compute(params, unpacked),
    compute(params, None),
  )
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + 1e-7),
    gradient,
    wanted,
  )


@pytest.mark.parametrize('case', CASES)
def test_the_transposes_are_the_transposes(case):
  rows, ids = lying(CASES[case], length=28, count=2)
  unpacked = jax.jit(unpacked_attention.unpack_rows)(rows, ids)
  rng = np.random.default_rng(0)
  slots = jnp.asarray(rng.normal(size=(*rows.origin.shape, 3)), jnp.float32)
  cells = jnp.asarray(rng.normal(size=(*ids.shape, 3)), jnp.float32)
  pairs = (
    (unpacked_attention._spread, unpacked_attention._gather, slots, cells),
    (unpacked_attention._collect, unpacked_attention._return, cells, slots),
  )
  for function, transposed, x, y in pairs:
    transpose = jax.linear_transpose(lambda x, f=function: f(unpacked, x), x)
    (expected,) = jax.jit(transpose)(y)
    np.testing.assert_allclose(jax.jit(transposed)(unpacked, y), expected, atol=1e-6)


def test_no_prompt_is_spread_to_rows_that_are_not_there():
  rows, ids = lying(CASES['shared'], length=28, count=2)
  unpacked = unpacked_attention.unpack_rows(rows, np.ones_like(ids))
  assert (np.asarray(unpacked.source)[5] == -1).all()
  assert (np.asarray(unpacked.segment_ids)[5] == 0).all()
  assert np.asarray(unpacked.shared).tolist() == [4, 4, 4, 0, 0, 0]
  assert np.asarray(unpacked.first).tolist() == [0, 0, 0, 3, 4, 5]


@pytest.mark.parametrize(
  ('sequences', 'longest', 'slots', 'platform', 'taken'),
  [
    (8, 96, (1, 551), 'cpu', True),  # samples of one prompt
    (8, 96, (1, 551), 'gpu', False),  # too short for a kernel
    (8, 192, (1, 1100), 'gpu', True),
    (8, 192, (1, 512), 'cpu', False),  # more pairs
    (23, 96, (1, 1024), 'cpu', False),  # fewer pairs, more than twice the slots
    (21, 96, (1, 1024), 'cpu', True),
    (6, 128, (3, 256), 'cpu', True),  # half of the pairs
    (7, 128, (3, 256), 'cpu', False),
  ],
)
def test_it_is_taken_where_it_is_little(sequences, longest, slots, platform, taken):
  place = np.zeros((sequences, longest), np.int32)
  rows = PackedRows(np.zeros(slots, np.int32), None, None, None, place)
  assert unpacked_attention.is_cheaper(rows, platform) == taken
