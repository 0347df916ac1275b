"""Process I/O: feeds a process and reads its output, within limits on time and size."""

import contextlib
import os
import selectors
import subprocess
import time

from jaxrl.envs.sandbox.sandbox_api import ExceededLimit

CHUNK_BYTES = 1 << 16  # bytes at a time


def communicate(
  process: subprocess.Popen[bytes],
  report: int,
  stdin: bytes,
  deadline: float,
  max_bytes: int,
) -> tuple[bytes, bytes, bytes, ExceededLimit]:
  """Writes `stdin` and reads stdout, stderr and `report` until all three have ended.

  Args:
    process: The process.
    report: A further descriptor to read.
    stdin: The standard input.
    deadline: When to stop, by time.monotonic().
    max_bytes: The maximum number of bytes of stdout and stderr together; the rest is
      cut off.

  Returns:
    The stdout, the stderr, the report, and which limit was exceeded.
  """
  assert process.stdin is not None
  assert process.stdout is not None
  assert process.stderr is not None
  out = process.stdout.fileno()
  err = process.stderr.fileno()
  unwritten = memoryview(stdin)
  output = {out: bytearray(), err: bytearray(), report: bytearray()}
  limit: ExceededLimit = ''
  with selectors.DefaultSelector() as selector:
    for descriptor in output:
      selector.register(descriptor, selectors.EVENT_READ)
    os.set_blocking(process.stdin.fileno(), False)
    selector.register(process.stdin, selectors.EVENT_WRITE)
    num_open = len(output)
    while num_open and not limit:
      for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
        if key.fileobj is process.stdin:
          unwritten = write_available(process.stdin.fileno(), unwritten)
          if not unwritten:
            selector.unregister(process.stdin)
            process.stdin.close()
        else:
          chunk = os.read(key.fd, CHUNK_BYTES)
          output[key.fd] += chunk
          if not chunk:
            selector.unregister(key.fd)
            num_open -= 1
      if len(output[out]) + len(output[err]) > max_bytes:
        limit = 'output'
      elif num_open and time.monotonic() >= deadline:
        limit = 'time'
  stdout_bytes = bytes(output[out][:max_bytes])
  return (
    stdout_bytes,
    bytes(output[err][: max_bytes - len(stdout_bytes)]),
    bytes(output[report]),
    limit,
  )


def write_available(descriptor: int, unwritten: memoryview) -> memoryview:
  """Writes as much as the descriptor takes.

  Args:
    descriptor: A non-blocking descriptor.
    unwritten: What is to be written.

  Returns:
    What remains to be written; nothing if nobody reads any more.
  """
  with contextlib.suppress(BlockingIOError):
    try:
      return (
        unwritten[os.write(descriptor, unwritten[:CHUNK_BYTES]) :]
        if unwritten
        else unwritten
      )
    except BrokenPipeError:
      return unwritten[:0]
  return unwritten
