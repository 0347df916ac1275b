"""Makes the runs of recipes, draws their figures and fills in their pages.

python -m recipes                     every recipe, with five seeds
python -m recipes --only=group_size   one of them
python -m recipes --verify=group_size makes a run of seed 0 again, compares its digest
python -m recipes --redraw            only figures and tables, from recipes/data/

Runs that are kept in recipes/data/ are not made again.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from launch.runtime import process_env
from recipes.recipe import limit_cores


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit status.

  Args:
    argv: The command line.
  """
  parser = argparse.ArgumentParser(
    'python -m recipes',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--only', default='', help='recipes, separated by commas')
  parser.add_argument('--seeds', type=int, default=5, help='how many runs of an arm')
  parser.add_argument('--redraw', action='store_true', help='make no runs')
  parser.add_argument('--verify', default='', help='recipe whose first arm to check')
  options = parser.parse_args(argv)
  from recipes import experiment, results
  from recipes.recipe import recipe_names

  if options.verify:
    return verify(options.verify)
  names = [name for name in options.only.split(',') if name] or recipe_names()
  if unknown := sorted({*names} - {*recipe_names()}):
    known = ', '.join(recipe_names())
    parser.error(f'--only: no recipe {unknown[0]}; there are {known}')

  def tell(line: str) -> None:
    print(line, flush=True)

  for name in names:
    if not options.redraw:
      experiment.make_runs(name, range(options.seeds), tell)
    results.write_results(name)
  results.write_index()
  return 0


def verify(name: str) -> int:
  """Makes a run of the first arm with seed 0 again, and compares its digest.

  Args:
    name: Name of the recipe.

  Returns:
    0 if the digest is the one that is kept, else 1.
  """
  from recipes import experiment

  repeated, kept = experiment.repeat_run(name, print)
  print(f'recorded {kept["digest"]} on {kept["machine"]}')
  print(f'now      {repeated["digest"]} on {repeated["machine"]}')
  return int(repeated['digest'] != kept['digest'])


if __name__ == '__main__':
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  limit_cores()
  process_env.apply()
  sys.exit(main(sys.argv[1:]))
