"""Stores on this machine's disk, for tests."""

import numpy as np

from jaxrl.data.store.experience_reader import ExperienceReader, GroupDecision
from jaxrl.data.store.experience_writer import ExperienceWriter, GroupSerializer
from jaxrl.data.store.reader_lease import ReaderLease
from jaxrl.data.store.store_database import StoreDatabase
from jaxrl.types import Trajectory
from tests.data.trajectory_writers.dumps import row


def url(folder):
  return f'sqlite:///{folder}/store.db'


def opened(folder):
  return StoreDatabase(url(folder))


def rich(number=0):
  """A trajectory in which every field has something to lose."""
  rng = np.random.default_rng(number)
  return Trajectory(
    tokens=rng.integers(0, 2**31 - 1, 5, np.int32),
    action_mask=np.array([False, True, True, False, True]),
    rollout_logprobs=np.array([0, -1e-38, -np.inf, -0.0, np.pi], np.float32),
    rewards=rng.standard_normal(5).astype(np.float32),
    weights_version=np.array([-1, 7, 7, -1, 8], np.int32),
    env_group=number,
    episode_id=3,
    sample_index=2,
    turn=1,
    tag='t',
    episode_seed=11,
    stop_reason='max_steps',
    is_expert=True,
    weight=0.1,
    messages=[{'role': 'user', 'content': [{'type': 'text', 'text': 'ü\x00'}]}],
    metrics={'a': float('nan'), 'b': 1 / 3},
    columns={'x': None, 'y': b'\xff'},
    extras={'states': np.arange(6, dtype=np.uint16).reshape(2, 3), 'pair': (1, 'two')},
  )


def fill(database, numbers, run='one', tag='t', facts=None):
  explorer, whole = ExperienceWriter(database, run, facts or {}), GroupSerializer()
  for number in numbers:
    explorer.add(tag, number, whole.rows([row(number, tag=tag)], number))
  return explorer.flush()


def reader(database, uses=1, name='trainer', tags=('t',)):
  return ExperienceReader(
    database, ReaderLease(database, name), uses=uses, tags=list(tags)
  )


def keep(group, facts):
  return GroupDecision(group)


def drawn(source, step, count, judge=keep, **options):
  return [p.group[0].env_group for p in source.draw(step, count, judge, **options)]
