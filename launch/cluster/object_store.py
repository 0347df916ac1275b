"""Weights in Ray's object store: written once, read by every node's engines.

Blobs are arrays of bytes in the stores of the nodes; readers on a node map the one copy
that is there. A directory, which is an actor, knows them by name. It lets no more nodes
fetch a blob at once than there are nodes that have it, times FAN_OUT, so that who comes
later fetches from whoever has it by then: a tree, of which the learner's node is not
every branch. Receivers begin at different blobs, which keeps all of them busy.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from jaxrl.rollout.weights.errors import WeightsError
from jaxrl.rollout.weights.transport import Buffer

SMALL = 65_536  # bytes up to which the directory itself keeps what it is given
FAN_OUT = 2  # nodes that may fetch from one at a time
ABANDONED = 10.0  # seconds after which whoever fetches a blob is not waited for
UNREACHABLE = 60.0  # seconds after which a blob counts as lost

Entry = bytes | list[Any]  # the bytes, or the one reference to them


class Directory:
  """What each name stands for, and which nodes have it. An actor's class."""

  def __init__(self) -> None:
    self._entries: dict[str, Entry] = {}
    self._nodes: dict[str, set[str]] = {}
    self._fetching: dict[str, dict[str, float]] = {}  # since when, by name and node
    self._news = asyncio.Event()

  async def put(self, name: str, entry: Entry, node: str) -> None:
    self._entries[name] = entry
    self._nodes[name], self._fetching[name] = {node}, {}
    self._wake()

  async def get(self, name: str, node: str) -> Entry | None:
    """What a node is to fetch, as soon as it may; None when nothing bears the name."""
    while name in self._entries and isinstance(self._entries[name], list):
      nodes, fetching = self._nodes[name], self._fetching[name]
      now = time.monotonic()
      busy = [n for n, since in fetching.items() if now - since < ABANDONED]
      if node in nodes or node in fetching:  # for another reader there, perhaps
        break
      if len(busy) < FAN_OUT * len(nodes):
        fetching[node] = now
        break
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(self._news.wait(), ABANDONED)
    return self._entries.get(name)

  async def fetched(self, name: str, node: str) -> None:
    """The node has it, and others may fetch from there."""
    if name in self._entries:
      self._nodes[name].add(node)
      self._fetching[name].pop(node, None)
      self._wake()

  async def delete(self, name: str) -> None:
    for table in (self._entries, self._nodes, self._fetching):
      table.pop(name, None)
    self._wake()

  def _wake(self) -> None:
    self._news.set()
    self._news = asyncio.Event()

  async def names(self, prefix: str) -> list[str]:
    return [name for name in self._entries if name.startswith(prefix)]


class ObjectStore:
  """A `Transport` that may be sent to any process of the cluster.

  directory: a handle whose methods return references. Objects are their writers': with
  a writer's process, what it has published is gone.
  """

  mapped = False  # what is held would fill the store of a node

  def __init__(self, directory: Any):
    self._directory = directory

  def put(self, name: str, *data: Buffer) -> None:
    """Raises WeightsError when the store is full."""
    import ray
    from ray import exceptions

    joined = b''.join(data)
    entry: Entry = joined
    if len(joined) > SMALL:
      try:
        entry = [ray.put(np.frombuffer(joined, np.uint8))]
      except exceptions.ObjectStoreFullError as error:
        raise WeightsError(
          f"{len(joined):,} bytes of weights do not fit into Ray's object store. Start "
          'Ray with a larger object_store_memory, or take checkpoint(folder=…)'
        ) from error
    with _directory_lives():
      ray.get(self._directory.put(name, entry, _node()))

  def get(self, name: str) -> memoryview:
    import ray
    from ray import exceptions

    with _directory_lives():
      entry = ray.get(self._directory.get(name, _node()))
    if entry is None:
      raise KeyError(name)
    if isinstance(entry, bytes):
      return memoryview(entry)
    try:
      found = cast(np.ndarray, ray.get(entry[0], timeout=UNREACHABLE))
    except (exceptions.ObjectLostError, exceptions.GetTimeoutError) as error:
      raise KeyError(name) from error
    self._directory.fetched(name, _node())
    return found.data

  def delete(self, name: str) -> None:
    self._directory.delete(name)

  def names(self, prefix: str) -> list[str]:
    import ray

    with _directory_lives():
      return ray.get(self._directory.names(prefix))

  def close(self) -> None:
    pass


def _node() -> str:
  import ray

  return ray.get_runtime_context().get_node_id()


@contextlib.contextmanager
def _directory_lives() -> Iterator[None]:
  from ray.exceptions import RayActorError

  try:
    yield
  except RayActorError as error:
    raise WeightsError('the actor that knows where weights lie has died') from error
