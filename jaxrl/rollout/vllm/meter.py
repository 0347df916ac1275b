"""What vLLM says of its steps, under the names that `JaxEngine` uses."""

import time
from typing import Any


class Meter:
  """Adds up steps until `report` starts afresh.

  A step computes prompts, decodes, or both: its seconds count as time/prefill when it
  finished any prompt, else as time/decode. Waiting without requests counts as neither.
  """

  def __init__(self, num_slots: int):
    self._slots = num_slots
    self._landed = self._woken = 0.0
    self._clear()

  def _clear(self) -> None:
    self._prefill = self._decode = 0.0
    self._generated = self._steps = self._computed = self._reused = 0

  def wake(self) -> None:
    """There is work again, after there was none."""
    self._woken = time.perf_counter()

  def silence(self) -> float:
    """Seconds since the last step, or since there was work."""
    return time.perf_counter() - max(self._landed, self._woken)

  def step(self, iteration: Any) -> None:
    """iteration: vLLM's `IterationStats` of a step."""
    now = time.perf_counter()
    seconds = now - max(self._landed, self._woken)
    self._landed = now
    prompts = iteration.prompt_token_stats
    self._computed += prompts.computed
    self._reused += prompts.cached_tokens
    self._generated += iteration.num_generation_tokens
    self._steps += 1
    if prompts.total:
      self._prefill += seconds
    else:
      self._decode += seconds

  def report(self) -> dict[str, float]:
    seconds = self._prefill + self._decode
    figures = {
      'tokens/generated': self._generated,
      'tokens/prefilled': self._computed,
      'tokens/prompt_reused': self._reused,
      'tokens/per_second': self._generated / seconds if seconds else 0.0,
      'time/prefill': self._prefill,
      'time/decode': self._decode,
      'rollout/decode_steps': self._steps,
      'rollout/busy_slots': self._generated / max(self._steps * self._slots, 1),
    }
    self._clear()
    return {name: float(value) for name, value in figures.items()}
