"""Lists every kind of component that a config names, or describes one in detail.

python -m launch.algorithms                    algorithms, and the other kinds
python -m launch.algorithms KIND               the components of a kind, a line each
python -m launch.algorithms --parts            every part that an algorithm may take
python -m launch.algorithms NAME …             what it is, its options, where it is from
python -m launch.algorithms --plugins=FOLDER …  includes your own, from a folder

KIND is such as samplers, envs or policy_losses. NAME is the name of a component, or,
for your own, package.module:name or file.py:name.
"""

import argparse
from collections.abc import Sequence

from jaxrl.options import ConfigError
from launch.logging.error_pages import print_error, with_flags
from launch.runtime.signal_handler import run_command
from launch.settings import catalogue, plugins


def main(argv: Sequence[str]) -> int:
  """Prints the requested descriptions and returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m launch.algorithms',
    usage='%(prog)s [--parts] [--plugins=FOLDER] [KIND or NAME …]',
    description='Lists algorithms and all other components, or describes those named.',
  )
  parser.add_argument(
    'names', nargs='*', metavar='NAME', help='a component, or a kind of components'
  )
  parser.add_argument('--parts', action='store_true', help='list the parts, by slot')
  parser.add_argument('--plugins', metavar='FOLDER', help='your own beside them')
  flags = parser.parse_args(argv)
  try:
    plugin_set = plugins.read(flags.plugins) if flags.plugins else plugins.Plugins()
    if flags.parts:
      print(with_flags(catalogue.parts(plugin_set)))
    pages = [
      p for name in flags.names for p in catalogue.component_pages(name, plugin_set)
    ]
    if pages:
      print(catalogue.RULE.join(pages))
    if not flags.names and not flags.parts:
      print(catalogue.index(plugin_set))
      print('\nMore: python -m launch.algorithms KIND or NAME. All parts: --parts')
  except ConfigError as error:
    print_error(error)
    return 2
  return 0


if __name__ == '__main__':
  run_command(main)
