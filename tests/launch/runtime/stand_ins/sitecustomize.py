"""For processes of a run without a GPU. Memory that CUDA would hand on is the host's;
NCCL's broadcast goes through the store where its group meets; vLLM sleeps on a platform
where that frees nothing.

Python imports this first where its folder is on the path. It waits for those who call.
"""

# pyright: reportMissingImports=false

import contextlib
import importlib.abc
import sys
import types

CALLERS = (
  'jaxrl.rollout.vllm.gpu_weight_sender',
  'jaxrl.rollout.vllm.gpu_weight_receiver',
)


class Watch(importlib.abc.MetaPathFinder):
  def find_spec(self, fullname, path, target=None):
    if fullname in CALLERS:
      sys.meta_path.remove(self)
      replace()
    return None


class Communicator:
  """Over a group of vLLM's own, that shares nothing but small objects."""

  def __init__(self, group, device):
    self.group, self.ranks = group, group.all_gather_obj(group.rank)

  def broadcast(self, tensor, src):
    tensor.copy_(self.group.broadcast(tensor, src))

  def destroy(self):
    pass


class Stream:
  def synchronize(self):
    pass


def replace():
  import torch
  from vllm.distributed.device_communicators import pynccl
  from vllm.distributed.weight_transfer import packed_tensor
  from vllm.platforms import current_platform

  from jaxrl.rollout.vllm import cuda_ipc

  lent = []

  def lend(tensor):
    shared_copy = tensor.clone().share_memory_()
    lent.append(shared_copy)  # lives as long as this process
    manager, name, size = shared_copy.untyped_storage()._share_filename_cpu_()
    return cuda_ipc.IpcHandle(f'{manager.decode()} {name.decode()} {size}', 0)

  def view(self, loan, size, place):
    manager, name, room = loan.handle.split()
    storage = torch.UntypedStorage._new_shared_filename_cpu(
      manager.encode(), name.encode(), int(room)
    )
    opened.append(torch.empty(0, dtype=torch.uint8).set_(storage)[:size])
    return opened[-1]

  def give_back(self):
    while opened:  # whoever reads it later would serve nonsense
      opened.pop().fill_(77)

  opened = []
  torch.multiprocessing.set_sharing_strategy('file_system')
  cuda_ipc.export_ipc = lend
  cuda_ipc.ImportedMemory.view = view
  cuda_ipc.ImportedMemory.release = give_back
  only = types.SimpleNamespace(uuid='GPU-0')
  torch.cuda.get_device_properties = lambda place: only
  torch.accelerator.synchronize = lambda: None
  torch.accelerator.current_device_index = lambda: 0
  torch.cuda.stream = contextlib.nullcontext
  packed_tensor._get_streams = lambda place, count: (Stream(),) * count
  pynccl.PyNcclCommunicator = Communicator
  type(current_platform).is_sleep_mode_available = lambda self: True


sys.meta_path.insert(0, Watch())
