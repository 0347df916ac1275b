"""Feeds a process and gathers what it says, within a time and a size."""

import contextlib
import os
import selectors
import subprocess
import time

from jaxrl.envs.sandbox.base import Limit

PIECE = 1 << 16  # bytes at a time


def collect(
  process: subprocess.Popen[bytes],
  report: int,
  stdin: bytes,
  deadline: float,
  most: int,
) -> tuple[bytes, bytes, bytes, Limit]:
  """Writes `stdin` and reads stdout, stderr and `report` until all three have ended.

  deadline: by time.monotonic(). most: bytes of stdout and stderr together; what
  comes beyond is cut off. Returns what each said and which of the two was exceeded.
  """
  assert process.stdin is not None
  assert process.stdout is not None
  assert process.stderr is not None
  out, err, rest = process.stdout.fileno(), process.stderr.fileno(), memoryview(stdin)
  told = {out: bytearray(), err: bytearray(), report: bytearray()}
  limit: Limit = ''
  with selectors.DefaultSelector() as waiting:
    for descriptor in told:
      waiting.register(descriptor, selectors.EVENT_READ)
    os.set_blocking(process.stdin.fileno(), False)
    waiting.register(process.stdin, selectors.EVENT_WRITE)
    reading = len(told)
    while reading and not limit:
      for key, _ in waiting.select(max(0.0, deadline - time.monotonic())):
        if key.fileobj is process.stdin:
          rest = feed(process.stdin.fileno(), rest)
          if not rest:
            waiting.unregister(process.stdin)
            process.stdin.close()
        else:
          piece = os.read(key.fd, PIECE)
          told[key.fd] += piece
          if not piece:
            waiting.unregister(key.fd)
            reading -= 1
      if len(told[out]) + len(told[err]) > most:
        limit = 'output'
      elif reading and time.monotonic() >= deadline:
        limit = 'time'
  said = bytes(told[out][:most])
  return said, bytes(told[err][: most - len(said)]), bytes(told[report]), limit


def feed(descriptor: int, rest: memoryview) -> memoryview:
  """Writes what fits; returns what is left, nothing when nobody reads."""
  with contextlib.suppress(BlockingIOError):
    try:
      return rest[os.write(descriptor, rest[:PIECE]) :] if rest else rest
    except BrokenPipeError:
      return rest[:0]
  return rest
