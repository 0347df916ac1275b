"""Stat logger: turns vLLM's step statistics into the metrics that `JaxEngine` has."""

# pyright: reportMissingImports=false

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from jaxrl import spans
from jaxrl.rollout.engine.engine_base import EngineStats


class VllmStats(EngineStats):
  """Accumulates vLLM's steps until `report` starts afresh.

  A step computes prompts, decodes, or both. Its seconds count as time/prefill if it
  finished any prompt, or else as time/decode. Waiting without requests counts as
  neither.
  """

  def __init__(self, num_slots: int):
    """Initializes all counts with zero.

    Args:
      num_slots: How many requests can be decoded at the same time.
    """
    super().__init__(num_slots)
    self._work_start = 0.0

  def start_work(self) -> None:
    """Notes that there are requests again, after there were none."""
    self._work_start = time.perf_counter()

  def seconds_since_step(self) -> float:
    """Returns the seconds since the last step or since there are requests again."""
    return time.perf_counter() - max(self._last_result_time, self._work_start)

  def record_step(self, iteration_stats: Any) -> None:
    """Counts a step that has just ended.

    Args:
      iteration_stats: vLLM's `IterationStats` of the step.
    """
    now = time.perf_counter()
    start_time = max(self._last_result_time, self._work_start)
    seconds = now - start_time
    self._last_result_time = now
    prompts = iteration_stats.prompt_token_stats
    self.num_prefilled += prompts.computed
    self.num_reused += prompts.cached_tokens
    self.num_generated += iteration_stats.num_generation_tokens
    self.num_slot_steps += iteration_stats.num_generation_tokens  # one token a slot
    self.num_decode_steps += 1
    if prompts.total:
      self.prefill_seconds += seconds
    else:
      self.decode_seconds += seconds
    name = 'prefill' if prompts.total else 'decode'
    spans.record('engine', name, name, start_time, now)


class VllmStatLogger(StatLoggerBase):
  """Passes the statistics of vLLM's steps to a `VllmStats`."""

  def __init__(self, stats: VllmStats, engine_index: int = 0):
    """Logs to `stats`; vLLM's `engine_index` is ignored."""
    self._stats = stats

  def record(
    self,
    scheduler_stats: object,
    iteration_stats: object,
    *args: object,
    **kwargs: object,
  ) -> None:
    """Records a step; vLLM calls it after each one."""
    if iteration_stats is not None:
      self._stats.record_step(iteration_stats)

  def log_engine_initialized(self) -> None:
    """Does nothing; vLLM requires the method."""
