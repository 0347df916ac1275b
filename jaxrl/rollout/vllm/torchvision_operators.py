"""Lets a CUDA build of torchvision be imported beside a CPU build of torch.

The package registry has torchvision only as a CUDA build. Beside a CPU build of torch
its compiled operators cannot be loaded, and its import fails at the first one that it
expects to be registered, which ends the import of transformers and of vLLM. Image
processors only need the transforms, which are written in Python. So this module
declares the two operators that the import expects; calling one of them still fails.

`python -m jaxrl.rollout.vllm.torchvision_operators`, which `make env-vllm` runs, has
every Python of its environment call `install` at its start.
"""

import importlib.metadata
import pathlib
import sys
import sysconfig

OPERATORS = (
  'nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
  'qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
)


def is_needed() -> bool:
  """Returns whether torch is a CPU build and the installed torchvision is not."""
  try:
    torch, vision = map(importlib.metadata.version, ('torch', 'torchvision'))
  except importlib.metadata.PackageNotFoundError:
    return False
  return torch.endswith('+cpu') and not vision.endswith('+cpu')


class DeclareOperators:
  """An import hook that declares the operators just before torchvision is imported."""

  def __init__(self):
    self.library = None  # the operators live as long as it does

  def find_spec(self, name: str, path: object = None, target: object = None) -> None:
    """Finds nothing: the usual hooks import torchvision.

    Args:
      name: The module that is imported.
      path: Where its package is.
      target: The module that is reloaded.
    """
    del path, target
    if name == 'torchvision' and self.library is None and is_needed():
      import torch

      self.library = torch.library.Library('torchvision', 'FRAGMENT')
      for operator in OPERATORS:
        self.library.define(operator)


def install() -> None:
  """Installs the hook in this process, once."""
  if not any(isinstance(finder, DeclareOperators) for finder in sys.meta_path):
    sys.meta_path.insert(0, DeclareOperators())


if __name__ == '__main__':
  START = pathlib.Path(sysconfig.get_path('purelib'), 'jaxrl_torchvision.pth')
  MODULE = 'jaxrl.rollout.vllm.torchvision_operators'
  START.write_text(f'import {MODULE}; {MODULE}.install()\n')
