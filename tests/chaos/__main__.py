"""Tries to break runs, and prints what was tried and what survived.

    python -m tests.chaos [--seed=0] [--minutes=30] [--only=NAME,NAME] [--table=FILE]

Each campaign has a share of the time and a random generator of its own, so that the
same seed tries the same things in the same order; a slower machine tries fewer. The
table replaces the one in FILE, such as docs/reliability.md.
"""

import argparse
import collections
import os
import pathlib
import platform
import re
import sys
import tempfile
import time
import zlib

import numpy as np

from tests import conftest  # noqa: F401  # quick compilation, as in the tests
from tests.chaos import disk, environments, inputs, kills, sandbox, services
from tests.chaos.trials import Campaign, Trial, run_campaign

ONE_LINE = 'it works, or says in one line what is wrong'
CAMPAIGNS = (
  Campaign(
    'kills', 'the same command ends at the same bits', kills.single_process, 6
  ),
  Campaign('ray', 'the same command ends at the same bits', kills.ray_parts, 7),
  Campaign(
    'environments', 'the run goes on, or says in one line why not',
    environments.trials, 6,
  ),
  Campaign('checkpoints', 'the same bits from an older one', inputs.checkpoints, 2),
  Campaign('data', ONE_LINE, inputs.data_files, 2),
  Campaign('models', ONE_LINE, inputs.model_folders, 1),
  Campaign('settings', ONE_LINE, inputs.component_calls, 1),
  Campaign('disk', 'one line, no hang', disk.trials, 2),
  Campaign('sandbox', 'no way out, and an end', sandbox.programs, 1.5),
  Campaign(
    'requests', 'errors without tracebacks; honest clients are served',
    services.fuzzed_requests, 1,
  ),
  Campaign(
    'connections', 'honest clients are served', services.silent_connections, 0.5
  ),
)  # fmt: skip
BEGIN, END = '<!-- chaos -->', '<!-- end -->'


def table(trials: list[Trial], seed: int) -> str:
  """Returns the outcome as Markdown."""
  by_campaign = collections.defaultdict(list)
  for trial in trials:
    by_campaign[trial.campaign].append(trial)
  date = time.strftime('%Y-%m-%d')
  lines = [
    f'Seed {seed}, {date}, {os.cpu_count()} cores, Python {platform.python_version()}.',
    '',
    '| campaign | survival means | tried | survived |',
    '|---|---|---:|---:|',
  ]
  for campaign in CAMPAIGNS:
    if done := by_campaign.get(campaign.name):
      survived = sum(not trial.fault for trial in done)
      cells = campaign.name, campaign.survival, str(len(done)), str(survived)
      lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines)


def main() -> int:
  """Runs the campaigns; returns 1 if a run did not survive."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--minutes', type=float, default=30)
  parser.add_argument('--only', default='', help='names of campaigns')
  parser.add_argument('--table', default='', help='file whose table is replaced')
  options = parser.parse_args()
  names = options.only.split(',') if options.only else [c.name for c in CAMPAIGNS]
  chosen = [campaign for campaign in CAMPAIGNS if campaign.name in names]
  unit = 60 * options.minutes / sum(campaign.minutes for campaign in chosen)
  trials: list[Trial] = []
  with tempfile.TemporaryDirectory(prefix='chaos-') as root:
    for campaign in chosen:
      folder = pathlib.Path(root) / campaign.name
      folder.mkdir()
      rng = np.random.default_rng([options.seed, zlib.crc32(campaign.name.encode())])
      print(f'{campaign.name}: {campaign.survival}', flush=True)
      count = 0
      for trial in run_campaign(campaign, rng, folder, unit * campaign.minutes):
        trials.append(trial)
        count += 1
        if trial.fault:
          print(f'  FAILED {trial.name}: {trial.fault}', flush=True)
      survived = sum(not t.fault for t in trials if t.campaign == campaign.name)
      print(f'  {survived} of {count} survived', flush=True)
  text = table(trials, options.seed)
  print(f'\n{text}')
  if options.table:
    path = pathlib.Path(options.table)
    page, pattern = path.read_text(), f'{BEGIN}.*?{END}'
    block = f'{BEGIN}\n{text}\n{END}'
    path.write_text(re.sub(pattern, lambda _: block, page, flags=re.DOTALL))
  return int(any(trial.fault for trial in trials))


if __name__ == '__main__':
  sys.exit(main())
