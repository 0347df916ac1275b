"""Weights from JAX's GPUs straight into vLLM's: CUDA IPC on shared GPUs, NCCL between.

For a learner whose environment has vLLM with CUDA too. Run on CPU with stand-ins for
CUDA's and NCCL's own calls; neither has been run on a GPU, for want of one.
"""

# pyright: reportMissingImports=false

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from jaxrl.models import names
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.vllm import gpu_memory
from jaxrl.rollout.vllm.received import IpcUpdate
from jaxrl.rollout.vllm.sums import Sums
from jaxrl.rollout.weights import whole
from jaxrl.rollout.weights.direct import Ask, Sending, Sent, Target
from jaxrl.types import Params

log = logging.getLogger(__name__)
BACKENDS = ('ipc', 'nccl')


class JaxSource(WeightSource):
  """A learner's parameters under their Hugging Face names, as torch tensors.

  dtype: floating-point arrays are cast to it; None keeps each one's own. `params` is
  replaced before each round, of whose tensors `sums` then knows the digest.
  """

  def __init__(self, shape: ModelConfig, params: Params, dtype: str | None = None):
    self._shape, self._dtype = shape, dtype
    self.params, self.sums = params, Sums()

  def metadata(self) -> list[ParamMeta]:
    found = []
    for tensor in names.tensors(self._shape):
      leaf = self.params
      for key in tensor.path:
        leaf = leaf[key]
      dtype: torch.dtype = getattr(torch, whole.cast(leaf, self._dtype))  # pyright: ignore
      found.append(ParamMeta(tensor.name, dtype, tensor.shape))
    return found

  def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor, (view,) in self.views((0,)):
      yield tensor.name, _owned(view)

  def views(
    self, places: Sequence[int]
  ) -> Iterator[tuple[names.Tensor, tuple[torch.Tensor, ...]]]:
    """Each tensor on several of JAX's devices, in JAX's own memory.

    places: which devices of this process's. A layer's tensors come one after another.
    """
    self.sums = Sums()
    devices = jax.local_devices()
    for tensor, array in whole.tensors(self._shape, self.params, self._dtype):
      there = {shard.device: shard.data for shard in array.addressable_shards}
      jax.block_until_ready(array)
      found = tuple(torch.from_dlpack(there[devices[place]]) for place in places)
      self.sums.add(tensor.name, found[0])
      yield tensor, found


def _owned(view: torch.Tensor) -> torch.Tensor:
  """A copy in torch's own memory: JAX may use its array's again as soon as it goes,
  when work that torch has only queued may not have read it yet.
  """
  copy = view.clone()
  if copy.is_cuda:
    torch.cuda.synchronize(copy.device)
  return copy


class Client:
  """The engines as vLLM's trainer side calls them, in threads of its own."""

  def __init__(self, ask: Ask, targets: Sequence[Target], source: JaxSource):
    self._ask, self._targets, self._source = ask, targets, source
    self.version, self.held = 0, []

  def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
    infos, offset = [], init_info.get('rank_offset')
    for target in self._targets:
      infos.append(dict(init_info))
      if offset is not None:  # ranks are counted through all engines' workers
        infos[-1]['rank_offset'] = offset
        offset += target.gpus
    self._call('init_transfer', [(info,) for info in infos])

  def start_weight_update(self) -> None:
    self._call('begin_update')

  def update_weights(self, update_info: Any) -> None:
    self._call('update', [(update_info,) for _ in self._targets])

  def finish_weight_update(self, weight_version: str | None = None) -> None:
    asked = self.version, self._source.sums.digest()
    self.held = self._call('end_update', [asked for _ in self._targets])

  def _call(self, name: str, arguments: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
    engines = [target.engine for target in self._targets]
    return self._ask(engines, name, arguments or [() for _ in engines])


class Lender:
  """Lends tensors by CUDA IPC to engines that have the same GPUs as this process.

  vLLM's own sender fills a buffer, from which its engines copy before they load. Here
  they load from where JAX put the tensors, on each of the GPUs, a layer or more at a
  time, `room` bytes or somewhat above: what they load of a layer they need no longer.
  """

  def __init__(
    self, client: Client, source: JaxSource, places: Sequence[int], room: int
  ):
    self._client, self._source, self._places = client, source, places
    self._room = room
    self._gpus = [str(torch.cuda.get_device_properties(place).uuid) for place in places]
    client.init_weight_transfer_engine({})

  def send_weights(self) -> None:
    self._client.start_weight_update()
    told, lent, size = _nothing(), [], 0
    source = self._source.views(self._places)
    for _, layer in itertools.groupby(source, key=lambda found: found[0].index[:1]):
      for tensor, views in layer:
        pairs = [_lent(view) for view in views]
        loans = dict(zip(self._gpus, (list(loan) for loan, _ in pairs), strict=True))
        dtype = str(views[0].dtype).removeprefix('torch.')
        row = tensor.name, dtype, list(tensor.shape), loans
        for values, value in zip(told.values(), row, strict=True):
          values.append(value)
        lent += [held for _, held in pairs]
        size += views[0].nbytes
      if size >= self._room:
        self._client.update_weights(told)
        told, lent, size = _nothing(), [], 0
    if lent:
      self._client.update_weights(told)
    self._client.finish_weight_update()

  def shutdown(self) -> None:
    pass


def _nothing() -> dict[str, list[Any]]:
  """What `received.IpcUpdate` tells, of no tensor yet."""
  return {field.name: [] for field in dataclasses.fields(IpcUpdate)}


def _lent(view: torch.Tensor) -> tuple[gpu_memory.Loan, torch.Tensor]:
  """The loan of a tensor, and what must be held while it lasts: the tensor itself, or
  a copy in torch's memory where that of JAX's allocator cannot be lent.
  """
  try:
    return gpu_memory.lend(view), view
  except gpu_memory.GpuMemoryError as error:
    _say_once(str(error))
  copy = _owned(view)
  return gpu_memory.lend(copy), copy


@functools.cache
def _say_once(reason: str) -> None:
  log.warning(
    "JAX's memory cannot be lent to engines, so weights are copied once more on their "
    'way: %s. What XLA_PYTHON_CLIENT_ALLOCATOR=default or platform gives can be lent',
    reason,
  )


class Sender:
  """The learner's end. backend: 'ipc' or 'nccl', with which the engines were made.

  ask: reaches them. address: makes 'host', 'port' of this process where those who talk
  NCCL meet, when they first do and whenever it is not the same engines any more. IPC
  is within this machine. packed: by NCCL, many tensors at once.
  """

  def __init__(
    self,
    backend: str,
    shape: ModelConfig,
    ask: Ask,
    address: Callable[[], tuple[str, int]],
    sending: Sending,
    *,
    packed: bool = True,
  ):
    if backend not in BACKENDS:
      raise ValueError(f'weights backend {backend!r} is not one of {BACKENDS}')
    self._backend, self._shape, self._sending = backend, shape, sending
    self._ask, self._address, self._packed = ask, address, packed
    self._members: list[str] = []
    self._client: Client | None = None
    self._engine: Any = None

  def send(self, version: int, params: Params, targets: Sequence[Target]) -> Sent:
    """Has the engines serve `params` as `version`; they may be donated afterwards.

    An engine that was handed other tensors, as its digest tells, does not serve.
    """
    members = [target.engine.key() for target in targets]
    if self._client is None or members != self._members:
      self.close()
      self._meet(params, targets)
      self._members = members
    client, source = self._client, self._source
    assert client is not None
    source.params, client.version = params, version
    try:
      self._engine.send_weights()
    except BaseException:
      self._members = []  # the group may be unusable: the next round makes a new one
      raise
    finally:
      source.params = {}  # which the learner goes on to donate
      _let_go()
    size = whole.size(self._shape, params, self._sending.dtype)
    return Sent(version, source.sums.digest(), tuple(client.held), size)

  def _meet(self, params: Params, targets: Sequence[Target]) -> None:
    source = self._source = JaxSource(self._shape, params, self._sending.dtype)
    client = self._client = Client(self._ask, targets, source)
    if self._backend == 'ipc':
      places = sorted({place for target in targets for place in target.places})
      self._engine = Lender(client, source, places, self._sending.buffer_bytes)
      return
    host, port = self._address()
    info = NCCLTrainerInitInfo(
      host,
      port,
      1 + sum(target.gpus for target in targets),
      rank=0,
      packed=self._packed,
      packed_buffer_size_bytes=self._sending.buffer_bytes,
    )
    self._engine = WeightTransferTrainerFactory.trainer_init(
      info, client=client, source=source
    )
    log.info('weights go to %d engines by NCCL, from %s:%d', len(targets), host, port)

  def close(self) -> None:
    if self._engine is not None:
      self._engine.shutdown()
    self._engine = self._client = None


def _let_go() -> None:
  """Gives back to the GPUs what torch keeps of them, which is none of JAX's budget."""
  if torch.cuda.is_available():
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
