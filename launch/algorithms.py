"""Lists the algorithms and their parts, or tells all of one.

python -m launch.algorithms                    every algorithm, a line each
python -m launch.algorithms --parts            every part that an algorithm may take
python -m launch.algorithms NAME …             formula, defaults, needs, paper
python -m launch.algorithms --plugins=FOLDER …  those of a folder of your own too

NAME is an algorithm's or a part's; of your own, package.module:function or
file.py:function.
"""

import argparse
import sys
from collections.abc import Sequence

from jaxrl.algorithms import describe, plugins
from jaxrl.signature import ConfigError


def main(argv: Sequence[str]) -> int:
  """Prints what was asked for; the exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m launch.algorithms',
    usage='%(prog)s [--parts] [--plugins=FOLDER] [NAME …]',
    description='Lists the algorithms, or tells all there is to know of those named.',
  )
  parser.add_argument('names', nargs='*', metavar='NAME', help='an algorithm or a part')
  parser.add_argument('--parts', action='store_true', help='list the parts, by slot')
  parser.add_argument('--plugins', metavar='FOLDER', help='your own beside them')
  flags = parser.parse_args(argv)
  try:
    own = plugins.read(flags.plugins) if flags.plugins else plugins.Plugins()
    if flags.parts:
      print(describe.parts(own.parts.values()))
    for name in flags.names:
      full = own.algorithms.get(name) or own.parts.get(name) or name
      print(describe.describe(full), end='\n\n')
    if not flags.names and not flags.parts:
      print(describe.algorithms(own.algorithms.values()))
      print('\nMore of one: python -m launch.algorithms NAME. Its parts: --parts')
  except ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
