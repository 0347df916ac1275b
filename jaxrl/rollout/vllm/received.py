"""vLLM's own ways from GPU to GPU, which also tell what has come out of them."""

# pyright: reportMissingImports=false

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import (
  NCCLWeightTransferEngine,
  NCCLWeightTransferInitInfo,
)

from jaxrl.rollout.vllm.sums import Sums

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


class Ipc(Summed, IPCWeightTransferEngine):
  """Through memory of the GPU that the learner has too."""


class Nccl(Summed, NCCLWeightTransferEngine):
  """By NCCL, in a group that is made anew whenever its members change."""

  def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
    self.shutdown()  # leaves the group it was in
    super().init_transfer_engine(init_info)


# Importing this module, as a worker does, makes them known.
WeightTransferEngineFactory.register_engine(BACKENDS['ipc'], Ipc)
WeightTransferEngineFactory.register_engine(BACKENDS['nccl'], Nccl)
