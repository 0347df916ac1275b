"""Runs a program's tests one after the other; it is executed inside the sandbox.

This is a program of its own, whose source is passed to `python -I -c`. It reads one
JSON object from stdin: `program`, `cases` (each with `input`, with `function` and
`args`, or with `statements`), `seconds` and `output_bytes`, the limits of one case. It
writes a JSON line per case to stdout: `output` (what the program printed, or its result
as JSON), `stderr` (its end), `code` (exit status) and `limit` ('time', 'output' or '').
It does not know the expected results, but for those in statements.
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

# What LeetCode and LiveCodeBench import before a program.
IMPORTS = """
import bisect, builtins, collections, copy, datetime, functools, heapq, io, itertools
import json, math, operator, random, re, statistics, string, sys, typing
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from json import *
from builtins import *
from typing import *
sys.setrecursionlimit(50000)
"""
STDERR_BYTES = 1000  # kept of what a program writes to stderr, from its end


def run_program(
  job: dict[str, Any], case: dict[str, Any], pipe: int, stderr: int, input_file: int
) -> None:
  """Runs the program in this process; returns so that Python ends as the program does.

  Args:
    job: The request that stdin held.
    case: The test.
    pipe: The file descriptor for the output or result.
    stderr: The file descriptor for stderr.
    input_file: The file descriptor of the input.
  """
  cpu = min(math.ceil(job['seconds']), resource.getrlimit(resource.RLIMIT_CPU)[1])
  resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
  os.setsid()
  is_call = 'input' not in case
  devnull = os.open(os.devnull, os.O_WRONLY)
  for target, source in enumerate((input_file, devnull if is_call else pipe, stderr)):
    os.dup2(source, target)
  sys.stdin = os.fdopen(0, closefd=False)  # the old one has reached its end
  module = types.ModuleType('solution' if is_call else '__main__')
  sys.modules[module.__name__] = module
  sys.argv = ['solution.py']
  if 'function' in case or 'testtype' in case:
    exec(IMPORTS, module.__dict__)
  imported = dict(module.__dict__)
  exec(compile(job['program'], 'solution.py', 'exec'), module.__dict__)
  if is_call:
    if 'statements' in case:
      exec(compile(case['statements'], 'tests.py', 'exec'), module.__dict__)
      result = True
    else:
      result = find_function(module, case['function'], imported)(*case['args'])
    text = json.dumps(result).encode()
    while text:
      text = text[os.write(pipe, text) :]


def find_function(module: types.ModuleType, name: str, imported: dict[str, Any]) -> Any:
  """Returns a function of the program, or a method of its class Solution.

  Args:
    module: The program as a module.
    name: The name of the function.
    imported: What the module had before the program ran, such as `re.search`.

  Returns:
    The function.
  """
  own = module.__dict__.get(name)
  if own is not None and own is not imported.get(name):
    return own
  if not hasattr(module, 'Solution'):
    raise NameError(f'the program defines no {name!r}')
  return getattr(module.Solution(), name)


def read_output(
  process: int, pipe: int, stderr: int, deadline: float, max_bytes: int
) -> tuple[bytes, bytes, str]:
  """Reads the pipes until the process ends or exceeds a limit.

  Args:
    process: The process id.
    pipe: The file descriptor of the output.
    stderr: The file descriptor of stderr, of which any amount may come.
    deadline: When to stop, by time.monotonic().
    max_bytes: The maximum number of bytes of the output.

  Returns:
    The output, the end of stderr, and the limit that was exceeded: 'time', 'output' or
    ''.
  """
  handle = os.pidfd_open(process)
  descriptors, output, errors, limit = [pipe, handle, stderr], b'', b'', ''
  while not limit:
    seconds_left = deadline - time.monotonic()
    ready = select.select(descriptors, [], [], max(0.0, seconds_left))[0]
    if pipe in ready:  # before the handle, so that no output is lost at the end
      chunk = os.read(pipe, 1 << 16)
      output += chunk
      if not chunk:
        descriptors.remove(pipe)
    elif stderr in ready:
      chunk = os.read(stderr, 1 << 16)
      errors = (errors + chunk)[-STDERR_BYTES:]
      if not chunk:
        descriptors.remove(stderr)
    if handle in ready and pipe not in ready:
      break  # what it leaves running may write to stderr for ever
    if len(output) > max_bytes:
      limit = 'output'
    elif seconds_left <= 0:
      limit = 'time'
  os.close(handle)
  return output[:max_bytes], errors, limit


def write_line(line: dict[str, Any]) -> None:
  """Writes one JSON line to stdout.

  Args:
    line: The object to write.
  """
  text = json.dumps(line).encode() + b'\n'
  while text:
    text = text[os.write(1, text) :]


def main() -> None:
  """Runs all tests of the request."""
  with open(0, 'rb', closefd=False) as stdin:
    job = json.load(stdin)
  if any('function' in case or 'testtype' in case for case in job['cases']):
    exec(IMPORTS, {})  # once here, so that each test finds the modules loaded
  for case in job['cases']:
    pipe, pipe_in = os.pipe()
    stderr, stderr_in = os.pipe()
    with tempfile.TemporaryFile() as input_file:
      input_file.write(case.get('input', '').encode())
      input_file.seek(0)
      process = os.fork()
      if process == 0:
        os.close(pipe)
        os.close(stderr)
        return run_program(job, case, pipe_in, stderr_in, input_file.fileno())
    os.close(pipe_in)
    os.close(stderr_in)
    deadline = time.monotonic() + job['seconds']
    output, errors, limit = read_output(
      process, pipe, stderr, deadline, job['output_bytes']
    )
    os.close(pipe)
    os.close(stderr)
    for kill in (os.killpg, os.kill):  # it may not be a process group yet
      with contextlib.suppress(ProcessLookupError):
        kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    output_text, error_text = (
      part.decode('utf-8', 'replace') for part in (output, errors)
    )
    write_line(
      {'output': output_text, 'stderr': error_text, 'code': code, 'limit': limit}
    )


if __name__ == '__main__':
  main()
