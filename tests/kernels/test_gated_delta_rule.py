"""The gated delta rule equals float64 loops over single sequences, in every form."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import gated_delta_rule as rule
from tests import marks
from tests.kernels.test_compiled_for_targets import compiled, mesh_of

KEY_HEADS, HEADS, DIM, WIDE = 2, 4, 8, 6
# Segments of two rows: tokens, and the number of the segment that each continues.
ROWS = [
  [(9, 0), (5, 1), (7, 1), (3, 0), (2, 4), (6, 4)],
  [(4, 0), (12, 0), (8, 2), (3, 0), (4, 2)],
]
LENGTH = 37


def make_inputs(slow=True):
  """Inputs that forget slowly, so that a leak from another sequence shows."""
  draw = np.random.default_rng(0)
  shape, values = (len(ROWS), LENGTH, KEY_HEADS, DIM), (len(ROWS), LENGTH, HEADS)
  q, k = draw.standard_normal((2, *shape))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  log_decay = -draw.exponential(0.02 if slow else 2.0, values)
  beta = draw.uniform(0.1, 1.0, values)
  v = draw.standard_normal((*values, WIDE))
  return [x.astype(np.float32) for x in (q, k, v, log_decay, beta)]


def ids():
  segment_ids, prefix_ids = np.zeros((2, len(ROWS), LENGTH), np.int32)
  for row, segments in enumerate(ROWS):
    start = 0
    for number, (count, prefix) in enumerate(segments, start=1):
      segment_ids[row, start : start + count] = number
      prefix_ids[row, start : start + count] = prefix
      start += count
  return segment_ids, prefix_ids


def sequences(with_prompts):
  """Of each segment its row, the slots of its whole sequence, and its own tokens."""
  for row, segments in enumerate(ROWS):
    starts = np.cumsum([0, *(count for count, _ in segments)])
    slots = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    for segment_slots, (count, prefix) in zip(slots, segments, strict=True):
      whole = (
        np.concatenate([slots[prefix - 1], segment_slots]) if prefix else segment_slots
      )
      yield row, whole if with_prompts else segment_slots, count


def loop(q, k, v, log_decay, beta):
  """One sequence in float64, token by token: out `[T, H, WIDE]` and the state."""
  share = HEADS // KEY_HEADS
  state, out = np.zeros((HEADS, DIM, WIDE)), []
  for t in range(len(q)):
    queries, keys = (np.repeat(x[t].astype(float), share, axis=0) for x in (q, k))
    state = state * np.exp(log_decay[t].astype(float))[:, None, None]
    change = v[t] - np.einsum('hkv,hk->hv', state, keys)
    state = state + keys[:, :, None] * (beta[t][:, None] * change)[:, None]
    out.append(np.einsum('hkv,hk->hv', state, queries))
  return np.stack(out), state


def tree_of(with_prompts):
  segment_ids, prefix_ids = map(jnp.asarray, ids())
  return rule.segment_tree(segment_ids, prefix_ids if with_prompts else None)


@pytest.mark.parametrize('with_prompts', [False, True])
@pytest.mark.parametrize(
  'form',
  [
    rule.recurrent_gated_delta_rule,
    functools.partial(rule.chunked_gated_delta_rule, chunk=8),
    rule.chunked_gated_delta_rule,
  ],
)
def test_packed_rows_equal_loops_over_their_sequences(form, with_prompts):
  arrays = make_inputs()
  out, states = map(np.asarray, jax.jit(form)(*arrays, tree_of(with_prompts)))
  for row, slots, count in sequences(with_prompts):
    wanted, state = loop(*(x[row, slots] for x in arrays))
    np.testing.assert_allclose(out[row, slots[-count:]], wanted[-count:], atol=2e-5)
  for row in range(len(ROWS)):  # that of the last segment, unchanged by padding
    last = [slots for other, slots, _ in sequences(with_prompts) if other == row][-1]
    _, state = loop(*(x[row, last] for x in arrays))
    np.testing.assert_allclose(states[row], state, atol=2e-5)


def test_these_inputs_show_leaks():
  arrays = make_inputs()
  out, _ = rule.recurrent_gated_delta_rule(*arrays, tree_of(False))
  one = rule.segment_tree(jnp.ones((len(ROWS), LENGTH), jnp.int32))
  leaky, _ = rule.recurrent_gated_delta_rule(*arrays, one)
  starts = np.diff(ids()[0], axis=1, prepend=1) != 0  # the first tokens of segments
  assert np.abs(leaky - out)[starts].max(axis=(1, 2)).min() > 0.01


@pytest.mark.parametrize('slow', [True, marks.slow(False)])
@pytest.mark.parametrize('with_prompts', [False, True])
def test_gradients_of_both_forms_are_equal(with_prompts, slow):
  arrays, tree = make_inputs(slow), tree_of(with_prompts)
  weights = np.random.default_rng(1).standard_normal((len(ROWS), LENGTH, HEADS, WIDE))

  def slopes(form):
    def total(*arrays):
      out, state = form(*arrays, tree)
      return (out * weights).sum() + (state**2).sum()

    return jax.jit(jax.grad(total, argnums=range(5)))(*arrays)

  chunked = functools.partial(rule.chunked_gated_delta_rule, chunk=8)
  for actual, wanted in zip(
    slopes(chunked), slopes(rule.recurrent_gated_delta_rule), strict=True
  ):
    size = max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5 * size)


def test_a_chunk_of_equal_keys_is_solved_precisely():
  """The powers of this triangular matrix are as large as 10^17."""
  keys = np.zeros((1, 64, KEY_HEADS, DIM), np.float32)
  keys[..., 0] = 1.0
  values = np.random.default_rng(0).standard_normal((1, 64, HEADS, WIDE))
  values = values.astype(np.float32)
  none, ones = np.zeros((1, 64, HEADS), np.float32), np.ones((1, 64, HEADS), np.float32)
  tree = rule.segment_tree(jnp.ones((1, 64), jnp.int32))
  form = jax.jit(rule.chunked_gated_delta_rule)
  out, _ = form(keys, keys, values, none, ones, tree)
  np.testing.assert_allclose(out, values, atol=1e-5)  # each value replaces the last


@pytest.mark.parametrize('with_prompts', [False, True])
def test_convolutions_see_their_own_sequence_alone(with_prompts):
  draw = np.random.default_rng(0)
  x = draw.integers(1, 9, (len(ROWS), LENGTH, 2, 3)).astype(np.float32)
  kernel = draw.integers(1, 9, (4, 2, 3)).astype(np.float32)
  out = np.asarray(rule.causal_convolution(x, kernel, tree_of(with_prompts)))
  for row, slots, count in sequences(with_prompts):
    padded = np.concatenate([np.zeros((3, 2, 3)), x[row, slots]])
    wanted = [(padded[t : t + 4] * kernel).sum(0) for t in range(len(slots))]
    np.testing.assert_array_equal(out[row, slots[-count:]], wanted[-count:])


def test_steps_equal_the_recurrence():
  arrays, tree = (
    make_inputs(),
    rule.segment_tree(jnp.ones((len(ROWS), LENGTH), jnp.int32)),
  )
  wanted, last = rule.recurrent_gated_delta_rule(*arrays, tree)
  state, step = jnp.zeros(last.shape), jax.jit(rule.gated_delta_step)
  for t in range(LENGTH):
    out, state = step(state, *(x[:, t] for x in arrays))
    np.testing.assert_allclose(out, wanted[:, t], atol=1e-6)
  np.testing.assert_allclose(state, last, atol=1e-6)


def test_the_best_form_is_chosen():
  arrays, tree = make_inputs(), tree_of(False)
  plain = functools.partial(rule.gated_delta_rule, kernels='reference')
  for chosen, form in (
    (rule.gated_delta_rule, rule.chunked_gated_delta_rule),
    (plain, rule.recurrent_gated_delta_rule),
  ):
    out, wanted = (jax.jit(run)(*arrays, tree)[0] for run in (chosen, form))
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.targets
@pytest.mark.parametrize('machine', ['v5p:2x2x1', 'h200:8'])
def test_both_forms_compile_with_their_gradients(machine):
  mesh = mesh_of(machine, (2, 2))
  batch, length, heads, dim = 2, 256, 4, 128
  platform = mesh.devices.flat[0].platform

  def total(q, k, v, log_decay, beta, segment_ids, prefix_ids):
    tree = rule.segment_tree(segment_ids, prefix_ids)
    options = {'platform': platform}
    out, state = rule.gated_delta_rule(q, k, v, log_decay, beta, tree, **options)
    x = rule.causal_convolution(v, jnp.ones((4, heads, dim)), tree)
    return out.sum() + state.sum() + x.sum()

  keys = (batch, length, heads // 2, dim), jnp.bfloat16, 'fsdp', None, 'tensor'
  values = (batch, length, heads, dim), jnp.bfloat16, 'fsdp', None, 'tensor'
  gates = (batch, length, heads), jnp.float32, 'fsdp', None, 'tensor'
  row_ids = (batch, length), jnp.int32, 'fsdp'
  slopes = jax.grad(total, argnums=range(5))
  program = compiled(slopes, mesh, keys, keys, values, gates, gates, row_ids, row_ids)
  # Solving the triangular systems by blocks took 130 times the values' memory on TPU.
  values_size = (batch // 2) * length * (heads // 2) * dim * 4
  assert 0 < program.memory_analysis().temp_size_in_bytes < 50 * values_size
