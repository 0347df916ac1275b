"""Where vLLM reports its steps."""

# pyright: reportMissingImports=false

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from jaxrl.rollout.vllm.meter import Meter


class Steps(StatLoggerBase):
  def __init__(self, meter: Meter, engine_index: int = 0):
    self._meter = meter

  def record(self, scheduler_stats, iteration_stats, *args: Any, **more: Any) -> None:
    if iteration_stats is not None:
      self._meter.step(iteration_stats)

  def log_engine_initialized(self) -> None:
    pass
