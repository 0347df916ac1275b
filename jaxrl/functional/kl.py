"""Estimates of KL(π_θ‖π_ref) per token, from log-probs of the sampled tokens.

p is the policy's log-prob, q the reference's, o the behaviour policy's. Each serves
twice: as a loss term with gradient through p, and as a penalty on rewards, where the
behaviour log-prob takes the place of p. J. Schulman, "Approximating KL divergence".
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.functional.groups import exp
from jaxrl.types import Array


def term(estimator: Callable[..., Array], coef: float) -> Callable[..., Array] | None:
  """The estimator times `coef`; None when it is 0, so no reference is scored."""
  return functools.partial(estimator, coef=coef) if coef else None


def k1(logprobs: Array, ref_logprobs: Array, *, coef: float = 1.0) -> Array:
  """coef·(p − q), unbiased, may be negative (Schulman, 2020). `[B, T]`.

  Meant as a reward penalty: as a loss its expected on-policy gradient is zero.
  """
  return coef * (logprobs - ref_logprobs)


def k2(logprobs: Array, ref_logprobs: Array, *, coef: float = 1.0) -> Array:
  """coef·½(p − q)², its on-policy gradient the KL's (Schulman, 2020). `[B, T]`.

  Also called `mse`.
  """
  return coef * 0.5 * jnp.square(logprobs - ref_logprobs)


mse = k2


def k3(logprobs: Array, ref_logprobs: Array, *, coef: float = 1.0) -> Array:
  """coef·(e^{q−p} − 1 − (q−p)), unbiased, never negative (Schulman, 2020). `[B, T]`."""
  return coef * _excess(ref_logprobs - logprobs)


def _excess(d: Array) -> Array:
  """e^d − 1 − d. Near 0 float32 would cancel nearly all of it: a series there."""
  near = jnp.abs(d) < 0.3
  x = jnp.where(near, d, 0)
  series = 0.0
  for factorial in (40320, 5040, 720, 120, 24, 6, 2):
    series = series * x + 1 / factorial
  return jnp.where(near, series * x * x, exp(d) - 1 - d)


def low_var(logprobs: Array, ref_logprobs: Array, *, coef: float = 1.0) -> Array:
  """coef·clip(e^{q−p} − 1 − (q−p), ±10), k3 bounded (Schulman, 2020). `[B, T]`."""
  return coef * jnp.clip(k3(logprobs, ref_logprobs), -10, 10)


def abs(logprobs: Array, ref_logprobs: Array, *, coef: float = 1.0) -> Array:
  """coef·|p − q| (Schulman, 2020). `[B, T]`."""
  return coef * jnp.abs(logprobs - ref_logprobs)


def corrected_k3(
  logprobs: Array, ref_logprobs: Array, old_logprobs: Array, *, coef: float = 1.0
) -> Array:
  """coef·clip(e^{p−o}, 0, 2)·k3 (DeepSeek-V3.2, arXiv 2512.02556). `[B, T]`.

  For off-policy samples. Gradient flows through the ratio, where it is not clipped.
  """
  ratio = jnp.clip(exp(logprobs - old_logprobs), 0, 2)
  return coef * ratio * k3(logprobs, ref_logprobs)


def full(logits: Array, ref_logits: Array, *, coef: float = 1.0) -> Array:
  """`[B, T]` coef·Σ_v π(v)·(log π(v) − log π_ref(v)), exact; logits `[B, T, V]`."""
  p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
  return coef * jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def adaptive_coef(
  beta: Array, kl: Array, n: Array, *, target: float = 0.1, horizon: float = 10_000.0
) -> Array:
  """The next β: β·(1 + clip(kl/target − 1, ±0.2)·n/horizon) (arXiv 1909.08593).

  kl: the mean KL over the last n rows. Steers the KL to `target`.
  """
  return beta * (1 + jnp.clip(kl / target - 1, -0.2, 0.2) * n / horizon)
