"""What is kept on the disk, and who is known: checkpoints, sessions, results."""

import asyncio
import dataclasses
import json
import os
import time

import numpy as np
import pytest

from jaxrl.rollout.tinker import checkpoint_store, request_bodies
from jaxrl.rollout.tinker.checkpoint_store import CheckpointStore, parse_path
from jaxrl.rollout.tinker.pending_results import (
  PendingResults,
  RequestError,
  TooManyRequestsError,
)
from jaxrl.rollout.tinker.sessions import SessionEndedError, SessionTable
from jaxrl.rollout.tinker.tenant_learner import TenantSnapshot
from jaxrl.rollout.tinker.tinker_options import TinkerOptions

RUN = 'abc:train:0'
FACTS = {'rank': 2, 'base_model': 'm'}


def snapshot(value=1.0, moments=True):
  pair = np.full((1, 3, 2), value, np.float32), np.full((1, 2, 3), value, np.float32)
  extra = {'mu': {'q': pair}, 'nu': {'q': pair}} if moments else {}
  return TenantSnapshot({'q': pair}, count=3, **extra)


@pytest.fixture
def store(tmp_path):
  return CheckpointStore(tmp_path, max_checkpoints=3)


def save(store, name='a', value=1.0, **options):
  return store.save(RUN, 'weights', name, snapshot(value), FACTS, **options)


def test_checkpoints_come_back(store):
  path = save(store)
  assert path == 'tinker://abc:train:0/weights/a' and store.find(path)['rank'] == 2
  loaded = store.load(path, moments=True)
  assert loaded.count == 3
  np.testing.assert_array_equal(loaded.mu['q'][0], snapshot().mu['q'][0])
  assert store.load(path).mu is None and store.load(path).count == 0
  (entry,) = store.checkpoints(RUN)
  assert entry['tinker_path'] == path and entry['size_bytes'] > 0
  store.delete(path)
  with pytest.raises(RequestError, match='no checkpoint'):
    store.find(path)
  assert not list(store.folder.glob('runs/*/weights/*'))


def test_a_copy_shares_its_files_and_outlives_what_was_copied(store):
  path = save(store)
  copied = store.copy(path, 'other', ttl_seconds=60)
  assert copied == 'tinker://other/weights/a' and store.find(copied)['expires']
  tensors = [store.files(x)['tensors.safetensors'] for x in (path, copied)]
  assert tensors[0].samefile(tensors[1])
  store.delete(path)
  assert store.load(copied, moments=True).count == 3
  with pytest.raises(RequestError, match='no checkpoint'):
    store.copy(path, 'third')
  assert not (store.folder / 'runs' / 'third').exists()


def test_what_is_saved_for_others_is_not_loaded(store):
  path = store.save(RUN, 'external_weights', 'a', None, FACTS, files={'x': b'1'})
  with pytest.raises(RequestError, match='for others'):
    store.load(path)


@pytest.mark.parametrize('seconds', [0, -1, 10**12])
def test_seconds_until_a_checkpoint_expires(store, seconds):
  with pytest.raises(RequestError, match='from 1'):
    save(store, ttl_seconds=seconds)
  assert checkpoint_store.check_ttl(None) is None
  assert checkpoint_store.check_ttl(60) == 60


def test_what_a_name_may_be(store):
  for name in ('', '../a', 'a/b', '.a', 'a.json', 'x' * 200, 'ä'):
    with pytest.raises(RequestError):
      save(store, name)
  for path in (
    'tinker://../weights/a',
    'tinker://a/models/b',
    'a',
    'tinker://a/weights/..',
  ):
    with pytest.raises(RequestError):
      parse_path(path)


def test_a_name_is_taken_once(store):
  save(store)
  with pytest.raises(RequestError, match='already'):
    save(store)
  path = save(store, value=2.0, overwrite=True)
  assert store.load(path).adapters['q'][0].max() == 2.0
  assert len([x for x in store.folder.glob('runs/*/weights/*') if x.is_dir()]) == 1


def test_there_is_room_for_so_many(store):
  for name in 'abc':
    save(store, name)
  with pytest.raises(RequestError, match='no more'):
    save(store, 'd')


def test_checkpoints_expire(store, monkeypatch):
  path = save(store, ttl_seconds=100)
  kept = save(store, 'b')
  now = time.time()
  monkeypatch.setattr(checkpoint_store.time, 'time', lambda: now + 101)
  store.remove_expired()
  with pytest.raises(RequestError, match='expired'):
    store.load(path)
  assert store.load(kept) and len(store.checkpoints()) == 1
  with pytest.raises(RequestError, match='ttl_seconds'):
    save(store, 'c', ttl_seconds=0)


@pytest.mark.parametrize('after', ['_write_bytes', 'replace'])
def test_a_save_that_is_cut_off_leaves_the_old_one(store, monkeypatch, after):
  path = save(store)

  class Cut(BaseException):
    pass

  def cut(*args):
    raise Cut

  with monkeypatch.context() as patch:
    # As kill -9: nothing after this point runs, so nothing is cleaned up.
    patch.setattr(checkpoint_store.shutil, 'rmtree', lambda *a, **k: None)
    if after == 'replace':
      patch.setattr(os, 'replace', cut)
    else:
      patch.setattr(checkpoint_store, '_write_bytes', cut)
    with pytest.raises(Cut):
      save(store, value=5.0, overwrite=True)
  again = CheckpointStore(store.folder)
  assert again.load(path).adapters['q'][0].max() == 1.0
  assert len([x for x in store.folder.glob('runs/*/weights/*') if x.is_dir()]) == 1
  assert not list(store.folder.rglob('*.tmp'))


def test_weights_alone_have_no_moments(store):
  path = store.save(RUN, 'sampler_weights', 'a', snapshot(moments=False), FACTS)
  with pytest.raises(RequestError, match='no optimizer state'):
    store.load(path, moments=True)


def test_runs_are_described(store):
  store.save_run(RUN, {'created': 1.0})
  store.save_run('abc:train:1', {'created': 2.0})
  assert [x['run_id'] for x in store.runs()] == ['abc:train:1', RUN]
  assert store.find_run('other') is None


@dataclasses.dataclass
class Clock:
  now: float = 0.0

  def __call__(self):
    return self.now


def test_sessions_live_by_signs_of_life(store):
  clock = Clock()
  table = SessionTable(store, max_sessions=2, timeout=10, clock=clock)
  first, second = (table.create(user_metadata=None) for _ in range(2))
  with pytest.raises(TooManyRequestsError):
    table.create()
  clock.now = 8
  table.touch(first.session_id)
  clock.now = 15
  assert table.vanished() == [second]
  table.end(second, 'its client vanished')
  with pytest.raises(SessionEndedError, match='vanished'):
    table.touch(second.session_id)
  with pytest.raises(RequestError, match='no session'):
    table.touch('other')
  # A new process knows it by its file.
  later = SessionTable(store, max_sessions=2, timeout=10, clock=clock)
  assert later.touch(first.session_id).facts['status'] == 'active'
  assert [x['session_id'] for x in store.sessions()][-1] == first.session_id


def test_results_are_kept_for_a_while():
  async def run():
    clock = Clock(time.monotonic())
    table = PendingResults(
      max_pending=2, keep_seconds=60, max_kept_bytes=100, clock=clock
    )
    first, second = (table.add(name, 's') for name in 'ab')
    with pytest.raises(TooManyRequestsError):
      table.add('c', 's')
    first.succeed({'x': 1})
    first.fail(ValueError('late'))
    assert json.loads(first.body) == {'x': 1} and not first.failed
    table.fail_owner('s', RequestError('gone'))
    assert json.loads(second.body) == {'error': 'gone', 'category': 'user'}
    assert table.find('a') and table.num_pending == 0
    clock.now += 61
    table.add('c', 's').succeed(b'x' * 200)
    assert table.find('a') is None
    table.add('d', 's').fail(OSError('disk'))  # too many bytes: the oldest goes
    assert table.find('c') is None
    assert json.loads(table.find('d').body)['category'] == 'server'
    assert '1 minutes' in table.lost_message()

  asyncio.run(run())


def test_bodies_name_the_field_at_fault():
  with pytest.raises(RequestError, match='seq_id'):
    request_bodies.parse_body(b'{"model_id": "a"}', request_bodies.OptimStep)
  body = request_bodies.parse_body(
    b'{"model_id": "a", "seq_id": 1, "new_field": 2}', request_bodies.OptimStep
  )
  assert body.seq_id == 1


def test_options_are_checked():
  assert TinkerOptions().max_tenants == 4
  with pytest.raises(ValueError, match='max_rank'):
    TinkerOptions(max_rank=0)
