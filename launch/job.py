"""A training run: a supervised start if asked for, then the algorithm's own steps."""

import contextlib
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl import loop
from jaxrl.config import Config
from jaxrl.data.chat import Chat
from jaxrl.data.samplers import FileSampler
from jaxrl.data.seeds import fold
from jaxrl.dispatch import Dispatcher
from jaxrl.models import huggingface
from jaxrl.rollout.handles import settle
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.training.learner import Learner
from jaxrl.training.optimizer import Optimizer, adamw
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm, Group, Params
from launch.rollouts import Rollouts
from launch.spawn import Host
from launch.writers import Writers, read_metrics

log = logging.getLogger(__name__)


class Job:
  """Everything a run needs, assembled by `launch.build`.

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
    mesh: Mesh,
    host: Host,
    dispatcher: Dispatcher,
    rollouts: Rollouts | None,
  ):
    self._config, self._workdir, self._writers = config, workdir, writers
    self._stop, self._policy, self._algorithm = stop, policy, algorithm
    self._mesh, self._host, self._dispatcher = mesh, host, dispatcher
    self._rollouts = rollouts
    self.facts: dict[str, str] = {}
    self.closing: dict[str, str] = {}

  async def train(self) -> bool:
    """Runs to the end or until asked to stop; True if it reached the end."""
    try:
      params = await self._warm_start()
      return params is not None and await self._main(params)
    except Exception as error:
      told = await self._host.explain(error)
      if told is error:
        raise
      raise told from error
    finally:
      if self._rollouts is not None:
        with contextlib.suppress(Exception):  # whoever is dead cannot be told to end
          await self._rollouts.close()
      await self._host.close()
      self._dispatcher.close()

  # ---- phases

  async def _warm_start(self) -> Params | None:
    """Supervised steps from files; the parameters after them, None if stopped."""
    from jaxrl.algorithms.sft import sft

    settings = self._config.sft
    if not settings.num_steps:
      return self._policy.params
    main = self._checkpointer('train')
    begun = main.latest is not None
    main.close()
    if begun:
      return self._policy.params  # the main phase restores its own
    source = {'path': settings.path or self._config.dataset.path}
    sampler = self._files(source, settings.batch_size, settings.limit)
    rate = adamw(
      learning_rate=settings.learning_rate,
      warmup_steps=min(settings.warmup_steps, settings.num_steps // 2),
      schedule='cosine',
      decay_steps=settings.num_steps,
      final_fraction=settings.final_fraction,
    )
    learner = self._learner(sft(), self._policy.params, rate, settings.batch_size)
    done = await self._phase('sft', learner, sampler, settings.num_steps)
    return learner.params if done else None

  async def _main(self, params: Params) -> bool:
    config = self._config
    optimizer = adamw(**config.optimizer)
    rows = config.batch.num_groups * self._algorithm.group_size
    learner = self._learner(self._algorithm, params, optimizer, rows)
    sampler: Any = self._rollouts
    if self._algorithm.schema != 'rollout':
      data = config.dataset
      source = {'path': data.path, 'split': data.split}
      sampler = self._files(source, config.batch.num_groups, data.limit)
    done = await self._phase('train', learner, sampler, config.num_steps)
    if done and config.checkpoint.export:
      await self._dispatcher.run(self._export, learner)
    return done

  def _files(
    self, source: dict[str, Any], batch_size: int, limit: int | None
  ) -> FileSampler:
    return FileSampler(
      Chat(self._policy.tokenizer),
      **source,
      limit=limit,
      batch_size=batch_size,
      max_length=self._config.batch.max_length,
      question_key=self._config.dataset.question_key,
      solution_key=self._config.sft.solution_key,
      seed=fold(self._config.seed, 'files'),
    )

  def _learner(
    self, algorithm: Algorithm, params: Params, optimizer: Optimizer, rows: int
  ) -> Learner:
    batch = self._config.batch
    return Learner(
      self._policy.model,
      params,
      algorithm,
      num_rows=rows,
      buckets=batch.buckets or (batch.max_length,),
      mesh=self._mesh,
      optimizer=optimizer,
      dispatcher=self._dispatcher,
      minibatches=batch.minibatches,
      micro_batches=batch.micro_batches,
      epochs=batch.epochs,
      temperature=self._config.rollout.temperature,
      seed=fold(self._config.seed, 'learner'),
      entropy=batch.entropy,
      mismatch_alarm=self._config.rollout.mismatch_alarm,
    )

  async def _phase(
    self, name: str, learner: Learner, sampler: Any, num_steps: int
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
    finally:
      checkpointer.close()

  def _checkpointer(self, name: str) -> Checkpointer:
    keep = self._config.checkpoint.keep
    return Checkpointer(self._workdir / 'checkpoints' / name, keep=keep)

  def _export(self, learner: Learner) -> None:
    folder = self._workdir / 'export'
    params = jax.tree.map(np.asarray, learner.params)
    tokenizer = self._policy.tokenizer
    huggingface.save(folder, self._policy.model.config, params, tokenizer)
    self.closing['model'] = f'{folder} (a Hugging Face folder)'


class Phase:
  """The hooks of one phase, around `loop.train`."""

  def __init__(
    self,
    job: Job,
    name: str,
    learner: Learner,
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
    self._plays = self._rollouts is not None and sampler is self._rollouts
    self._warm = False
    self._times: dict[str, float] = {}
    self._begun = time.perf_counter()

  async def start(self, state: dict[str, Any]) -> list[Any]:
    """Puts back what a checkpoint holds and starts whoever plays."""
    if self._plays:
      return await self._rollouts.start(state.get('queues', {}))  # pyright: ignore
    if state:
      self._sampler.load_state_dict(state['sampler'])
    return []

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
    groups = await self._sampler.next(step)
    self._times['time/rollout'] = time.perf_counter() - start
    if self._plays:
      self._times |= await self._rollouts.metrics()  # pyright: ignore
    return groups

  async def _publish(self, step: int) -> None:
    self._begun = time.perf_counter()
    if self._rollouts is None or not (self._plays or self._due(step)):
      return
    await self._rollouts.weights.publish(step, self._learner.params)
    self._times['time/publish'] = time.perf_counter() - self._begun
    if not self._warm:
      self._warm = True
      await settle(self._rollouts.engine.warmup())

  async def _advance(self, step: int) -> None:
    if self._plays:
      await self._rollouts.advance(step)  # pyright: ignore

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
    state: dict[str, Any] = {}
    if self._plays:
      state['queues'] = await self._rollouts.state_dict()  # pyright: ignore
    else:
      state['sampler'] = self._sampler.state_dict()
    await self._learner.save(self._checkpointer, state, wait=last)
