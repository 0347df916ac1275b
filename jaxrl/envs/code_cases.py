"""Plays a program's test cases, one after the other. Runs inside the sandbox.

A program: its source is given to `python -I -c`. On stdin comes one JSON object:
`program`, `cases` (each with `input`, or with `function` and `args`), `seconds` and
`output` (bytes) of one case. For each case a JSON line goes to stdout: `said` (what
the program printed, or the result as JSON), `code` (exit status) and `limit` ('time',
'output' or ''). What is right is not known here.
"""

import contextlib
import json
import math
import os
import resource
import select
import signal
import sys
import tempfile
import time
import types
from typing import Any


def become(job: dict[str, Any], case: dict[str, Any], pipe: int, given: int) -> None:
  """Runs the program in this process; returns so that Python ends as it does."""
  cpu = min(math.ceil(job['seconds']), resource.getrlimit(resource.RLIMIT_CPU)[1])
  resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
  os.setsid()
  called = 'function' in case
  nowhere = os.open(os.devnull, os.O_WRONLY)
  for target, source in enumerate((given, nowhere if called else pipe, nowhere)):
    os.dup2(source, target)
  sys.stdin = os.fdopen(0, closefd=False)  # the old one has seen its end
  module = types.ModuleType('solution' if called else '__main__')
  sys.modules[module.__name__] = module
  sys.argv = ['solution.py']
  exec(compile(job['program'], 'solution.py', 'exec'), module.__dict__)
  if called:
    result = find(module, case['function'])(*case['args'])
    text = json.dumps(result).encode()
    while text:
      text = text[os.write(pipe, text) :]


def find(module: types.ModuleType, name: str) -> Any:
  """A function of the program, or a method of its class Solution."""
  if hasattr(module, name) or not hasattr(module, 'Solution'):
    return getattr(module, name)
  return getattr(module.Solution(), name)


def watch(process: int, pipe: int, deadline: float, most: int) -> tuple[bytes, str]:
  """What comes through the pipe until the process ends, and which limit ended it."""
  handle = os.pidfd_open(process)
  waiting, said, limit = [pipe, handle], b'', ''
  while not limit:
    left = deadline - time.monotonic()
    ready = select.select(waiting, [], [], max(0.0, left))[0]
    if pipe in ready:  # first, so that nothing is lost at the end
      piece = os.read(pipe, 1 << 16)
      said += piece
      if not piece:
        waiting.remove(pipe)
    elif handle in ready:
      break
    if len(said) > most:
      limit = 'output'
    elif left <= 0:
      limit = 'time'
  os.close(handle)
  return said[:most], limit


def tell(line: dict[str, Any]) -> None:
  """Writes one line."""
  text = json.dumps(line).encode() + b'\n'
  while text:
    text = text[os.write(1, text) :]


def main() -> None:
  with open(0, 'rb', closefd=False) as stdin:
    job = json.load(stdin)
  for case in job['cases']:
    pipe, pipe_in = os.pipe()
    with tempfile.TemporaryFile() as given:
      given.write(case.get('input', '').encode())
      given.seek(0)
      process = os.fork()
      if process == 0:
        os.close(pipe)
        return become(job, case, pipe_in, given.fileno())
    os.close(pipe_in)
    deadline = time.monotonic() + job['seconds']
    said, limit = watch(process, pipe, deadline, job['output'])
    os.close(pipe)
    for kill in (os.killpg, os.kill):  # it may not have become a group yet
      with contextlib.suppress(ProcessLookupError):
        kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    tell({'said': said.decode('utf-8', 'replace'), 'code': code, 'limit': limit})


if __name__ == '__main__':
  main()
