"""What can go wrong between a publisher and a receiver of weights."""


class WeightsError(RuntimeError):
  """Weights cannot be published or loaded; the message says which and why."""


class Corrupt(WeightsError):
  """Bytes are missing or not what was published. Asking again may help."""
