"""The runs that every peer does, and how a peer is driven: plain Python alone.

A peer is a process that does one thing at a time, as it is told on its standard input:
`step` (a whole GRPO step), `decode` (different prompts, new tokens for each, with their
log-probs), `peak` (rates of the machine) or `quit`. It answers each with a line of
JSON. So peers in environments of their own can take turns.

The environment variable PEER_SIZE names one of SIZES; with PEER_ENDS=1 samples end at
different lengths, which are drawn by seed and so are the same for all.
"""

import dataclasses
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Size:
  """A model and a step: how many prompts and samples, and their tokens.

  alone: Peers run one after the other, as memory does not hold several.
  """

  model: dict[str, int]
  prompts: int
  samples: int
  prompt: int
  new: int
  about: str
  alone: bool = False

  @property
  def weights(self) -> int:
    """The weights that a token is multiplied by, those of the head included."""
    m = self.model
    heads, kv_heads = m['num_heads'] * m['head_dim'], m['num_kv_heads'] * m['head_dim']
    attention = m['hidden_size'] * (2 * heads + 2 * kv_heads)
    mlp = 3 * m['hidden_size'] * m['intermediate_size']
    return m['num_layers'] * (attention + mlp) + m['hidden_size'] * m['vocab_size']

  @property
  def forward_flops(self) -> float:
    """Of all rows, nothing recomputed or shared; attention to half of each row."""
    m, length = self.model, self.prompt + self.new
    tokens = self.prompts * self.samples * length
    scores = 2 * length * m['num_layers'] * m['num_heads'] * m['head_dim']
    return tokens * (2 * self.weights + scores)

  @property
  def decode_bytes(self) -> float:
    """What decoding reads at least: weights and cache once a token, in float32."""
    m, rows = self.model, self.prompts * self.samples
    cached = 2 * m['num_layers'] * m['num_kv_heads'] * m['head_dim']
    middle = self.prompt + self.new / 2
    return 4.0 * self.new * (self.weights + rows * middle * cached)


def _model(vocab: int, hidden: int, layers: int, heads: int, kv: int, mlp: int):
  return {
    'vocab_size': vocab,
    'hidden_size': hidden,
    'num_layers': layers,
    'num_heads': heads,
    'num_kv_heads': kv,
    'head_dim': 64,
    'intermediate_size': mlp,
  }


SIZES = {
  'toy': Size(
    _model(512, 256, 4, 4, 2, 768), 8, 8, 32, 64, 'the toy (3.28 M parameters'
  ),
  'mid': Size(
    _model(16_384, 512, 6, 8, 4, 1536),
    4,
    8,
    128,
    128,
    'the mid size (27.3 M parameters',
  ),
  'smollm2': Size(
    _model(49_152, 576, 30, 9, 3, 1536),
    *(2, 4, 96, 96),
    "SmolLM2-135M's shape (134.5 M parameters",
    alone=True,
  ),
}
SIZE = SIZES[os.environ.get('PEER_SIZE', 'toy')]
ENDS = os.environ.get('PEER_ENDS') == '1'
MODEL = SIZE.model
PROMPTS, SAMPLES, PROMPT, NEW = SIZE.prompts, SIZE.samples, SIZE.prompt, SIZE.new
LEARNING_RATE = 1e-3
# Counted once each, nothing recomputed or shared: forward of all tokens; forward and
# backward of the same.
GENERATE_FLOPS, TRAIN_FLOPS = SIZE.forward_flops, 3 * SIZE.forward_flops


def prompts(seed: int, distinct: int, samples: int = 1) -> list[list[int]]:
  """`distinct` prompts of token ids, each `samples` times in a row."""
  draw = random.Random(seed)
  tokens = range(1, MODEL['vocab_size'] - 1)  # the last one may end a sample
  rows = [draw.choices(tokens, k=PROMPT) for _ in range(distinct)]
  return [row for row in rows for _ in range(samples)]


def lengths(seed: int, size: Size = SIZE) -> list[int]:
  """How many tokens each sample has: all new ones, or with ENDS an eighth or more."""
  count = size.prompts * size.samples
  if not ENDS:
    return [size.new] * count
  draw = random.Random(f'lengths {seed}')
  return [draw.randint(size.new // 8, size.new) for _ in range(count)]


def mean_length(size: Size = SIZE) -> float:
  """Returns the mean of `lengths` with ENDS."""
  return (size.new // 8 + size.new) / 2


class Turns:
  """The peer's end. decode: does it for prompts and lengths. ready: waits for devices.

  peak: measures FLOP/s and bytes/s of the machine.
  """

  def __init__(
    self,
    decode: Callable[[list[list[int]], list[int]], Any] | None = None,
    *,
    ready: Callable[[], Any] = lambda: None,
    peak: Callable[[], tuple[float, float]] | None = None,
  ):
    self._out = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print goes to the standard error
    self.decode, self.ready, self.peak = decode, ready, peak
    self._begun: float | None = None
    self.step, self._decodes, self.generate_s = -1, 0, 0.0

  def next(self) -> bool:
    """Between steps: tells of the one done, then waits for the next; False: the end."""
    if self._begun is not None:
      self.ready()
      seconds = time.perf_counter() - self._begun
      generate = self.generate_s
      self._tell(step_s=seconds, generate_s=generate, train_s=seconds - generate)
    while word := sys.stdin.readline().strip():
      if word == 'step':
        self.step += 1
        self._begun, self.generate_s = time.perf_counter(), 0.0
        return True
      if word == 'quit':
        break
      if word == 'peak':
        flops, rate = self.peak() if self.peak else (0.0, 0.0)
        self._tell(flops=flops, rate=rate)
        continue
      rows = prompts(1000 + self._decodes, PROMPTS * SAMPLES)
      ends = lengths(1000 + self._decodes)
      self._decodes += 1
      start = time.perf_counter()
      assert self.decode is not None
      count = self.decode(rows, ends)
      assert count == sum(ends), f'{count} tokens, not {sum(ends)}'
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
