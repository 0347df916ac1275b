"""Training queue: runs each run's requests in order, and rows of several in one step.

A run's requests are numbered, and a request waits for those before it. At the front of
each run stand either rows, to run forward or backward, or a call, such as an optimizer
step. Rows of one bucket are taken from all runs in turn until a program is full.

A run's own rows keep their order, by request and then by bucket, whatever other runs
do. So its gradients are summed in the same order as if it were alone.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.device_thread import DeviceThread
from jaxrl.options import JsonObject
from jaxrl.rollout.tinker.pending_results import PendingResult
from jaxrl.rollout.tinker.proto_codec import write_forward_backward
from jaxrl.rollout.tinker.tenant_learner import Tenant, TenantLearner, TrainingRow
from jaxrl.rollout.tinker.tenant_programs import num_targets

_Key = tuple[int, int, bool]  # bucket, targets of a position, whether backward


@dataclasses.dataclass
class QueuedRows:
  """The rows of one request.

  Attributes:
    result: The request.
    rows: The rows.
    backward: Whether gradients are wanted.
    order: The rows' indices in the order in which they run.
    num_started: How many of them have started.
    outputs: Each row's log-probs and loss, once it has run.
  """

  result: PendingResult
  rows: Sequence[TrainingRow]
  backward: bool
  order: list[int]
  num_started: int = 0
  outputs: dict[int, tuple[np.ndarray, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class QueuedCall:
  """A request that is one call.

  Attributes:
    result: The request.
    call: Returns its result.
  """

  result: PendingResult
  call: Callable[[], Awaitable[JsonObject]]


@dataclasses.dataclass
class QueuedRun:
  """A run with its requests.

  Attributes:
    tenant: Its place in the learner.
    waiting: Requests by number.
    ready: Requests whose turn has come, in order.
    next_number: The number of the next request.
    is_busy: Whether a call of its is running.
  """

  tenant: Tenant
  waiting: dict[int, Any] = dataclasses.field(default_factory=dict)
  ready: list[Any] = dataclasses.field(default_factory=list)
  next_number: int = 1
  is_busy: bool = False


class TrainingQueue:
  """Runs the requests of all runs on one learner."""

  def __init__(self, learner: TenantLearner, device_thread: DeviceThread):
    """Creates a queue without runs.

    Args:
      learner: The learner.
      device_thread: Runs its work.
    """
    self._learner, self._device_thread = learner, device_thread
    self._runs: dict[str, QueuedRun] = {}
    self._turn = itertools.count()
    self._last_turn: dict[str, int] = {}
    self._wake = asyncio.Event()
    self._task: asyncio.Task | None = None
    self._calls: set[asyncio.Task] = set()

  def open(self, run_id: str, tenant: Tenant) -> None:
    """Adds a run.

    Args:
      run_id: The run.
      tenant: Its place in the learner.
    """
    self._runs[run_id] = QueuedRun(tenant)

  def close(self, run_id: str) -> None:
    """Removes a run; what it has queued never runs."""
    self._runs.pop(run_id, None)
    self._last_turn.pop(run_id, None)

  def find(self, run_id: str) -> QueuedRun | None:
    """Returns a run; None if there is no such run."""
    return self._runs.get(run_id)

  def add_rows(
    self,
    run_id: str,
    number: int,
    result: PendingResult,
    rows: Sequence[TrainingRow],
    *,
    backward: bool,
  ) -> None:
    """Queues rows.

    Args:
      run_id: The run.
      number: The request's number.
      result: The request.
      rows: The rows; at least one.
      backward: Whether gradients are wanted.
    """
    order = sorted(range(len(rows)), key=lambda i: self._key(rows[i], backward))
    self._add(run_id, number, QueuedRows(result, rows, backward, order))

  def add_call(
    self,
    run_id: str,
    number: int,
    result: PendingResult,
    call: Callable[[], Awaitable[JsonObject]],
  ) -> None:
    """Queues a call.

    Args:
      run_id: The run.
      number: The request's number.
      result: The request.
      call: Returns its result; what it raises is the request's error.
    """
    self._add(run_id, number, QueuedCall(result, call))

  def _add(self, run_id: str, number: int, request: QueuedRows | QueuedCall) -> None:
    run = self._runs[run_id]
    run.waiting[number] = request
    while run.next_number in run.waiting:
      run.ready.append(run.waiting.pop(run.next_number))
      run.next_number += 1
    self._last_turn.setdefault(run_id, next(self._turn))
    self._wake.set()
    if self._task is None or self._task.done():
      self._task = asyncio.get_running_loop().create_task(self._work())

  async def stop(self) -> None:
    """Ends the work after the step that is running."""
    tasks = [task for task in (self._task, *self._calls) if task is not None]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

  async def _work(self) -> None:
    while True:
      self._start_calls()
      batch = self._take_rows()
      if batch:
        await self._run_rows(*batch)
        continue
      self._wake.clear()
      await self._wake.wait()

  def _in_turn(self) -> list[tuple[str, QueuedRun]]:
    """Returns the runs that may start something, the longest unserved first."""
    able = [(name, run) for name, run in self._runs.items() if not run.is_busy]
    return sorted(able, key=lambda item: self._last_turn.get(item[0], 0))

  def _start_calls(self) -> None:
    for name, run in self._in_turn():
      if run.ready and isinstance(run.ready[0], QueuedCall):
        run.is_busy = True
        task = asyncio.get_running_loop().create_task(self._call(name, run))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

  async def _call(self, name: str, run: QueuedRun) -> None:
    request = run.ready.pop(0)
    try:
      request.result.succeed(await request.call())
    except Exception as error:
      request.result.fail(error)
    finally:
      run.is_busy = False
      self._last_turn[name] = next(self._turn)
      self._wake.set()

  def _key(self, row: TrainingRow, backward: bool) -> _Key:
    bucket = self._learner.bucket(len(row.tokens))
    return bucket, num_targets(row.targets.shape[1]), backward

  def _front(self, run: QueuedRun) -> QueuedRows | None:
    """Returns the rows of which a run's next one is to start; None if it must wait."""
    for request in run.ready:
      if isinstance(request, QueuedCall):
        return None
      if request.num_started < len(request.order):
        return request
    return None

  def _take_rows(self) -> tuple[list[tuple[QueuedRun, QueuedRows, int]], _Key] | None:
    """Takes rows for one program, one of each run in turn."""
    batch: list[tuple[QueuedRun, QueuedRows, int]] = []
    key: _Key | None = None
    size = 1
    took = True
    while took and len(batch) < size:
      took = False
      for name, run in self._in_turn():
        request = self._front(run)
        if request is None or len(batch) >= size:
          continue
        index = request.order[request.num_started]
        own = self._key(request.rows[index], request.backward)
        if key is None:
          key, size = own, self._learner.rows_per_step(own[0])
        if own == key:
          request.num_started += 1
          batch.append((run, request, index))
          self._last_turn[name] = next(self._turn)
          took = True
    return (batch, key) if key is not None else None

  async def _run_rows(
    self, batch: list[tuple[QueuedRun, QueuedRows, int]], key: _Key
  ) -> None:
    rows = [(run.tenant, request.rows[index]) for run, request, index in batch]
    try:
      outputs = await self._device_thread.run(self._learner.run, rows, backward=key[2])
    except Exception as error:
      for run, request, _ in batch:
        if request in run.ready:
          run.ready.remove(request)
          request.result.fail(error)
          if request.backward:  # some of its rows may have been added
            run.tenant.has_dropped = True
            await self._device_thread.run(self._learner.discard_gradients, run.tenant)
      return
    for (run, request, index), output in zip(batch, outputs, strict=True):
      request.outputs[index] = output
      if len(request.outputs) == len(request.rows) and request in run.ready:
        run.ready.remove(request)
        request.result.succeed(_message(request))


def _message(request: QueuedRows) -> bytes:
  outputs, total = [], 0.0
  for i, row in enumerate(request.rows):
    logprobs, loss = request.outputs[i]
    if row.is_flat:
      logprobs = logprobs[:, 0]
    outputs.append({'logprobs': logprobs})
    total += loss
  return write_forward_backward(outputs, {'loss:sum': total})
