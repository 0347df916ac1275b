"""The experts that an episode's tokens took, `[·, L, k]`, put together from replies."""

import numpy as np


def joined(known: np.ndarray | None, found: np.ndarray | None) -> np.ndarray | None:
  """What is known of the first tokens, and then what a later reply tells of the rest.

  found: of the tokens from the first on. A token that a later prompt brings again stays
  with the experts that it took when what follows it was drawn.
  """
  if known is None or found is None:
    return found if known is None else known
  return np.concatenate([known, found[len(known) :]])


def fitted(routed: np.ndarray, length: int) -> np.ndarray:
  """Of `length` tokens: cut, or −1 for those that no one fed to the model."""
  routed = routed[:length]
  rest = ((0, length - len(routed)), (0, 0), (0, 0))
  return np.pad(routed, rest, constant_values=-1)
