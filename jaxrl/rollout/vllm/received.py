"""Ways from GPU to GPU into vLLM, which also tell what has come out of them."""

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

from jaxrl.rollout.vllm import gpu_memory
from jaxrl.rollout.vllm.sums import Sums
from jaxrl.rollout.weights.errors import WeightsError

BACKENDS = {'ipc': 'jaxrl-ipc', 'nccl': 'jaxrl-nccl'}  # as vLLM knows them


class Summed:
  """What a class of vLLM's transfer engines needs, before it in the bases, to know the
  digest of the tensors that it handed to the model since an update began.
  """

  model: Any

  def start_weight_update(self) -> None:
    self._sums = Sums()
    super().start_weight_update()  # pyright: ignore

  def receive_weights(self, update_info: Any) -> None:
    model, self.model = self.model, _Model(self.model, self._sums)
    try:
      super().receive_weights(update_info)  # pyright: ignore
    finally:
      self.model = model

  def loaded(self) -> str:
    return self._sums.digest()


class _Model:
  """The model, as far as a transfer engine knows it."""

  def __init__(self, model: Any, sums: Sums):
    self._model, self._sums = model, sums

  def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    return self._model.load_weights(self._sums.through(weights))

  def modules(self) -> Iterable[Any]:
    return self._model.modules()


@dataclasses.dataclass
class IpcInit(WeightTransferInitInfo):
  """Nothing need be agreed on before."""


@dataclasses.dataclass
class IpcUpdate(WeightTransferUpdateInfo):
  """Tensors of whole layers. loans: of each, by the names of the GPUs on which it lies,
  a `gpu_memory.Loan`.
  """

  names: list[str]
  dtypes: list[str]
  shapes: list[list[int]]
  loans: list[dict[str, list[Any]]]


class _Ipc(WeightTransferEngine[IpcInit, IpcUpdate]):
  """Loads from memory of the GPU that the learner has too, where the learner put it.

  vLLM's own way copies it twice before. It is given whole layers here, and when an
  update ends the learner takes the memory back: only what vLLM holds back until all
  are there is copied.
  """

  init_info_cls = IpcInit
  update_info_cls = IpcUpdate

  def init_transfer_engine(self, init_info: IpcInit) -> None:
    del init_info

  def start_weight_update(self) -> None:
    self._borrowed, self._held = gpu_memory.Borrowed(), []
    reload.initialize_layerwise_reload(self.model)

  def receive_weights(self, update_info: IpcUpdate) -> None:
    """Raises WeightsError for a GPU that the learner does not have."""
    place = self.device.index
    self.model.load_weights(self._tensors(update_info, place))
    self._hold()
    if torch.cuda.is_available():
      torch.cuda.synchronize(place)
    self._borrowed.close()

  def _hold(self) -> None:
    """Copies what vLLM has not loaded yet: a vocabulary that it fills up waits for the
    end, for the loader never finds it whole.
    """
    for layer in self.model.modules():
      for _, bound in get_layerwise_info(layer).loaded_weights:
        for name, value in bound.arguments.items():
          lent = isinstance(value, torch.Tensor) and name != 'param'
          if lent and not any(value is own for own in self._held):
            bound.arguments[name] = value.clone()
            self._held.append(bound.arguments[name])

  def _tensors(
    self, update: IpcUpdate, place: int
  ) -> Iterator[tuple[str, torch.Tensor]]:
    own = str(torch.cuda.get_device_properties(place).uuid)
    rows = zip(update.names, update.dtypes, update.shapes, update.loans, strict=True)
    for name, dtype, shape, loans in rows:
      if own not in loans:
        raise WeightsError(
          f'GPU {own} is none of those on which the learner has its weights, '
          f"{', '.join(loans)}: cluster.weights='ipc' needs engines on the learner's"
        )
      kind = getattr(torch, dtype)
      size = kind.itemsize * torch.Size(shape).numel()
      found = self._borrowed.view(gpu_memory.Loan(*loans[own]), size, place)
      yield name, found.view(kind).view(shape)

  def finish_weight_update(self) -> None:
    reload.finalize_layerwise_reload(self.model, self.model_config)
    self._held = []

  def shutdown(self) -> None:
    pass


class Ipc(Summed, _Ipc):
  """Through memory of the GPU that the learner has too."""


class Nccl(Summed, NCCLWeightTransferEngine):
  """By NCCL, in a group that is made anew whenever its members change."""

  def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
    self.shutdown()  # leaves the group it was in
    super().init_transfer_engine(init_info)


# Importing this module, as a worker does, makes them known.
WeightTransferEngineFactory.register_engine(BACKENDS['ipc'], Ipc)
WeightTransferEngineFactory.register_engine(BACKENDS['nccl'], Nccl)
