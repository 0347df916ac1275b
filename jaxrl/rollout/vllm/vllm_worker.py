"""vLLM worker: reads published weights inside vLLM's processes, where the model is."""

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
from jaxrl.models.lora import is_transfer, merge_transfer_on_host
from jaxrl.rollout.vllm.gpu_weight_receiver import GPU_TRANSFER_BACKENDS
from jaxrl.rollout.weights.transport import WeightsError, join_folder
from jaxrl.rollout.weights.verified_store import EngineWeightClient
from jaxrl.types import Params

PULL_BACKEND = 'jaxrl'
# vLLM's names of the backends, by ours.
TRANSFER_BACKENDS = {PULL_BACKEND: PULL_BACKEND, **GPU_TRANSFER_BACKENDS}


@dataclasses.dataclass
class PullInitInfo(WeightTransferInitInfo):
  """Says where versions are published.

  Attributes:
    address: The folder of the versions; it may be in memory.
    parts: Number of the learner's processes, each of which publishes a part.
  """

  address: str
  parts: int = 1


@dataclasses.dataclass
class PullUpdateInfo(WeightTransferUpdateInfo):
  """Names the version to load.

  Attributes:
    version: The version that `fetch` has received.
  """

  version: int


class PullTransferEngine(WeightTransferEngine[PullInitInfo, PullUpdateInfo]):
  """Receives versions while the model serves another, and loads them on request.

  Arrays are checked where they are mapped, or are put together in memory. vLLM's loader
  gets them under their Hugging Face names and copies them to where they are used.
  """

  init_info_cls = PullInitInfo
  update_info_cls = PullUpdateInfo

  def __init__(self, *args: object):
    """Passes vLLM's arguments on."""
    super().__init__(*args)
    self._config = huggingface.load_config(self.model_config.model)
    self._executor = concurrent.futures.ThreadPoolExecutor(1, 'weights')
    self._client: EngineWeightClient | None = None
    self._fetched: tuple[int, Params] | None = None
    self._fetching: concurrent.futures.Future[str] | None = None

  def init_transfer_engine(self, init_info: PullInitInfo) -> None:
    """Connects to the folder where versions are published."""
    if self._client is not None:
      self._client.close()
    self._client = EngineWeightClient(
      join_folder(init_info.address),
      self._keep,
      parts=init_info.parts,
      place=None,
    )

  def fetch(self, version: int, full: bool) -> None:
    """Starts receiving `version` or a later one, while the model goes on.

    Args:
      version: The oldest version that will do.
      full: Whether to read all bytes again.

    Raises:
      WeightsError: If no folder is connected.
    """
    if self._client is None:
      raise WeightsError('no transport is connected: call init_transfer_engine first')
    self._fetched = None
    pull = self._client.pull(version, full=full)
    self._fetching = self._executor.submit(asyncio.run, pull)

  def fetched(self) -> tuple[int | None, str] | None:
    """Returns what `fetch` has received.

    Returns:
      The version and the digest of its arrays; None while it has not arrived. The
      version is None if the arrays differ from what was published.

    Raises:
      WeightsError: If it could not be received.
    """
    if self._fetching is None or not self._fetching.done():
      return None
    digest = self._fetching.result()
    return (None if self._fetched is None else self._fetched[0]), digest

  async def _keep(self, version: int, params: Params) -> None:
    self._fetched = version, params

  def start_weight_update(self) -> None:
    """Prepares vLLM's model for loading layer by layer."""
    if current_platform.is_cpu():
      # On CPU vLLM packs the experts for their kernel when it creates the kernel, but
      # not when it loads others, and would compute with memory it cannot read. Without
      # a kernel it creates a new one.
      for layer in self.model.modules():
        method: Any = getattr(layer, 'quant_method', None)
        if hasattr(method, 'moe_kernel'):
          method.moe_kernel = None
    initialize_layerwise_reload(self.model)

  def finish_weight_update(self) -> None:
    """Completes the update of vLLM's model and drops the received arrays."""
    finalize_layerwise_reload(self.model, self.model_config)
    if self._config.tie_embeddings and current_platform.is_cpu():
      # A tied head shares the embedding's tensor, which has been loaded. On CPU it
      # computes with a packed copy, which vLLM only makes for loaded layers.
      # A model that sees images has its head in its language model.
      language_model = getattr(self.model, 'language_model', self.model)
      head: Any = getattr(language_model, 'lm_head', None)
      if hasattr(head, 'quant_method'):
        head.quant_method.process_weights_after_loading(head)
    self._fetched = None

  def update_weights(self, update_info: dict[str, Any]) -> None:
    """Loads the version that `update_info` names, and waits until it is in place."""
    self.receive_weights(self.parse_update_info(update_info))
    if torch.accelerator.is_available():
      torch.accelerator.synchronize()

  def receive_weights(self, update_info: PullUpdateInfo) -> None:
    """Hands the received arrays to vLLM's loader.

    Raises:
      WeightsError: If another version or none has been fetched.
    """
    if self._fetched is None or self._fetched[0] != update_info.version:
      raise WeightsError(f'version {update_info.version} has not been fetched')
    self.model.load_weights(self._named_tensors(self._fetched[1]))

  def _named_tensors(self, params: Params) -> Iterator[tuple[str, torch.Tensor]]:
    if is_transfer(params):
      params = merge_transfer_on_host(params)
    for name, array in huggingface.export(self._config, params):
      yield name, to_torch(array)

  def shutdown(self) -> None:
    """Disconnects from the folder."""
    self._executor.shutdown()
    if self._client is not None:
      self._client.close()


class WorkerExtension:
  """Adds methods to vLLM's workers, which `collective_rpc` calls by name."""

  weight_transfer_engine: Any

  def fetch_weights(self, version: int, full: bool) -> None:
    """Starts receiving a version; see `PullTransferEngine.fetch`."""
    self.weight_transfer_engine.fetch(version, full)

  def fetched_weights(self) -> tuple[int | None, str] | None:
    """Returns what was received; see `PullTransferEngine.fetched`."""
    return self.weight_transfer_engine.fetched()

  def loaded_weights(self) -> str:
    """Returns the weights' digest; see `ChecksummedTransfer.loaded_digest`."""
    return self.weight_transfer_engine.loaded_digest()


def to_torch(array: np.ndarray) -> torch.Tensor:
  """Returns a read-only view of a numpy array, which may be bfloat16, as a tensor."""
  is_bfloat16 = array.dtype.name == 'bfloat16'
  with warnings.catch_warnings():  # torch warns of read-only memory
    warnings.simplefilter('ignore', UserWarning)
    tensor = torch.from_numpy(array.view(np.int16) if is_bfloat16 else array)
  return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


# vLLM's workers import this module for `WorkerExtension`, which registers the engine.
WeightTransferEngineFactory.register_engine(PULL_BACKEND, PullTransferEngine)
