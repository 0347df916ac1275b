"""Lists the algorithms, or tells of one: `python -m launch.algorithms [NAME]`.

NAME is a built-in name, or your own: package.module:function or file.py:function.
"""

import sys
from collections.abc import Sequence

from jaxrl.algorithms import compose, describe
from jaxrl.signature import ConfigError


def main(argv: Sequence[str]) -> int:
  """Prints a line for each algorithm, or all there is to know of those named."""
  try:
    for name in argv:
      print(describe.describe(name), end='\n\n')
    for name in [] if argv else compose.names():
      print(f'{name:22} {describe.summary(name)}')
  except ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
