"""One of the ready-made configs, compiled for its own machine."""

from launch import plan
from tests.targets import TARGETS

pytestmark = TARGETS


def test_it_fits(capsys):
  options = ['--config=configs/qwen3_1_7b.py', '--topology=v5e:4x4']
  assert plan.main(options) == 0
  assert 'fits, with' in capsys.readouterr().out
