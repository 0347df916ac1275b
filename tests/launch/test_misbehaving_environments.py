"""Environments cannot take a run's streams away or keep it from ending."""

import subprocess
import sys

import pytest

from tests.chaos.environments import CODE, CONFIG, GOOD_RESET
from tests.chaos.trials import TRACEBACK, launch

STEP = """
    import os, sys, threading, time
    from concurrent.futures import ThreadPoolExecutor
    kind = Bad.count = getattr(Bad, 'count', -1) + 1
    if kind % 5 == 0:
      os.close(1)
    elif kind % 5 == 1:
      sys.stdout.close()
      sys.stderr.close()
    elif kind % 5 == 2:
      sys.stdout = sys.stderr = None
    elif kind % 5 == 3:
      threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()
      ThreadPoolExecutor().submit(time.sleep, 1000)
    else:
      os.close(2)
      os.close(0)
    return None, 1.0, True, False, {}
"""


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_keeps_its_streams_and_its_exit(tmp_path):
  (tmp_path / 'bad.py').write_text(CODE.format(reset=GOOD_RESET, step=STEP.strip()))
  config = CONFIG.format(kind=f'{tmp_path / "bad.py"}:Bad')
  (tmp_path / 'config.py').write_text(
    config.replace('max_retries = 1', 'max_retries = 9')
  )
  status, output = launch(
    f'--config={tmp_path / "config.py"}',
    f'--workdir={tmp_path / "run"}',
    '--config.logging.sinks=',
    timeout=300,
  )
  assert status == 0 and TRACEBACK not in output, output
  assert 'Finished.' in output and 'train 2/2' in output
  assert output.splitlines()[-1].startswith('warning: ended, though threads'), output


LEFT = """
import concurrent.futures, multiprocessing, sys, threading, time
from launch.runtime import signal_handler

if __name__ == '__main__':
  signal_handler.EXIT_TIMEOUT_S = 0.3
  left = sys.argv[1]
  if left == 'thread':
    threading.Thread(target=time.sleep, args=(60,), daemon=False).start()
  elif left == 'executor':
    concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 60)
  elif left == 'process':
    multiprocessing.get_context('fork').Process(target=time.sleep, args=(1,)).start()
  print('done')
  signal_handler.exit_process(3)
"""


@pytest.mark.parametrize('left', ['nothing', 'thread', 'executor', 'process'])
def test_what_is_left_running_does_not_hold_up_the_end_of_a_command(left):
  done = subprocess.run(
    [sys.executable, '-c', LEFT, left],
    capture_output=True,
    text=True,
    timeout=30,
    check=False,
  )
  assert (done.returncode, done.stdout) == (3, 'done\n')
  assert ('threads or processes' in done.stderr) == (left != 'nothing')
