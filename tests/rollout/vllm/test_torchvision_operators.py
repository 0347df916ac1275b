"""vLLM can be imported where torchvision is a CUDA build and torch is not."""

import importlib.metadata
import subprocess
import sys

import pytest

from jaxrl.rollout.vllm import torchvision_operators
from tests.rollout.vllm import needs


@pytest.mark.parametrize(
  ('torch', 'torchvision', 'needed'),
  [
    ('2.13.0+cpu', '0.28.0', True),
    ('2.13.0+cpu', '0.28.0+cpu', False),
    ('2.13.0', '0.28.0', False),
    ('2.13.0+cpu', None, False),
    (None, None, False),
  ],
)
def test_operators_are_declared_for_mixed_builds_only(
  monkeypatch, torch, torchvision, needed
):
  versions = {'torch': torch, 'torchvision': torchvision}

  def version(name):
    if versions[name] is None:
      raise importlib.metadata.PackageNotFoundError(name)
    return versions[name]

  monkeypatch.setattr(importlib.metadata, 'version', version)
  assert torchvision_operators.is_needed() is needed


class TestEnvironment:
  """The environment of `make env-vllm`."""

  pytestmark = needs.VLLM

  def test_torchvision_is_imported_and_does_not_bring_torch_before(self):
    program = (
      'import sys; assert "torch" not in sys.modules; import torchvision.transforms.v2'
    )
    subprocess.run([sys.executable, '-c', program], check=True, timeout=120)
