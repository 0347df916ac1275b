"""What tests with a real vLLM are marked with."""

import importlib.util
import os

import pytest

VLLM = [
  pytest.mark.vllm,
  pytest.mark.timeout(600),
  pytest.mark.skipif(
    importlib.util.find_spec('vllm') is None,
    reason='vllm is not installed here: make env-vllm, then make test-vllm',
  ),
]


def prepare() -> None:
  """What vLLM must find in the environment before it is imported."""
  for name, value in {
    'GLOO_SOCKET_IFNAME': 'lo',
    'VLLM_HOST_IP': '127.0.0.1',
    'VLLM_LOGGING_LEVEL': 'ERROR',
    'VLLM_NO_USAGE_STATS': '1',
  }.items():
    os.environ.setdefault(name, value)
