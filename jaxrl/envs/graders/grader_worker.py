"""The worker process of `grader_processes` runs functions that may never return.

It reads requests from the socket whose descriptor is its first argument, each a JSON
object {target, args, options, needs, limit}. It answers each with 'ready' (what it
needs is imported, so the clock starts) and then with a JSON object {value}, or
{error, place} with the file and line of the user's code that raised the error.
"""

import contextlib
import importlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jaxrl.envs.env_registry import as_real_number
from jaxrl.envs.graders.grader_processes import MAX_ANSWER_BYTES
from jaxrl.options import JsonObject
from jaxrl.user_code import import_object, user_place

MAX_MEMORY_BYTES = 4 << 30  # bytes of address space
_ORPHAN_GRACE_S = 2.0  # seconds beyond its limit after which an orphan ends itself
_instances: dict[tuple[str, str], Any] = {}  # by target and options


def serve(pipe: Connection) -> None:
  """Answers requests until the other end is closed.

  Args:
    pipe: The connection to the parent.
  """
  while True:
    try:
      request = json.loads(pipe.recv_bytes())
    except EOFError:
      return
    try:
      fn = _load(request)
      pipe.send_bytes(b'ready')
      # The parent kills a call that is too long; if it is gone, the kernel does.
      signal.setitimer(signal.ITIMER_REAL, request['limit'] + _ORPHAN_GRACE_S)
      options = request['options']
      if isinstance(fn, type):
        answer = {'value': _instance(request['target'], options)(*request['args'])}
      else:
        answer = {'value': fn(*request['args'], **options)}
      answer = json.dumps(answer, default=_plain_number)
      if len(answer) > MAX_ANSWER_BYTES:  # json.dumps writes ASCII
        raise ValueError(f'it returned more than {MAX_ANSWER_BYTES} bytes')
    except MemoryError:
      os._exit(137)  # the process is in an unknown state
    except Exception as error:
      text, place = f'{type(error).__name__}: {error}', user_place(error)
      answer = json.dumps({'error': text, 'place': place})
    signal.setitimer(signal.ITIMER_REAL, 0)
    pipe.send_bytes(answer.encode())


def _plain_number(value: object) -> float:
  """Returns a scalar of numpy, JAX or torch as a number, for JSON."""
  number = as_real_number(value)
  if number is None:
    shape = getattr(value, 'shape', None)
    what = f'{type(value).__name__} of shape {shape}' if shape else type(value).__name__
    raise TypeError(f'it returned a {what}, which is not a number')
  return number


def _load(request: JsonObject) -> Callable[..., Any]:
  for name in request['needs']:
    importlib.import_module(name)
    logging.getLogger(name).setLevel(logging.ERROR)
  return import_object(request['target'])


def _instance(target: str, options: JsonObject) -> Any:
  """Returns an object of a class of graders, which is made once in this process."""
  key = target, json.dumps(options, sort_keys=True)
  if key not in _instances:
    _instances[key] = import_object(target)(**options)
  return _instances[key]


def main() -> None:
  """Limits this process's memory and serves requests."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
  serve(Connection(int(sys.argv[1])))


if __name__ == '__main__':
  main()
