"""GPU weight sender: sends weights from JAX's GPUs to vLLM's, by CUDA IPC or NCCL.

CUDA IPC is for engines on the learner's own GPUs, NCCL for all others. Both need a
learner whose environment has vLLM with CUDA. They run on CPU with stand-ins for the
calls to CUDA and NCCL; neither has been run on a GPU, for want of one.
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

from jaxrl.models import hf_names
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.vllm import cuda_ipc
from jaxrl.rollout.vllm.gpu_weight_receiver import IpcUpdateInfo
from jaxrl.rollout.vllm.tensor_digest import TensorDigest
from jaxrl.rollout.weights import direct_transfer
from jaxrl.rollout.weights.direct_transfer import (
  EngineCaller,
  TransferOptions,
  TransferReport,
  TransferTarget,
)
from jaxrl.types import Params

log = logging.getLogger(__name__)
SENDER_BACKENDS = ('ipc', 'nccl')


class JaxWeightSource(WeightSource):
  """Yields a learner's parameters as torch tensors, under their Hugging Face names.

  Attributes:
    params: The parameters, which are replaced before each transfer.
    digest: The digest of the tensors that the last transfer has read.
  """

  def __init__(self, config: ModelConfig, params: Params, dtype: str | None = None):
    """Initializes the source.

    Args:
      config: The model's config.
      params: The parameters.
      dtype: Floating-point arrays are cast to it; None keeps the dtype of each.
    """
    self._config = config
    self._dtype = dtype
    self.params = params
    self.digest = TensorDigest()

  def metadata(self) -> list[ParamMeta]:
    """Returns name, dtype and shape of every tensor, for vLLM."""
    metadata = []
    for tensor in hf_names.checkpoint_tensors(self._config):
      leaf = self.params
      for key in tensor.parts[0].path:
        leaf = leaf[key]
      dtype_name = direct_transfer.cast_dtype(leaf, self._dtype)
      dtype: torch.dtype = getattr(torch, dtype_name)  # pyright: ignore
      metadata.append(ParamMeta(tensor.name, dtype, tensor.shape))
    return metadata

  def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) pairs; the tensors are copies."""
    for tensor, (view,) in self.views((0,)):
      yield tensor.name, _copy_to_torch(view)

  def views(
    self, device_indices: Sequence[int]
  ) -> Iterator[tuple[Any, tuple[torch.Tensor, ...]]]:
    """Yields views of every tensor on several devices, in JAX's own memory.

    Args:
      device_indices: Indices of this process's JAX devices.

    Yields:
      A tensor's description and its view on each device. The tensors of a layer come
      one after another.
    """
    self.digest = TensorDigest()
    devices = jax.local_devices()
    tensors = direct_transfer.gather_hf_tensors(self._config, self.params, self._dtype)
    for tensor, array in tensors:
      data = {shard.device: shard.data for shard in array.addressable_shards}
      jax.block_until_ready(array)
      views = tuple(torch.from_dlpack(data[devices[i]]) for i in device_indices)
      self.digest.add(tensor.name, views[0])
      yield tensor, views


def _copy_to_torch(view: torch.Tensor) -> torch.Tensor:
  """Copies a tensor into torch's own memory.

  JAX may reuse its array's memory as soon as the array is deleted, when work that torch
  has only queued may not have read it yet.
  """
  copy = view.clone()
  if copy.is_cuda:
    torch.cuda.synchronize(copy.device)
  return copy


class TransferClient:
  """Calls all engines at once, with the interface of vLLM's trainer side.

  Attributes:
    version: The version to send next.
    engine_digests: What the engines received in the last transfer.
  """

  def __init__(
    self,
    call_engines: EngineCaller,
    targets: Sequence[TransferTarget],
    source: JaxWeightSource,
  ):
    """Initializes the client.

    Args:
      call_engines: Calls a method of every engine and waits for the results.
      targets: The engines.
      source: What is sent.
    """
    self._call_engines = call_engines
    self._targets = targets
    self._source = source
    self.version = 0
    self.engine_digests: list[str] = []

  def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
    """Prepares all engines; NCCL ranks are counted through all engines' workers."""
    arguments, rank_offset = [], init_info.get('rank_offset')
    for target in self._targets:
      engine_info = dict(init_info)
      if rank_offset is not None:
        engine_info['rank_offset'] = rank_offset
        rank_offset += target.num_gpus
      arguments.append((engine_info,))
    self._call('init_transfer', arguments)

  def start_weight_update(self) -> None:
    """Opens an update in all engines."""
    self._call('begin_update')

  def update_weights(self, update_info: object) -> None:
    """Tells all engines where a part of the weights is."""
    self._call('update', [(update_info,) for _ in self._targets])

  def finish_weight_update(self, weight_version: str | None = None) -> None:
    """Closes the update; engines that received other tensors do not serve them."""
    expected = self.version, self._source.digest.digest()
    self.engine_digests = self._call('end_update', [expected for _ in self._targets])

  def _call(self, method: str, arguments: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
    engines = [target.engine for target in self._targets]
    return self._call_engines(engines, method, arguments or [() for _ in engines])


class IpcSender:
  """Exports tensors by CUDA IPC to engines that share this process's GPUs.

  vLLM's own sender fills a buffer, from which its engines copy before they load. Here
  they load from where JAX has put the tensors, on each of the GPUs, in groups of whole
  layers. What they have loaded of a layer they do not need any longer.
  """

  def __init__(
    self,
    client: TransferClient,
    source: JaxWeightSource,
    device_indices: Sequence[int],
    buffer_bytes: int,
  ):
    """Initializes the sender and all engines.

    Args:
      client: Calls the engines.
      source: What is sent.
      device_indices: Indices of the GPUs that are shared.
      buffer_bytes: A group of layers ends once it has this many bytes.
    """
    self._client = client
    self._source = source
    self._device_indices = device_indices
    self._buffer_bytes = buffer_bytes
    self._gpu_names = [
      str(torch.cuda.get_device_properties(i).uuid) for i in device_indices
    ]
    client.init_weight_transfer_engine({})

  def send_weights(self) -> None:
    """Sends all weights of the source to all engines."""
    self._client.start_weight_update()
    update, exported, num_bytes = _empty_update(), [], 0
    tensors = self._source.views(self._device_indices)
    for _, layer in itertools.groupby(tensors, key=lambda item: item[0].index[:1]):
      for tensor, views in layer:
        exports = [_export(view) for view in views]
        handles = [list(handle) for handle, _ in exports]
        update['names'].append(tensor.name)
        update['dtypes'].append(str(views[0].dtype).removeprefix('torch.'))
        update['shapes'].append(list(tensor.shape))
        update['handles'].append(dict(zip(self._gpu_names, handles, strict=True)))
        exported += [memory for _, memory in exports]
        num_bytes += views[0].nbytes
      if num_bytes >= self._buffer_bytes:
        self._client.update_weights(update)
        update, exported, num_bytes = _empty_update(), [], 0
    if exported:
      self._client.update_weights(update)
    self._client.finish_weight_update()

  def shutdown(self) -> None:
    """Does nothing: there is nothing to close."""


def _empty_update() -> dict[str, list[Any]]:
  """Returns the fields of an `IpcUpdateInfo` without tensors."""
  return {field.name: [] for field in dataclasses.fields(IpcUpdateInfo)}


def _export(view: torch.Tensor) -> tuple[cuda_ipc.IpcHandle, torch.Tensor]:
  """Exports a tensor, or a copy where the memory of JAX's allocator cannot be shared.

  Returns the handle, and the tensor that must live until the engines have closed it.
  """
  try:
    return cuda_ipc.export_ipc(view), view
  except cuda_ipc.GpuMemoryError as error:
    _warn_once(str(error))
  copy = _copy_to_torch(view)
  return cuda_ipc.export_ipc(copy), copy


@functools.cache
def _warn_once(reason: str) -> None:
  log.warning(
    "JAX's memory cannot be shared with engines, so weights are copied once more on "
    'their way: %s. The allocators XLA_PYTHON_CLIENT_ALLOCATOR=default and platform '
    'have memory that can be shared',
    reason,
  )


class GpuWeightSender:
  """Sends versions of the weights from the learner's GPUs to the engines."""

  def __init__(
    self,
    backend: str,
    config: ModelConfig,
    call_engines: EngineCaller,
    make_address: Callable[[], tuple[str, int]],
    options: TransferOptions,
    *,
    packed: bool = True,
  ):
    """Initializes the sender; the first `send` connects it.

    Args:
      backend: 'ipc' (within this machine) or 'nccl', as the engines were created with.
      config: The model's config.
      call_engines: Calls a method of every engine and waits for the results.
      make_address: Returns host and port of this process where an NCCL group can meet.
        Called for the first group and whenever the engines change.
      options: How weights are sent.
      packed: Whether NCCL sends many tensors at once.

    Raises:
      ValueError: If the backend does not exist.
    """
    if backend not in SENDER_BACKENDS:
      raise ValueError(f'weights backend {backend!r} is not one of {SENDER_BACKENDS}')
    self._backend = backend
    self._config = config
    self._call_engines = call_engines
    self._make_address = make_address
    self._options = options
    self._packed = packed
    self._connected_keys: list[str] = []
    self._client: TransferClient | None = None
    self._backend_sender: Any = None

  def send(
    self, version: int, params: Params, targets: Sequence[TransferTarget]
  ) -> TransferReport:
    """Makes engines serve new parameters.

    An engine that received other tensors, as its digest shows, does not serve.

    Args:
      version: The weights version.
      params: The parameters; they may be donated afterwards.
      targets: The engines.

    Returns:
      What was sent and what the engines received.
    """
    keys = [target.engine.key() for target in targets]
    if self._client is None or keys != self._connected_keys:
      self.close()
      self._connect(params, targets)
      self._connected_keys = keys
    client, source = self._client, self._source
    assert client is not None
    source.params, client.version = params, version
    try:
      self._backend_sender.send_weights()
    except BaseException:
      self._connected_keys = []  # the group may be unusable: make another
      raise
    finally:
      source.params = {}  # the learner donates them next
      _free_torch_cache()
    return TransferReport(
      version=version,
      digest=source.digest.digest(),
      engine_digests=tuple(client.engine_digests),
      num_bytes=direct_transfer.hf_tensors_bytes(
        self._config, params, self._options.dtype
      ),
    )

  def _connect(self, params: Params, targets: Sequence[TransferTarget]) -> None:
    source = JaxWeightSource(self._config, params, self._options.dtype)
    client = TransferClient(self._call_engines, targets, source)
    self._source, self._client = source, client
    if self._backend == 'ipc':
      indices = sorted({i for target in targets for i in target.device_indices})
      buffer_bytes = self._options.buffer_bytes
      self._backend_sender = IpcSender(client, source, indices, buffer_bytes)
      return
    host, port = self._make_address()
    init_info = NCCLTrainerInitInfo(
      host,
      port,
      1 + sum(target.num_gpus for target in targets),
      rank=0,
      packed=self._packed,
      packed_buffer_size_bytes=self._options.buffer_bytes,
    )
    self._backend_sender = WeightTransferTrainerFactory.trainer_init(
      init_info, client=client, source=source
    )
    log.info('weights go to %d engines by NCCL, from %s:%d', len(targets), host, port)

  def close(self) -> None:
    """Leaves the group of engines."""
    if self._backend_sender is not None:
      self._backend_sender.shutdown()
    self._backend_sender = self._client = None


def _free_torch_cache() -> None:
  """Frees the GPU memory that torch caches, which JAX's budget does not count."""
  if torch.cuda.is_available():
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
