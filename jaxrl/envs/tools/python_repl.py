"""Runs pieces of Python one after the other in one namespace, inside the sandbox.

This is a program of its own, whose source is passed to `python -I -c`. Each line of
stdin is a JSON object {code, mark}. What the code prints, the value of its last
expression and the traceback of what it raises come on stdout, followed by the mark.
"""

import ast
import io
import json
import linecache
import os
import sys
import traceback
from typing import Any

CODE_FILENAME = '<code>'


def run_code(code: str, namespace: dict[str, Any]) -> None:
  """Runs the code as an interactive session does: the last value is shown.

  Args:
    code: The source.
    namespace: The namespace.
  """
  linecache.cache[CODE_FILENAME] = (
    len(code),
    None,
    code.splitlines(keepends=True),
    CODE_FILENAME,
  )
  tree = ast.parse(code, CODE_FILENAME)
  last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
  exec(compile(tree, CODE_FILENAME, 'exec'), namespace)
  if isinstance(last, ast.Expr):
    value = eval(compile(ast.Expression(last.value), CODE_FILENAME, 'eval'), namespace)
    if value is not None:
      print(repr(value))


def print_traceback(error: BaseException) -> None:
  """Prints the traceback of an error, without the frames of this program.

  Args:
    error: The error.
  """
  trace = error.__traceback__
  while trace is not None and trace.tb_frame.f_code.co_filename != CODE_FILENAME:
    trace = trace.tb_next
  traceback.print_exception(type(error), error, trace, limit=-10, file=sys.stdout)


def main() -> None:
  """Runs requests until stdin ends."""
  requests, answers = os.fdopen(os.dup(0)), os.dup(1)
  devnull = os.open(os.devnull, os.O_RDONLY)
  os.dup2(devnull, 0)  # code that reads its input finds none
  os.dup2(1, 2)  # stdout and stderr in order
  pid, out = os.getpid(), sys.stdout
  if isinstance(out, io.TextIOWrapper):
    out.reconfigure(errors='backslashreplace')
  namespace: dict[str, Any] = {'__name__': '__main__'}
  for line in requests:
    request = json.loads(line)
    sys.stdout = sys.stderr = out
    try:
      run_code(request['code'], namespace)
    except BaseException as error:  # also sys.exit(), because more requests may follow
      sys.stdout = out
      print_traceback(error)
    if os.getpid() != pid:
      os._exit(0)  # a child that the code forked
    try:
      out.flush()
    except (OSError, ValueError):  # the code has closed it
      os._exit(1)
    os.write(answers, request['mark'].encode())
  os._exit(0)  # whatever threads the code has left


if __name__ == '__main__':
  main()
