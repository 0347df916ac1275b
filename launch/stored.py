"""Training from an experience store: `--config.data.source`, and who writes it."""

import hashlib
import json
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl.algorithms import compose
from jaxrl.config import Config
from jaxrl.data import samplers
from jaxrl.data.store import options
from jaxrl.data.store.database import Database
from jaxrl.data.store.lease import Lease
from jaxrl.data.store.reader import Reader
from jaxrl.data.store.writer import Explorer, Whole, run_of
from jaxrl.rollout.filters import make_filter
from jaxrl.rollout.gate import Gate
from jaxrl.rollout.shapers import make_shaper
from jaxrl.rollout.stored import StoredGroups
from jaxrl.signature import ConfigError
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.training.policy import Policy
from jaxrl.types import Algorithm, Group
from launch import off_policy
from launch import samplers as run_samplers
from launch.algorithm import response_limit
from launch.rollouts import joined

log = logging.getLogger(__name__)

KEY = 'data.source'


def check(config: Config, algorithm: Algorithm) -> None:
  """Raises ConfigError for what a store cannot give, or what has no effect with it."""
  if not config.data.source:
    return
  where, name = f'--config.{KEY}={config.data.source}', config.algorithm.name
  asked = options.read(config.data.source, options.reading, KEY)
  if algorithm.schema != 'rollout':
    raise ConfigError(f'{where}: {name} learns from files, schema={algorithm.schema}')
  if 'greedy_mask' in compose.needs(algorithm):
    raise ConfigError(f'{where}: {name} needs a greedy attempt at each task, which '
                      'explorers do not play')  # fmt: skip
  if samplers.find(algorithm.sampler)[0].reuses and asked.uses > 1:
    raise ConfigError(
      f'{where}: --config.algorithm.sampler={algorithm.sampler} says how often a group '
      'is used: leave uses=1'
    )
  for key in ('sync', 'async_ratio'):
    value = config.rollout[key]
    if value not in ('fixed', 0):
      raise ConfigError(
        f'--config.rollout.{key}={value}: has no effect here: nothing is played, see '
        f'{where}; rollout.staleness bounds the age of what is learned from'
      )


def facts(config: Config, algorithm: Algorithm, tokenizer: Any) -> dict[str, Any]:
  """What an explorer and the trainer must agree on, by name."""
  vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
  auto = compose.formulation(algorithm)
  return {
    'tokenizer': hashlib.sha256(vocabulary).hexdigest()[:16],
    'temperature': float(config.rollout.temperature),
  } | {
    f'formulation of {tag}': env.formulation if env.formulation != 'auto' else auto
    for tag, env in config.env.items()
  }


def _key(fact: str) -> str:
  """Where a fact is set."""
  if fact.startswith('formulation of '):
    return f'env.{fact.removeprefix("formulation of ")}.formulation'
  return {'tokenizer': 'model.checkpoint'}.get(fact, f'rollout.{fact}')


def make(
  config: Config,
  algorithm: Algorithm,
  policy: Policy,
  *,
  workdir: pathlib.Path,
  stop: Callable[[], bool],
) -> 'Stored | None':
  """What gives a run in `workdir` its groups; None where it plays them itself."""
  if not config.data.source:
    return None
  checkpointer = Checkpointer(workdir / 'checkpoints' / 'train')
  fresh = checkpointer.latest is None
  checkpointer.close()
  return Stored(config, algorithm, policy, fresh=fresh, stop=stop)


class Stored:
  """The sampler of a run that plays nothing, over a store; checkpoints tell it too.

  fresh: the run has no checkpoint. stop: True when the user asked to end. Raises
  ConfigError where another process trains, or trained, under this reader's name.
  """

  def __init__(
    self,
    config: Config,
    algorithm: Algorithm,
    policy: Policy,
    *,
    fresh: bool,
    stop: Callable[[], bool],
  ):
    asked = options.read(config.data.source, options.reading, KEY)
    self._database = Database(asked.url, KEY)
    self._lease = Lease(self._database, asked.reader, say=log.info)
    try:
      tags = list(config.env)
      self._reader = Reader(self._database, self._lease, uses=asked.uses, tags=tags)
      if fresh:
        self._reader.check_fresh()
      self._groups = self._make(config, algorithm, policy, asked.wait, stop)
      self._sampler = run_samplers.make(config, algorithm, policy, self._groups)
      self._groups.num_groups = self._sampler.groups_from_queue
      for played in self._reader.explorers().values():
        self._groups.check(played)
    except BaseException:
      self.close()
      raise
    self.num_rows = config.batch.num_groups * compose.rows_per_group(algorithm)
    self._uses = asked.uses

  def _make(
    self,
    config: Config,
    algorithm: Algorithm,
    policy: Policy,
    wait: float,
    stop: Callable[[], bool],
  ) -> StoredGroups:
    rollout, size = config.rollout, algorithm.group_size
    least = rollout.min_members or size
    mine = facts(config, algorithm, policy.tokenizer)
    filters = joined(algorithm.filters, rollout.group_filter)
    shapers, gates = joined(algorithm.shapers, rollout.shapers), {}
    for tag, env in config.env.items():
      drop = make_filter(filters, config.to_dict(), env)
      shaper = make_shaper(shapers, {'max_length': response_limit(config, tag)})
      gates[tag] = Gate(drop, shaper, least=least, greedy=False)
    return StoredGroups(
      self._reader,
      gates,
      name=self._database.name,
      num_groups=config.batch.num_groups,
      size=size,
      least=least,
      max_length=config.batch.max_length,
      vocab_size=policy.model.config.vocab_size,
      wanted={name: (value, _key(name)) for name, value in mine.items()},
      wait=wait,
      max_lost=rollout.max_lost,
      stop=stop,
      most=off_policy.most(config),
    )

  def describe(self) -> str:
    """The data of a run, in a line for people."""
    often = f'each used {self._uses} times' if self._uses > 1 else 'each used once'
    return (
      f'{self._database.name}: {self._reader.size():,} groups, {often} by reader '
      f'{self._lease.name!r}, {self._reader.left():,} not used up'
    )

  # ---- as a sampler

  async def next(self, step: int) -> list[Group]:
    return await self._sampler.next(step)

  def metrics(self) -> dict[str, float]:
    return self._sampler.metrics()

  async def counts(self) -> dict[str, float]:
    return await self._groups.counts()

  # ---- with checkpoints

  def start(self, step: int, state: Mapping[str, Any] | None) -> None:
    """Goes on at `step`. state: what a checkpoint holds of `state_dict`; None: nothing.

    Raises ConfigError for a checkpoint of a run that played, or of another store.
    """
    if state is None:
      self._reader.begin()
      return
    if 'store' not in state:
      raise ConfigError(
        f'--config.{KEY}: this run has played what it learned from: name another '
        '--workdir'
      )
    self._reader.resume(step, state['store'])
    self._sampler.load_state_dict(state['sampler'])

  def state_dict(self) -> dict[str, Any]:
    return {'store': self._reader.state_dict(), 'sampler': self._sampler.state_dict()}

  def saved(self, step: int) -> None:
    """The checkpoint of `step` is on disk."""
    self._reader.saved(step)

  def close(self) -> None:
    self._lease.close()
    self._database.close()


def check_played(state: Mapping[str, Any]) -> None:
  """Raises ConfigError for a sampler's state of a run that learned from a store."""
  if 'store' in state:
    raise ConfigError(
      f"--config.{KEY}='': this run has learned from a store: name it, or another "
      '--workdir'
    )


class Kept(NamedTuple):
  """What keeps the groups of a run that plays, and where, for people."""

  columns: Whole
  ledger: Explorer
  name: str


def explorer(
  config: Config, algorithm: Algorithm, folder: pathlib.Path, tokenizer: Any
) -> Kept:
  """Keeps groups in the store that `dump.path` names. folder: the run's own.

  Raises ConfigError for columns, which a store has not, and as `Database`.
  """
  if config.dump.columns:
    raise ConfigError('--config.dump.columns: an experience store keeps groups whole')
  asked = options.read(config.dump.path, options.writing, 'dump.path')
  database = Database(asked.url, 'dump.path')
  own = facts(config, algorithm, tokenizer)
  ledger = Explorer(database, run_of(folder), own)
  return Kept(Whole(asked.version), ledger, database.name)
