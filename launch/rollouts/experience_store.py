"""Opens experience stores: the one that a run trains from, and those it writes."""

import asyncio
import hashlib
import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

from jaxrl.algorithms import requirements
from jaxrl.data.store.experience_reader import ExperienceReader
from jaxrl.data.store.experience_writer import (
  ExperienceWriter,
  GroupSerializer,
  writer_run_id,
)
from jaxrl.data.store.reader_lease import ReaderLease
from jaxrl.data.store.store_database import StoreDatabase
from jaxrl.model_loading import LoadedModel
from jaxrl.options import ConfigError, JsonObject
from jaxrl.rollout.queue.group_pipeline import GroupPipeline
from jaxrl.rollout.queue.store_source import StoreGroupSource
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.types import StateDict
from launch.rollouts.group_samplers import make_group_sampler
from launch.rollouts.group_sources import GroupSource, Metrics, Players
from launch.rollouts.rollout_scheduler import (
  make_filter_and_shaper,
  tag_row_format,
)
from launch.settings.off_policy import max_staleness
from launch.settings.run_settings import RunSettings

log = logging.getLogger(__name__)

KEY = 'dataset.experience_store'


def compatibility_facts(settings: RunSettings, tokenizer: Any) -> JsonObject:
  """Returns what an explorer and the trainer must agree on, by name."""
  vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
  return {
    'tokenizer': hashlib.sha256(vocabulary).hexdigest()[:16],
    'temperature': float(settings.rollout.temperature),
  } | {
    f'formulation of {tag}': tag_row_format(settings, tag)
    for tag in settings.training_tags
  }


def _config_key(fact: str) -> str:
  if fact.startswith('formulation of '):
    return f'env.{fact.removeprefix("formulation of ")}.row_format'
  return {'tokenizer': 'model.checkpoint'}.get(fact, f'rollout.{fact}')


class StoredGroups(GroupSource):
  """Groups that other runs have played, from an experience store.

  The position in the store is part of the run's checkpoints.
  """

  def __init__(
    self,
    settings: RunSettings,
    policy: LoadedModel,
    players: Players | None,
    *,
    workdir: pathlib.Path,
    stop: Callable[[], bool],
  ):
    """Opens the store.

    Raises:
      ConfigError: If another process trains, or trained, under this reader's name.
    """
    checkpointer = Checkpointer(workdir / 'checkpoints' / 'train')
    fresh = checkpointer.latest_step is None
    checkpointer.close()
    store = settings.experience_store
    assert store is not None
    self._database = StoreDatabase(store.url, KEY)
    self._lease = ReaderLease(self._database, store.reader, say=log.info)
    try:
      tags = settings.training_tags
      self._reader = ExperienceReader(
        self._database, self._lease, uses=store.uses, tags=tags
      )
      if fresh:
        self._reader.check_fresh()
      self._groups = self._make_source(settings, policy, store.wait, stop)
      sampler = make_group_sampler(settings, policy, self._groups)
      self._groups.num_groups = sampler.groups_from_queue
      for facts in self._reader.writer_facts().values():
        self._groups.check_facts(facts)
    except BaseException:
      self._close_store()
      raise
    super().__init__(sampler, players)
    rows = requirements.rows_per_group(settings.algorithm)
    self.num_rows = settings.batch.num_groups * rows
    self.num_steps = settings.num_steps
    self._uses = store.uses

  def _make_source(
    self,
    settings: RunSettings,
    policy: LoadedModel,
    timeout: float,
    stop: Callable[[], bool],
  ) -> StoreGroupSource:
    group_size = settings.algorithm.group_size
    min_samples = settings.rollout.min_group_size or group_size
    facts = compatibility_facts(settings, policy.tokenizer)
    pipelines = {}
    for tag in settings.training_tags:
      pipelines[tag] = GroupPipeline(
        *make_filter_and_shaper(settings, tag),
        min_samples=min_samples,
        needs_greedy=False,
      )
    return StoreGroupSource(
      self._reader,
      pipelines,
      name=self._database.name,
      num_groups=settings.batch.num_groups,
      group_size=group_size,
      min_samples=min_samples,
      max_length=settings.batch.max_length,
      vocab_size=policy.model.config.vocab_size,
      required_facts={
        name: (value, _config_key(name)) for name, value in facts.items()
      },
      timeout=timeout,
      max_consecutive_drops=settings.rollout.max_consecutive_drops,
      stop_requested=stop,
      max_staleness=max_staleness(settings),
    )

  def describe(self) -> str:
    """Describes the data of the run in one line."""
    often = f'each used {self._uses} times' if self._uses > 1 else 'each used once'
    return (
      f'{self._database.name}: {self._reader.num_groups():,} groups, {often} by reader '
      f'{self._lease.name!r}, {self._reader.num_left():,} not used up'
    )

  async def start(self, step: int, state: StateDict) -> list[asyncio.Task]:
    """Starts to read at `step`.

    Raises:
      ConfigError: For a checkpoint of a run that played, or of another store.
    """
    if not state:
      self._reader.begin()
      return []
    position = state['sampler']
    if 'store' not in position:
      raise ConfigError(
        f'--config.{KEY}: the run in this --workdir has played its own '
        'episodes: name another --workdir to train from a store'
      )
    self._reader.resume(step, position['store'])
    self._sampler.load_state_dict(position['sampler'])
    return []

  async def metrics(self, step: int) -> Metrics:
    """Returns the sampler's and what the store's reader has counted."""
    return await super().metrics(step) | await self._groups.counts()

  async def state(self) -> StateDict:
    """Returns the position in the store and the sampler's state."""
    position = {'store': self._reader.state_dict(), **await super().state()}
    return {'sampler': position}

  async def saved(self, step: int) -> None:
    """Lets the store forget what no resumed run will read again."""
    await asyncio.to_thread(self._reader.mark_saved, step)

  async def close(self) -> None:
    """Gives up the reader's lease and closes the database."""
    await super().close()
    self._close_store()

  def _close_store(self) -> None:
    self._lease.close()
    self._database.close()


def open_store_target(
  settings: RunSettings, folder: pathlib.Path, tokenizer: Any
) -> tuple[GroupSerializer, ExperienceWriter, str]:
  """Opens the store that `trajectory_dump.path` names, to write groups to it.

  Returns:
    What turns groups into rows of the store, what writes them, and the store's name.

  Raises:
    ConfigError: For `trajectory_dump.columns`, which a store does not have, and for a
      store that cannot be opened.
  """
  dump = settings.trajectory_dump
  assert dump is not None and dump.store is not None
  for key, is_set in (
    ('columns', bool(dump.columns)),
    ('save_arrays', not dump.save_arrays),
  ):
    if is_set:
      raise ConfigError(
        f'--config.trajectory_dump.{key}: has no effect here: an experience '
        'store keeps whole groups. Leave it out'
      )
  database = StoreDatabase(dump.store.url, 'trajectory_dump.path')
  facts = compatibility_facts(settings, tokenizer)
  ledger = ExperienceWriter(database, writer_run_id(folder), facts)
  return GroupSerializer(dump.store.version), ledger, database.name
