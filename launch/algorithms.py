"""Lists the algorithms and their parts, or describes one in detail.

python -m launch.algorithms                    every algorithm, a line each
python -m launch.algorithms --parts            every part that an algorithm may take
python -m launch.algorithms NAME …             formula, defaults, needs, paper
python -m launch.algorithms --plugins=FOLDER …  includes your own, from a folder

NAME is the name of an algorithm or a part, or, for your own, package.module:function
or file.py:function.
"""

import argparse
import sys
from collections.abc import Sequence

from jaxrl.algorithms import describe
from jaxrl.call_strings import ConfigError
from launch.settings import plugins


def main(argv: Sequence[str]) -> int:
  """Prints the requested descriptions and returns the exit status."""
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
    plugin_set = plugins.read(flags.plugins) if flags.plugins else plugins.Plugins()
    if flags.parts:
      print(describe.parts(plugin_set.parts.values()))
    for name in flags.names:
      spec = plugin_set.algorithms.get(name) or plugin_set.parts.get(name) or name
      print(describe.describe(spec), end='\n\n')
    if not flags.names and not flags.parts:
      print(describe.algorithms(plugin_set.algorithms.values()))
      print('\nMore of one: python -m launch.algorithms NAME. Its parts: --parts')
  except ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
