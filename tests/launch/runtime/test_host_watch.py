"""The host watch reports hosts that do not answer, and ends what runs there."""

import contextlib
import logging
import socket
import time
import types

import pytest

from launch.runtime import host_watch, supervision
from launch.runtime.host_watch import HostWatch


class Actor:
  """An actor that can say how full its disk is."""

  def __init__(self, name, node, free=500):
    self.name, self.node, self.free = name, node, free
    self.has_started = True
    self._actor_id = self
    self.__ray_call__ = types.SimpleNamespace(
      remote=lambda fn: ('/tmp/ray', self.free, 1000)
    )

  def hex(self):
    return self.name


class Cluster:
  """Stands in for Ray: nodes whose raylets are sockets of this machine."""

  def __init__(self, count):
    self.sockets = {f'node{i}': self.listen() for i in range(count)}
    self.gone, self.killed, self.parts = set(), [], {}
    self.ports = {name: s.getsockname()[1] for name, s in self.sockets.items()}

  @staticmethod
  def listen(port=0):
    return socket.create_server(('127.0.0.1', port), backlog=128)

  def nodes(self):
    return [  # in any order, as Ray does
      {
        'NodeID': name,
        'Alive': name not in self.gone,
        'NodeManagerHostname': f'{name}.example',
        'NodeManagerAddress': '127.0.0.1',
        'NodeManagerPort': port,
        'Resources': {host_watch.HEAD_RESOURCE: 1} if name == 'node0' else {},
      }
      for name, port in self.ports.items()
    ]

  def get_runtime_context(self):
    return types.SimpleNamespace(get_node_id=lambda: 'node0')

  def is_initialized(self):
    return True

  def kill(self, actor):
    self.killed.append(actor.name)

  def wait(self, answers, *, num_returns, timeout):
    return answers, []

  def get(self, answer):
    return answer

  def actors(self):
    return {
      actor.name: {
        'Address': {'NodeID': actor.node if actor.has_started else 'f' * 56},
        'State': 'ALIVE' if actor.has_started else 'PENDING_CREATION',
      }
      for actor in self.parts.values()
    }

  def cut_off(self, name):
    self.sockets[name].close()

  def reconnect(self, name):
    self.sockets[name] = self.listen(self.ports[name])

  def close(self):
    for listener in self.sockets.values():
      listener.close()


@pytest.fixture
def cluster(monkeypatch):
  from ray._private import state

  cluster = Cluster(3)
  monkeypatch.setattr(state, 'actors', cluster.actors)
  monkeypatch.setattr(host_watch, 'LIST_INTERVAL_S', 0.05)
  yield cluster
  cluster.close()


@contextlib.contextmanager
def watching(cluster, timeout=0.3):
  watch = HostWatch(cluster, lambda: cluster.parts, timeout=timeout, interval=0.02)
  watch.start()
  yield watch
  watch.close()


def wait_until(condition):
  end = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


def place(cluster, watch, *names):
  """Starts parts where the watch says."""
  for name in names:
    node = watch.choose_node()
    cluster.parts[name] = Actor(name, node)
    watch.place(cluster.parts[name], node)


def test_what_runs_on_a_host_that_does_not_answer_is_ended(cluster, caplog):
  caplog.set_level(logging.WARNING, 'launch')
  with watching(cluster) as watch:
    place(cluster, watch, 'engine 1', 'engine 2', 'RolloutWorker 1', 'RolloutWorker 2')
    nodes = [actor.node for actor in cluster.parts.values()]
    assert nodes == ['node0', 'node1', 'node2', 'node0']
    lost = cluster.parts['RolloutWorker 1']
    cluster.cut_off('node2')
    wait_until(lambda: cluster.killed)
    assert cluster.killed == ['RolloutWorker 1'] and watch.lost_nodes() == ['node2']
    reported, given_up = caplog.messages
    assert 'host node2.example (127.0.0.1) has not answered for' in reported
    assert 'the run waits for RolloutWorker 1 there' in reported
    assert 'RolloutWorker 1 will be started elsewhere' in given_up
    assert watch.has_ended(lost) and not watch.has_ended(cluster.parts['engine 1'])
    watch.forget(lost)
    place(cluster, watch, 'RolloutWorker 1')
    assert cluster.parts['RolloutWorker 1'].node == 'node1'
    cluster.reconnect('node2')  # two parts each on the others: one of them moves
    wait_until(lambda: len(cluster.killed) > 1)
    assert cluster.killed[1] in ('engine 1', 'engine 2')
    moved = cluster.parts.pop(cluster.killed[1])
    watch.forget(moved)
    place(cluster, watch, moved.name)
    assert cluster.parts[moved.name].node == 'node2'
    assert f'{moved.name} moves to host node2.example' in caplog.text


def test_what_was_sent_to_a_host_that_does_not_answer_is_ended_before_it_starts(
  cluster, caplog
):
  caplog.set_level(logging.WARNING, 'launch')
  with watching(cluster) as watch:
    place(cluster, watch, 'engine 1', 'engine 2')
    cluster.parts['engine 2'].has_started = False
    cluster.cut_off('node1')
    wait_until(lambda: cluster.killed)
    assert cluster.killed == ['engine 2']
    assert 'the run waits for engine 2 there' in caplog.text


def test_a_host_that_starts_ray_again_is_used_again(cluster, caplog):
  caplog.set_level(logging.WARNING, 'launch')
  with watching(cluster, timeout=60) as watch:
    cluster.gone.add('node1')
    wait_until(lambda: 'node1.example (127.0.0.1) has left' in caplog.text)
    place(cluster, watch, *'abcd')
    assert {actor.node for actor in cluster.parts.values()} == {'node0', 'node2'}
    cluster.sockets['new'] = cluster.listen()
    cluster.ports['new'] = cluster.sockets['new'].getsockname()[1]
    wait_until(lambda: cluster.killed)
    assert 'host new.example (127.0.0.1) is back' in caplog.text
    assert not watch.lost_nodes() and len(cluster.killed) == 1


def test_a_host_that_starts_ray_again_at_once_is_used_again(
  cluster, caplog, monkeypatch
):
  """Its new node is there before the old one has been silent for long enough."""
  caplog.set_level(logging.WARNING, 'launch')
  monkeypatch.setattr(host_watch, 'LIST_INTERVAL_S', 0.05)
  monkeypatch.setattr(host_watch, 'REPORT_SHARE', 1e-5)
  with watching(cluster, timeout=3600) as watch:
    place(cluster, watch, 'engine 1', 'engine 2', 'engine 3')
    cluster.cut_off('node1')
    wait_until(lambda: 'has not answered' in caplog.text)
    cluster.sockets['new'] = cluster.listen()
    cluster.ports['new'] = cluster.sockets['new'].getsockname()[1]
    wait_until(lambda: 'host new.example (127.0.0.1) is back' in caplog.text)
    assert 'host node1.example (127.0.0.1) is given up' in caplog.text
    assert cluster.killed == ['engine 2'] and watch.lost_nodes() == ['node1']
    assert watch.choose_node() == 'new'


def test_a_host_that_ray_has_given_up_is_not_used_when_it_answers(
  cluster, caplog, monkeypatch
):
  caplog.set_level(logging.WARNING, 'launch')
  monkeypatch.setattr(host_watch, 'LIST_INTERVAL_S', 60)
  with watching(cluster) as watch:
    place(cluster, watch, 'engine 1', 'engine 2')
    cluster.cut_off('node1')
    wait_until(lambda: cluster.killed)
    watch.forget(cluster.parts['engine 2'])
    place(cluster, watch, 'engine 2', 'RolloutWorker 1')
    cluster.gone.add('node1')
    cluster.reconnect('node1')
    wait_until(lambda: 'answers again' in caplog.text)
    assert '(127.0.0.1) answers again, but Ray has given it up' in caplog.text
    assert watch.choose_node() != 'node1' and cluster.killed == ['engine 2']
    monkeypatch.setattr(host_watch, 'LIST_INTERVAL_S', 0.05)
    cluster.sockets['new'] = cluster.listen()
    cluster.ports['new'] = cluster.sockets['new'].getsockname()[1]
    wait_until(lambda: 'host new.example (127.0.0.1) is back' in caplog.text)
    assert watch.choose_node() == 'new'


def test_nothing_is_started_where_the_disk_is_full(cluster, caplog):
  caplog.set_level(logging.WARNING, 'launch')
  with watching(cluster) as watch:
    place(cluster, watch, *'abc')
    cluster.parts['b'].free = 3
    wait_until(lambda: 'has room' not in caplog.text and 'is full' in caplog.text)
    assert "host node1.example (127.0.0.1): the disk with Ray's files" in caplog.text
    assert 'b may wait for room there' in caplog.text
    place(cluster, watch, *'defg')
    assert 'node1' not in {cluster.parts[name].node for name in 'defg'}
    cluster.parts['b'].free = 500
    wait_until(lambda: 'has room again' in caplog.text)
    assert watch.choose_node() == 'node1'


def test_a_run_starts_without_a_host_that_does_not_answer(cluster, caplog):
  cluster.cut_off('node1')
  watch = HostWatch(cluster, dict)
  assert watch.lost_nodes() == ['node1'] and watch.choose_node() != 'node1'
  assert 'node1.example (127.0.0.1) does not answer: the run starts' in caplog.text
  watch.close()


def test_the_head_cannot_be_given_up(cluster, caplog):
  caplog.set_level(logging.WARNING, 'launch')
  with watching(cluster):
    cluster.parts['engine 1'] = Actor('engine 1', 'node0')
    cluster.cut_off('node0')
    wait_until(lambda: "Ray's head is there" in caplog.text)
    assert supervision.RESUME_HINT in caplog.text and not cluster.killed


@pytest.mark.ray
@pytest.mark.xdist_group('ray')
def test_the_free_bytes_are_those_of_rays_own_disk(ray):
  @ray.remote(num_cpus=0)
  class Part:
    pass

  actor = Part.remote()
  folder, free, total = ray.get(actor.__ray_call__.remote(supervision.measure_disk))
  assert 'session_' in folder and 0 < free <= total
  ray.kill(actor)
