"""A malloc that keeps freed blocks, as a library to load before libc.

Programs of XLA take their memory from it at each call; `kept_blocks.c` says
why glibc's own is not enough.
"""

import ctypes
import pathlib

from kernels.native import compiler

SOURCE = pathlib.Path(__file__).parent / 'kept_blocks.c'
IDLE_BYTES = 'JAXRL_IDLE_BYTES'  # the variable with the most bytes that it keeps


def build() -> pathlib.Path:
  """Returns the library, for the variable LD_PRELOAD of a process with glibc.

  Raises:
    OSError: It cannot be compiled or loaded here.
  """
  library = compiler.build('blocks', (SOURCE,), options=('-O2', '-pthread'))
  ctypes.CDLL(str(library))  # where it cannot be loaded, each process would complain
  if {' ', ':'} & set(str(library)):
    raise OSError(f'has a path that LD_PRELOAD cannot name: {library}')
  return library
