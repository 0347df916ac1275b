"""Prompt blocks compute prompts in pieces of one shape, so that prompts share pieces.

A prompt that begins like a cached one takes over their common blocks and computes the
rest: the next turn of an agent's session, branches, and samples that part late. See
`BlockRows` for why bits stay those of a prompt that shares nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.decoding import decode_step
from jaxrl.models.decoding.block_rows import BlockRows
from jaxrl.models.kv_cache import Cache
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.types import Array, Params, PyTree


@dataclasses.dataclass(frozen=True)
class StagedPrompt:
  """A prompt that takes over its first blocks and computes the rest.

  Attributes:
    slot: Its slot.
    prompt: `[P]` int32.
    start: How many tokens need not be computed.
    source: The slot to copy them from; None if they are in its own.
  """

  slot: int
  prompt: np.ndarray
  start: int
  source: int | None


class BlockPrefill:
  """Computes prompts block by block, up to a few slots' blocks at a time."""

  def __init__(self, model: TransformerLM, size: int, num_rows: int, num_slots: int):
    """Creates the program; it is compiled when it is first used.

    Args:
      model: The model.
      size: Tokens of a block.
      num_rows: Blocks that one program computes, each of another slot.
      num_slots: Number of cache slots.
    """
    self._size, self._num_rows, self._num_slots = size, num_rows, num_slots
    self.program = jax.jit(functools.partial(prefill_blocks, model), donate_argnums=1)

  def run(
    self,
    params: Params,
    cache: Cache,
    staged: Iterable[Sequence[StagedPrompt]],
    copy: Callable[[Cache, Sequence[tuple[int, int, int]]], Cache],
  ) -> Cache:
    """Copies what prompts share and computes the rest, except for their last tokens.

    Args:
      params: What `ModelRunner.prepare_params` returned.
      cache: The cache; it is donated.
      staged: Prompts, stage by stage: each may copy from those of earlier ones.
      copy: As `ModelRunner.copy_prompts`.

    Returns:
      The updated cache.
    """
    for stage in staged:
      copies = [(p.source, p.slot, p.start) for p in stage if p.source is not None]
      cache = copy(cache, copies)
      todo = [(p.slot, p.prompt[:-1], p.start) for p in stage]
      while todo := [one for one in todo if one[2] < len(one[1])]:
        now = todo[: self._num_rows]
        cache = self.program(params, cache, *self._inputs(now))
        done = [(slot, prompt, start + self._size) for slot, prompt, start in now]
        todo = done + todo[self._num_rows :]
    return cache

  def warmup(self, params: Params, cache: Cache) -> Cache:
    """Compiles the program.

    Args:
      params: What `ModelRunner.prepare_params` returned.
      cache: The cache; it is donated.

    Returns:
      The cache.
    """
    return self.program(params, cache, *self._inputs([]))

  def _inputs(self, blocks: Sequence[tuple[int, np.ndarray, int]]) -> PyTree:
    tokens = np.zeros((self._num_rows, self._size), np.int32)
    starts = np.zeros(self._num_rows, np.int32)
    slots = np.full(self._num_rows, self._num_slots, np.int32)  # skipped
    for row, (slot, prompt, start) in enumerate(blocks):
      piece = prompt[start : start + self._size]
      tokens[row, : len(piece)] = piece
      starts[row], slots[row] = start, slot
    return tokens, starts, slots


def prefill_blocks(
  model: TransformerLM,
  params: Params,
  cache: Cache,
  tokens: Array,
  starts: Array,
  slots: Array,
) -> Cache:
  """Computes keys and values of a block of each of P slots.

  Args:
    model: The model.
    params: Its parameters.
    cache: The cache, of chunks.
    tokens: `[P, N]` int32. What follows a prompt's end is computed too, and
      overwritten before any token attends to it.
    starts: `[P]` int32, positions of their first tokens.
    slots: `[P]` int32; those outside the cache are skipped.

  Returns:
    The cache.
  """
  positions = starts[:, None] + jnp.arange(tokens.shape[1])
  flat = tokens.reshape(-1), positions.reshape(-1)
  inputs = *flat, jnp.max(positions) + 1, model.rotations(flat[1])
  # Nobody reads the logits, so none are computed.
  return decode_step.decode(model, params, cache, *inputs, BlockRows(slots, positions))[
    1
  ]
