"""Distillation losses: divergences on the teacher's most likely tokens."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional.components import component
from jaxrl.types import Array

NEGLIGIBLE_LOGPROB = -40.0  # a log-probability that adds nothing to a sum in float32
Kind = Literal['forward', 'reverse', 'adaptive', 'skewed', 'js']


@component()
def distill(
  topk_logprobs: Array,
  teacher_topk_logprobs: Array,
  mask: Array,
  *,
  kind: Kind = 'forward',
  top_k: int = 64,
  skew: float = 0.1,
  head: float = 0.5,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = D(t, s) over k tokens and "the rest" (arXiv 1503.02531).

  With t the teacher, s the student and KL(a‖b) = Σ a·log(a/b), the divergence D is one
  of:

    forward: KL(t‖s).
    reverse: KL(s‖t).
    skewed: KL(t‖skew·t + (1−skew)·s) (arXiv 2402.03898).
    js: ½KL(t‖m) + ½KL(s‖m), m = ½(t+s).
    adaptive: a·forward + (1−a)·reverse with sg(a), a the share of |t−s| that lies on
      the head, the likeliest tokens that make up `head` of t (arXiv 2404.02657).

  Args:
    topk_logprobs: `[B, T, K]` the student's log-probs of the teacher's K likeliest
      tokens, in falling order.
    teacher_topk_logprobs: `[B, T, K]` the teacher's own.
    mask: `[B, T]` bool, True at action tokens.
    kind: The divergence.
    top_k: How many of the K tokens count individually.
    skew: The teacher's share in 'skewed'.
    head: The teacher's probability of the head in 'adaptive'.

  Returns:
    Loss `[B, T]` and no metrics.
  """
  valid = mask[..., None] & (jnp.arange(topk_logprobs.shape[-1]) < top_k)
  s = _with_rest(jnp.where(valid, topk_logprobs, NEGLIGIBLE_LOGPROB))
  t = _with_rest(jnp.where(valid, teacher_topk_logprobs, NEGLIGIBLE_LOGPROB))
  if kind == 'forward':
    loss = _kl(t, s)
  elif kind == 'reverse':
    loss = _kl(s, t)
  elif kind == 'skewed':
    loss = _kl(t, jnp.logaddexp(jnp.log(skew) + t, jnp.log1p(-skew) + s))
  elif kind == 'js':
    m = jnp.logaddexp(t, s) - jnp.log(2.0)
    loss = 0.5 * (_kl(t, m) + _kl(s, m))
  elif kind == 'adaptive':
    a = jax.lax.stop_gradient(_head_share(t, s, head))
    loss = a * _kl(t, s) + (1 - a) * _kl(s, t)
  else:
    raise ValueError(f'kind is {kind!r}; it must be one of {Kind.__args__}')
  return jnp.where(mask, loss, 0), {}


def self_distill_fields(
  mask: Array, teacher_mask: Array, aggregation: str
) -> dict[str, Array]:
  """Counts, in the whole optimizer batch, the tokens that a teacher speaks of.

  Args:
    mask: `[B, T]` bool, True at action tokens.
    teacher_mask: `[B, T]` bool, where the teacher has something to teach.
    aggregation: The mode of the mean over tokens.

  Returns:
    {'distill_scale': what turns a mean over all action tokens into one over these; 1
    for other means, in which rows without a teacher count as 0}.
  """
  if aggregation != 'token_mean':
    return {'distill_scale': jnp.float32(1)}
  taught = jnp.sum(jnp.asarray(mask, bool) & jnp.asarray(teacher_mask, bool))
  return {'distill_scale': jnp.sum(mask) / jnp.maximum(taught, 1).astype(jnp.float32)}


@component(precompute=self_distill_fields)
def self_distill(
  logprobs: Array,
  old_logprobs: Array,
  topk_logprobs: Array,
  teacher_topk_logprobs: Array,
  teacher_mask: Array,
  mask: Array,
  distill_scale: Array | float = 1.0,
  *,
  alpha: float = 0.5,
  top_k: int = 100,
  tail: bool = True,
  is_clip: float | None = 2.0,
) -> tuple[Array, dict[str, Array]]:
  """Computes L_t = min(sg(r), is_clip)·D_α(t, s) on k tokens (arXiv 2601.20802).

  With t the teacher, s the student and m = α·t + (1−α)·s, the divergence D_α is
  α·KL(t‖m) + (1−α)·KL(s‖m); for α = 0 it is KL(t‖s), for α = 1 KL(s‖t).

  Args:
    logprobs: `[B, T]` the student's log-probs p of the row's tokens.
    old_logprobs: `[B, T]` the log-probs o of the policy that wrote them; r = e^{p−o}.
    topk_logprobs: `[B, T, K]` the student's log-probs of the K tokens compared.
    teacher_topk_logprobs: `[B, T, K]` the teacher's.
    teacher_mask: `[B, T]` bool, where the teacher has something to teach.
    mask: `[B, T]` bool, True at action tokens.
    distill_scale: From `self_distill_fields` over the whole optimizer batch.
    alpha: α of the divergence.
    top_k: How many of the K tokens count.
    tail: Whether all other tokens count as one more; otherwise the k tokens'
      probabilities are normalised.
    is_clip: The greatest weight for the age of a row; None for no such weight.

  Returns:
    Loss `[B, T]` and the metrics 'taught', the share of tokens that the teacher speaks
    of, and 'divergence', of these.
  """
  mask = jnp.asarray(mask, bool)
  taught = mask & jnp.asarray(teacher_mask, bool)
  valid = taught[..., None] & (jnp.arange(topk_logprobs.shape[-1]) < top_k)
  complete = _with_tail if tail else _normalise
  s = complete(jnp.where(valid, topk_logprobs, NEGLIGIBLE_LOGPROB))
  t = complete(jnp.where(valid, teacher_topk_logprobs, NEGLIGIBLE_LOGPROB))
  inner = jnp.clip(alpha, 1e-6, 1 - 1e-6)
  m = jnp.logaddexp(jnp.log(inner) + t, jnp.log1p(-inner) + s)
  mixed = inner * _kl(t, m) + (1 - inner) * _kl(s, m)
  divergence = jnp.where(alpha >= 1, _kl(s, t), mixed)
  divergence = jnp.where(alpha <= 0, _kl(t, s), divergence)
  loss = divergence
  if is_clip is not None:
    age = jax.lax.stop_gradient(jnp.where(taught, logprobs - old_logprobs, 0))
    loss = loss * jnp.minimum(jnp.exp(jnp.clip(age, -20, 20)), is_clip)
  metrics = {
    'taught': taught.astype(jnp.float32),
    'divergence': jnp.where(taught, distill_scale * divergence, 0),
  }
  return jnp.where(taught, distill_scale * loss, 0), metrics


def _with_tail(logprobs: Array) -> Array:
  """Appends the log-probability of all other tokens, at least 1e-7."""
  total = jax.nn.logsumexp(logprobs, axis=-1, keepdims=True)
  tail = jnp.log(-jnp.expm1(jnp.minimum(total, -1e-7)))
  return jnp.concatenate([logprobs, tail], axis=-1)


def _normalise(logprobs: Array) -> Array:
  return logprobs - jax.nn.logsumexp(logprobs, axis=-1, keepdims=True)


def _with_rest(logprobs: Array) -> Array:
  """Appends the log-probability of everything else, at least e^−20."""
  rest = 1 - jnp.sum(jnp.exp(logprobs), axis=-1, keepdims=True)
  floor = jnp.exp(-20.0)
  return jnp.concatenate([logprobs, jnp.log(jnp.maximum(rest, floor))], axis=-1)


def _kl(a: Array, b: Array) -> Array:
  return jnp.sum(jnp.exp(a) * (a - b), axis=-1)


def _head_share(t: Array, s: Array, head: float) -> Array:
  order = jnp.argsort(-t, axis=-1)
  mass = jnp.take_along_axis(jnp.exp(t), order, axis=-1)
  gap = jnp.take_along_axis(jnp.abs(jnp.exp(t) - jnp.exp(s)), order, axis=-1)
  on_head = jnp.cumsum(mass, axis=-1) - mass < head
  total = jnp.sum(gap, axis=-1)
  share = jnp.sum(jnp.where(on_head, gap, 0), axis=-1) / jnp.where(total > 0, total, 1)
  return jnp.where(total > 0, share, 0.5)
