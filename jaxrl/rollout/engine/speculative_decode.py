"""Speculative decode guesses tokens from a request's own text, and checks the guesses.

Where the last tokens of a request occurred before in its prompt or reply, those that
followed then are drafted (prompt lookup, arXiv 2304.04487). Rows of idle slots compute
the drafted tokens in the step that decodes the token before them; see `DraftRows`. Each
place draws with the key that it has anyway, and a draft is accepted where it is the
token drawn. Tokens and log-probs are therefore those of decoding without drafts, bit
for bit. A request that rarely accepts drafts makes few.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import kv_cache as caches
from jaxrl.models.decoding import decode_step
from jaxrl.models.decoding.draft_rows import DraftRows
from jaxrl.models.kv_cache import Cache
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine import token_sampling
from jaxrl.types import AnyArray, Array, Params, PyTree

# A request has at most so much credit. A drafted token costs COST, an accepted one
# earns GAIN, and a step without a draft earns 1.
MAX_CREDIT, COST, GAIN = 256, 8, 32


@dataclasses.dataclass(frozen=True)
class Drafting:
  """How drafts are made. Static and hashable.

  Attributes:
    tokens: The most tokens K of a draft.
    match: How many of the last tokens must have occurred before.
  """

  tokens: int
  match: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DraftState:
  """Holds what drafts are made from, as numpy or device arrays.

  Attributes:
    history: `[S, C]` int32, the tokens of each slot by position, up to the one to feed.
    credit: `[S]` int32; a slot makes drafts while it is positive.
  """

  history: AnyArray
  credit: AnyArray

  @classmethod
  def idle(cls, num_slots: int, max_length: int) -> 'DraftState':
    """Makes a numpy state of slots that are idle.

    Args:
      num_slots: The number of slots S.
      max_length: Context length C, in tokens.
    """
    history = np.zeros((num_slots, max_length), np.int32)
    return cls(history, np.full(num_slots, MAX_CREDIT, np.int32))


def find_drafts(
  history: Array, positions: Array, drafting: Drafting
) -> tuple[Array, Array]:
  """Finds the last place where each slot's last tokens occurred before.

  Args:
    history: `[S, C]` int32; see `DraftState`.
    positions: `[S]` int32, the position of the last token.
    drafting: How drafts are made.

  Returns:
    The tokens that followed then, `[S, K]` int32, repeated from that place on if they
    reach the last token; and `[S]` bool, whether there is such a place.
  """
  most, match = drafting.tokens, drafting.match
  length, last = history.shape[1], positions[:, None]
  ends = jnp.arange(match - 1, length)  # where an occurrence may end
  is_match = ends < last
  for back in range(match):
    token = jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=1)
    is_match &= history[:, match - 1 - back : length - back] == token
  end = jnp.max(jnp.where(is_match, ends, -1), axis=1, keepdims=True)
  is_found = end[:, 0] >= 0
  period = jnp.maximum(last - end, 1)
  places = end + 1 + jnp.mod(jnp.arange(most), period)
  drafts = jnp.take_along_axis(history, jnp.clip(places, 0, length - 1), axis=1)
  return drafts, is_found


def decode_with_drafts(
  model: TransformerLM,
  num_steps: int,
  drafting: Drafting,
  params: Params,
  cache: Cache,
  slots: PyTree,
) -> tuple[Cache, PyTree, Array, Array, Array | None, Array]:
  """Decodes as `decode_slots` does, in as many steps, with up to K + 1 tokens in each.

  Args:
    model: The model.
    num_steps: Most steps.
    drafting: How drafts are made.
    params: The model's parameters.
    cache: The cache, of chunks.
    slots: The `SlotState`, with a `DraftState`.

  Returns:
    As `ModelRunner.decode`, with tokens `[D · (K + 1), S]`, each slot's one after the
    other and −1 behind them.
  """
  num_slots, width = slots.tokens.shape[0], drafting.tokens + 1
  start_positions, capacity = slots.positions, num_steps * width
  scratch_position = caches.length(cache) - 1
  tokens = jnp.full((capacity, num_slots), token_sampling.NO_TOKEN, jnp.int32)
  logprobs = jnp.zeros((capacity, num_slots), jnp.float32)
  counts = jnp.zeros((3, num_slots), jnp.int32)
  # Inside the loop, XLA would compute the sines again for each head of each layer.
  rotations = model.rotations(jnp.arange(scratch_position + 1))
  own, number = jnp.arange(num_slots), jnp.arange(width)[:, None]

  def is_unfinished(carry):
    step, _, slots, *_ = carry
    return (step < num_steps) & jnp.any(slots.remaining > 0)

  def advance(carry):
    step, cache, slots, tokens, logprobs, num_drawn, counts = carry
    is_busy = slots.remaining > 0
    drafts, wanted = _drafts_of(slots, drafting)
    positions = jnp.where(is_busy, slots.positions, scratch_position)
    rows = DraftRows.place(is_busy, positions, wanted, drafting.tokens)
    drawn, drawn_logprobs, cache = _check_rows(
      model, params, cache, slots, rows, drafts, rotations
    )
    by_slot = drawn[rows.index]  # [K + 1, S]
    agrees = (by_slot[:-1] == drafts.T) & (number[:-1] < rows.granted)
    num_accepted = jnp.sum(jnp.cumprod(agrees, axis=0), axis=0)
    is_stop = jnp.any(by_slot[..., None] == slots.stop_ids, axis=-1)
    num_stops_before = jnp.cumsum(is_stop, axis=0) - is_stop
    is_new = is_busy & (number <= num_accepted) & (num_stops_before == 0)
    num_new = jnp.sum(is_new, axis=0, dtype=jnp.int32)
    has_stopped = jnp.any(is_stop & is_new, axis=0)
    at = jnp.where(is_new, num_drawn + number, capacity)
    tokens = tokens.at[at, own].set(by_slot, mode='drop')
    logprobs = logprobs.at[at, own].set(drawn_logprobs[rows.index], mode='drop')
    num_used = jnp.maximum(num_new - 1, 0)
    counts += jnp.stack([is_busy.astype(jnp.int32), rows.granted, num_used])
    slots = dataclasses.replace(
      slots,
      tokens=jnp.where(is_busy, by_slot[num_used, own], slots.tokens),
      positions=slots.positions + num_new,
      remaining=jnp.where(has_stopped, 0, slots.remaining - num_new),
      token_indices=slots.token_indices + num_new,
      drafts=_next_state(slots, rows, by_slot, is_new, num_used),
    )
    return step + 1, cache, slots, tokens, logprobs, num_drawn + num_new, counts

  num_drawn = jnp.zeros(num_slots, jnp.int32)
  carry = jnp.int32(0), cache, slots, tokens, logprobs, num_drawn, counts
  carry = jax.lax.while_loop(is_unfinished, advance, carry)
  _, cache, slots, tokens, logprobs, _, counts = carry
  routed = None
  if 'e' in cache:
    routed = caches.experts_from(cache, start_positions, capacity)
  return cache, slots, tokens, logprobs, routed, counts


def _drafts_of(slots: PyTree, drafting: Drafting) -> tuple[Array, Array]:
  """Returns drafts `[S, K]`, and how many of them each slot wants to have checked."""
  num_slots = slots.tokens.shape[0]
  is_busy = slots.remaining > 0
  may_draft = is_busy & (slots.drafts.credit > 0) & (slots.remaining > 1)

  def find():
    drafts, is_found = find_drafts(slots.drafts.history, slots.positions, drafting)
    most = jnp.minimum(slots.remaining - 1, drafting.tokens)
    return drafts, jnp.where(is_found & may_draft, most, 0)

  def none():
    shape = num_slots, drafting.tokens
    return jnp.zeros(shape, jnp.int32), jnp.zeros(num_slots, jnp.int32)

  has_room = jnp.any(may_draft) & ~jnp.all(is_busy)
  return jax.lax.cond(has_room, find, none)


def _check_rows(
  model: TransformerLM,
  params: Params,
  cache: Cache,
  slots: PyTree,
  rows: DraftRows,
  drafts: Array,
  rotations: PyTree,
) -> tuple[Array, Array, Cache]:
  """Draws what follows each row's token; returns tokens, log-probs and the cache."""
  drafted = drafts[rows.slots, jnp.maximum(rows.offsets - 1, 0)]
  fed = jnp.where(rows.offsets > 0, drafted, slots.tokens)
  positions = rows.row_positions
  is_busy = slots.remaining > 0
  limit = jnp.max(jnp.where(is_busy, slots.positions + rows.granted, 0)) + 1
  row_rotations = jax.tree.map(lambda x: x[positions], rotations)
  logits, cache = decode_step.decode(
    model, params, cache, fed, positions, limit, row_rotations, rows
  )
  row_slots = jax.tree.map(
    lambda x: x[rows.slots], dataclasses.replace(slots, drafts=None)
  )
  row_slots = dataclasses.replace(
    row_slots, token_indices=row_slots.token_indices + rows.offsets
  )
  drawn = token_sampling.draw_tokens(model, token_sampling.ANY, logits, row_slots)
  return *drawn, cache


def _next_state(
  slots: PyTree,
  rows: DraftRows,
  by_slot: Array,
  is_new: Array,
  num_used: Array,
) -> DraftState:
  """Appends new tokens to the history and settles what drafts have cost and earned."""
  history, credit = slots.drafts.history, slots.drafts.credit
  place = slots.positions + 1 + jnp.arange(len(by_slot))[:, None]
  place = jnp.where(is_new, place, history.shape[1])
  own = jnp.arange(history.shape[0])
  earned = GAIN * num_used - COST * rows.granted + (rows.granted == 0)
  return DraftState(
    history=history.at[own, place].set(by_slot, mode='drop'),
    credit=jnp.minimum(credit + earned, MAX_CREDIT),
  )
