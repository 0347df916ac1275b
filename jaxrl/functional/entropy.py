"""The entropy bonus."""

from jaxrl.types import Array


def entropy_loss(entropy: Array, *, coef: float = 0.0) -> Array:
  """`[B, T]` −coef·H, H `[B, T]` the full distribution's entropy at temperature 1."""
  return -coef * entropy
