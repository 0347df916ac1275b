"""Memory of a GPU that one process lends to another: CUDA's driver, nothing of torch's.

What is lent is told by numbers and text alone, so that no one need unpickle it. JAX's
own arrays are lent where they lie. Not run on a GPU yet, for want of one.
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
  """CUDA did not lend or open memory; the message has its reason."""


class Loan(NamedTuple):
  """handle: of the allocation that the memory is part of, as hexadecimal digits.
  offset: bytes from its start.
  """

  handle: str
  offset: int


class _Handle(ctypes.Structure):
  _fields_ = [('reserved', ctypes.c_ubyte * HANDLE_BYTES)]


def lend(tensor: torch.Tensor) -> Loan:
  """Lets other processes of this machine open what `tensor` lies in.

  It must live until they have closed it. Raises GpuMemoryError where CUDA does not
  share that memory: it shares what cuMemAlloc gave, whole pools or single arrays.
  """
  base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
  pointer = tensor.data_ptr()
  with _current(tensor.device):
    _call(
      'cuMemGetAddressRange_v2',
      ctypes.byref(base),
      ctypes.byref(size),
      ctypes.c_uint64(pointer),
    )
    _call('cuIpcGetMemHandle', ctypes.byref(handle), base)
  return Loan(bytes(handle.reserved).hex(), pointer - base.value)


class Borrowed:
  """Memory of other processes, each allocation opened once until `close`,
  which must come before that memory is freed.
  """

  def __init__(self) -> None:
    self._open: dict[str, ctypes.c_uint64] = {}
    self._used: weakref.WeakSet[_Bytes] = weakref.WeakSet()

  def view(self, loan: Loan, size: int, place: int) -> torch.Tensor:
    """`size` bytes of it as they lie, on this process's GPU number `place`."""
    with _current(place):
      if loan.handle not in self._open:
        self._open[loan.handle] = _opened(loan.handle)
      pointer = self._open[loan.handle].value + loan.offset
      found = _Bytes(pointer, size)
      self._used.add(found)
      return torch.as_tensor(found, device=f'cuda:{place}')

  def give_back(self) -> None:
    """Raises GpuMemoryError if a view, or a view of one, is still held somewhere."""
    if self._used:
      gc.collect()  # what only a circle of references still holds
    if self._used:
      raise GpuMemoryError(
        f'{len(self._used)} tensors in memory of another process are still held, which '
        'takes it back now: their values would change'
      )

  def close(self) -> None:
    """Closes what was opened; it is the other process's alone again."""
    self.give_back()
    while self._open:
      _, pointer = self._open.popitem()
      _call('cuIpcCloseMemHandle', pointer)


class _Bytes:
  """Bytes on a GPU, for whoever reads the CUDA array interface (version 3).

  torch holds it for as long as any tensor has the memory.
  """

  def __init__(self, pointer: int, size: int):
    self.__cuda_array_interface__ = {
      'shape': (size,),
      'typestr': '|u1',
      'data': (pointer, False),
      'version': 3,
    }


@contextlib.contextmanager
def _current(device: Any) -> Iterator[None]:
  """Makes a GPU's context that of this thread, which naming the GPU alone does not."""
  with torch.cuda.device(device):
    torch.cuda.synchronize()
    yield


def _opened(handle: str) -> ctypes.c_uint64:
  pointer = ctypes.c_uint64()
  made = _Handle.from_buffer_copy(bytes.fromhex(handle))
  flags = ctypes.c_uint(LAZY_PEER_ACCESS)
  _call('cuIpcOpenMemHandle_v2', ctypes.byref(pointer), made, flags)
  return pointer


@functools.cache
def _driver() -> Any:
  return ctypes.CDLL('libcuda.so.1')


def _call(name: str, *arguments: Any) -> None:
  """Calls CUDA's driver. Raises GpuMemoryError with the name of its error."""
  status = getattr(_driver(), name)(*arguments)
  if status:
    text = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(text))
    reason = (text.value or b'an unknown error').decode()
    raise GpuMemoryError(f'{name} of the CUDA driver: {reason} ({status})')
