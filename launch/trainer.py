"""Train: an optional supervised warm start, then the algorithm's own steps."""

import asyncio
import contextlib
import logging
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxrl import loop, spans
from jaxrl.algorithms import requirements
from jaxrl.call_strings import ConfigError
from jaxrl.data.file_sampler import FileSampler
from jaxrl.data.samplers import Sampler
from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import LoadedModel
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.queue.group_pipeline import StopRequested, StoreTimeoutError
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.training.monitoring import memory_metrics
from jaxrl.types import Group
from launch.components import offline_data
from launch.components.learner_factory import (
  LearnerFactory,
  LearnerHandle,
  PhaseSpec,
  adapter_folder,
)
from launch.components.rollout_scheduler import RolloutScheduler
from launch.logging.metric_loggers import MultiLogger, read_metrics
from launch.runtime.runtime_interface import Runtime, supervise_run
from launch.settings.run_settings import RunSettings

if TYPE_CHECKING:
  from launch.components.experience_store import StoredGroupSampler
  from launch.logging.step_trace import StepTracer

log = logging.getLogger(__name__)


class Trainer:
  """Runs the phases of a training run, which `launch.build` assembles.

  Attributes:
    facts: what to tell the user first, by label.
    closing: what to tell the user last, by label.
    restarts: how often this command has started the run anew, after losing actors.
  """

  def __init__(
    self,
    settings: RunSettings,
    *,
    workdir: pathlib.Path,
    writers: MultiLogger,
    stop: Callable[[], bool],
    policy: LoadedModel,
    learners: LearnerFactory,
    runtime: Runtime,
    device_thread: DeviceThread,
    rollouts: RolloutScheduler | None,
    sampler: Sampler | None,
    source: FileSampler | None,
    store: 'StoredGroupSampler | None' = None,
    trace_steps: Sequence[tuple[int, int]] = (),
  ):
    """Takes the parts of the run.

    Args:
      settings: settings of the run.
      workdir: folder of the run.
      writers: takes metrics and trajectories.
      stop: returns True once the user asked to end.
      policy: the model as it is before training, with its tokenizer.
      learners: makes the learner of each phase.
      runtime: hosts the parts of the run.
      device_thread: the thread of this process's devices.
      rollouts: the rollout side; None for a run that plays nothing.
      sampler: gives an algorithm that plays its groups; None for one of files.
      source: gives an algorithm for files its rows; None for one that plays.
      store: groups that other runs played, in the place of `sampler`.
      trace_steps: the first and the last step of each trace.
    """
    self._settings = settings
    self._workdir = workdir
    self._writers = writers
    self._stop = stop
    self._policy = policy
    self._learners = learners
    self._runtime = runtime
    self._device_thread = device_thread
    self._rollouts = rollouts
    self._sampler = sampler
    self._source = source
    self._store = store
    self._trace_steps = trace_steps
    self._num_steps = offline_data.count_steps(settings, source)
    self.facts: dict[str, str] = {}
    self.closing: dict[str, str] = {}
    self.restarts = 0

  async def train(self) -> bool:
    """Trains to the end or until asked to stop.

    Returns:
      Whether training reached its end.
    """
    try:
      return await supervise_run(self._runtime, self._run_phases())
    finally:
      if self._rollouts is not None:
        with contextlib.suppress(Exception):  # a dead actor cannot be told to stop
          await self._rollouts.close()
      if self._store is not None:
        self._store.close()
      await self._learners.close()
      await self._runtime.close()
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
    stage = PhaseSpec('sft', sft.batch_size, sft.num_steps)
    learner = await self._learners.make(stage)
    return await self._train_phase('sft', learner, sampler, sft.num_steps), True

  async def _main(self, continue_params: bool) -> bool:
    rows_per_group = requirements.rows_per_group(self._settings.algorithm)
    rows = self._settings.batch.num_groups * rows_per_group
    sampler: Any = self._store or self._sampler
    if self._source is not None:
      sampler, rows = self._source, self._source.num_rows
    stage = PhaseSpec('train', rows, self._num_steps)
    learner = await self._learners.make(stage, continue_params=continue_params)
    done = await self._train_phase('train', learner, sampler, self._num_steps)
    if done and self._settings.checkpoint.export:
      folder = self._workdir / 'export'
      await self._learners.export(folder)
      self.closing['model'] = f'{folder} (a Hugging Face folder)'
      if self._settings.model.lora:
        self.closing['adapter'] = f'{adapter_folder(folder)} (of PEFT)'
    return done

  async def _train_phase(
    self, name: str, learner: LearnerHandle, sampler: Any, num_steps: int
  ) -> bool:
    """Trains one phase, from its newest checkpoint if it has one."""
    if self._stop():
      return False
    checkpointer = self._checkpointer(name)
    phase = TrainPhase(self, name, learner, sampler, checkpointer, num_steps)
    try:
      state = await learner.restore(checkpointer) if checkpointer.latest_step else {}
      self._writers.phase(name, num_steps, learner.step)
      workers = []
      if learner.step < num_steps:
        await learner.warmup()
        workers = await phase.start(state)
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

  def make_tracer(self, num_steps: int) -> 'StepTracer | None':
    """Returns what traces the chosen steps; None if there are none.

    Args:
      num_steps: the step to train to.
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
      self._runtime.call_actors,
      profiles_here=not self._runtime.hosts_learner,
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
    settings = self._settings.checkpoint
    return Checkpointer(
      self._workdir / 'checkpoints' / name,
      max_to_keep=settings.max_to_keep,
      strict=settings.strict,
    )


class TrainPhase:
  """Provides `loop.train` with groups and hooks for one phase of training."""

  def __init__(
    self,
    job: Trainer,
    name: str,
    learner: LearnerHandle,
    sampler: Any,
    checkpointer: Checkpointer,
    num_steps: int,
  ):
    self._settings = job._settings
    self._writers = job._writers
    self._stop = job._stop
    self._name = name
    self._learner = learner
    self._sampler = sampler
    self._checkpointer = checkpointer
    self._runtime = job._runtime
    self._restarts = job.restarts
    self._num_steps = num_steps
    # A warm start plays nothing; an algorithm for files may still be evaluated.
    self._rollouts = job._rollouts if name == 'train' else None
    self._plays = sampler is not None and sampler is job._sampler
    self._store = job._store if sampler is job._store else None
    self._saving: int | None = None  # the step of a checkpoint that is being written
    self._engines_are_warm = False
    self._sleeps = job._settings.cluster.placement.sleeps
    # A learner elsewhere has to leave its memory to the engine while it generates.
    self._learner_sleeps = self._sleeps and job._runtime.hosts_learner
    self._local_devices = [] if job._runtime.hosts_learner else jax.local_devices()
    self._times: dict[str, float] = {}
    self._step_start = time.perf_counter()
    self._tracer = job.make_tracer(num_steps) if name == 'train' else None

  async def start(self, state: dict[str, Any]) -> list[Any]:
    """Restores what a checkpoint holds, and starts playing.

    Args:
      state: what the checkpoint holds; empty without one.

    Returns:
      The tasks of the workers that play.
    """
    if self._store is not None:
      self._store.start(self._learner.step, state.get('sampler'))
    elif state:
      _check_rollout_state(state['sampler'])
      self._sampler.load_state_dict(state['sampler'])
    if not self._plays:
      return []
    queues, count = state.get('queues', {}), self._sampler.groups_from_queue
    return await self._rollouts.start(queues, count)  # pyright: ignore

  def hooks(self) -> loop.Hooks:
    """Returns the hooks that the loop calls."""
    return loop.Hooks(
      publish=self._publish,
      advance=self._advance,
      evaluate=self._evaluate,
      record=self._record,
      save=self._save,
      stop=self._stop,
    )

  async def next(self, step: int) -> list[Group]:
    """Waits for the groups of a step."""
    start = time.perf_counter()
    try:
      groups = await self._sampler.next(step)
    except (StoreTimeoutError, StopRequested):
      await self._save(step, True)
      raise
    self._add_time('trainer', 'rollout', start, step)
    if self._plays:
      self._times |= await self._take_rollout_metrics(step)
      self._times |= self._rollouts.weight_syncer.metrics(step)  # pyright: ignore
      if self._sleeps:  # until weights are published again
        await maybe_await(self._rollouts.engine.sleep())  # pyright: ignore
        if self._learner_sleeps:
          await self._learner.reload()
    self._times |= self._sampler.metrics() | await self._runtime.metrics()
    if self._store is not None:
      self._times |= await self._store.counts()
    return groups

  async def _take_rollout_metrics(
    self, step: int, *, count: bool = True
  ) -> loop.Metrics:
    """Returns the rollout side's metrics, which start anew.

    Args:
      step: the step that is being collected.
      count: whether they are the step's own.
    """
    if self._tracer is not None:
      await self._tracer.before_report(step)
    metrics = await self._rollouts.metrics()  # pyright: ignore
    if self._tracer is not None:
      self._tracer.after_report(step if count else None)
    return metrics

  def _add_time(self, part: str, name: str, start: float, step: int) -> float:
    """Adds the metric time/NAME of what has just ended, and its span."""
    end = time.perf_counter()
    self._times[f'time/{name}'] = end - start
    spans.record(part, name, name, start, end, step=step)
    return end - start

  async def _publish(self, step: int) -> None:
    if self._tracer is not None:
      await self._tracer.before_step(step)
    self._step_start = time.perf_counter()
    evaluates = bool(self._evaluations_due(step))
    if self._rollouts is None or not (self._plays_at(step) or evaluates):
      return
    syncer = self._rollouts.weight_syncer
    hand_over = syncer.sync_now if evaluates else syncer.maybe_sync
    await hand_over(step, self._learner.inference_params)
    self._add_time('weights', 'publish', self._step_start, step)
    self._times |= self._rollouts.weights.metrics()
    if self._sleeps:
      if self._learner_sleeps:
        await self._learner.offload()
      await maybe_await(self._rollouts.engine.resume())
    if not self._engines_are_warm:
      self._engines_are_warm = True
      await maybe_await(self._rollouts.engine.warmup())

  async def _advance(self, step: int) -> None:
    if self._plays_at(step):
      await self._rollouts.advance(step)  # pyright: ignore

  def _plays_at(self, step: int) -> bool:
    return self._plays and self._sampler.plays(step)

  def _evaluations_due(self, step: int) -> list[str]:
    """Returns the names of the evaluation sets that are played at a step."""
    ends = step in (0, self._num_steps)
    active = self._settings.eval.active.items()
    return [name for name, s in active if ends or step % s.interval == 0]

  def complete(self, metrics: pathlib.Path) -> bool:
    """Returns whether not even an evaluation is left to do after the last step.

    Args:
      metrics: path of the run's metrics.jsonl.
    """
    if self._learner.step > self._num_steps or not self._evaluates_at(self._num_steps):
      return True
    last = {'phase': self._name, 'step': self._num_steps}
    return any(
      last.items() <= row.items() and any(name.startswith('eval/') for name in row)
      for row in read_metrics(metrics)
    )

  def _evaluates_at(self, step: int) -> bool:
    return self._rollouts is not None and bool(self._evaluations_due(step))

  async def _evaluate(self, step: int, last: bool) -> loop.Metrics:
    if self._rollouts is None or not self._evaluates_at(step):
      return {}
    start = time.perf_counter()
    names = self._evaluations_due(step)
    work = self._rollouts.evaluate(names=names)
    try:
      metrics, groups = await loop.await_unless_stopped(work, self._stop)
    except StopRequested:
      await self._save(step, True)
      raise
    await self._take_rollout_metrics(step, count=False)
    self._writers.trajectories(step, groups, kind='eval')
    self._step_start += self._add_time('trainer', 'evaluate', start, step)
    return metrics

  def _record(self, step: int, metrics: loop.Metrics, groups: list[Group]) -> None:
    if groups:
      self._add_time('trainer', 'step', self._step_start, step)
    metrics = {**metrics, **self._times}
    if groups:
      metrics |= memory_metrics(self._local_devices)
      if self._restarts:
        metrics['rollout/restarts'] = float(self._restarts)
    self._times = {}
    if self._tracer is not None:
      self._tracer.add_metrics(metrics)
    self._writers.write(step, metrics)
    self._writers.logprobs(step, self._learner.old_logprobs)
    self._writers.trajectories(step, groups, self._learner.advantages)

  async def close(self) -> None:
    """Writes the trace that is being taken, if any."""
    if self._tracer is not None:
      with contextlib.suppress(Exception):  # the error that ended the run matters more
        await self._tracer.close(self._learner.step)

  async def _save(self, step: int, last: bool) -> None:
    if self._tracer is not None:
      await self._tracer.after_step(step - 1)
    every = self._settings.checkpoint.save_interval
    last = last or step == self._num_steps
    if not last and not (every and step % every == 0):
      return
    state: dict[str, Any] = {'sampler': self._sampler.state_dict()}
    if self._plays:
      state['queues'] = await self._rollouts.state_dict()  # pyright: ignore
    await self._learner.save(self._checkpointer, state, wait=last)
    if self._store is not None:
      durable = step if last else self._saving  # whose writing this save waited for
      if durable is not None:
        await asyncio.to_thread(self._store.saved, durable)
      self._saving = step


def _check_rollout_state(state: Mapping[str, Any]) -> None:
  """Raises ConfigError for a sampler's state of a run that learned from a store."""
  if 'store' in state:
    raise ConfigError(
      "--config.dataset.experience_store='': the run in this --workdir "
      'trains from a store: set the key again, or name another --workdir'
    )


def run_with_restarts(
  make_trainer: Callable[[], Trainer],
  warn: Callable[[str], None],
  *,
  max_restarts: int = 3,
  pause: float = 10.0,
) -> tuple[Trainer, bool]:
  """Trains; starts anew from the newest checkpoint when an actor of the run is lost.

  A trainer that cannot be made again counts as lost too, and after a pause there is
  another try: the config fitted the cluster, so it is the cluster that has changed.

  Args:
    make_trainer: makes a trainer, whenever one is needed.
    warn: takes a line for the user about each restart.
    max_restarts: restarts in a row without a newer checkpoint.
    pause: seconds before another try to make a trainer.

  Returns:
    The trainer that came to its end, and whether training reached its end.

  Raises:
    ActorError: if an actor is lost too often, or before there is a checkpoint.
  """
  newest, restarts, total_restarts = None, 0, 0
  while True:
    trainer = None
    try:
      trainer = make_trainer()
      trainer.restarts = total_restarts
      return trainer, asyncio.run(trainer.train())
    except Exception as error:
      # Imported here because most runs lose no actor.
      from launch.runtime.supervision import ActorError

      if trainer is None:
        if newest is None:
          raise
        checkpoint = newest
      elif isinstance(error, ActorError):
        checkpoint = trainer.newest_checkpoint()
      else:
        raise
      restarts = 1 if checkpoint != newest else restarts + 1
      total_restarts += 1
      newest = checkpoint
      if checkpoint is None or restarts > max_restarts:
        if isinstance(error, ConfigError):  # not a mistake of the user's any more
          raise ActorError(str(error)) from error
        raise
      phase, step = checkpoint
      reason = str(error) if trainer is None else str(error).partition(',')[0]
      warn(
        f'{reason}: the run goes on from its newest checkpoint, {phase} {step} '
        f'(resume {restarts} of {max_restarts})'
      )
    if trainer is None:
      time.sleep(pause)
