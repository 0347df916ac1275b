"""The host watch says which host of a cluster does not answer, and gives it up.

Calls to an actor on a host that is cut off wait until Ray declares the host dead, which
takes a minute or more, and those that are on their way can wait until the link returns.
The watch connects to each host every second. What runs on one that does not answer is
ended, so that every such call fails, and is replaced as if its process had died.
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxrl.rollout.engine.actor_proxy import ActorHandle
from launch.runtime import supervision

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 5.0  # enough for two packets that are lost
REPORT_SHARE = 1 / 3  # of the timeout, after which a silent host is reported
LIST_INTERVAL_S = 5.0  # between two looks for hosts that have joined or ended
DISK_TIMEOUT_S = 3.0  # for an actor to say how full its disk is
MIN_FREE_SHARE = 0.02  # of a disk, below which it counts as full
HEAD_RESOURCE = 'node:__internal_head__'


@dataclasses.dataclass
class _Host:
  """What is known of a host.

  Attributes:
    node_id: Ray's id, which a host that starts Ray again does not keep.
    name: What the user knows it by.
    address: Its address.
    port: Where its raylet listens.
    is_head: Whether Ray's head is there.
    last_answer: When it last answered, by the monotonic clock.
    is_reported: Whether the user knows that it does not answer.
    is_lost: Whether it has been given up.
    is_full: Whether its disk is full.
  """

  node_id: str
  name: str
  address: str
  port: int
  is_head: bool
  last_answer: float = dataclasses.field(default_factory=time.monotonic)
  is_reported: bool = False
  is_lost: bool = False
  is_full: bool = False

  def __str__(self) -> str:
    return f'host {self.name} ({self.address})'


def _list_hosts(ray: Any) -> dict[str, _Host]:
  """Returns the hosts that Ray takes for alive, by node id, in order of address."""
  nodes = sorted(ray.nodes(), key=lambda node: node['NodeManagerAddress'])
  return {
    node['NodeID']: _Host(
      node['NodeID'],
      node['NodeManagerHostname'],
      node['NodeManagerAddress'],
      node['NodeManagerPort'],
      HEAD_RESOURCE in node['Resources'],
    )
    for node in nodes
    if node['Alive']
  }


async def _answers(host: _Host) -> bool:
  """Returns whether the host's raylet accepts a connection."""
  try:
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
      _, writer = await asyncio.open_connection(host.address, host.port)
  except OSError:  # a timeout is one
    return False
  writer.close()
  return True


async def _find_answering(hosts: Collection[_Host]) -> list[_Host]:
  answers = await asyncio.gather(*map(_answers, hosts))
  return [host for host, answer in zip(hosts, answers, strict=True) if answer]


class HostWatch:
  """Watches the hosts of a cluster from a thread, and says where parts are to run.

  Args:
    ray: The module, connected to the cluster.
    parts: Returns (name, actor) of the parts of the run that are alive.
    timeout: Seconds without an answer after which a host is given up.
    interval: Seconds between two connections to a host.
  """

  def __init__(
    self,
    ray: Any,
    parts: Callable[[], Mapping[str, ActorHandle]],
    *,
    timeout: float = 30.0,
    interval: float = 1.0,
  ):
    self._ray = ray
    self._parts = parts
    self._timeout_s = timeout
    self._interval_s = interval
    self._own_node = ray.get_runtime_context().get_node_id()
    self._hosts = _list_hosts(ray)
    self._listed_at = time.monotonic()
    self._lost_addresses: set[str] = set()  # of hosts that may come back
    self._placed: dict[str, str] = {}  # node ids by actor ids, of parts that can move
    self._ended: set[str] = set()  # ids of actors that were ended here
    self._asked: dict[str, tuple[Any, list[str]]] = {}  # how full a node's disk is
    self._lock = threading.Lock()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name='host-watch', daemon=True)
    answering = asyncio.run(_find_answering(self._hosts.values()))
    for host in self._hosts.values():
      if host not in answering:
        host.is_reported = host.is_lost = True
        self._lost_addresses.add(host.address)
        log.warning('%s does not answer: the run starts without it', host)

  def start(self) -> None:
    """Starts to watch."""
    self._thread.start()

  def close(self) -> None:
    """Ends the watch."""
    self._stop.set()
    if self._thread.is_alive() and self._thread is not threading.current_thread():
      self._thread.join(timeout=2 * CONNECT_TIMEOUT_S)

  # ---- where parts run

  def lost_nodes(self) -> list[str]:
    """Returns the ids of the nodes that have been given up."""
    return [host.node_id for host in self._hosts.values() if host.is_lost]

  def choose_node(self) -> str | None:
    """Returns the id of the node with the fewest parts; None to leave it to Ray."""
    with self._lock:
      usable = self._usable()
      counts = Counter(self._placed.values())
      if not usable:
        return None
      return min(usable, key=lambda host: counts[host.node_id]).node_id

  def place(self, actor: ActorHandle, node_id: str) -> None:
    """Remembers where a part that can be moved was started."""
    with self._lock:
      self._placed[_actor_id(actor)] = node_id

  def forget(self, actor: ActorHandle) -> None:
    """Forgets a part that is dead."""
    with self._lock:
      self._placed.pop(_actor_id(actor), None)

  def has_ended(self, actor: ActorHandle) -> bool:
    """Returns whether the watch has ended a part, or its host is lost."""
    with self._lock:
      node_id = self._placed.get(_actor_id(actor))
    host = self._hosts.get(node_id or '')
    is_gone = node_id is not None and (host is None or host.is_reported)
    return is_gone or _actor_id(actor) in self._ended

  def _usable(self) -> list[_Host]:
    """Returns the hosts where something can be started, those in doubt last."""
    hosts = [h for h in self._hosts.values() if not h.is_lost and not h.is_reported]
    return [host for host in hosts if not host.is_full] or hosts

  # ---- the thread

  def _run(self) -> None:
    disks_at = time.monotonic()
    while not self._stop.wait(self._interval_s):
      try:
        self._check_links()
        # Ray's own calls would block here while its head does not answer.
        if any(host.is_head and host.is_reported for host in self._hosts.values()):
          continue
        if time.monotonic() - self._listed_at > LIST_INTERVAL_S:
          self._list()
        if time.monotonic() - disks_at > LIST_INTERVAL_S:
          self._check_disks()
          disks_at = time.monotonic()
      except Exception as error:
        if not self._stop.is_set() and self._ray.is_initialized():
          log.debug('the hosts could not be checked: %s', error)

  def _check_links(self) -> None:
    """Connects to each host, and acts on those that do not answer."""
    hosts = list(self._hosts.values())
    answering = asyncio.run(_find_answering(hosts))
    now = time.monotonic()
    for host in answering:
      host.last_answer = now
      if host.is_reported:
        self._welcome(host)
    silent = [host for host in hosts if host not in answering]
    for host in silent:
      seconds = now - host.last_answer
      if not host.is_reported and seconds > self._timeout_s * REPORT_SHARE:
        host.is_reported = True
        self._report(host, seconds, alone=len(silent) == len(hosts) - 1 > 1)
      if not host.is_lost and seconds > self._timeout_s:
        host.is_lost = True
        self._lost_addresses.add(host.address)
        self._give_up(host)

  def _report(self, host: _Host, seconds: float, *, alone: bool) -> None:
    rest = self._timeout_s - seconds
    if host.is_head:
      what = "Ray's head is there, without which the run cannot go on; "
      what += supervision.RESUME_HINT
    else:
      names = self._parts_on(host.node_id)
      waiting = f'{_join(list(names))} there' if names else 'nothing of the run there'
      what = f'the run waits for {waiting}; given up in {max(rest, 0):.0f} s'
    if alone:
      what += '. No other host answers: this one may be cut off'
    log.warning('%s has not answered for %.0f s: %s', host, seconds, what)

  def _give_up(self, host: _Host) -> None:
    """Ends what runs on a host, so that whoever waits for it is told."""
    if host.is_head:
      return  # nothing can be ended without it
    names = self._parts_on(host.node_id)
    log.warning(
      '%s is given up after %.0f s without an answer%s',
      host,
      time.monotonic() - host.last_answer,
      f': {_join(list(names))} will be started elsewhere' if names else '',
    )
    self._end(names.values())

  def _welcome(self, host: _Host) -> None:
    nodes = self._alive_nodes() if host.is_lost else {}
    if nodes and host.node_id not in nodes:
      del self._hosts[host.node_id]  # it comes back as another node
      raylets = {(node.address, node.port) for node in nodes.values()}
      if (host.address, host.port) not in raylets:
        log.warning('%s answers again, but Ray has given it up: start Ray there', host)
      return
    was_lost, host.is_reported, host.is_lost = host.is_lost, False, False
    log.warning('%s answers again', host)
    if was_lost:
      self._lost_addresses.discard(host.address)
      self._use_again(host)

  def _alive_nodes(self) -> dict[str, _Host]:
    """Returns the nodes that Ray takes for alive; none if it cannot be asked.

    A raylet accepts connections for a while before it learns that Ray has given its
    host up in the meantime; nothing can be started there any more.
    """
    if any(host.is_head and host.is_reported for host in self._hosts.values()):
      return {}
    return _list_hosts(self._ray)

  def _list(self) -> None:
    """Looks for hosts that have joined, and for those that Ray has given up."""
    listed = _list_hosts(self._ray)
    self._listed_at = time.monotonic()
    for node_id, host in list(self._hosts.items()):
      if node_id not in listed:
        del self._hosts[node_id]
        self._lost_addresses.add(host.address)
        if not host.is_lost:
          log.warning('%s has left the cluster', host)
    for node_id, host in listed.items():
      if node_id in self._hosts:
        continue
      # Ray may have been started again before its silence was long enough.
      olds = [h for h in self._hosts.values() if h.address == host.address]
      replaced = [old for old in olds if old.is_reported]
      for old in replaced:
        if not old.is_lost:
          old.is_lost = True
          self._give_up(old)
      self._hosts[node_id] = host
      if replaced or host.address in self._lost_addresses:
        self._lost_addresses.discard(host.address)
        log.warning('%s is back', host)
        self._use_again(host)

  def _use_again(self, host: _Host) -> None:
    """Moves a part to a host that is back, if another one has two more than it."""
    with self._lock:
      counts = Counter(self._placed.values())
      usable = [other.node_id for other in self._usable()]
      if host.node_id not in usable:
        return
      fullest = max(usable, key=lambda node_id: counts[node_id])
      if counts[fullest] - counts[host.node_id] < 2:
        return
      here = {key for key, node_id in self._placed.items() if node_id == fullest}
    movable = {n: a for n, a in self._parts().items() if _actor_id(a) in here}
    # An engine's requests go on where they were; a worker plays its episodes again.
    for name in sorted(movable, key=lambda name: not name.startswith('engine')):
      log.warning('%s moves to %s', name, host)
      self._end([movable[name]])
      return

  def _parts_by_node(self) -> dict[str, dict[str, ActorHandle]]:
    """Returns the run's parts on each node, by name."""
    from ray._private import state

    table, nodes = state.actors(), defaultdict(dict)
    for name, actor in self._parts().items():
      known = table.get(_actor_id(actor))
      if known is not None and known['State'] != 'DEAD':
        node_id = known['Address']['NodeID']
        if known['State'] != 'ALIVE':  # it has not started yet where it was sent
          node_id = self._placed.get(_actor_id(actor), node_id)
        nodes[node_id][name] = actor
    return nodes

  def _parts_on(self, node_id: str) -> dict[str, ActorHandle]:
    return self._parts_by_node().get(node_id, {})

  def _end(self, actors: Collection[ActorHandle]) -> None:
    for actor in actors:
      self._ended.add(_actor_id(actor))
      with contextlib.suppress(ValueError):  # it has ended meanwhile
        self._ray.kill(actor)

  def _check_disks(self) -> None:
    """Asks one part on each host how full the disk with Ray's files is."""
    for node_id, parts in self._parts_by_node().items():
      host = self._hosts.get(node_id)
      if host and not host.is_reported and node_id not in self._asked:
        actor = list(parts.values())[-1]
        answer = actor.__ray_call__.remote(supervision.measure_disk)
        self._asked[node_id] = answer, list(parts)
    if not self._asked:
      return
    waiting = [answer for answer, _ in self._asked.values()]
    answers, _ = self._ray.wait(
      waiting, num_returns=len(waiting), timeout=DISK_TIMEOUT_S
    )
    for node_id, (answer, names) in list(self._asked.items()):
      if answer in answers:
        del self._asked[node_id]
        with contextlib.suppress(Exception):  # of an actor that has ended
          self._judge_disk(self._hosts[node_id], names, *self._ray.get(answer))

  def _judge_disk(
    self, host: _Host, names: Sequence[str], folder: str, free: int, total: int
  ) -> None:
    was_full, host.is_full = host.is_full, free < MIN_FREE_SHARE * total
    if host.is_full and not was_full:
      log.warning(
        "%s: the disk with Ray's files (%s) is full, %.1f of %.0f MB are free; %s may "
        'wait for room there, and nothing more is started there before',
        host,
        folder,
        free / 1e6,
        total / 1e6,
        _join(names),
      )
    elif was_full and not host.is_full:
      log.warning("%s: the disk with Ray's files has room again", host)


def _actor_id(actor: Any) -> str:
  return actor._actor_id.hex()


def _join(names: Sequence[str]) -> str:
  *others, last = names
  return f'{", ".join(others)} and {last}' if others else last
