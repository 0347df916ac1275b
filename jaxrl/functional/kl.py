"""KL estimators per token, of KL(π_θ‖π_ref), from log-probs of the sampled tokens.

p is the policy's log-prob, q the reference's, o the old policy's. Each estimator serves
as a loss term, with gradient through p, and as a penalty on rewards, where o takes the
place of p (J. Schulman, "Approximating KL divergence", 2020).
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp

from jaxrl.functional.components import component
from jaxrl.functional.reductions import clipped_exp
from jaxrl.types import Array


def term(estimator: Callable[..., Array], coef: float) -> Callable[..., Array] | None:
  """Binds a coefficient to an estimator.

  Args:
    estimator: One of this module.
    coef: The coefficient.

  Returns:
    The estimator times `coef`; None when it is 0, so that no reference is scored.
  """
  return functools.partial(estimator, coef=coef) if coef else None


@component()
def k1(logprobs: Array, ref_logprobs: Array, *, coef: float = 1.0) -> Array:
  """Computes coef·(p − q), unbiased, which may be negative (Schulman, 2020).

  It is meant as a reward penalty: as a loss its expected on-policy gradient is zero.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    ref_logprobs: `[B, T]` the reference's log-probs q.
    coef: The coefficient.

  Returns:
    `[B, T]`.
  """
  return coef * (logprobs - ref_logprobs)


@component()
def k2(logprobs: Array, ref_logprobs: Array, *, coef: float = 1.0) -> Array:
  """Computes coef·½(p − q)², whose on-policy gradient is the KL's (Schulman, 2020).

  It is also called `mse`.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    ref_logprobs: `[B, T]` the reference's log-probs q.
    coef: The coefficient.

  Returns:
    `[B, T]`.
  """
  return coef * 0.5 * jnp.square(logprobs - ref_logprobs)


mse = k2


@component()
def k3(logprobs: Array, ref_logprobs: Array, *, coef: float = 1.0) -> Array:
  """Computes coef·(e^{q−p} − 1 − (q−p)), unbiased and not negative (Schulman, 2020).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    ref_logprobs: `[B, T]` the reference's log-probs q.
    coef: The coefficient.

  Returns:
    `[B, T]`.
  """
  return coef * _excess(ref_logprobs - logprobs)


def _excess(d: Array) -> Array:
  """Computes e^d − 1 − d, as a series near 0, where float32 would cancel."""
  near = jnp.abs(d) < 0.3
  x = jnp.where(near, d, 0)
  series = 0.0
  for factorial in (40320, 5040, 720, 120, 24, 6, 2):
    series = series * x + 1 / factorial
  return jnp.where(near, series * x * x, clipped_exp(d) - 1 - d)


@component()
def low_var(logprobs: Array, ref_logprobs: Array, *, coef: float = 1.0) -> Array:
  """Computes coef·clip(e^{q−p} − 1 − (q−p), ±10), k3 bounded (Schulman, 2020).

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    ref_logprobs: `[B, T]` the reference's log-probs q.
    coef: The coefficient.

  Returns:
    `[B, T]`.
  """
  return coef * jnp.clip(k3(logprobs, ref_logprobs), -10, 10)


@component()
def abs(logprobs: Array, ref_logprobs: Array, *, coef: float = 1.0) -> Array:
  """Computes coef·|p − q| (Schulman, 2020).

  The gradient is coef·sign(p − q), and 0 where the two are equal.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    ref_logprobs: `[B, T]` the reference's log-probs q.
    coef: The coefficient.

  Returns:
    `[B, T]`.
  """
  difference = logprobs - ref_logprobs
  # JAX differentiates |x| at 0 to 1, so a policy equal to its reference would move.
  return coef * jnp.sign(difference) * difference


@component()
def corrected_k3(
  logprobs: Array, ref_logprobs: Array, old_logprobs: Array, *, coef: float = 1.0
) -> Array:
  """Computes coef·clip(e^{p−o}, 0, 2)·k3 (DeepSeek-V3.2, arXiv 2512.02556).

  It is for off-policy samples. Gradient flows through the ratio where that is not
  clipped.

  Args:
    logprobs: `[B, T]` the policy's log-probs p, with gradient.
    ref_logprobs: `[B, T]` the reference's log-probs q.
    old_logprobs: `[B, T]` the old log-probs o.
    coef: The coefficient.

  Returns:
    `[B, T]`.
  """
  ratio = jnp.clip(clipped_exp(logprobs - old_logprobs), 0, 2)
  return coef * ratio * k3(logprobs, ref_logprobs)
