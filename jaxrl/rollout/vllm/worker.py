"""What runs inside vLLM's processes: weights read where the learner left them."""

# pyright: reportMissingImports=false

import asyncio
import concurrent.futures
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
  WeightTransferEngine,
  WeightTransferInitInfo,
  WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
  finalize_layerwise_reload,
  initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from jaxrl.models import huggingface
from jaxrl.models.unmerged import is_unmerged, merge_on_host
from jaxrl.rollout.vllm import received
from jaxrl.rollout.weights.errors import WeightsError
from jaxrl.rollout.weights.pulls import Puller
from jaxrl.rollout.weights.shared_memory import attach
from jaxrl.types import Params

BACKEND = 'jaxrl'
BACKENDS = {BACKEND: BACKEND, **received.BACKENDS}  # as vLLM knows them, by our names


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
  """address: the folder, in memory perhaps, that the versions lie in. parts: processes
  of the learner.
  """

  address: str
  parts: int = 1


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
  """version: the one that `fetch` brought."""

  version: int


class ReadWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
  """Receives versions behind the one in use, and loads one when it is told to.

  The arrays are checked where they are mapped, or put together, and handed to vLLM's
  loader under their Hugging Face names: it copies them to where they are used.
  """

  init_info_cls = InitInfo
  update_info_cls = UpdateInfo

  def __init__(self, *args: Any):
    super().__init__(*args)
    self._shape = huggingface.load_config(self.model_config.model)
    self._pool = concurrent.futures.ThreadPoolExecutor(1, 'weights')
    self._puller: Puller | None = None
    self._fetched: tuple[int, Params] | None = None
    self._fetching: concurrent.futures.Future[str] | None = None

  def init_transfer_engine(self, init_info: InitInfo) -> None:
    if self._puller is not None:
      self._puller.close()
    self._puller = Puller(
      attach(init_info.address),
      self._keep,
      parts=init_info.parts,
      place=None,
    )

  def fetch(self, version: int, full: bool) -> None:
    """Begins to receive `version` or a later one, while the model goes on."""
    if self._puller is None:
      raise WeightsError('no transport was named: init_transfer_engine comes first')
    self._fetched = None
    self._fetching = self._pool.submit(
      asyncio.run, self._puller.pull(version, full=full)
    )

  def fetched(self) -> tuple[int | None, str] | None:
    """(version, digest of its arrays) once it is here, None before.

    No version, but a digest, when they are not what was published.
    """
    if self._fetching is None or not self._fetching.done():
      return None
    digest = self._fetching.result()
    return (None if self._fetched is None else self._fetched[0]), digest

  async def _keep(self, version: int, params: Params) -> None:
    self._fetched = version, params

  def start_weight_update(self) -> None:
    if current_platform.is_cpu():
      # There experts are packed for their kernel when it is made, and not when others
      # come: vLLM would compute with what it cannot read. So it makes a new one.
      for layer in self.model.modules():
        method: Any = getattr(layer, 'quant_method', None)
        if hasattr(method, 'moe_kernel'):
          method.moe_kernel = None
    initialize_layerwise_reload(self.model)

  def finish_weight_update(self) -> None:
    finalize_layerwise_reload(self.model, self.model_config)
    if self._shape.tie_embeddings and current_platform.is_cpu():
      # A tied head shares the embedding's tensor, which has been loaded, but on CPU
      # computes with a packed copy of it, which vLLM makes for loaded layers alone.
      head: Any = getattr(self.model, 'lm_head', None)
      if hasattr(head, 'quant_method'):
        head.quant_method.process_weights_after_loading(head)
    self._fetched = None

  def update_weights(self, update_info: dict[str, Any]) -> None:
    self.receive_weights(self.parse_update_info(update_info))
    if torch.accelerator.is_available():
      torch.accelerator.synchronize()

  def receive_weights(self, update_info: UpdateInfo) -> None:
    if self._fetched is None or self._fetched[0] != update_info.version:
      raise WeightsError(f'version {update_info.version} has not been fetched')
    self.model.load_weights(self._named(self._fetched[1]))

  def _named(self, params: Params) -> Iterator[tuple[str, torch.Tensor]]:
    if is_unmerged(params):
      params = merge_on_host(params)
    for name, array in huggingface.export(self._shape, params):
      yield name, tensor(array)

  def shutdown(self) -> None:
    self._pool.shutdown()
    if self._puller is not None:
      self._puller.close()


class Extension:
  """Methods that vLLM's workers get, for `collective_rpc`."""

  weight_transfer_engine: Any

  def fetch_weights(self, version: int, full: bool) -> None:
    self.weight_transfer_engine.fetch(version, full)

  def fetched_weights(self) -> tuple[int | None, str] | None:
    return self.weight_transfer_engine.fetched()

  def loaded_weights(self) -> str:
    return self.weight_transfer_engine.loaded()


def tensor(array: np.ndarray) -> torch.Tensor:
  """A view of a numpy array, bfloat16 included. Nobody may write to it."""
  bits = array.view(np.int16) if array.dtype.name == 'bfloat16' else array
  with warnings.catch_warnings():  # read-only memory is meant
    warnings.simplefilter('ignore', UserWarning)
    found = torch.from_numpy(bits)
  return found.view(torch.bfloat16) if bits is not array else found


# Importing this module, as a worker does for `Extension`, makes the engine known.
WeightTransferEngineFactory.register_engine(BACKEND, ReadWeights)
