"""Step traces: one Perfetto file of everything that a run did in chosen steps.

A file merges the spans of all processes (`jaxrl.spans`) with what `jax.profiler` saw in
the processes of the learner and of JAX engines. It is Chrome's JSON trace format, which
ui.perfetto.dev opens. Each part of the run is a process of the trace, with a name.
"""

import asyncio
import dataclasses
import functools
import gzip
import itertools
import json
import logging
import os
import pathlib
import shutil
import socket
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxrl import spans
from jaxrl.spans import PARTS, Span

log = logging.getLogger(__name__)

TRACES = 'traces'  # the folder of a run's traces
# Marks a known time in a profile, whose own times count from its start.
_CLOCK_EVENT = 'jaxrl clock'
# Programs compute only where these actors live.
_PROFILED_ACTORS = ('LearnerActor', 'engine')
_FIRST_PROFILE_PID = 1000

Event = dict[str, Any]
CallActors = Callable[[Callable[[Any, str], Any]], Awaitable[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Profile:
  """What `jax.profiler` saw in a process.

  Attributes:
    data: A Chrome trace as gzipped JSON.
    clock_time: The time of `_CLOCK_EVENT` in it, on `time.perf_counter`.
  """

  data: bytes
  clock_time: float


@dataclasses.dataclass(frozen=True)
class ProcessTrace:
  """What one process did.

  Attributes:
    actor: Its name; '' for the process of the trainer.
    host: Its machine.
    pid: Its process id.
    wall_offset: Seconds to add to `time.perf_counter` for the time of day, which
      processes on several machines have in common.
    spans: Its spans.
    profile: What JAX did there; None if that was not recorded.
  """

  actor: str
  host: str
  pid: int
  wall_offset: float
  spans: list[Span]
  profile: Profile | None


# ---- in every process


# The profile that this process is recording: its folder and its clock's time.
_state = types.SimpleNamespace(folder=None, clock_time=0.0)


def start_spans(actor: Any, name: str) -> None:
  """Starts to keep the spans of this process; actors are called with their name."""
  spans.start()


def start_profile(actor: Any, name: str) -> None:
  """Starts `jax.profiler` if this process computes with JAX."""
  is_engine_of_vllm = 'vllm' in sys.modules
  if is_engine_of_vllm or (name and not name.startswith(_PROFILED_ACTORS)):
    return
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # every Python call would be too much
  _state.folder = tempfile.mkdtemp(prefix='jaxrl-profile-')
  jax.profiler.start_trace(_state.folder, profiler_options=options)
  _state.clock_time = time.perf_counter()
  with jax.profiler.TraceAnnotation(_CLOCK_EVENT):
    pass


def stop(actor: Any, name: str) -> ProcessTrace:
  """Stops recording, and returns what this process did."""
  recorded, profile = spans.stop(), None
  folder, _state.folder = _state.folder, None
  if folder is not None:
    try:
      jax.profiler.stop_trace()
      path = next(pathlib.Path(folder).rglob('*.trace.json.gz'))
      profile = Profile(path.read_bytes(), _state.clock_time)
    finally:
      shutil.rmtree(folder, ignore_errors=True)
  offset = time.time() - time.perf_counter()
  return ProcessTrace(
    name, socket.gethostname(), os.getpid(), offset, recorded, profile
  )


# ---- in the process of the trainer


class StepTracer:
  """Traces the chosen steps of a phase.

  Call `before_step` and `after_step` around each step, and `before_report` and
  `after_report` around each call that takes the engines' metrics.

  Args:
    ranges: The first and the last step of each file.
    folder: Where files go.
    call_actors: Calls a function in every actor, as `Runtime.call_actors`.
    profiles_here: Whether this process computes with JAX.
  """

  def __init__(
    self,
    ranges: Sequence[tuple[int, int]],
    folder: pathlib.Path,
    call_actors: CallActors,
    *,
    profiles_here: bool,
  ):
    self._ranges = ranges
    self._folder = folder
    self._call_actors = call_actors
    self._profiles_here = profiles_here
    self._keeps_spans = False
    self._first: int | None = None  # the first step of the trace that is being taken
    self._last = 0
    self._start = 0.0
    self._report_start = 0.0
    self._reports: list[tuple[float, float, int | None]] = []  # start, end and step
    self._seconds: dict[str, float] = defaultdict(float)  # of the metrics, by name

  async def before_step(self, step: int) -> None:
    """Starts a trace if the step is the first of one."""
    for first, last in self._ranges:
      if first <= step <= last and self._first is None:
        await self._start_spans()
        await self._everywhere(start_profile, here=self._profiles_here)
        self._first, self._last, self._start = step, last, time.perf_counter()

  async def before_report(self, step: int) -> None:
    """Prepares for the engines' metrics of a step.

    What engines do from here on counts in the next step.
    """
    if any(step + 1 == first for first, _ in self._ranges):
      await self._start_spans()
    self._report_start = time.perf_counter()

  def after_report(self, step: int | None) -> None:
    """Notes that the engines' metrics were taken.

    Args:
      step: The step that they count in; None for none.
    """
    if self._keeps_spans:
      self._reports.append((self._report_start, time.perf_counter(), step))

  def add_metrics(self, metrics: Mapping[str, float]) -> None:
    """Adds the times that a step's metrics tell."""
    if self._first is not None:
      for name, value in metrics.items():
        if name.startswith('time/'):
          self._seconds[name] += value

  async def after_step(self, step: int) -> None:
    """Writes the file if the step is the last of a trace."""
    if self._first is not None and step >= self._last:
      await self._finish(step)

  async def close(self, num_steps: int) -> None:
    """Writes what there is of a trace that ends after the `num_steps` steps taken."""
    if self._first is not None and num_steps > self._first:
      await self._finish(num_steps - 1)
    elif self._keeps_spans:
      await self._collect()

  async def _start_spans(self) -> None:
    if not self._keeps_spans:
      self._keeps_spans = True
      await self._everywhere(start_spans)

  async def _everywhere(
    self, fn: Callable[[Any, str], Any], *, here: bool = True
  ) -> list[Any]:
    """Calls `fn(actor, name)` in each process of the run."""
    results = [await asyncio.to_thread(fn, None, '')] if here else []
    return [*results, *(await self._call_actors(fn)).values()]

  async def _collect(self) -> list[ProcessTrace]:
    self._keeps_spans = False
    return await self._everywhere(stop)

  async def _finish(self, last: int) -> None:
    assert self._first is not None
    end, steps = time.perf_counter(), range(self._first, last + 1)
    trace = StepTrace(
      steps=steps,
      window=(self._start, end),
      reports=self._reports,
      seconds=dict(self._seconds),
      processes=await self._collect(),
    )
    self._first, self._reports = None, []
    self._seconds.clear()
    ends = steps[0], last
    path = self._folder / f'steps-{steps[0]}-{last}.json.gz'
    try:
      await asyncio.to_thread(trace.write, path)
    except OSError as error:  # the run is worth more than its trace
      log.warning('the trace of steps %d to %d is not written: %s', *ends, error)
    else:
      log.info('trace: open %s at ui.perfetto.dev', path)


@dataclasses.dataclass
class StepTrace:
  """What a run did in some steps.

  Attributes:
    steps: The steps.
    window: When they began and ended, on the `time.perf_counter` of this process.
    reports: When the engines' metrics were taken, and the step that they count in.
    seconds: Sums of the steps' metrics 'time/…'.
    processes: What each process did; this one is the first.
  """

  steps: range
  window: tuple[float, float]
  reports: list[tuple[float, float, int | None]]
  seconds: dict[str, float]
  processes: list[ProcessTrace]

  def write(self, path: pathlib.Path) -> None:
    """Writes the file, which is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix('.part')
    about = {
      'steps': list(self.steps),
      'seconds_by_metric': self.seconds,
      'processes': [f'{p.actor or "trainer"} {p.host}:{p.pid}' for p in self.processes],
    }
    with gzip.open(temporary, 'wt', compresslevel=5, encoding='utf-8') as file:
      file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},\n')
      file.write('"traceEvents":[\n')
      events = itertools.chain(self._span_events(), self._profile_events())
      for number, event in enumerate(events):
        file.write((',\n' if number else '') + json.dumps(event, separators=(',', ':')))
      file.write('\n]}\n')
    temporary.replace(path)

  def _local_time(self, process: ProcessTrace, time_s: float) -> float:
    """Converts a time of a process to this process's `time.perf_counter`."""
    if process.host == self.processes[0].host:
      return time_s  # all processes of a machine have one
    return time_s + process.wall_offset - self.processes[0].wall_offset

  @functools.cached_property
  def _zero(self) -> float:
    """The time from which the file counts; Perfetto drops what is before 0.

    Asynchronous rollouts of the first step began before it.
    """
    starts = (
      self._local_time(process, span.start)
      for process in self.processes
      for part in PARTS
      for span in self._spans_of(process, part)
    )
    return min(self.window[0], min(starts, default=self.window[0]))

  def _microseconds(self, process: ProcessTrace, time_s: float) -> float:
    """Converts a time of a process to the file's."""
    return round((self._local_time(process, time_s) - self._zero) * 1e6, 3)

  def _span_events(self) -> Iterator[Event]:
    """Draws each part of each process as a process of the trace."""
    tracks = [
      (part, process, chosen)
      for part in PARTS
      for process in self.processes
      if (chosen := list(self._spans_of(process, part)))
    ]
    count, number = Counter(part for part, _, _ in tracks), Counter[str]()
    for pid, (part, process, chosen) in enumerate(tracks, 1):
      number[part] += 1
      name = part if count[part] == 1 else f'{part} {number[part]}'
      where = f'{process.actor} {process.host}:{process.pid}'.strip()
      yield _about(pid, 'process_name', name=name)
      yield _about(pid, 'process_labels', labels=where)
      yield _about(pid, 'process_sort_index', sort_index=pid)
      lanes = {}
      for span in chosen:
        if span.lane not in lanes:
          lanes[span.lane] = len(lanes) + 1
          yield _about(pid, 'thread_name', tid=lanes[span.lane], name=span.lane)
        args: dict[str, Any] = {} if span.step is None else {'step': span.step}
        yield {
          'ph': 'X',
          'pid': pid,
          'tid': lanes[span.lane],
          'ts': self._microseconds(process, span.start),
          'dur': round((span.end - span.start) * 1e6, 3),
          'name': span.name,
          'cat': part,
          'args': args | ({'detail': span.detail} if span.detail else {}),
        }

  def _spans_of(self, process: ProcessTrace, part: str) -> Iterator[Span]:
    """Yields a part's spans of these steps, in the order of their start.

    Spans that are counted in no step are shown if they lie in the window.
    """
    part_spans = [span for span in process.spans if span.part == part]
    if part == 'engine':
      part_spans = self._assign_steps(process, part_spans)
    for span in sorted(part_spans, key=lambda span: (span.start, -span.end)):
      if span.step is None:
        if self._local_time(process, span.end) >= self.window[0]:
          yield span
      elif span.step in self.steps:
        yield span

  def _assign_steps(
    self, process: ProcessTrace, engine_spans: list[Span]
  ) -> list[Span]:
    """Returns an engine's spans with the step whose metrics count them.

    An engine counts until it reports, and does not know in which step that is.
    """
    ends = sorted(span.start for span in engine_spans if span.name == 'report')
    assigned = []
    for span in engine_spans:
      report = next((end for end in ends if span.end <= end), None)
      if span.name == 'report':
        continue
      if report is not None:
        at, step = self._local_time(process, report), None
        if self.reports:  # the call during which, or next to which, it happened
          *_, step = min(self.reports, key=lambda r: max(r[0] - at, at - r[1], 0.0))
        span = span._replace(step=step)
      assigned.append(span)
    return assigned

  def _profile_events(self) -> Iterator[Event]:
    """Yields JAX's own events, with process ids of their own and the trace's time."""
    pid = _FIRST_PROFILE_PID
    for process in self.processes:
      if process.profile is None:
        continue
      events = json.loads(gzip.decompress(process.profile.data))['traceEvents']
      clock = [e['ts'] for e in events if e.get('name') == _CLOCK_EVENT and 'ts' in e]
      if not clock:
        log.warning('the profile of %s has no clock: left out', process.actor or 'here')
        continue
      shift = self._microseconds(process, process.profile.clock_time) - clock[0]
      pids: dict[int, int] = {}
      for event in events:
        if 'ph' not in event or event.get('name') == _CLOCK_EVENT:
          continue
        if event.get('pid') not in pids:
          pids[event.get('pid')] = pid
          pid += 1
        event['pid'] = pids[event.get('pid')]
        if 'ts' in event:
          event['ts'] = round(max(event['ts'] + shift, 0.0), 3)
        if event['name'] == 'process_name':
          where = f'{process.actor} ' if process.actor else ''
          event['args']['name'] = f'JAX: {where}{event["args"]["name"]}'
        elif event['name'] == 'process_sort_index':
          event['args']['sort_index'] = event['pid']
        yield event


def _about(pid: int, key: str, *, tid: int = 0, **args: Any) -> Event:
  """Returns the event that names a process or thread of the trace."""
  return {'ph': 'M', 'pid': pid, 'tid': tid, 'name': key, 'args': args}


def read_trace(path: pathlib.Path) -> dict[str, Any]:
  """Returns the content of a trace file."""
  with gzip.open(path, 'rt', encoding='utf-8') as file:
    return json.load(file)


def seconds_by_metric(trace: Mapping[str, Any]) -> dict[str, float]:
  """Sums a trace's spans to what the steps' metrics 'time/…' say.

  As in the metrics, times are of the learner's first process, and means of engines.
  """
  sums: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
  engines = set()
  for event in trace['traceEvents']:
    part = event.get('cat')
    if event['ph'] != 'X' or 'step' not in event.get('args', {}) or part not in PARTS:
      continue
    sums[f'time/{event["name"]}'][event['pid']] += event['dur'] / 1e6
    engines |= {event['pid']} if part == 'engine' else set()
  return {
    name: sum(by_pid.values()) / len(engines)
    if by_pid.keys() & engines
    else by_pid[min(by_pid)]
    for name, by_pid in sums.items()
  }
