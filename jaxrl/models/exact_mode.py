"""Exact mode gives a token's log-prob the same bits however it is computed.

Sampling sees one token of every sequence at a time, scoring and training see whole
rows; compilers sum these shapes in different orders, so log-probs differ in their last
bits. In exact mode both run the same few loops, whose bodies have fixed shapes:
whatever works on single tokens takes `rows` tokens per iteration, attention takes
SEQUENCES × QUERIES of them against one chunk of keys. The number of iterations is a
run-time value, so that no compiler unrolls a loop or fuses its body with what surrounds
it.

Each row contains one sequence, from its first column on.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import kv_cache as caches
from jaxrl.models import layer_stack
from jaxrl.models.model_config import ModelConfig
from jaxrl.types import Params, PyTree
from kernels.attention import attend_chunk, chunk_state, visible_keys

SEQUENCES, QUERIES = 8, 8
CHUNK = 128


def call_directly(
  function: Callable[..., PyTree], params: Params, *arrays: jax.Array
) -> PyTree:
  """Returns `function(params, *arrays)`, all on one device.

  Args:
    function: The function.
    params: Its parameters.
    *arrays: Its arrays.
  """
  return function(params, *arrays)


def check_supported(config: ModelConfig, dtype: str) -> None:
  """Checks that a model can compute exactly.

  Args:
    config: Its shape.
    dtype: The type of its activations.

  Raises:
    ValueError: If it cannot.
  """
  if dtype != 'float32':
    raise ValueError(f"exact mode needs dtype='float32', not {dtype!r}")
  if config.vision is not None:
    raise ValueError(
      'exact mode does not compute models that see images, and this one, of family '
      f'{config.family}, does'
    )


@dataclasses.dataclass(frozen=True)
class Exact:
  """How the exact mode of a model computes. Static and hashable.

  Attributes:
    rows: Tokens that pass a layer's matrices at a time, a multiple of 8. Engine and
      learner must have the same.
    per_device: `(function, params, *arrays)` runs it on each device with whole params
      and its own share of the arrays' rows.
  """

  rows: int = 64
  per_device: Callable[..., PyTree] = call_directly

  def __post_init__(self) -> None:
    if self.rows < 8 or self.rows % 8:
      raise ValueError(f'rows={self.rows}: must be a positive multiple of 8')

  @classmethod
  def for_slots(cls, num_slots: int) -> 'Exact':
    """Returns the mode of an engine of `num_slots`, which its learner scores with too.

    Args:
      num_slots: Sequences that are decoded at a time.
    """
    return cls(rows=min(64, -(-num_slots // 8) * 8))

  def tokenwise(
    self, function: Callable[..., PyTree], *arrays: jax.Array | None
  ) -> PyTree:
    """Computes function(*arrays) for `rows` of the N rows at a time.

    Args:
      function: The function.
      *arrays: `[N, …]`; all but the first may be None.
    """
    return _in_turns(function, self.rows, arrays)

  def logprobs(
    self, logits: jax.Array, tokens: jax.Array, temperature: jax.Array
  ) -> jax.Array:
    """Computes log softmax(logits / temperature) of tokens.

    Args:
      logits: `[N, V]`.
      tokens: `[N]`.
      temperature: `[N]`; 0 stands for 1, as it does where tokens are drawn.

    Returns:
      `[N]`.
    """
    # Compilers turn a division by a constant into this product.
    scale = 1.0 / jnp.where(temperature <= 0, 1.0, temperature)
    return self.tokenwise(_logprobs, logits, tokens, scale)

  def row_logprobs(
    self,
    forward: Callable[..., jax.Array],
    logits: Callable[..., jax.Array],
    params: Params,
    tokens: jax.Array,
    temperature: jax.Array | float,
  ) -> jax.Array:
    """Computes the log-probs of whole rows.

    Args:
      forward: `(params, tokens) -> x [B · T, D]`.
      logits: `(params, x [N, D]) -> [N, V]`.
      params: The model's parameters.
      tokens: `[B, T]`, one sequence per row.
      temperature: A number or `[B, T]`.

    Returns:
      `[B, T − 1]`, of the tokens but the first; without a gradient.
    """

    def score(params, tokens, temperature):
      x, targets = forward(params, tokens), jnp.roll(tokens, -1, axis=1)

      def score_chunk(x, targets, temperature):  # all logits at once would be large
        return self.logprobs(logits(params, x), targets, temperature)

      flat = x, targets.reshape(-1), temperature.reshape(-1)
      return self.tokenwise(score_chunk, *flat).reshape(tokens.shape)[:, :-1]

    temperature = jnp.broadcast_to(jnp.float32(temperature), tokens.shape)
    params, temperature = jax.lax.stop_gradient((params, temperature))
    return self.per_device(score, params, tokens, temperature)


def run_rows(
  config: ModelConfig,
  enter: Callable[..., PyTree],
  layer: Callable[..., PyTree],
  params: Params,
  tokens: jax.Array,
  lengths: jax.Array | None = None,
  *,
  unroll: int = 1,
  keep_cache: bool = False,
) -> tuple[jax.Array, caches.PrefillKV | None]:
  """Runs the layers of a model over rows that contain one sequence each.

  Args:
    config: The model's shape.
    enter: `(params, tokens [N], positions [N]) -> (x [N, D], rotations, extras)`.
    layer: `(block, x, rotations, attend, extra) -> (x, (kept, aux))`.
    params: The parameters.
    tokens: `[B, T]` int32.
    lengths: `[B]` int32, tokens of each row; None for T.
    unroll: Layers per step of the scan.
    keep_cache: Whether keys and values are kept.

  Returns:
    The last layer's output `[B · T, D]`, and the keys and values or None.
  """
  batch, length = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
  entered = enter(params, tokens.reshape(-1), positions.reshape(-1))
  (x, rotations, extras), shared = entered, caches.SharedKV()

  if lengths is None:
    lengths = jnp.full(batch, length, jnp.int32)

  def mix_rows(block, *inputs):
    inputs = [x.reshape(batch, length, *x.shape[1:]) for x in inputs]
    is_token = (positions < lengths[:, None])[..., None]
    gates = (jnp.where(is_token, x, 0) for x in inputs[3:])  # else the state stays
    states = block.delta.empty_states(batch, inputs[0].dtype)
    rows = (*inputs[:3], *gates), states, positions
    out, states = scan_tokens(block.delta.step, *rows)
    state_inputs = states['state'], tuple(inputs[:3]), lengths
    taps = config.conv_width - 1
    kept = caches.keep_states(*state_inputs, taps) if keep_cache else None
    return out.reshape(-1, *out.shape[2:]), (kept, None)

  def attend_rows(block, q, own_k, own_v, *gates):
    if gates:
      return mix_rows(block, q, own_k, own_v, *gates)
    k, v = shared.read(block.config, own_k, own_v)
    aux = shared.passed_on(block.config, k, v)
    fold = lambda y: y.reshape(batch, length, *y.shape[1:])  # noqa: E731
    q, k, v = jax.tree.map(fold, (q, k, v))
    whole = caches.keep(k, v, q)
    chunks = cut_chunks(whole['k'], 3), cut_chunks(whole['v'], 2)
    limit = jnp.int32(length)
    out = attend(q, *chunks, positions, limit, **block.cache_rules)
    out = out.reshape(-1, *q.shape[2:]).astype(q.dtype)
    whole = whole if own_k is not None else caches.keep(None, None, q)
    whole |= caches.no_states(q) if config.has_linear_attention else {}
    return out, (whole if keep_cache else None, aux)

  def body(block, x, extra):
    own_attend = functools.partial(attend_rows, block)
    x, (kept, _) = layer(block, x, rotations, own_attend, extra)
    return x, kept

  each = None if extras is None else jnp.moveaxis(extras, 1, 0)
  options = {'unroll': unroll, 'each': each, 'after': shared.after}
  x, (kept, _) = layer_stack.run_layers(config, params, x, body, **options)
  return x, kept


def attend(
  q: jax.Array,
  k_chunks: Sequence[jax.Array],
  v_chunks: Sequence[jax.Array],
  positions: jax.Array,
  limit: jax.Array,
  *,
  sinks: jax.Array | None = None,
  **rules: Any,
) -> jax.Array:
  """Attends from each query to the keys of its row, up to its own position.

  Args:
    q: `[B, T, H, d]`.
    k_chunks: Each `[B, K, d, CHUNK]`.
    v_chunks: Each `[B, K, CHUNK, d]`; () if keys are their own values.
    positions: `[B, T]` int32.
    limit: A scalar; keys from there on need not be read.
    sinks: As in `kernels.attention.attention`.
    **rules: Its `window`, `softcap` and `scale`. Unlike in `decode_attention`, the
      chunks hold all positions even with a window.

  Returns:
    `[B, T, H, d]` float32.
  """
  batch, length = q.shape[:2]
  count = max(2, -(-batch // SEQUENCES)) * SEQUENCES
  keys = tuple(_pad(k, count) for k in k_chunks)
  values = tuple(_pad(v, count) for v in v_chunks)

  def sequences(q, positions, index):
    """Computes attention `[S, T, …]` of the sequences from index · SEQUENCES on."""

    def tile(q, positions):  # time first: [QUERIES, S, …]
      q, positions = q.swapaxes(0, 1), positions.swapaxes(0, 1)
      first = index[0] * SEQUENCES
      out = _tile(q, positions, keys, values, first, limit, sinks, **rules)
      return out.swapaxes(0, 1)

    out = _in_turns(tile, QUERIES, (q.swapaxes(0, 1), positions.swapaxes(0, 1)))
    return out.swapaxes(0, 1)

  index = jnp.arange(batch, dtype=jnp.int32) // SEQUENCES
  out = _in_turns(sequences, SEQUENCES, (q, positions, index))
  return out.reshape(batch, length, *q.shape[2:])


def scan_tokens(
  step: Callable[..., tuple[jax.Array, PyTree]],
  inputs: PyTree,
  states: PyTree,
  positions: jax.Array,
) -> tuple[jax.Array, PyTree]:
  """Runs a recurrence over rows, for a token of SEQUENCES rows at a time.

  Args:
    step: `(inputs, states, positions) -> (out, states)` for a token of each row.
    inputs: A tree of `[B, T, …]`.
    states: A tree of `[B, …]`.
    positions: `[B, T]` int32.

  Returns:
    out `[B, T, …]`, and the states after the last token.
  """
  length = positions.shape[1]

  def sequences(positions, inputs, states):
    rows = jax.tree.map(lambda x: x.swapaxes(0, 1), (inputs, positions))
    rows = jax.tree.map(lambda x: _pad(x, max(length, 2)), rows)  # as in `_in_turns`

    def token(t):
      take = functools.partial(jax.lax.dynamic_index_in_dim, axis=0, keepdims=False)
      return jax.tree.map(lambda x: take(x, t), rows)

    def body(t, carry):
      states, out = carry
      inputs, at = token(t)
      y, states = step(inputs, states, at)
      return states, jax.lax.dynamic_update_index_in_dim(out, y, t, 0)

    inputs, at = token(0)
    like = jax.eval_shape(step, inputs, states, at)[0]
    out = jnp.zeros((max(length, 2), *like.shape), like.dtype)
    count = _opaque_count(length, positions)
    states, out = jax.lax.fori_loop(0, count, body, (states, out))
    return out[:length].swapaxes(0, 1), states

  return _in_turns(sequences, SEQUENCES, (positions, inputs, states))


def step_token(
  step: Callable[..., tuple[jax.Array, PyTree]],
  inputs: PyTree,
  states: PyTree,
  positions: jax.Array,
) -> tuple[jax.Array, PyTree]:
  """Runs one step of the recurrence that `scan_tokens` runs.

  Args:
    step: As there.
    inputs: A tree of `[S, …]`.
    states: A tree of `[S, …]`.
    positions: `[S]` int32.

  Returns:
    out `[S, …]`, and the states.
  """
  inputs, positions = jax.tree.map(lambda x: x[:, None], (inputs, positions))
  out, states = scan_tokens(step, inputs, states, positions)
  return out[:, 0], states


def cut_chunks(x: jax.Array, axis: int) -> tuple[jax.Array, ...]:
  """Cuts an array into chunks of CHUNK positions, appending zeros.

  Args:
    x: The array.
    axis: The axis of positions.
  """
  count = -(-x.shape[axis] // CHUNK)
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, count * CHUNK - x.shape[axis])
  x = jnp.pad(x, widths)
  slices = (
    jax.lax.slice_in_dim(x, i * CHUNK, (i + 1) * CHUNK, axis=axis) for i in range(count)
  )
  return tuple(slices)


@jax.custom_jvp
def with_gradient_of(value: jax.Array, of: jax.Array) -> jax.Array:
  """Returns `value` with the derivative of another array.

  Args:
    value: The value.
    of: What is differentiated.
  """
  del of
  return value


@with_gradient_of.defjvp
def _(primals, tangents):
  return primals[0], tangents[1]


def _logprobs(logits: jax.Array, tokens: jax.Array, scale: jax.Array) -> jax.Array:
  scaled = logits * scale[:, None]
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
  return chosen - jax.nn.logsumexp(scaled, axis=-1)


def _tile(
  q: jax.Array,
  positions: jax.Array,
  keys: tuple[jax.Array, ...],
  values: tuple[jax.Array | None, ...],
  first: jax.Array,
  limit: jax.Array,
  sinks: jax.Array | None = None,
  *,
  window: int = 0,
  softcap: float = 0.0,
  scale: float | None = None,
) -> jax.Array:
  """Attends from q `[S, M, H, d]` at positions `[S, M]` to keys from row `first` on."""
  count, queries, heads, dim = q.shape
  kv_heads = keys[0].shape[1]
  q = q.reshape(count, queries, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
  q = q.reshape(count, kv_heads, -1, dim).astype(jnp.float32)
  q = q * (dim**-0.5 if scale is None else scale)
  reach = jnp.minimum(positions.max() + 1, limit)

  def run(state, k, v, start):
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first)
    k, v = jax.tree.map(lambda x: cut(x, slice_size=count), (k, v))
    visible = visible_keys(start + jnp.arange(CHUNK), positions, window, ring)
    visible = jnp.tile(visible, (1, heads // kv_heads, 1))[:, None]
    return attend_chunk(state, q, k, v, visible, softcap)

  state, ring = chunk_state(q, sinks), len(keys) * CHUNK
  values = values or (None,) * len(keys)
  for i, (k, v) in enumerate(zip(keys, values, strict=True)):
    step = functools.partial(run, start=i * CHUNK)
    state = jax.lax.cond(i * CHUNK < reach, step, lambda s, *_: s, state, k, v)
  _, total, out = state
  out = (out / total[..., None]).reshape(count, kv_heads, -1, queries, dim)
  return out.transpose(0, 3, 1, 2, 4).reshape(count, queries, heads, dim)


def _pad(x: jax.Array, count: int) -> jax.Array:
  """Pads with zeros after the last row, up to `count` rows."""
  return jnp.pad(x, ((0, count - len(x)), *((0, 0),) * (x.ndim - 1)))


def _in_turns(
  function: Callable[..., PyTree], size: int, arrays: tuple[jax.Array | None, ...]
) -> PyTree:
  """Computes function(*arrays) for `size` rows at a time, and joins the results."""
  first = arrays[0]
  assert first is not None  # which has the number of rows
  length = len(first)
  turns = -(-length // size)
  # One turn slices from two, or the slice would be the array and leave the loop.
  arrays = jax.tree.map(lambda x: _pad(x, max(turns, 2) * size), arrays)

  def part(i):
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size)  # noqa: E731
    return jax.tree.map(cut, arrays)

  def body(i, out):
    result = function(*part(i))
    return jax.tree.map(
      lambda o, x: jax.lax.dynamic_update_slice_in_dim(o, x, i * size, 0), out, result
    )

  out = jax.tree.map(
    lambda x: jnp.zeros((turns * size, *x.shape[1:]), x.dtype),
    jax.eval_shape(lambda: function(*part(0))),
  )
  out = jax.lax.fori_loop(0, _opaque_count(turns, first), body, out)
  return jax.tree.map(lambda x: x[:length], out)


def _opaque_count(number: int, x: jax.Array) -> jax.Array:
  """Hides a trip count from XLA so that one-iteration loops are not unrolled.

  An optimization barrier does not last long enough; x · 0 is not simplified, because it
  is 0 only for finite x.
  """
  value = jnp.nan_to_num(x.reshape(-1)[0].astype(jnp.float32), posinf=0.0, neginf=0.0)
  return number + (value * 0).astype(jnp.int32)
