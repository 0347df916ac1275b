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
