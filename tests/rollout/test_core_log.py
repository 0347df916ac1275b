"""Why vLLM's engine core ended is read from what it wrote."""

import os
import subprocess
import sys

import pytest

READ = """
import sys
from jaxrl.rollout.vllm.core_log import CoreLog
print('ValueError: of an earlier run', file=sys.stderr, flush=True)
log = CoreLog()
sys.stderr.write(open(sys.argv[1]).read())
sys.stderr.flush()
open(sys.argv[2], 'w').write(log.last_error())
"""
LINE = '(EngineCore pid=7) ERROR 11-28 10:00:00 [core.py:1108]'
STARTED = f"""(EngineCore pid=7) Process EngineCore:
{LINE} EngineCore failed to start.
{LINE} Traceback (most recent call last):
{LINE}   File "cpu_attn.py", line 88, in __init__
{LINE} NotImplementedError: Unsupported CPU attention configuration: head_dim=16
RuntimeError: Engine core initialization failed. See root cause above. Failed: {{}}
"""
SERVED = f"""{LINE} NotImplementedError: no kernel here takes 31 tokens
{LINE} RuntimeError: Worker failed with error 'no', see the stack trace above
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
asyncio.exceptions.CancelledError: cancelled
"""


@pytest.mark.parametrize(
  'text, cause',
  [
    (
      STARTED,
      'NotImplementedError: Unsupported CPU attention configuration: head_dim=16',
    ),
    (SERVED, 'NotImplementedError: no kernel here takes 31 tokens'),
    ('torch.OutOfMemoryError: 2 GiB\nbye\n', 'torch.OutOfMemoryError: 2 GiB'),
    ('all is well\n', ''),
  ],
)
def test_the_last_error_that_is_a_cause(tmp_path, text, cause):
  (tmp_path / 'text').write_text(text)
  command = [sys.executable, '-c', READ, tmp_path / 'text', tmp_path / 'cause']
  with open(tmp_path / 'stderr', 'w') as stderr:
    subprocess.run(command, stderr=stderr, check=True, env=dict(os.environ))
  assert (tmp_path / 'cause').read_text() == cause


def test_nothing_is_read_from_what_is_no_file(tmp_path):
  (tmp_path / 'text').write_text(STARTED)
  command = [sys.executable, '-c', READ, tmp_path / 'text', tmp_path / 'cause']
  subprocess.run(command, capture_output=True, check=True)
  assert (tmp_path / 'cause').read_text() == ''
