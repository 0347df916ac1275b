"""The object store transport keeps weights in Ray's object store, on all machines.

Blobs are arrays of bytes, written once; readers on a node map the one copy that is
there. A directory, which is an actor, knows them by name. Blobs spread as in a
broadcast tree: at most FAN_OUT nodes at a time fetch from each node that has a blob,
and the others wait until more nodes have it. Readers begin at different blobs, which
keeps all nodes busy.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from jaxrl.rollout.weights.transport import Buffer, WeightsError

MAX_INLINE_BYTES = 65_536  # the directory itself keeps what is not larger
FAN_OUT = 2  # nodes that may fetch from one at a time
FETCH_TIMEOUT_S = 10.0  # after which a node that fetches a blob is not waited for
GET_TIMEOUT_S = 60.0  # after which a blob counts as lost

Entry = bytes | list[Any]  # the bytes, or the one reference to them


class ObjectDirectory:
  """An actor that knows what each name stands for, and which nodes have it."""

  def __init__(self) -> None:
    self._entries: dict[str, Entry] = {}
    self._nodes: dict[str, set[str]] = {}
    self._fetching: dict[str, dict[str, float]] = {}  # since when, by name and node
    self._changed = asyncio.Event()

  async def put(self, name: str, entry: Entry, node: str) -> None:
    """Sets what a name stands for; `node` has it."""
    self._entries[name] = entry
    self._nodes[name], self._fetching[name] = {node}, {}
    self._wake()

  async def get(self, name: str, node: str) -> Entry | None:
    """Returns what a node is to fetch, as soon as it may; None without such a name."""
    while name in self._entries and isinstance(self._entries[name], list):
      nodes, fetching = self._nodes[name], self._fetching[name]
      now = time.monotonic()
      busy = [n for n, since in fetching.items() if now - since < FETCH_TIMEOUT_S]
      if node in nodes or node in fetching:  # for another reader there, perhaps
        break
      if len(busy) < FAN_OUT * len(nodes):
        fetching[node] = now
        break
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FETCH_TIMEOUT_S):
          await self._changed.wait()
    return self._entries.get(name)

  async def fetched(self, name: str, node: str) -> None:
    """Says that a node has it, so that others may fetch it from there."""
    if name in self._entries:
      self._nodes[name].add(node)
      self._fetching[name].pop(node, None)
      self._wake()

  async def delete(self, name: str) -> None:
    """Deletes a name, if it exists."""
    for table in (self._entries, self._nodes, self._fetching):
      table.pop(name, None)
    self._wake()

  def _wake(self) -> None:
    self._changed.set()
    self._changed = asyncio.Event()

  async def names(self, prefix: str) -> list[str]:
    """Returns the names that begin with `prefix`."""
    return [name for name in self._entries if name.startswith(prefix)]


class ObjectStoreTransport:
  """A `Transport` that may be sent to any process of the cluster.

  Ray frees objects with the process that wrote them: what a process has published is
  gone with it.

  Args:
    directory: A handle of an `ObjectDirectory`, whose methods return references.
  """

  mapped = False  # readers would fill the store of their node

  def __init__(self, directory: Any):
    self._directory = directory

  def put(self, name: str, *data: Buffer) -> None:
    """Stores a copy of `data`, joined. Raises WeightsError if the store is full."""
    import ray
    from ray import exceptions

    joined = b''.join(data)
    entry: Entry = joined
    if len(joined) > MAX_INLINE_BYTES:
      try:
        entry = [ray.put(np.frombuffer(joined, np.uint8))]
      except exceptions.ObjectStoreFullError as error:
        raise WeightsError(
          f"{len(joined):,} bytes of weights do not fit into Ray's object store. Start "
          'Ray with a larger object_store_memory, or take checkpoint(folder=…)'
        ) from error
    with _report_directory_death():
      ray.get(self._directory.put(name, entry, _node_id()))

  def get(self, name: str) -> memoryview:
    """Returns the bytes. Raises KeyError if there is no such name, or they are lost."""
    import ray
    from ray import exceptions

    with _report_directory_death():
      entry = ray.get(self._directory.get(name, _node_id()))
    if entry is None:
      raise KeyError(name)
    if isinstance(entry, bytes):
      return memoryview(entry)
    try:
      array = cast(np.ndarray, ray.get(entry[0], timeout=GET_TIMEOUT_S))
    except (exceptions.ObjectLostError, exceptions.GetTimeoutError) as error:
      raise KeyError(name) from error
    self._directory.fetched(name, _node_id())
    return array.data

  def delete(self, name: str) -> None:
    """Deletes a name, if it exists."""
    self._directory.delete(name)

  def names(self, prefix: str) -> list[str]:
    """Returns the names that begin with `prefix`."""
    import ray

    with _report_directory_death():
      return ray.get(self._directory.names(prefix))

  def close(self) -> None:
    """Does nothing: the actor ends with the run."""


def _node_id() -> str:
  import ray

  return ray.get_runtime_context().get_node_id()


@contextlib.contextmanager
def _report_directory_death() -> Iterator[None]:
  from ray.exceptions import RayActorError

  try:
    yield
  except RayActorError as error:
    raise WeightsError(
      'the Ray actor that tracks the published weights has died'
    ) from error
