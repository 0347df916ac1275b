"""Weights from JAX's GPUs straight into vLLM's: CUDA IPC on shared GPUs, NCCL between.

For a learner whose environment has vLLM with CUDA too. Run on CPU with stand-ins for
CUDA's and NCCL's own calls; neither has been run on a GPU, for want of one.
"""

# pyright: reportMissingImports=false

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch.multiprocessing import reductions
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from jaxrl.models import names
from jaxrl.models.config import ModelConfig
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
    for name, (tensor,) in self.copies((0,)):
      yield name, tensor

  def copies(
    self, places: Sequence[int]
  ) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    """Each tensor on several of JAX's devices. places: which of this process's."""
    self.sums = Sums()
    devices = jax.local_devices()
    for tensor, array in whole.tensors(self._shape, self.params, self._dtype):
      there = {shard.device: shard.data for shard in array.addressable_shards}
      jax.block_until_ready(array)
      found = tuple(_owned(there[devices[place]]) for place in places)
      self.sums.add(tensor.name, found[0])
      yield tensor.name, found


def _owned(array: jax.Array) -> torch.Tensor:
  """A copy in torch's own memory: JAX may use its array's again as soon as it goes,
  when work that torch has only queued may not have read it yet.
  """
  copy = torch.from_dlpack(array).clone()
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


class Handles:
  """Sends by CUDA IPC to engines that have the same GPUs as this process.

  vLLM's own sender knows a process of one GPU. Here one process fills a buffer on each
  GPU with the same tensors, and sends every engine the handles of all of them; each of
  its workers opens that of its own GPU.
  """

  def __init__(
    self, client: Client, source: JaxSource, places: Sequence[int], room: int
  ):
    self._client, self._source, self._places = client, source, places
    self._room = room
    client.init_weight_transfer_engine({'packed': True})

  def send_weights(self) -> None:
    self._client.start_weight_update()
    sizes = [_bytes(meta) for meta in self._source.metadata()]
    room = max(min(self._room, sum(sizes)), *sizes)
    buffers, handles, chunk = (), {}, _Chunk()
    for name, tensors in self._source.copies(self._places):
      if not buffers:  # on the devices where the tensors are
        buffers = tuple(
          torch.empty(room, dtype=torch.uint8, device=t.device) for t in tensors
        )
        handles = self._handles(buffers)
      flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
      if chunk.end + len(flat[0]) > room:
        self._ship(chunk, buffers, handles)
        chunk = _Chunk()
      for buffer, part in zip(buffers, flat, strict=True):
        buffer[chunk.end : chunk.end + len(part)].copy_(part)
      chunk.add(name, tensors[0], len(flat[0]))
    self._ship(chunk, buffers, handles)
    self._client.finish_weight_update()

  def shutdown(self) -> None:
    pass

  def _handles(self, buffers: Sequence[torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    """By the names of the GPUs, what a process that shares it opens a buffer with."""
    return {
      str(torch.cuda.get_device_properties(place).uuid): reductions.reduce_tensor(b)[1]
      for place, b in zip(self._places, buffers, strict=True)
    }

  def _ship(
    self, chunk: '_Chunk', buffers: Sequence[torch.Tensor], handles: dict[str, Any]
  ) -> None:
    """Returns when every engine has copied what the buffers hold."""
    for buffer in buffers:
      if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    self._client.update_weights({**chunk.fields, 'ipc_handles': handles})


class _Chunk:
  """What a buffer holds. fields: as vLLM's update wants them."""

  def __init__(self) -> None:
    self.end = 0
    self.fields: dict[str, list[Any]] = {
      key: [] for key in ('names', 'dtype_names', 'shapes', 'tensor_sizes')
    }

  def add(self, name: str, tensor: torch.Tensor, size: int) -> None:
    dtype = str(tensor.dtype).removeprefix('torch.')
    row = name, dtype, list(tensor.shape), size
    for values, value in zip(self.fields.values(), row, strict=True):
      values.append(value)
    self.end += size


def _bytes(meta: ParamMeta) -> int:
  return meta.dtype.itemsize * torch.Size(meta.shape).numel()


class Sender:
  """The learner's end. backend: 'ipc' or 'nccl', with which the engines were made.

  ask: reaches them. address: makes 'host', 'port' of this process where those who talk
  NCCL meet, when they first do and whenever it is not the same engines any more. IPC
  hands CUDA handles through vLLM's own channel between processes of this machine,
  which it pickles: engines need VLLM_ALLOW_INSECURE_SERIALIZATION=1, and get it for
  this backend alone. packed: by NCCL, many tensors at once.
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
      self._engine = Handles(client, source, places, self._sending.buffer_bytes)
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
