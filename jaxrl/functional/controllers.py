"""What steers the coefficient of a KL term: `fn(state, kl, num_rows, *, …) -> state`.

The state's 'scale' multiplies the coefficients of kl_loss and kl_penalty and starts
at 1. kl is the mean over action tokens of the estimator at coefficient 1, between the
policy that sampled and the reference; num_rows, how many rows that mean is over.
"""

import jax.numpy as jnp

from jaxrl.functional.kl import adaptive_coef
from jaxrl.functional.marks import stateful
from jaxrl.types import Array


def init_scale() -> dict[str, Array]:
  """The state before any batch."""
  return {'scale': jnp.ones(())}


@stateful(init_scale)
def adaptive(
  state: dict[str, Array],
  kl: Array,
  num_rows: Array,
  *,
  target: float = 0.1,
  horizon: float = 10_000.0,
) -> dict[str, Array]:
  """Up to a fifth up or down per `horizon` rows, towards `target` (arXiv 1909.08593).

  kl, num_rows: scalars. target: in nats a token, as kl is. Returns the next state.
  """
  scale = adaptive_coef(state['scale'], kl, num_rows, target=target, horizon=horizon)
  return {'scale': scale}
