"""CUDA IPC: shares a GPU's memory between processes, through CUDA's driver alone.

A handle consists of text and numbers, so it can be sent without pickling. JAX's own
arrays are shared where they lie. This has not been run on a GPU yet, for want of one.
"""

# pyright: reportMissingImports=false

import contextlib
import ctypes
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
LAZY_PEER_ACCESS = 1  # the only flag that cuIpcOpenMemHandle takes


class GpuMemoryError(RuntimeError):
  """CUDA did not share or open memory; the message has its reason."""


class IpcHandle(NamedTuple):
  """Identifies memory that another process has exported.

  Attributes:
    handle: Handle of the allocation that has the memory, as hexadecimal digits.
    offset: Bytes from the start of the allocation.
  """

  handle: str
  offset: int


class _CudaHandle(ctypes.Structure):
  _fields_ = [('reserved', ctypes.c_ubyte * HANDLE_BYTES)]


def export_ipc(tensor: torch.Tensor) -> IpcHandle:
  """Lets other processes of this machine open a tensor's memory.

  Args:
    tensor: A tensor on a GPU. It must live until the others have closed its memory.

  Returns:
    The handle to open it with.

  Raises:
    GpuMemoryError: If CUDA does not share that memory. It shares what cuMemAlloc
      returned, whole pools or single arrays.
  """
  base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _CudaHandle()
  pointer = tensor.data_ptr()
  with _current_device(tensor.device):
    _call_driver(
      'cuMemGetAddressRange_v2',
      ctypes.byref(base),
      ctypes.byref(size),
      ctypes.c_uint64(pointer),
    )
    _call_driver('cuIpcGetMemHandle', ctypes.byref(handle), base)
  return IpcHandle(bytes(handle.reserved).hex(), pointer - base.value)


class ImportedMemory:
  """Opens memory of other processes, each allocation once until `close`.

  `close` must come before the other process frees the memory.
  """

  def __init__(self) -> None:
    """Opens nothing yet."""
    self._open_pointers: dict[str, ctypes.c_uint64] = {}
    self._views: weakref.WeakSet[_GpuBytes] = weakref.WeakSet()

  def view(self, handle: IpcHandle, size: int, device_index: int) -> torch.Tensor:
    """Returns a view of exported memory.

    Args:
      handle: What the other process exported.
      size: Number of bytes.
      device_index: Index of the GPU in this process.

    Returns:
      `[size]` uint8.

    Raises:
      GpuMemoryError: If CUDA does not open the memory.
    """
    with _current_device(device_index):
      if handle.handle not in self._open_pointers:
        self._open_pointers[handle.handle] = _open_handle(handle.handle)
      base = self._open_pointers[handle.handle].value
      gpu_bytes = _GpuBytes(base + handle.offset, size)
      self._views.add(gpu_bytes)
      return torch.as_tensor(gpu_bytes, device=f'cuda:{device_index}')

  def release(self) -> None:
    """Checks that no view is in use any more.

    Raises:
      GpuMemoryError: If a view, or a view of one, is still held somewhere.
    """
    if self._views:
      gc.collect()  # frees what only reference cycles still hold
    if self._views:
      raise GpuMemoryError(
        f'{len(self._views)} tensors in memory of another process are still held, but '
        'that process is about to reuse the memory: their values would change'
      )

  def close(self) -> None:
    """Closes all memory, so that it belongs to the other process alone again.

    Raises:
      GpuMemoryError: If a view is still held, or CUDA does not close the memory.
    """
    self.release()
    while self._open_pointers:
      _, pointer = self._open_pointers.popitem()
      _call_driver('cuIpcCloseMemHandle', pointer)


class _GpuBytes:
  """Bytes on a GPU, readable through the CUDA array interface (version 3).

  torch holds the object for as long as any tensor uses the memory.
  """

  def __init__(self, pointer: int, size: int):
    self.__cuda_array_interface__ = {
      'shape': (size,),
      'typestr': '|u1',
      'data': (pointer, False),
      'version': 3,
    }


@contextlib.contextmanager
def _current_device(device: object) -> Iterator[None]:
  """Makes a GPU's context current on this thread, which selecting the GPU does not."""
  with torch.cuda.device(device):
    torch.cuda.synchronize()
    yield


def _open_handle(handle: str) -> ctypes.c_uint64:
  pointer = ctypes.c_uint64()
  cuda_handle = _CudaHandle.from_buffer_copy(bytes.fromhex(handle))
  flags = ctypes.c_uint(LAZY_PEER_ACCESS)
  _call_driver('cuIpcOpenMemHandle_v2', ctypes.byref(pointer), cuda_handle, flags)
  return pointer


@functools.cache
def _driver() -> Any:
  return ctypes.CDLL('libcuda.so.1')


def _call_driver(name: str, *arguments: object) -> None:
  """Calls CUDA's driver; raises GpuMemoryError with the name of its error."""
  status = getattr(_driver(), name)(*arguments)
  if status:
    error_name = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(error_name))
    reason = (error_name.value or b'an unknown error').decode()
    raise GpuMemoryError(f'{name} of the CUDA driver: {reason} ({status})')
