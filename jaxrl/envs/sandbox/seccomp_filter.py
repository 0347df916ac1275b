"""The seccomp filter refuses the system calls that lead out of a sandbox's namespaces.

These are the calls of keyrings, which no namespace separates; sockets of other families
than UNIX, INET, INET6 and NETLINK, as VSOCK leads to the host of a virtual machine; and
io_uring, which opens sockets past the filter. The kernel answers as if it had none of
them.
"""

import errno
import platform
import struct

SOCKET_FAMILIES = (1, 2, 10, 16)
_IO_URING = (425, 426, 427)  # on every architecture
# For each machine, the architectures that its programs may have; for each of them, its
# AUDIT_ARCH and its numbers of `socket` and of the refused calls: add_key, request_key,
# keyctl, and `socketcall`, which hides the family from the filter.
_CALLS = {
  'x86_64': (
    (0xC000003E, 41, (248, 249, 250, *_IO_URING)),
    (0x40000003, 359, (102, 286, 287, 288, *_IO_URING)),  # i386
  ),
  'aarch64': (
    (0xC00000B7, 198, (217, 218, 219, *_IO_URING)),
    (0x40000028, 281, (102, 309, 310, 311, *_IO_URING)),  # arm
  ),
}
KEYCTL = {'x86_64': 250, 'aarch64': 219}  # the number of `keyctl`
_X32_BIT = 0x40000000  # x32 has x86-64's architecture, and this bit in its numbers
# Codes of instructions of the classic Berkeley packet filter.
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x50000  # SECCOMP_RET_ALLOW and SECCOMP_RET_ERRNO
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data


def seccomp_program(machine: str = '') -> bytes:
  """Returns the filter.

  Args:
    machine: The machine, as `platform.machine` names it; '' for this one.

  Returns:
    Instructions of 8 bytes each. They are empty where the numbers of a machine's system
    calls are not known here.
  """
  machine = machine or platform.machine()
  if machine not in _CALLS:
    return b''
  allow, missing = _answer(_ALLOW), _answer(_FAIL | errno.ENOSYS)
  program = _instruction(_LOAD, _ARCHITECTURE)
  for architecture, socket_call, refused in _CALLS[machine]:
    calls = _instruction(_LOAD, _NUMBER)
    if machine == 'x86_64':
      calls += _when(_X32_BIT, missing, comparison=_IF_AT_LEAST)
    calls += b''.join(_when(number, missing) for number in refused)
    families = b''.join(_when(family, allow) for family in SOCKET_FAMILIES)
    no_family = _answer(_FAIL | errno.EAFNOSUPPORT)
    calls += _when(
      socket_call, _instruction(_LOAD, _FIRST_ARGUMENT) + families + no_family
    )
    program += _when(architecture, calls + allow)
  return program + missing


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
  return struct.pack('HBBI', code, if_true, if_false, value)


def _answer(action: int) -> bytes:
  return _instruction(_RETURN, action)


def _when(value: int, then: bytes, comparison: int = _IF_EQUAL) -> bytes:
  """Returns instructions that run `then` if the loaded word is `value`."""
  return _instruction(comparison, value, if_false=len(then) // 8) + then
