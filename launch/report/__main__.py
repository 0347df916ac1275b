"""Renders a run's report again: `python -m launch.report WORKDIR`."""

import pathlib
import sys

from jaxrl.options import ConfigError
from launch.report.report_sink import write_report

if __name__ == '__main__':
  if sys.argv[1:] in (['--help'], ['-h']):
    print(
      'usage: python -m launch.report WORKDIR\n\nRenders WORKDIR/report.html again.'
    )
    sys.exit()
  if len(sys.argv) != 2:
    sys.exit('usage: python -m launch.report WORKDIR')
  if not (pathlib.Path(sys.argv[1]) / 'metrics.jsonl').exists():
    sys.exit(f'error: {sys.argv[1]} has no metrics.jsonl: name the folder of a run')
  try:
    print(write_report(pathlib.Path(sys.argv[1]), 'finished'))
  except (ConfigError, OSError) as error:
    sys.exit(f'error: {error}')
