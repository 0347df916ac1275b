"""A training run: a supervised start if asked for, then the algorithm's own steps."""

import asyncio
import contextlib
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

from jaxrl import loop
from jaxrl.algorithms import compose
from jaxrl.config import Config
from jaxrl.data.files import FileSampler
from jaxrl.data.samplers import Sampler
from jaxrl.dispatch import Dispatcher
from jaxrl.rollout.handles import settle
from jaxrl.rollout.stored import Starved, Stopped
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm, Group
from launch import files, placement
from launch.learners import AnyLearner, Learners, Stage, adapter_folder
from launch.rollouts import Rollouts
from launch.spawn import Host, guarded
from launch.stored import Stored, check_played
from launch.writers import Writers, read_metrics

log = logging.getLogger(__name__)


class Job:
  """Everything a run needs, assembled by `launch.build`.

  sampler: what gives an algorithm that plays its groups, None for one of files.
  source: the rows that an algorithm for files learns from, None for one that plays.
  store: the groups that others played, in the place of `sampler`.
  facts: what to tell the user first. closing: what to tell them last.
  """

  def __init__(
    self,
    config: Config,
    *,
    workdir: pathlib.Path,
    writers: Writers,
    stop: Callable[[], bool],
    policy: Policy,
    algorithm: Algorithm,
    learners: Learners,
    host: Host,
    dispatcher: Dispatcher,
    rollouts: Rollouts | None,
    sampler: Sampler | None,
    source: FileSampler | None,
    store: Stored | None = None,
  ):
    self._config, self._workdir, self._writers = config, workdir, writers
    self._stop, self._policy, self._algorithm = stop, policy, algorithm
    self._learners, self._host, self._dispatcher = learners, host, dispatcher
    self._rollouts = rollouts
    self._sampler, self._source, self._store = sampler, source, store
    self._num_steps = files.num_steps(config, source)
    self.facts: dict[str, str] = {}
    self.closing: dict[str, str] = {}

  async def train(self) -> bool:
    """Runs to the end or until asked to stop; True if it reached the end."""
    try:
      return await guarded(self._host, self._phases())
    finally:
      if self._rollouts is not None:
        with contextlib.suppress(Exception):  # whoever is dead cannot be told to end
          await self._rollouts.close()
      if self._store is not None:
        self._store.close()
      await self._learners.close()
      await self._host.close()
      self._dispatcher.close()

  # ---- phases

  async def _phases(self) -> bool:
    go_on, learned = await self._warm_start()
    return go_on and await self._main(learned)

  async def _warm_start(self) -> tuple[bool, bool]:
    """Supervised steps from files. Whether to go on, and whether there were any."""
    settings = self._config.sft
    if not settings.num_steps:
      return True, False
    main = self._checkpointer('train')
    begun = main.latest is not None
    main.close()
    if begun:
      return True, False  # the main phase restores its own parameters
    sampler = files.warm_start(self._config, self._policy.tokenizer)
    stage = Stage('sft', settings.batch_size, settings.num_steps)
    learner = await self._learners.make(stage)
    return await self._phase('sft', learner, sampler, settings.num_steps), True

  async def _main(self, follow: bool) -> bool:
    rows = self._config.batch.num_groups * compose.rows_per_group(self._algorithm)
    sampler: Any = self._store or self._sampler
    if self._source is not None:
      sampler, rows = self._source, self._source.num_rows
    stage = Stage('train', rows, self._num_steps)
    learner = await self._learners.make(stage, follow=follow)
    done = await self._phase('train', learner, sampler, self._num_steps)
    if done and self._config.checkpoint.export:
      folder = self._workdir / 'export'
      await self._learners.export(folder)
      self.closing['model'] = f'{folder} (a Hugging Face folder)'
      if self._config.model.lora:
        self.closing['adapter'] = f'{adapter_folder(folder)} (of PEFT)'
    return done

  async def _phase(
    self, name: str, learner: AnyLearner, sampler: Any, num_steps: int
  ) -> bool:
    """One phase of training, from its newest checkpoint if it has one."""
    if self._stop():
      return False
    checkpointer = self._checkpointer(name)
    phase = Phase(self, name, learner, sampler, checkpointer, num_steps)
    try:
      state = await learner.restore(checkpointer) if checkpointer.latest else {}
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
    except Stopped:
      return False
    finally:
      checkpointer.close()

  def newest(self) -> tuple[str, int] | None:
    """The newest checkpoint, its phase and step; None before any."""
    for name in ('train', 'sft'):
      checkpointer = self._checkpointer(name)
      step = checkpointer.latest
      checkpointer.close()
      if step is not None:
        return name, step
    return None

  def _checkpointer(self, name: str) -> Checkpointer:
    keep = self._config.checkpoint.keep
    return Checkpointer(self._workdir / 'checkpoints' / name, keep=keep)


class Phase:
  """The hooks of one phase, around `loop.train`."""

  def __init__(
    self,
    job: Job,
    name: str,
    learner: AnyLearner,
    sampler: Any,
    checkpointer: Checkpointer,
    num_steps: int,
  ):
    self._config, self._writers = job._config, job._writers
    self._stop, self._name, self._learner = job._stop, name, learner
    self._sampler, self._checkpointer = sampler, checkpointer
    self._num_steps = num_steps
    # A supervised start plays nothing; a supervised algorithm is still evaluated.
    self._rollouts = job._rollouts if name == 'train' else None
    self._plays = sampler is not None and sampler is job._sampler
    self._store = job._store if sampler is job._store else None
    self._saving: int | None = None  # the step of a checkpoint that is being written
    self._warm, self._sleeps = False, placement.sleeps(job._config)
    self._apart = job._host.learns  # and so it has to leave its memory to the engine
    self._times: dict[str, float] = {}
    self._begun = time.perf_counter()

  async def start(self, state: dict[str, Any]) -> list[Any]:
    """Puts back what a checkpoint holds and starts whoever plays."""
    if self._store is not None:
      self._store.start(self._learner.step, state.get('sampler'))
    elif state:
      check_played(state['sampler'])
      self._sampler.load_state_dict(state['sampler'])
    if not self._plays:
      return []
    queues, count = state.get('queues', {}), self._sampler.groups_from_queue
    return await self._rollouts.start(queues, count)  # pyright: ignore

  def hooks(self) -> loop.Hooks:
    return loop.Hooks(
      publish=self._publish,
      advance=self._advance,
      evaluate=self._evaluate,
      record=self._record,
      save=self._save,
      stop=self._stop,
    )

  async def next(self, step: int) -> list[Group]:
    start = time.perf_counter()
    try:
      groups = await self._sampler.next(step)
    except (Starved, Stopped):
      await self._save(step, True)
      raise
    self._times['time/rollout'] = time.perf_counter() - start
    if self._plays:
      self._times |= await self._rollouts.metrics()  # pyright: ignore
      self._times |= self._rollouts.swaps.metrics(step)  # pyright: ignore
      if self._sleeps:  # until weights are published again
        await settle(self._rollouts.engine.sleep())  # pyright: ignore
        if self._apart:
          await self._learner.wake()
    self._times |= self._sampler.metrics()
    if self._store is not None:
      self._times |= await self._store.counts()
    return groups

  async def _publish(self, step: int) -> None:
    self._begun = time.perf_counter()
    if self._rollouts is None or not (self._plays_at(step) or self._due(step)):
      return
    swaps = self._rollouts.swaps
    await (swaps.now if self._due(step) else swaps.at)(step, self._learner.weights)
    self._times['time/publish'] = time.perf_counter() - self._begun
    self._times |= self._rollouts.weights.metrics()
    if self._sleeps:
      if self._apart:
        await self._learner.rest()
      await settle(self._rollouts.engine.resume())
    if not self._warm:
      self._warm = True
      await settle(self._rollouts.engine.warmup())

  async def _advance(self, step: int) -> None:
    if self._plays_at(step):
      await self._rollouts.advance(step)  # pyright: ignore

  def _plays_at(self, step: int) -> bool:
    return self._plays and self._sampler.plays(step)

  def _due(self, step: int) -> bool:
    every = self._config.eval.every
    ends = step in (0, self._num_steps)
    return every > 0 and (ends or step % every == 0)

  def complete(self, metrics: pathlib.Path) -> bool:
    """Whether nothing is left to do after the last step: no evaluation, that is."""
    if self._learner.step > self._num_steps or not self._evaluates(self._num_steps):
      return True
    last = {'phase': self._name, 'step': self._num_steps}
    return any(
      last.items() <= row.items() and any(name.startswith('eval/') for name in row)
      for row in read_metrics(metrics)
    )

  def _evaluates(self, step: int) -> bool:
    return self._rollouts is not None and self._due(step)

  async def _evaluate(self, step: int, last: bool) -> loop.Metrics:
    if self._rollouts is None or not self._evaluates(step):
      return {}
    start = time.perf_counter()
    metrics, groups = await self._rollouts.evaluate()
    await self._rollouts.metrics()  # the engines' counts start anew
    self._writers.trajectories(step, groups, kind='eval')
    self._begun += time.perf_counter() - start
    return {**metrics, 'time/evaluate': time.perf_counter() - start}

  def _record(self, step: int, metrics: loop.Metrics, groups: list[Group]) -> None:
    metrics = {**metrics, **self._times}
    if groups:
      metrics['time/step'] = time.perf_counter() - self._begun
    self._times = {}
    self._writers.write(step, metrics)
    self._writers.trajectories(step, groups, self._learner.advantages)

  async def _save(self, step: int, last: bool) -> None:
    every = self._config.checkpoint.every
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
