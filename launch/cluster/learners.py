"""The learner as Ray actors, one a host: one JAX program over the devices of all."""

import asyncio
import contextlib
import importlib
import logging
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxrl.config import Config
from jaxrl.dispatch import Dispatcher
from jaxrl.models.config import ModelConfig
from jaxrl.rollout import sync
from jaxrl.rollout.weights import whole
from jaxrl.rollout.weights.broadcast import BroadcastWeights
from jaxrl.rollout.weights.direct import Sending, Sent, Target, asker
from jaxrl.training import distributed
from jaxrl.training import policy as policies
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.training.learner import Learner
from jaxrl.types import Group, Params
from launch import learners, teachers, weights
from launch.algorithm import make_algorithm
from launch.cluster.remote_params import Connect, RemoteParams, together
from launch.learners import Metrics, Stage
from launch.weights import Plan

DEVICE = 'jaxrl.rollout.vllm.device'  # which needs torch and vLLM
GRACE = 60.0  # seconds for checkpoints at hand to be written when a run ends
log = logging.getLogger(__name__)
Lines = list[tuple[int, str]]  # level and text
Place = tuple[pathlib.Path, int]  # a checkpointer's folder, and how many it keeps


class _Lines(logging.Handler):
  """Keeps what this process has to say, for the run's own process to tell."""

  def __init__(self) -> None:
    super().__init__(logging.INFO)
    self._kept: Lines = []

  def emit(self, record: logging.LogRecord) -> None:
    self._kept.append((record.levelno, record.getMessage()))

  def take(self) -> Lines:
    found, self._kept = self._kept, []
    return found


class LearnerActor:
  """One process of the learner. All get the same calls, in the same order.

  config: the run's. folder: of the policy, which like the run's own every host sees.
  """

  def __init__(self, config: Config, folder: pathlib.Path):
    self._config, self._folder = config, folder
    self._dispatcher = Dispatcher('learner')
    self._learner: Learner | None = None
    self._checkpointer: tuple[Place, Checkpointer] | None = None
    self._weights: BroadcastWeights | None = None
    self._sender: Any = None
    self._held: dict[int, Params] = {}
    self._lines, ours = _Lines(), logging.getLogger('jaxrl')
    ours.addHandler(self._lines)
    ours.setLevel(logging.INFO)

  async def host(self) -> str:
    """The address of the machine that this is on, by which the others know it."""
    from ray.util import get_node_ip_address

    return get_node_ip_address()

  async def address(self, host: str) -> str:
    """Where the processes of the learner can meet, if they meet at this one."""
    return distributed.free_address(host)

  async def join(self, meeting: str, count: int, rank: int, address: str) -> str:
    """Meets the others, of which there are `count`; returns what devices there are."""
    self._rank, self._count = rank, count
    if count > 1:
      # Not on the device thread: it has to be done before JAX is used at all.
      await asyncio.to_thread(distributed.join, meeting, count, rank, address=address)
    config, algorithm = self._config, make_algorithm(self._config)
    policy = policies.load(
      str(self._folder),
      value_head=algorithm.value_loss is not None,
      **learners.model_options(config),
    )
    staff, mesh = teachers.load(config, algorithm, policy), learners.mesh_of(config)
    self._learners = learners.LocalLearners(
      config, policy, algorithm, mesh, self._dispatcher, staff
    )
    return self._learners.describe()

  async def make(self, stage: Stage, follow: bool) -> None:
    await self._settle()
    self._learner = await self._learners.make(stage, follow=follow)

  @property
  def _newest(self) -> Learner:
    assert self._learner is not None
    return self._learner

  async def warmup(self) -> tuple[Metrics, Lines]:
    return await self._newest.warmup(), self._lines.take()

  async def update(self, groups: Sequence[Group]) -> tuple[Metrics, Any, Lines]:
    """Metrics, advantages, whole, but on the first process alone, and log lines."""
    metrics = await self._newest.update(groups)
    advantages = self._newest.advantages
    if advantages is not None:
      advantages = await self._dispatcher.run(distributed.to_host, advantages)
    if self._rank:
      advantages = None
    return metrics, advantages, self._lines.take()

  async def rest(self) -> None:
    await self._newest.rest()

  async def wake(self) -> None:
    await self._newest.wake()

  async def save(self, place: Place, data: Mapping[str, Any], wait: bool) -> None:
    checkpointer = await self._checkpoints(place)
    await self._newest.save(checkpointer, data, wait=wait)

  async def restore(self, place: Place) -> tuple[int, dict[str, Any]]:
    data = await self._newest.restore(await self._checkpoints(place))
    return self._newest.step, data

  async def _checkpoints(self, place: Place) -> Checkpointer:
    if self._checkpointer is None or self._checkpointer[0] != place:
      await self._settle()
      made = await self._dispatcher.run(Checkpointer, place[0], keep=place[1])
      self._checkpointer = place, made
    return self._checkpointer[1]

  async def _settle(self) -> None:
    """Waits for checkpoints that are being written."""
    if self._checkpointer is not None:
      (_, checkpointer), self._checkpointer = self._checkpointer, None
      await self._dispatcher.run(checkpointer.close)

  async def hold(self, ticket: int, wanted: Collection[int] = ()) -> None:
    """Copies the parameters, to be published later.

    wanted: tickets of older copies that are still to be published; others are let go.
    """
    self._held = {n: held for n, held in self._held.items() if n in wanted}
    params = await self._newest.weights()
    self._held[ticket] = await sync.copy(self._dispatcher.run, params)

  async def publish(
    self, version: int, connect: Connect, plan: Plan, ticket: int
  ) -> tuple[str, Metrics]:
    """Publishes this process's part of the parameters; its digest, and what it took.

    ticket: of those held, 0 for the newest. It and older ones are let go of.
    """
    last = ticket or max(self._held, default=0)
    if self._weights is None:
      self._weights = weights.publisher(
        plan, connect(), self._dispatcher, part=self._rank, parts=self._count
      )
    params = self._held[ticket] if ticket else await self._newest.weights()
    await self._weights.publish(version, params)
    self._held = {n: held for n, held in self._held.items() if n > last}
    return self._weights.digest, self._weights.metrics()

  async def push(
    self,
    version: int | None,
    targets: Sequence[Target],
    backend: str,
    sending: Sending,
    ticket: int,
  ) -> Sent | None:
    """Sends parameters to engines; what was sent, on the first process alone.

    version: None for the newest, whatever step that is of. ticket: as for `publish`.
    """
    if version is None:
      version, ticket = self._newest.step, 0
    params = self._held[ticket] if ticket else await self._newest.weights()
    if self._rank == 0 and self._sender is None:
      device = await asyncio.to_thread(importlib.import_module, DEVICE)  # seconds
      ask = asker(asyncio.get_running_loop())
      own = self._shape, ask, self._meeting_place, sending
      self._sender = device.Sender(backend, *own)
    sent = await self._dispatcher.run(self._push, version, params, targets, sending)
    self._held = {n: held for n, held in self._held.items() if n > ticket}
    return sent

  def _push(
    self, version: int, params: Params, targets: Sequence[Target], sending: Sending
  ) -> Sent | None:
    if self._sender is not None:
      return self._sender.send(version, params, targets)
    for _ in whole.tensors(self._shape, params, sending.dtype):
      pass  # what is gathered for the first process, all of them gather
    return None

  @property
  def _shape(self) -> ModelConfig:
    return self._learners.shape

  def _meeting_place(self) -> tuple[str, int]:
    """Where others may connect to this process, and nothing listens yet."""
    from ray.util import get_node_ip_address

    host, port = distributed.free_address(get_node_ip_address()).rsplit(':', 1)
    return host.strip('[]'), int(port)

  async def export(self, folder: pathlib.Path) -> None:
    await self._learners.export(folder)

  async def close(self) -> None:
    await self._settle()
    if self._sender is not None:
      await self._dispatcher.run(self._sender.close)
    if self._weights is not None:
      await self._weights.close()


class RemoteLearner:
  """A `Learner` whose processes are elsewhere. put: stores groups for all to read."""

  def __init__(self, actors: Sequence[Any], put: Callable[[Any], Any]):
    self._actors, self._put, self._turn = actors, put, asyncio.Lock()
    self.step, self.advantages = 0, None
    self.params = RemoteParams(actors, self._turn)

  async def warmup(self) -> Metrics:
    metrics, lines = (await together(self._actors, 'warmup'))[0]
    _tell(lines)
    return metrics

  async def weights(self) -> RemoteParams:
    """Where they are: adapters are merged there, when the parameters are sent."""
    return self.params

  async def update(self, groups: Sequence[Group]) -> Metrics:
    shared = await asyncio.to_thread(self._put, list(groups))
    async with self._turn:
      found = (await together(self._actors, 'update', shared))[0]
    metrics, self.advantages, lines = found
    _tell(lines)
    self.step += 1
    return metrics

  async def save(
    self, checkpointer: Checkpointer, data: Mapping[str, Any], *, wait: bool = False
  ) -> None:
    async with self._turn:
      await together(self._actors, 'save', _place(checkpointer), data, wait)

  async def rest(self) -> None:
    await together(self._actors, 'rest')

  async def wake(self) -> None:
    await together(self._actors, 'wake')

  async def restore(self, checkpointer: Checkpointer) -> dict[str, Any]:
    found = await together(self._actors, 'restore', _place(checkpointer))
    self.step, data = found[0]
    return data


def _tell(lines: Lines) -> None:
  for level, line in lines:
    log.log(level, '%s', line)


def _place(checkpointer: Checkpointer) -> Place:
  return checkpointer.directory, checkpointer.keep


class RemoteLearners:
  """The processes of a run's learners. actors: `LearnerActor`s that have joined.

  devices: what they said of their devices.
  """

  def __init__(self, actors: Sequence[Any], devices: str, put: Callable[[Any], Any]):
    self._actors, self._devices, self._put = actors, devices, put

  def describe(self) -> str:
    count = len(self._actors)
    return f'{self._devices}, in {count} process{"es" if count > 1 else ""}'

  async def make(self, stage: Stage, *, follow: bool = False) -> RemoteLearner:
    await together(self._actors, 'make', stage, follow)
    return RemoteLearner(self._actors, self._put)

  async def export(self, folder: pathlib.Path) -> None:
    await together(self._actors, 'export', folder.absolute())

  async def close(self) -> None:
    """Lets them finish the checkpoints at hand, if they live."""
    with contextlib.suppress(Exception):
      await asyncio.wait_for(together(self._actors, 'close'), GRACE)


async def meet(actors: Sequence[Any]) -> str:
  """Joins fresh `LearnerActor`s into one learner; returns what devices it has."""
  hosts = await together(actors, 'host')
  meeting = await actors[0].address(hosts[0])
  calls = (
    actor.join(meeting, len(actors), rank, hosts[rank])
    for rank, actor in enumerate(actors)
  )
  return (await asyncio.gather(*calls))[0]
