"""Whether a process that a test started, or one below it, has ended."""

import time


def is_running(pid: int) -> bool:
  """False for a process that has ended, even if nobody has waited for it yet."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except (FileNotFoundError, ProcessLookupError):  # the latter ended while we read
    return False


def wait_for_end(pid: int, seconds: float = 60):
  """Waits until a process has ended; fails the test if that takes over `seconds`."""
  end = time.monotonic() + seconds
  while is_running(pid):
    assert time.monotonic() < end, f'process {pid} still runs after {seconds} s'
    time.sleep(0.02)
