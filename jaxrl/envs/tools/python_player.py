"""Runs pieces of Python one after the other, in one namespace. Runs inside the sandbox.

A program: its source is given to `python -I -c`. Each line of stdin is a JSON object
{code, mark}. What the code prints, the value of its last expression and the trace of
what it raises come on stdout, and then the mark.
"""

import ast
import io
import json
import linecache
import os
import sys
import traceback
from typing import Any

NAME = '<code>'


def run(code: str, space: dict[str, Any]) -> None:
  """Runs the code as an interactive session does: the last value is shown."""
  linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
  tree = ast.parse(code, NAME)
  last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
  exec(compile(tree, NAME, 'exec'), space)
  if isinstance(last, ast.Expr):
    value = eval(compile(ast.Expression(last.value), NAME, 'eval'), space)
    if value is not None:
      print(repr(value))


def tell(error: BaseException) -> None:
  """Prints the trace of an error, but for the frames of this program."""
  trace = error.__traceback__
  while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
    trace = trace.tb_next
  traceback.print_exception(type(error), error, trace, limit=-10, file=sys.stdout)


def main() -> None:
  asked, answers = os.fdopen(os.dup(0)), os.dup(1)
  nothing = os.open(os.devnull, os.O_RDONLY)
  os.dup2(nothing, 0)  # code that reads its input finds none
  os.dup2(1, 2)  # what it says, in order
  me, out = os.getpid(), sys.stdout
  if isinstance(out, io.TextIOWrapper):
    out.reconfigure(errors='backslashreplace')
  space: dict[str, Any] = {'__name__': '__main__'}
  for line in asked:
    ask = json.loads(line)
    sys.stdout = sys.stderr = out
    try:
      run(ask['code'], space)
    except BaseException as error:  # sys.exit() too: the next piece is still to come
      sys.stdout = out
      tell(error)
    if os.getpid() != me:
      os._exit(0)  # a child that the code forked
    try:
      out.flush()
    except (OSError, ValueError):  # the code has closed it
      os._exit(1)
    os.write(answers, ask['mark'].encode())
  os._exit(0)  # whatever threads the code has left


if __name__ == '__main__':
  main()
