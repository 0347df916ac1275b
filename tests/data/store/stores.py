"""Stores on this machine's disk, for tests."""

import numpy as np

from jaxrl.data.store.database import Database
from jaxrl.data.store.lease import Lease
from jaxrl.data.store.reader import Reader, Verdict
from jaxrl.data.store.writer import Explorer, Whole
from jaxrl.types import Trajectory
from tests.data.sinks.dumps import row


def url(folder):
  return f'sqlite:///{folder}/store.db'


def opened(folder):
  return Database(url(folder))


def rich(number=0):
  """A trajectory in which every field has something to lose."""
  rng = np.random.default_rng(number)
  return Trajectory(
    tokens=rng.integers(0, 2**31 - 1, 5, np.int32),
    action_mask=np.array([False, True, True, False, True]),
    rollout_logprobs=np.array([0, -1e-38, -np.inf, -0.0, np.pi], np.float32),
    rewards=rng.standard_normal(5).astype(np.float32),
    weights_version=np.array([-1, 7, 7, -1, 8], np.int32),
    group_id=number,
    episode_id=3,
    member=2,
    step=1,
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
  explorer, whole = Explorer(database, run, facts or {}), Whole()
  for number in numbers:
    explorer.add(tag, number, whole.rows([row(number, tag=tag)], number))
  return explorer.seal()


def reader(database, uses=1, name='trainer', tags=('t',)):
  return Reader(database, Lease(database, name), uses=uses, tags=list(tags))


def keep(group, facts):
  return Verdict(group)


def drawn(source, step, count, judge=keep, **options):
  return [p.group[0].group_id for p in source.draw(step, count, judge, **options)]
