"""GPU weight receiver: vLLM transfer engines that load from GPUs and keep a digest."""

# pyright: reportMissingImports=false

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
  WeightTransferEngine,
  WeightTransferInitInfo,
  WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
  NCCLWeightTransferEngine,
  NCCLWeightTransferInitInfo,
)
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from jaxrl.rollout.vllm import cuda_ipc
from jaxrl.rollout.vllm.tensor_digest import TensorDigest
from jaxrl.rollout.weights.transport import WeightsError

GPU_TRANSFER_BACKENDS = {'ipc': 'jaxrl-ipc', 'nccl': 'jaxrl-nccl'}  # vLLM's names


class ChecksummedTransfer:
  """Mixin for vLLM's transfer engines that computes a digest of what the model loads.

  It must come before the transfer engine among the base classes.
  """

  model: Any

  def start_weight_update(self) -> None:
    """Starts an update with an empty digest."""
    self._digest = TensorDigest()
    super().start_weight_update()  # pyright: ignore

  def receive_weights(self, update_info: object) -> None:
    """Loads tensors into the model and adds them to the digest."""
    model = self.model
    self.model = _ChecksummedModel(model, self._digest)
    try:
      super().receive_weights(update_info)  # pyright: ignore
    finally:
      self.model = model

  def loaded_digest(self) -> str:
    """Returns the digest of what the model has loaded since the update started."""
    return self._digest.digest()


class _ChecksummedModel:
  """The part of a model that transfer engines use."""

  def __init__(self, model: Any, digest: TensorDigest):
    self._model = model
    self._digest = digest

  def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    return self._model.load_weights(self._digest.record_all(weights))

  def modules(self) -> Iterable[Any]:
    return self._model.modules()


@dataclasses.dataclass
class IpcInitInfo(WeightTransferInitInfo):
  """Initializes a transfer by CUDA IPC, which needs nothing."""


@dataclasses.dataclass
class IpcUpdateInfo(WeightTransferUpdateInfo):
  """Describes the tensors of some whole layers.

  Attributes:
    names: Hugging Face names.
    dtypes: Names of torch's dtypes.
    shapes: Shapes.
    handles: For each tensor, the fields of a `cuda_ipc.IpcHandle` by the name of the
      GPU on which it lies.
  """

  names: list[str]
  dtypes: list[str]
  shapes: list[list[int]]
  handles: list[dict[str, list[Any]]]


class _IpcTransferEngine(WeightTransferEngine[IpcInitInfo, IpcUpdateInfo]):
  """Loads from memory of a GPU that the learner uses too, where the learner put it.

  vLLM's own way copies it twice before. Here it gets whole layers, and the learner
  takes the memory back when an update ends. Only what vLLM keeps until all tensors of a
  layer are there is copied.
  """

  init_info_cls = IpcInitInfo
  update_info_cls = IpcUpdateInfo

  def init_transfer_engine(self, init_info: IpcInitInfo) -> None:
    """Does nothing: IPC needs no group."""
    del init_info

  def start_weight_update(self) -> None:
    """Prepares vLLM's model for loading layer by layer."""
    self._imported = cuda_ipc.ImportedMemory()
    self._copies: list[torch.Tensor] = []
    reload.initialize_layerwise_reload(self.model)

  def receive_weights(self, update_info: IpcUpdateInfo) -> None:
    """Loads tensors from the learner's memory.

    Raises:
      WeightsError: If the learner does not use this worker's GPU.
    """
    device_index = self.device.index
    self.model.load_weights(self._open_tensors(update_info, device_index))
    self._copy_kept_tensors()
    if torch.cuda.is_available():
      torch.cuda.synchronize(device_index)
    self._imported.close()

  def _copy_kept_tensors(self) -> None:
    """Copies what vLLM has not loaded yet.

    A padded vocabulary waits for the end of the update, because vLLM's loader never
    finds it complete.
    """
    for layer in self.model.modules():
      for _, bound in get_layerwise_info(layer).loaded_weights:
        for name, value in bound.arguments.items():
          is_imported = isinstance(value, torch.Tensor) and name != 'param'
          if is_imported and not any(value is copy for copy in self._copies):
            bound.arguments[name] = value.clone()
            self._copies.append(bound.arguments[name])

  def _open_tensors(
    self, update: IpcUpdateInfo, device_index: int
  ) -> Iterator[tuple[str, torch.Tensor]]:
    gpu_name = str(torch.cuda.get_device_properties(device_index).uuid)
    rows = zip(update.names, update.dtypes, update.shapes, update.handles, strict=True)
    for name, dtype_name, shape, handles in rows:
      if gpu_name not in handles:
        raise WeightsError(
          f'GPU {gpu_name} is none of those on which the learner has its weights, '
          f"{', '.join(handles)}: weight_sync.transport='ipc' needs engines on the "
          "learner's GPUs"
        )
      dtype = getattr(torch, dtype_name)
      num_bytes = dtype.itemsize * torch.Size(shape).numel()
      handle = cuda_ipc.IpcHandle(*handles[gpu_name])
      raw = self._imported.view(handle, num_bytes, device_index)
      yield name, raw.view(dtype).view(shape)

  def finish_weight_update(self) -> None:
    """Loads what vLLM has kept until the end."""
    reload.finalize_layerwise_reload(self.model, self.model_config)
    self._copies = []

  def shutdown(self) -> None:
    """Does nothing: there is nothing to close."""


class IpcTransferEngine(ChecksummedTransfer, _IpcTransferEngine):
  """Loads weights by CUDA IPC from a learner on the same GPU."""


class NcclTransferEngine(ChecksummedTransfer, NCCLWeightTransferEngine):
  """Receives weights by NCCL, in a group that is rebuilt when its members change."""

  def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
    """Joins a group, leaving the one it was in."""
    self.shutdown()
    super().init_transfer_engine(init_info)


# vLLM's workers import this module, which registers the engines.
WeightTransferEngineFactory.register_engine(
  GPU_TRANSFER_BACKENDS['ipc'], IpcTransferEngine
)
WeightTransferEngineFactory.register_engine(
  GPU_TRANSFER_BACKENDS['nccl'], NcclTransferEngine
)
