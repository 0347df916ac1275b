"""Processors of this machine."""

import os


def count() -> int:
  """Those that this process may run on."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
