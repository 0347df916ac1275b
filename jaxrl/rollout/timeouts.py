"""How long an environment or an engine may take."""

from typing import NamedTuple

from jaxrl.signature import call


class Timeouts(NamedTuple):
  """Seconds, None for no limit: an environment's reset and step, an engine's reply."""

  reset: float | None
  step: float | None
  generate: float | None


def _timeouts(
  *, reset: float = 60.0, step: float = 60.0, generate: float = 0.0
) -> Timeouts:
  return Timeouts(reset or None, step or None, generate or None)


def read(text: str) -> Timeouts:
  """`'reset=300, step=900'` as Timeouts; 0 is no limit. Raises ConfigError."""
  made = {'timeouts': _timeouts}
  return call(f'timeouts({text})', made, 'timeouts', 'env.<tag>.timeouts')
