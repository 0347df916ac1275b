"""Threaded decode: decodes partitions of the slots on separate threads, on CPUs.

A decode step of a small model is about a hundred operations of microseconds each, and
XLA's CPU backend runs one after the other. It shares out matrix products between its
threads, but not what lies between them. Two programs of half the slots each keep two
cores busy. On other devices, and where a partition would have few slots, there is one
partition, and `make_model_runner` returns a plain `ModelRunner`.
"""

import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from jaxrl.device_thread import cpu_count
from jaxrl.models.exact_mode import Exact
from jaxrl.models.kv_cache import Cache
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine import token_sampling
from jaxrl.rollout.engine.model_runner import ModelRunner, SlotState
from jaxrl.types import Array, Params

if TYPE_CHECKING:
  from kernels.block_rounding import BlockFormat

log = logging.getLogger(__name__)
R = TypeVar('R')

# Fewer slots are not worth a thread: all slots of a partition share one read of the
# weights.
MIN_SLOTS_PER_THREAD = 32


def make_model_runner(
  model: TransformerLM,
  *,
  decode_threads: int,
  num_slots: int,
  prefill_tokens: int,
  sharding: jax.sharding.Sharding,
  **options: Any,
) -> 'ModelRunner | ThreadedDecoder':
  """Creates a model runner, or a threaded one where several threads are faster.

  Args:
    model: The model. In exact mode there is one thread.
    decode_threads: Number of threads; 0 chooses it by platform, cores and slots.
    num_slots: Number of cache slots of all threads together.
    prefill_tokens: As for `ModelRunner`, for all threads together.
    sharding: Where weights and cache lie.
    **options: Other options of `ModelRunner`.

  Returns:
    An object with the methods of `ModelRunner`.

  Raises:
    ValueError: If the slots cannot be split between `decode_threads`.
  """
  is_exact, num_devices = model.exact is not None, sharding.num_devices
  platform = next(iter(sharding.device_set)).platform
  if model.config.vision is not None:  # features of images are kept once
    if decode_threads > 1:
      raise ValueError(
        f'a model that sees images decodes with one thread, not decode_threads='
        f'{decode_threads}'
      )
    decode_threads = 1
  num_threads = decode_threads or choose_decode_threads(
    num_slots, platform, num_devices, is_exact
  )
  problem = decode_threads_error(
    num_threads, num_slots, exact=is_exact, devices=num_devices
  )
  if problem:
    raise ValueError(problem)
  partition_runner = ModelRunner(
    model,
    num_slots=num_slots // num_threads,
    prefill_tokens=-(-prefill_tokens // num_threads),
    sharding=sharding,
    **options,
  )
  if num_threads == 1:
    return partition_runner
  log.info('%d slots are decoded by %d threads', num_slots, num_threads)
  return ThreadedDecoder(partition_runner, num_threads)


def choose_decode_threads(
  num_slots: int, platform: str, devices: int, exact: bool
) -> int:
  """Chooses the number of threads that decode `num_slots` slots fastest.

  Args:
    num_slots: Number of cache slots.
    platform: JAX's name of the devices' platform.
    devices: Number of devices of the engine.
    exact: Whether log-probs must have the learner's bits. Then there is one thread,
      because the learner scores `num_slots` rows in one program.

  Returns:
    A divisor of `num_slots`.
  """
  if platform != 'cpu' or devices > 1 or exact:
    return 1
  max_threads = min(cpu_count(), num_slots // MIN_SLOTS_PER_THREAD)
  return next((n for n in range(max_threads, 1, -1) if num_slots % n == 0), 1)


def decode_threads_error(
  decode_threads: int, num_slots: int, *, exact: bool, devices: int = 1
) -> str:
  """Says why an engine cannot have so many decode threads.

  Args:
    decode_threads: Number of threads.
    num_slots: Number of cache slots.
    exact: Whether log-probs must have the learner's bits.
    devices: Number of devices of the engine.

  Returns:
    The problem; '' if there is none.
  """
  if decode_threads < 1 or num_slots % decode_threads:
    return (
      f'max_num_seqs={num_slots} is not divisible by decode_threads={decode_threads}'
    )
  if exact and decode_threads > 1:
    return (
      'exact mode decodes all slots in one program, not with '
      f'decode_threads={decode_threads}'
    )
  if devices > 1 and decode_threads > 1:
    return (
      f'{devices} devices decode in one program, not with '
      f'decode_threads={decode_threads}'
    )
  return ''


def configure_model(
  model: TransformerLM,
  sharding: jax.sharding.Sharding,
  *,
  exact: Exact | None,
  router_replay: bool,
  weights_dtype: str,
  weights_format: 'BlockFormat | None',
) -> TransformerLM:
  """Returns the model as an engine runs it.

  Args:
    model: The model.
    sharding: Where weights and cache lie.
    exact: The exact mode, if it is asked for; the model's own is kept otherwise.
    router_replay: As for `JaxEngine`.
    weights_dtype: As there.
    weights_format: The format of 8-bit weights; None for more bits.

  Raises:
    ValueError: If the model or the devices do not have this.
  """
  platform = next(iter(sharding.device_set)).platform
  model = dataclasses.replace(model, platform=platform)
  if exact is not None:
    model = dataclasses.replace(model, exact=exact)
  if router_replay:
    model = dataclasses.replace(model, router_replay=True)
  fits = platform == 'cpu' and model.exact is None and sharding.num_devices == 1
  if weights_format is not None and model.exact is not None:
    raise ValueError(f'weights_dtype={weights_dtype!r} is not for exact mode')
  if weights_dtype and weights_format is None and not fits:
    raise ValueError(
      f'weights_dtype={weights_dtype!r} is for one CPU device, and not for exact mode'
    )
  if fits and 'bfloat16' in (weights_dtype, model.dtype):
    model = dataclasses.replace(model, weights_dtype='bfloat16')
  return model


def make_weights_format(weights_dtype: str, weights_block: int) -> 'BlockFormat | None':
  """Returns the format of 8-bit weights.

  Args:
    weights_dtype: As for `JaxEngine`.
    weights_block: As there.

  Returns:
    The format; None for weights of more bits.
  """
  if weights_dtype not in ('int8', 'float8_e4m3fn'):
    return None
  from kernels.block_rounding import BlockFormat  # few engines have 8-bit weights

  return BlockFormat(weights_dtype, weights_block)


def check_cache_use(
  model: TransformerLM,
  draft_tokens: int,
  draft_match: int,
  prompt_block: int,
  **engine: Any,
) -> Any:
  """Checks that an engine can draft tokens, and compute prompts in blocks, if it does.

  Args:
    model: The model, with its platform.
    draft_tokens: As for `JaxEngine`.
    draft_match: As there.
    prompt_block: As there.
    **engine: Its `devices` and `keeps_prompts`; see `CacheUse.obstacle`.

  Returns:
    The `Drafting`; None if it drafts nothing.

  Raises:
    ValueError: If it cannot.
  """
  if not (prompt_block or draft_tokens):
    return None
  from jaxrl.rollout.engine import cache_uses  # most engines have neither

  place: Any = {'platform': model.platform, **engine}
  if prompt_block:
    cache_uses.PROMPT_BLOCKS.check(prompt_block, model.config, **place)
  if not draft_tokens:
    return None
  from jaxrl.rollout.engine import speculative_decode

  cache_uses.DRAFTS.check(draft_tokens, model.config, **place)
  return speculative_decode.Drafting(draft_tokens, draft_match)


class ThreadedDecoder:
  """Runs one `ModelRunner`'s programs on several partitions, a thread for each.

  Its methods are those of `ModelRunner`. Slots are numbered through all partitions,
  and caches, slot states and results are lists with one entry per partition.

  Attributes:
    partition_runner: The programs of one partition.
    num_partitions: Number of partitions.
    num_slots: Number of slots of all partitions together.
  """

  def __init__(self, partition_runner: ModelRunner, num_partitions: int):
    """Creates the threads.

    Args:
      partition_runner: The programs of one partition.
      num_partitions: Number of partitions.
    """
    self.partition_runner = partition_runner
    self.num_partitions = num_partitions
    self.num_slots = partition_runner.num_slots * num_partitions
    self.prompt_buckets = partition_runner.prompt_buckets
    self.max_stop_ids = partition_runner.max_stop_ids
    # XLA runs what one thread has started in order, so each partition has its own.
    self._executors = [
      concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f'decode {i}')
      for i in range(num_partitions)
    ]

  @property
  def compile_count(self) -> int:
    """Returns the number of programs compiled so far."""
    return self.partition_runner.compile_count

  def init_state(self) -> tuple[list[Cache], list[SlotState]]:
    """Returns empty caches and idle slots, on the device."""
    states = [self.partition_runner.init_state() for _ in range(self.num_partitions)]
    return [cache for cache, _ in states], [slots for _, slots in states]

  def idle_slots(self) -> SlotState:
    """Makes a numpy state in which every slot of all partitions is idle."""
    idle = self.partition_runner.idle_slots()
    return jax.tree.map(lambda x: np.concatenate([x] * self.num_partitions), idle)

  def spent_panels(self, params: Params | None) -> Params | None:
    """Returns what `ModelRunner.spent_panels` does."""
    return self.partition_runner.spent_panels(params)

  def prepare_params(
    self, params: Params, copy: bool = False, old: Params | None = None
  ) -> Params:
    """Prepares weights as `ModelRunner.prepare_params` does."""
    return self.partition_runner.prepare_params(params, copy, old)

  def warmup(self, params: Params) -> None:
    """Compiles every program; see `ModelRunner.warmup`."""
    self.partition_runner.warmup(params)

  def log_recompiles(self, description: str) -> int:
    """Logs new compilations; see `ModelRunner.log_recompiles`."""
    return self.partition_runner.log_recompiles(description)

  def prefill(
    self,
    params: Params,
    caches: list[Cache],
    prompts: Sequence[tuple[int, np.ndarray]],
  ) -> list[Cache]:
    """Computes keys and values of prompts; see `ModelRunner.prefill`."""
    by_partition: list[list[tuple[int, np.ndarray]]] = self._empty_lists()
    for slot, prompt in prompts:
      partition, local_slot = self._locate(slot)
      by_partition[partition].append((local_slot, prompt))
    prefill = self.partition_runner.prefill
    return self._run_in_threads(lambda i: prefill(params, caches[i], by_partition[i]))

  def prefill_staged(
    self, params: Params, caches: list[Cache], staged: Sequence[Sequence[Any]]
  ) -> list[Cache]:
    """Computes prompts in blocks; see `BlockPrefill.run`."""
    by_partition: list[list[list[Any]]] = self._empty_lists()
    for stage in staged:
      for stages in by_partition:
        stages.append([])
      for one in stage:
        partition, slot = self._locate(one.slot)
        source = None if one.source is None else self._locate(one.source)[1]
        local = dataclasses.replace(one, slot=slot, source=source)
        by_partition[partition][-1].append(local)
    prefill = self.partition_runner.prefill_staged
    return self._run_in_threads(lambda i: prefill(params, caches[i], by_partition[i]))

  def copy_prompts(
    self, caches: list[Cache], copies: Sequence[tuple[int, int, int]]
  ) -> list[Cache]:
    """Copies cached prompts within a partition; see `ModelRunner.copy_prompts`."""
    by_partition: list[list[tuple[int, int, int]]] = self._empty_lists()
    for source, target, length in copies:
      partition, local_source = self._locate(source)
      target_partition, local_target = self._locate(target)
      if target_partition != partition:
        raise ValueError(
          f'cannot copy from partition {partition} to partition {target_partition}: '
          'each has its own cache'
        )
      by_partition[partition].append((local_source, local_target, length))
    return [
      self.partition_runner.copy_prompts(cache, local_copies)
      for cache, local_copies in zip(caches, by_partition, strict=True)
    ]

  def update_slots(
    self, slots: list[SlotState], is_updated: np.ndarray, new_state: SlotState
  ) -> list[SlotState]:
    """Overwrites the state of slots; see `ModelRunner.update_slots`."""
    size = self.partition_runner.num_slots
    updated = []
    for i, local_slots in enumerate(slots):
      span = slice(i * size, (i + 1) * size)
      if is_updated[span].any():
        local_slots = self.partition_runner.update_slots(
          local_slots, is_updated[span], new_state.select(span)
        )
      updated.append(local_slots)
    return updated

  def routed_experts(self, caches: list[Cache], slot: int) -> Array | None:
    """Returns the experts of a slot; see `ModelRunner.routed_experts`."""
    partition, local_slot = self._locate(slot)
    return self.partition_runner.routed_experts(caches[partition], local_slot)

  def decode(
    self,
    params: Params,
    caches: list[Cache],
    slots: list[SlotState],
    needs: str = token_sampling.TRUNCATED,
  ) -> tuple[list[Any], ...]:
    """Starts decoding in every partition; see `ModelRunner.decode`.

    Does not wait for the end: a train step that starts meanwhile shares the cores.
    """
    decode = self.partition_runner.decode
    results = self._run_in_threads(lambda i: decode(params, caches[i], slots[i], needs))
    return tuple(map(list, zip(*results, strict=True)))

  def _empty_lists(self) -> list[list[Any]]:
    return [[] for _ in range(self.num_partitions)]

  def _locate(self, slot: int) -> tuple[int, int]:
    """Returns a slot's partition and its number within the partition."""
    return divmod(slot, self.partition_runner.num_slots)

  def _run_in_threads(self, fn: Callable[[int], R]) -> list[R]:
    """Calls `fn(partition)` for every partition on the partition's thread."""
    futures = [
      executor.submit(fn, partition)
      for partition, executor in enumerate(self._executors)
    ]
    concurrent.futures.wait(futures)  # even if one fails, none is left running
    return [future.result() for future in futures]
