"""Disks without room: the run says so in one line, and never hangs."""

import resource
import signal

from tests.chaos.trials import Trials, judge, launch
from tests.launch import runs


def trials(rng, folder) -> Trials:
  """Runs that may not write files beyond a size, as on a disk that is full."""
  for number, kib in enumerate([1, 16, 64, 256, 1024, *rng.integers(1, 2000, size=8)]):

    def limit(kib=int(kib)) -> None:
      signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing raises OSError
      resource.setrlimit(resource.RLIMIT_FSIZE, (kib << 10, kib << 10))

    def attempt(number=number, limit=limit) -> str:
      config = [f'--config={runs.DEBUG}', f'--workdir={folder / f"run{number}"}']
      options = ('--config.num_steps=4', '--config.checkpoint.save_interval=1')
      options += ('--config.sft.num_steps=0', '--config.logging.sinks=tensorboard')
      return judge(*launch(*config, *options, preexec_fn=limit))

    yield f'files of at most {kib} KiB', attempt
