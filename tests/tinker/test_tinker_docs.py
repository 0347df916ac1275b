"""What docs/tinker.md shows works, with the official client."""

import os
import subprocess
import sys

import pytest

from tests.docs import blocks
from tests.tinker import tiny

pytest.importorskip('tinker')
pytestmark = pytest.mark.clients
PAGE = blocks.ROOT / 'docs' / 'tinker.md'


def test_the_script_trains_and_samples(server, checkpoint, tmp_path):
  (script,) = [text for kind, text in blocks.blocks(PAGE) if kind == 'python']
  env = {
    **os.environ,
    'MODEL': str(checkpoint),
    'TINKER_API_KEY': tiny.KEY,
    'TINKER_BASE_URL': server.url,
  }
  done = subprocess.run(
    [sys.executable, '-c', script], env=env, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  first, *_, last = (float(line) for line in done.stdout.splitlines()[:4])
  assert last < first


def test_the_page_names_every_loss():
  from jaxrl.rollout.tinker import tenant_losses

  text = PAGE.read_text()
  for name in tenant_losses.LOSSES:
    assert f'`{name}`' in text, name
