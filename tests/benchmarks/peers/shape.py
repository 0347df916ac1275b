"""The toy that every peer runs, and how a peer is driven: plain Python alone.

A peer is a process that does one thing at a time, as it is told on its standard input:
`step` (a whole GRPO step), `decode` (64 different prompts, 64 new tokens each, with
their log-probs), `peak` (a matrix product's rate) or `quit`. It answers each with a
line of JSON. So peers in environments of their own can take turns.
"""

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

MODEL = {
  'vocab_size': 512,
  'hidden_size': 256,
  'num_layers': 4,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 64,
  'intermediate_size': 768,
}
PROMPTS, SAMPLES, PROMPT, NEW = 8, 8, 32, 64
LEARNING_RATE = 1e-3
# Counted once each, nothing recomputed or shared: forward of 64 × 96 tokens; forward
# and backward of the same.
GENERATE_FLOPS, TRAIN_FLOPS = 40.5e9, 122.8e9


def prompts(seed: int, distinct: int, samples: int = 1) -> list[list[int]]:
  """`distinct` prompts of 32 token ids, each `samples` times in a row."""
  draw = random.Random(seed)
  tokens = range(1, MODEL['vocab_size'])
  rows = [draw.choices(tokens, k=PROMPT) for _ in range(distinct)]
  return [row for row in rows for _ in range(samples)]


class Turns:
  """The peer's end. decode: does it for a list of prompts. ready: waits for devices."""

  def __init__(
    self,
    decode: Callable[[list[list[int]]], Any] | None = None,
    *,
    ready: Callable[[], Any] = lambda: None,
    peak: Callable[[], float] | None = None,
  ):
    self._out = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print goes to the standard error
    self.decode, self.ready, self.peak = decode, ready, peak
    self._begun: float | None = None
    self._decodes, self.generate_s = 0, 0.0

  def next(self) -> bool:
    """Between steps: tells of the one done, then waits for the next; False: the end."""
    if self._begun is not None:
      self.ready()
      seconds = time.perf_counter() - self._begun
      generate = self.generate_s
      self._tell(step_s=seconds, generate_s=generate, train_s=seconds - generate)
    while word := sys.stdin.readline().strip():
      if word == 'step':
        self._begun, self.generate_s = time.perf_counter(), 0.0
        return True
      if word == 'quit':
        break
      if word == 'peak':
        self._tell(flops=self.peak() if self.peak else 0.0)
        continue
      rows = prompts(1000 + self._decodes, PROMPTS * SAMPLES)
      self._decodes += 1
      start = time.perf_counter()
      assert self.decode is not None
      count = self.decode(rows)
      assert count == len(rows) * NEW, f'{count} tokens, not {len(rows) * NEW}'
      self._tell(decode_s=time.perf_counter() - start)
    return False

  def generating(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, its seconds counted as generation."""

    def timed(*args: Any, **kwargs: Any) -> Any:
      start = time.perf_counter()
      result = function(*args, **kwargs)
      self.generate_s += time.perf_counter() - start
      return result

    return timed

  def _tell(self, **figures: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(figures | {'mib': peak / 1024}), file=self._out, flush=True)
