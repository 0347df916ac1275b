"""The core log finds out why vLLM's engine core, a process of its own, has ended.

vLLM's front end only says that the core is dead, and to look above. What the core wrote
went to the standard streams that it shares with this process, which are files in an
actor of Ray's.
"""

import os
import re
import stat

TAIL_BYTES = 1 << 18  # of each stream, which are looked at
MAX_CHARS = 300  # of the line that is told
_ERROR = re.compile(
  r'(?:^|[\s\]])((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt): .+)$'
)
# What vLLM says when another error came before.
_CONSEQUENCES = (
  'EngineDeadError',
  'EngineGenerateError',
  'Engine core initialization failed',
  'CancelledError',
  'the stack trace above',
)


class CoreLog:
  """What is written to the standard streams from now on, where they are files."""

  def __init__(self):
    """Remembers how long the files are now."""
    # stderr first: there the core's own traceback ends in its error.
    self._starts = {fd: _size(fd) for fd in (2, 1)}

  def last_error(self) -> str:
    """Returns the last line that names an error; '' if none can be found."""
    for fd, start in self._starts.items():
      for line in reversed(_read_tail(fd, start).splitlines()):
        found = _ERROR.search(line)
        if found and not any(words in line for words in _CONSEQUENCES):
          return found[1].strip()[:MAX_CHARS]
    return ''


def _size(fd: int) -> int:
  """Returns the size of the file that a descriptor writes to; −1 if it is none."""
  try:
    status = os.fstat(fd)
  except OSError:
    return -1
  return status.st_size if stat.S_ISREG(status.st_mode) else -1


def _read_tail(fd: int, start: int) -> str:
  """Returns the end of what was written after `start`."""
  if start < 0:
    return ''
  try:
    with open(f'/proc/self/fd/{fd}', 'rb') as file:
      size = os.fstat(file.fileno()).st_size
      file.seek(max(start if start <= size else 0, size - TAIL_BYTES))
      return file.read(TAIL_BYTES).decode(errors='replace')
  except OSError:
    return ''
