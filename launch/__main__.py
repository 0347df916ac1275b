"""Lists the commands: `python -m launch`."""

import sys
from collections.abc import Sequence

from launch.runtime.signal_handler import run_command

COMMANDS = {
  'train': 'trains a model; the same command resumes the run',
  'evaluate': "scores a checkpoint on a config's tasks or on a published benchmark",
  'rollout': 'generates rollouts for a whole data set and stores the trajectories',
  'play': 'shows one episode, turn by turn and token by token',
  'serve': "serves a checkpoint through OpenAI's API",
  'tinker': 'serves the Tinker API, to train and sample with its scripts',
  'plan': 'predicts whether a run fits on other machines, and how long a step takes',
  'algorithms': 'lists and describes algorithms and every other kind of component',
  'view': 'shows runs in a browser, during and after them',
  'report': "renders a run's report.html again",
}


def main(argv: Sequence[str]) -> int:
  """Lists the commands; returns 2 if it was asked for anything else."""
  for name, summary in COMMANDS.items():
    print(f'python -m launch.{name:<12} {summary}')
  print('\nEach has --help. docs/concepts.md explains the words.')
  wrong = [word for word in argv if word not in ('--help', '-h')]
  if wrong:
    print(f'error: python -m launch takes no {wrong[0]!r}', file=sys.stderr)
  return 2 if wrong else 0


if __name__ == '__main__':
  run_command(main)
