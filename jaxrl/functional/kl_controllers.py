"""KL controllers steer the coefficient of a KL term: `fn(state, kl, num_rows, *, …)`.

A controller returns its next state. The state's 'scale' multiplies the coefficients of
`kl_loss` and `kl_penalty` and starts at 1.
"""

import jax.numpy as jnp

from jaxrl.functional.components import component
from jaxrl.types import Array


def init_scale() -> dict[str, Array]:
  """Returns the state before the first batch."""
  return {'scale': jnp.ones(())}


def adaptive_coef(
  beta: Array, kl: Array, n: Array, *, target: float = 0.1, horizon: float = 10_000.0
) -> Array:
  """Returns the next β: β·(1 + clip(kl/target − 1, ±0.2)·n/horizon) (arXiv 1909.08593).

  Args:
    beta: The coefficient so far, a scalar.
    kl: The mean KL over the last n rows, a scalar.
    n: The number of rows.
    target: The KL to steer to.
    horizon: The number of rows in which β changes by at most a fifth.
  """
  return beta * (1 + jnp.clip(kl / target - 1, -0.2, 0.2) * n / horizon)


@component(init_state=init_scale)
def adaptive(
  state: dict[str, Array],
  kl: Array,
  num_rows: Array,
  *,
  target: float = 0.1,
  horizon: float = 10_000.0,
) -> dict[str, Array]:
  """Moves the scale up or down by up to a fifth per `horizon` rows (arXiv 1909.08593).

  Args:
    state: The state so far; see `init_scale`.
    kl: The mean over action tokens of the estimator at coefficient 1, between the
      policy that sampled and the reference; a scalar.
    num_rows: The number of rows that mean is over; a scalar.
    target: The KL to steer to, in nats per token.
    horizon: The number of rows in which the scale changes by at most a fifth.

  Returns:
    The next state.
  """
  scale = adaptive_coef(state['scale'], kl, num_rows, target=target, horizon=horizon)
  return {'scale': scale}
