"""Trains: an optional supervised warm start, then the algorithm's own steps."""

import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax

from jaxrl import loop
from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import LoadedModel
from jaxrl.rollout.queue.group_pipeline import StopRequested, StoreTimeoutError
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.training.monitoring import memory_metrics
from jaxrl.types import Group
from launch.learner.learner_factory import (
  LearnerFactory,
  LearnerHandle,
  PhaseSpec,
  adapter_folder,
)
from launch.logging.metric_sinks import MultiSink, read_metrics
from launch.rollouts import offline_data
from launch.rollouts.group_sources import FileGroups, GroupSource, StepTimes
from launch.runtime.runtime_base import Runtime, supervise_run
from launch.settings.run_settings import EvalSetSettings, RunSettings

if TYPE_CHECKING:
  from launch.logging.step_trace import StepTracer

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunParts:
  """The parts of a run that all of its phases use.

  Attributes:
    settings: Settings of the run.
    workdir: Folder of the run.
    sink: Takes metrics and trajectories.
    stop: Returns True once the user asked to end.
    runtime: Hosts the parts of the run.
  """

  settings: RunSettings
  workdir: pathlib.Path
  sink: MultiSink
  stop: Callable[[], bool]
  runtime: Runtime


class Trainer:
  """Runs the phases of a training run, which `launch.build` assembles.

  Attributes:
    facts: What to tell the user first, by label.
    closing: What to tell the user last, by label.
    restarts: How often this command has started the run anew, after losing actors.
  """

  def __init__(
    self,
    parts: RunParts,
    *,
    policy: LoadedModel,
    learners: LearnerFactory,
    device_thread: DeviceThread,
    source: GroupSource,
    trace_steps: Sequence[tuple[int, int]] = (),
  ):
    """Takes the parts of the run.

    Args:
      parts: Those that all phases use.
      policy: The model as it is before training, with its tokenizer.
      learners: Makes the learner of each phase.
      device_thread: The thread of this process's devices.
      source: Gives the algorithm its groups.
      trace_steps: The first and the last step of each trace.
    """
    self._parts = parts
    self._settings = parts.settings
    self._workdir = parts.workdir
    self._policy = policy
    self._learners = learners
    self._device_thread = device_thread
    self._source = source
    self._trace_steps = trace_steps
    self.facts: dict[str, str] = {}
    self.closing: dict[str, str] = {}
    self.restarts = 0

  async def train(self) -> bool:
    """Trains to the end or until asked to stop.

    Returns:
      Whether training reached its end.
    """
    try:
      return await supervise_run(self._parts.runtime, self._run_phases())
    finally:
      await self._source.close()
      await self._learners.close()
      await self._parts.runtime.close()
      self._device_thread.close()

  # ---- phases

  async def _run_phases(self) -> bool:
    proceed, warm_started = await self._warm_start()
    return proceed and await self._main(warm_started)

  async def _warm_start(self) -> tuple[bool, bool]:
    """Takes supervised steps; returns whether to go on, and whether it took any."""
    sft = self._settings.sft
    if not sft.num_steps:
      return True, False
    checkpointer = self._checkpointer('train')
    main_has_begun = checkpointer.latest_step is not None
    checkpointer.close()
    if main_has_begun:  # it restores its own parameters
      return True, False
    sampler = offline_data.make_warm_start_sampler(
      self._settings, self._policy.tokenizer
    )
    phase = PhaseSpec('sft', sft.batch_size, sft.num_steps)
    learner = await self._learners.make(phase)
    source = FileGroups(sampler, sft.num_steps)
    return await self._train_phase('sft', learner, source, {}), True

  async def _main(self, continue_params: bool) -> bool:
    source = self._source
    phase = PhaseSpec('train', source.num_rows, source.num_steps)
    learner = await self._learners.make(phase, continue_params=continue_params)
    evaluations = self._settings.active_evaluations
    done = await self._train_phase('train', learner, source, evaluations)
    if done and self._settings.checkpoint.export:
      folder = self._workdir / 'export'
      await self._learners.export(folder)
      self.closing['model'] = f'{folder} (a Hugging Face folder)'
      if self._settings.model.lora:
        self.closing['adapter'] = f'{adapter_folder(folder)} (of PEFT)'
    return done

  async def _train_phase(
    self,
    name: str,
    learner: LearnerHandle,
    source: GroupSource,
    evaluations: Mapping[str, EvalSetSettings],
  ) -> bool:
    """Trains one phase, from its newest checkpoint if it has one."""
    if self._parts.stop():
      return False
    checkpointer, num_steps = self._checkpointer(name), source.num_steps
    phase = TrainPhase(
      self._parts,
      name,
      learner,
      source,
      checkpointer,
      evaluations,
      restarts=self.restarts,
      tracer=self._make_tracer(num_steps) if name == 'train' else None,
    )
    try:
      state = await learner.restore(checkpointer) if checkpointer.latest_step else {}
      self._parts.sink.phase(name, num_steps, learner.step)
      workers = []
      if learner.step < num_steps:
        await learner.warmup()
        workers = await source.start(learner.step, state)
      elif phase.complete(self._workdir / 'metrics.jsonl'):
        return True
      return await loop.train(
        learner, phase, phase.hooks(), num_steps=num_steps, workers=workers
      )
    except StopRequested:
      return False
    finally:
      await phase.close()
      checkpointer.close()

  def _make_tracer(self, num_steps: int) -> 'StepTracer | None':
    """Returns what traces the chosen steps; None if there are none.

    Args:
      num_steps: The step to train to.
    """
    if not self._trace_steps:
      return None
    last = self._trace_steps[-1][1]
    if last >= num_steps:
      log.warning(
        'logging.trace_steps names step %d, but the last step of this run is %d',
        last,
        num_steps - 1,
      )
    # Imported here because few runs trace steps.
    from launch.logging.step_trace import TRACES, StepTracer

    folder = self._workdir / TRACES
    self.closing['traces'] = f'{folder} (open them at ui.perfetto.dev)'
    return StepTracer(
      self._trace_steps,
      folder,
      self._parts.runtime.call_actors,
      profiles_here=not self._parts.runtime.hosts_learner,
    )

  def newest_checkpoint(self) -> tuple[str, int] | None:
    """Returns the phase and step of the newest checkpoint; None before any."""
    for name in ('train', 'sft'):
      checkpointer = self._checkpointer(name)
      step = checkpointer.latest_step
      checkpointer.close()
      if step is not None:
        return name, step
    return None

  def _checkpointer(self, name: str) -> Checkpointer:
    folder = self._workdir / 'checkpoints' / name
    return Checkpointer(folder, self._settings.checkpoint)


class TrainPhase:
  """Provides `loop.train` with groups and hooks for one phase of training."""

  def __init__(
    self,
    parts: RunParts,
    name: str,
    learner: LearnerHandle,
    source: GroupSource,
    checkpointer: Checkpointer,
    evaluations: Mapping[str, EvalSetSettings],
    *,
    restarts: int = 0,
    tracer: 'StepTracer | None' = None,
  ):
    """Takes the parts of the phase.

    Args:
      parts: Those of the run.
      name: The phase's name.
      learner: Learns from the groups.
      source: Provides them.
      checkpointer: Keeps the checkpoints of the phase.
      evaluations: What is evaluated, by name.
      restarts: How often this command has started the run anew.
      tracer: Traces chosen steps; None for none.
    """
    self._parts = parts
    self._name = name
    self._learner = learner
    self._source = source
    self._checkpointer = checkpointer
    self._evaluations = evaluations
    self._restarts = restarts
    self._tracer = tracer
    self._saving: int | None = None  # the step of a checkpoint that is being written
    self._local_devices = [] if parts.runtime.hosts_learner else jax.local_devices()
    self._times = StepTimes()
    self._step_start = time.perf_counter()

  def hooks(self) -> loop.Hooks:
    """Returns the hooks that the loop calls."""
    return loop.Hooks(
      publish=self._publish,
      advance=self._source.advance,
      evaluate=self._evaluate,
      record=self._record,
      save=self._save,
      stop=self._parts.stop,
    )

  async def next(self, step: int) -> list[Group]:
    """Waits for the groups of a step."""
    start = time.perf_counter()
    try:
      groups = await self._source.next(step)
    except (StoreTimeoutError, StopRequested):
      await self._save(step, True)
      raise
    self._times.end('trainer', 'rollout', start, step)
    self._times.add(await self._take_metrics(step))
    await self._source.yield_devices(self._learner)
    self._times.add(await self._parts.runtime.metrics())
    return groups

  async def _take_metrics(self, step: int, *, count: bool = True) -> loop.Metrics:
    """Returns the source's metrics, of which those of engines start anew.

    Args:
      step: The step that is being collected.
      count: Whether they are the step's own.
    """
    if self._tracer is not None:
      await self._tracer.before_report(step)
    metrics = await self._source.metrics(step)
    if self._tracer is not None:
      self._tracer.after_report(step if count else None)
    return metrics

  async def _publish(self, step: int) -> None:
    if self._tracer is not None:
      await self._tracer.before_step(step)
    self._step_start = time.perf_counter()
    evaluates = bool(self._evaluations_due(step))
    await self._source.publish(step, self._learner, self._times, evaluates=evaluates)

  def _evaluations_due(self, step: int) -> list[str]:
    """Returns the names of the evaluation sets that are played at a step."""
    ends = step in (0, self._source.num_steps)
    active = self._evaluations.items()
    return [name for name, s in active if ends or step % s.interval == 0]

  def complete(self, metrics: pathlib.Path) -> bool:
    """Returns whether not even an evaluation is left to do after the last step.

    Args:
      metrics: Path of the run's metrics.jsonl.
    """
    num_steps = self._source.num_steps
    if self._learner.step > num_steps or not self._evaluations_due(num_steps):
      return True
    last = {'phase': self._name, 'step': num_steps}
    return any(
      last.items() <= row.items() and any(name.startswith('eval/') for name in row)
      for row in read_metrics(metrics)
    )

  async def _evaluate(self, step: int, last: bool) -> loop.Metrics:
    names = self._evaluations_due(step)
    if not names:
      return {}
    start = time.perf_counter()
    work = self._source.evaluate(names)
    try:
      metrics, groups = await loop.await_unless_stopped(work, self._parts.stop)
    except StopRequested:
      await self._save(step, True)
      raise
    await self._take_metrics(step, count=False)
    self._parts.sink.trajectories(step, groups, kind='eval')
    self._step_start += self._times.end('trainer', 'evaluate', start, step)
    return metrics

  def _record(self, step: int, metrics: loop.Metrics, groups: list[Group]) -> None:
    if groups:
      self._times.end('trainer', 'step', self._step_start, step)
    metrics = {**metrics, **self._times.take()}
    if groups:
      metrics |= memory_metrics(self._local_devices)
      if self._restarts:
        metrics['rollout/restarts'] = float(self._restarts)
    if self._tracer is not None:
      self._tracer.add_metrics(metrics)
    sink = self._parts.sink
    sink.write(step, metrics)
    sink.trajectories(
      step,
      groups,
      self._learner.advantages,
      logprobs=self._learner.old_logprobs,
    )

  async def close(self) -> None:
    """Writes the trace that is being taken, if any."""
    if self._tracer is not None:
      with contextlib.suppress(Exception):  # the error that ended the run matters more
        await self._tracer.close(self._learner.step)

  async def _save(self, step: int, last: bool) -> None:
    if self._tracer is not None:
      await self._tracer.after_step(step - 1)
    every = self._parts.settings.checkpoint.save_interval
    last = last or step == self._source.num_steps
    if not last and not (every and step % every == 0):
      return
    state = await self._source.state()
    await self._learner.save(self._checkpointer, state, wait=last)
    durable = step if last else self._saving  # whose writing this save waited for
    if durable is not None:
      await self._source.saved(durable)
    self._saving = step
