"""Tenant programs are what is compiled to train and score rows of several tenants.

Rows are padded to buckets, powers of two, and every program of a bucket has the same
number of rows. What a row computes therefore does not depend on what else runs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.tinker import row_adapters
from jaxrl.rollout.tinker.row_adapters import Adapters, DecodingStack, tenant_axis
from jaxrl.rollout.tinker.tenant_losses import LossRows, row_losses
from jaxrl.types import AnyArray, Array, Params, PyTree

MIN_BUCKET = 32
MAX_LOGITS = 2**22  # that are held at a time, unless one position of each row has more


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TokenRows:
  """G rows of tokens, padded to T.

  Attributes:
    tokens: `[G, T]` int32.
    lengths: `[G]` int32; 0 for a row that is only padding.
    targets: `[G, T, K]` int32, tokens to score after each position.
    tenants: `[G]` int32, whose adapters a row uses; N or more for none.
    scales: `[G]` float32, α / rank of these adapters.
  """

  tokens: AnyArray
  lengths: AnyArray
  targets: AnyArray
  tenants: AnyArray
  scales: AnyArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class AdamHyperparameters:
  """One step's hyperparameters, float32 scalars, named as in the API."""

  learning_rate: AnyArray
  beta1: AnyArray
  beta2: AnyArray
  eps: AnyArray
  weight_decay: AnyArray
  grad_clip_norm: AnyArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MuonHyperparameters:
  """One step's hyperparameters, float32 scalars, named as in the API."""

  learning_rate: AnyArray
  beta1: AnyArray
  grad_clip_norm: AnyArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TenantState:
  """The adapters of all tenants, the gradients so far, and the optimizers' moments.

  Attributes:
    stack: Parameters.
    totals: Gradients since the last step.
    mu: First moments, of Adam or of Muon.
    nu: Second moments of Adam; zero for Muon.
  """

  stack: Adapters
  totals: Adapters
  mu: Adapters
  nu: Adapters


def buckets_to(max_length: int) -> list[int]:
  """Returns padded lengths: powers of two from 32 until they hold `max_length`.

  Args:
    max_length: Tokens of the longest row.
  """
  sizes = [MIN_BUCKET]
  while sizes[-1] < max_length:
    sizes.append(2 * sizes[-1])
  return sizes


def num_targets(width: int) -> int:
  """Returns how many targets of a position a program has room for: a power of two.

  Args:
    width: The most targets of a row's positions.
  """
  return 1 << (max(width, 1) - 1).bit_length()


def _segments(rows: TokenRows) -> Array:
  time = jnp.arange(rows.tokens.shape[1])
  return (time < rows.lengths[:, None]).astype(jnp.int32)


def _in_chunks(chunk_fn: Any, vocab_size: int, *arrays: Array) -> PyTree:
  """Runs `chunk_fn` on pieces of arrays `[G, T, …]` along T, and joins the results."""
  groups, length = arrays[0].shape[:2]
  size = length
  while size > 1 and groups * size * vocab_size > MAX_LOGITS:
    size //= 2  # a bucket is a power of two

  def split(x: Array) -> Array:
    return jnp.moveaxis(x.reshape(groups, -1, size, *x.shape[2:]), 1, 0)

  def join(x: Array) -> Array:
    return jnp.moveaxis(x, 0, 1).reshape(groups, length, *x.shape[3:])

  run = jax.checkpoint(lambda pieces: chunk_fn(*pieces))
  return jax.tree.map(join, jax.lax.map(run, jax.tree.map(split, arrays)))


def _target_logprobs(logits: Array, targets: Array) -> Array:
  chosen = jnp.take_along_axis(logits, targets, axis=-1)
  return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def tenant_logprobs(
  model: TransformerLM, params: Params, state: TenantState, rows: TokenRows
) -> Array:
  """Computes the log-probs of rows' targets, differentiable by `state.stack`.

  The gradient is `state.totals` plus the rows' gradients.

  Args:
    model: The model.
    params: Its parameters.
    state: The tenants' adapters.
    rows: The rows.

  Returns:
    `[G, T, K]` float32.
  """
  stacks = state.stack, state.totals, rows.tenants, rows.scales
  with_rows, (head_a, head_b) = row_adapters.attach_training(params, *stacks)
  hidden = model.hidden(with_rows, rows.tokens, _segments(rows))
  a, b = head_a.astype(hidden.dtype), head_b.astype(hidden.dtype)
  config = dataclasses.replace(model.config, logits_softcap=0.0)
  plain, cap = dataclasses.replace(model, config=config), model.config.logits_softcap

  def score(states: Array, targets: Array) -> Array:
    logits = plain.logits(params, states)
    logits = logits + ((states @ a) @ b).astype(jnp.float32)
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    return _target_logprobs(logits, targets)

  return _in_chunks(score, model.config.vocab_size, hidden, rows.targets)


def forward(
  model: TransformerLM,
  params: Params,
  state: TenantState,
  rows: TokenRows,
  loss_rows: LossRows,
) -> tuple[Array, Array]:
  """Computes log-probs `[G, T, K]` and losses `[G]`, without gradients."""
  logprobs = tenant_logprobs(model, params, state, rows)
  return logprobs, row_losses(logprobs, loss_rows)


def forward_backward(
  model: TransformerLM,
  params: Params,
  state: TenantState,
  rows: TokenRows,
  loss_rows: LossRows,
) -> tuple[TenantState, Array, Array]:
  """Adds the rows' gradients to their tenants' sums.

  Returns:
    The state, log-probs `[G, T, K]` and losses `[G]`.
  """

  def total_loss(stack: Adapters) -> tuple[Array, tuple[Array, Array]]:
    of_stack = dataclasses.replace(state, stack=stack)
    logprobs = tenant_logprobs(model, params, of_stack, rows)
    losses = row_losses(logprobs, loss_rows)
    return jnp.sum(losses), (logprobs, losses)

  totals, (logprobs, losses) = jax.grad(total_loss, has_aux=True)(state.stack)
  return dataclasses.replace(state, totals=totals), logprobs, losses


def take_tenant(state: TenantState, tenant: Array) -> TenantState:
  """Copies one tenant's part of the state.

  Args:
    state: The state of all.
    tenant: The tenant's place in the stack.
  """

  def take(tree: Adapters) -> Adapters:
    return {
      name: tuple(
        jax.lax.dynamic_index_in_dim(x, tenant, tenant_axis(name), keepdims=False)
        for x in pair
      )
      for name, pair in tree.items()
    }

  return _map_trees(take, state)


def put_tenant(state: TenantState, tenant: Array, own: TenantState) -> TenantState:
  """Replaces one tenant's part of the state, in place if the state is donated.

  Args:
    state: The state of all.
    tenant: The tenant's place in the stack.
    own: The part.
  """

  def put(tree: Adapters, part: Adapters) -> Adapters:
    return {
      name: tuple(
        jax.lax.dynamic_update_index_in_dim(x, new, tenant, tenant_axis(name))
        for x, new in zip(tree[name], part[name], strict=True)
      )
      for name in tree
    }

  return _map_trees(put, state, own)


def _map_trees(function: Any, *states: TenantState) -> TenantState:
  names = [field.name for field in dataclasses.fields(TenantState)]
  return TenantState(*(function(*(getattr(x, n) for x in states)) for n in names))


def _clip(gradients: Adapters, limit: Array) -> tuple[Adapters, Array]:
  """Shrinks gradients to a norm if one is set; returns their norm before, too."""
  norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
  is_long = (limit > 0) & (norm > limit)
  shrink = jnp.where(is_long, limit / jnp.maximum(norm, 1e-30), 1.0)
  return jax.tree.map(lambda g: g * shrink, gradients), norm


def adam_step(
  own: TenantState, count: Array, options: AdamHyperparameters
) -> tuple[TenantState, Array]:
  """Applies AdamW (arXiv 1711.05101) to one tenant's part and zeroes its gradients.

  As torch's: p ← p·(1 − η·λ) − η·m̂ / (√v̂ + ε).

  Args:
    own: The tenant's part of the state, from `take_tenant`. A program that took it out
      of the state and put it back would copy the state of all.
    count: The number of the step, from 1.
    options: The hyperparameters.

  Returns:
    The part and the norm of the gradient before it was clipped.
  """
  gradients, norm = _clip(own.totals, options.grad_clip_norm)
  beta1, beta2, rate = options.beta1, options.beta2, options.learning_rate

  def moments(decay: Array, old: Array, new: Array) -> Array:
    return decay * old + (1 - decay) * new

  mu = jax.tree.map(lambda m, g: moments(beta1, m, g), own.mu, gradients)
  nu = jax.tree.map(lambda v, g: moments(beta2, v, g * g), own.nu, gradients)

  def update(p: Array, m: Array, v: Array) -> Array:
    root = jnp.sqrt(v / (1 - beta2**count)) + options.eps
    # What has no gradient, such as padded ranks, does not move where ε is 0 either.
    step = jnp.where(root > 0, m / (1 - beta1**count) / jnp.where(root > 0, root, 1), 0)
    return p * (1 - rate * options.weight_decay) - rate * step

  stack = jax.tree.map(update, own.stack, mu, nu)
  return TenantState(stack, jax.tree.map(jnp.zeros_like, gradients), mu, nu), norm


def muon_step(
  own: TenantState, count: Array, options: MuonHyperparameters
) -> tuple[TenantState, Array]:
  """Applies Muon to one tenant's part and zeroes its gradients.

  p ← p − η·NS(m), with the Newton-Schulz iteration and the Nesterov momentum of
  https://kellerjordan.github.io/posts/muon/, as optax computes them. Each layer's A and
  B is a matrix of its own. A step's Frobenius norm is about η·√rank; padded ranks have
  gradients of zero and do not move.

  Args:
    own: The tenant's part of the state, from `take_tenant`.
    count: The number of the step, from 1.
    options: The hyperparameters.

  Returns:
    The part and the norm of the gradient before it was clipped.
  """
  gradients, norm = _clip(own.totals, options.grad_clip_norm)
  axes = optax.contrib.MuonDimensionNumbers(-2, -1)
  numbers: PyTree = jax.tree.map(lambda _: axes, gradients)
  muon = optax.contrib.scale_by_muon(
    beta=options.beta1, weight_dimension_numbers=numbers
  )
  before: PyTree = muon.init(gradients)
  after: AnyArray
  steps, after = muon.update(gradients, before._replace(count=count - 1, mu=own.mu))
  rate = options.learning_rate
  stack = jax.tree.map(lambda p, step: p - rate * step, own.stack, steps)
  zeros = jax.tree.map(jnp.zeros_like, gradients)
  return TenantState(stack, zeros, after.mu, own.nu), norm


def score(
  model: TransformerLM,
  top_k: int,
  draws: int,
  params: Params,
  stack: DecodingStack,
  rows: TokenRows,
  temperature: Array,
  key: Array,
) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:
  """Scores rows under adapters of the decoding stack.

  Args:
    model: The model.
    top_k: How many of the likeliest tokens to tell after each position.
    draws: How many tokens to draw after each position.
    params: The model's parameters, with layers as a tuple.
    stack: The decoding stack.
    rows: The rows.
    temperature: `[G]` float32, of the draws; 0 takes the likeliest token.
    key: A JAX random key of the draws.

  Returns:
    The targets' log-probs `[G, T, K]`; the likeliest tokens and their log-probs, each
    `[G, T, top_k]`; the tokens drawn and their log-probs at temperature 1, each
    `[G, T, draws]`.
  """
  with_rows = row_adapters.attach_decoding(params, stack, rows.tenants)
  hidden = model.hidden(with_rows, rows.tokens, _segments(rows))
  heat = jnp.where(temperature > 0, temperature, 1.0)[:, None, None, None]
  is_drawn = (temperature > 0)[:, None, None, None]
  index = jnp.broadcast_to(jnp.arange(hidden.shape[1]), hidden.shape[:2])

  def one(states: Array, targets: Array, place: Array):
    logits = model.logits(with_rows, states)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    best = jax.lax.top_k(logprobs, max(top_k, 1))
    drawn = jnp.zeros((*logits.shape[:2], draws), jnp.int32)
    if draws:
      shape = (*logits.shape[:2], draws, logits.shape[2])
      noise = jax.random.gumbel(jax.random.fold_in(key, place[0, 0]), shape)
      noisy = logits[:, :, None] / heat + jnp.where(is_drawn, noise, 0)
      drawn = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    drawn_logprobs = jnp.take_along_axis(logprobs, drawn, axis=-1)
    return _target_logprobs(logits, targets), best[1], best[0], drawn, drawn_logprobs

  vocabulary = model.config.vocab_size * (draws + 1)
  own, ids, best, drawn, drawn_logprobs = _in_chunks(
    one, vocabulary, hidden, rows.targets, index
  )
  return own, (ids[..., :top_k], best[..., :top_k]), (drawn, drawn_logprobs)


class TenantPrograms:
  """Compiles the programs of one model; each keeps a cache of its own.

  Attributes:
    model: The model.
  """

  def __init__(self, model: TransformerLM):
    """Compiles nothing yet.

    Args:
      model: The model.
    """
    self.model = model
    self.forward = jax.jit(functools.partial(forward, model))
    backward = functools.partial(forward_backward, model)
    self.forward_backward = jax.jit(backward, donate_argnums=1)
    self.take_tenant = jax.jit(take_tenant)
    self.put_tenant = jax.jit(put_tenant, donate_argnums=0)
    self.adam_step = jax.jit(adam_step, donate_argnums=0)
    self.muon_step = jax.jit(muon_step, donate_argnums=0)
    self._scores: dict[tuple[int, int], Any] = {}

  def score(self, top_k: int, draws: int, *arrays: AnyArray) -> PyTree:
    """Runs `score`, compiled for a number of likeliest tokens and of draws.

    Args:
      top_k: As in `score`.
      draws: As in `score`.
      *arrays: The rest.
    """
    program = self._scores.get((top_k, draws))
    if program is None:
      program = jax.jit(functools.partial(score, self.model, top_k, draws))
      self._scores[top_k, draws] = program
    return program(*arrays)
