"""Finds real tokenizers, templates and checkpoints, which `make env-real` fetches.

They come from packages alone and lie in `.real/`, which git ignores. Tests that use
them are marked `real` and are skipped, with the reason, where they are absent.
"""

import functools
import pathlib
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2] / '.real'
TOKENIZERS = ('gemma3', 'qwen3', 'gptoss', 'llama3_1', 'deepseek_v3', 'mistral_v1')
SMOLLM2, GEMMA3 = 'smollm2-135m-instruct', 'gemma3-270m'


def find(name: str) -> pathlib.Path:
  """Returns a path below `.real/`, or skips the test if it is absent.

  Args:
    name: The path, such as 'tokenizers/qwen3'.
  """
  path = ROOT / name
  if not path.exists():
    pytest.skip(f'{name} is not in .real/: run make env-real, which needs registries')
  return path


@functools.cache
def load_tokenizer(name: str) -> Any:
  """Returns a real tokenizer as `jaxrl` loads it. Tests share it: copy to change it.

  Args:
    name: One of TOKENIZERS, or a checkpoint.
  """
  from jaxrl.data import tokenizer

  folder = 'tokenizers' if name in TOKENIZERS else 'checkpoints'
  return tokenizer.load_tokenizer(find(f'{folder}/{name}'))


def read_template(name: str) -> str:
  """Returns the chat template of a published model.

  Args:
    name: Its name in the package that has it, such as 'qwen3' or 'gemma4'.
  """
  return (find('templates') / f'{name}.jinja').read_text(encoding='utf-8')


def template_names() -> list[str]:
  """Returns the names of the templates that are there; none without `.real/`."""
  return sorted(path.stem for path in (ROOT / 'templates').glob('*.jinja'))


def import_packages() -> None:
  """Makes the packages of `.real/packages` importable, after the environment's own."""
  path = str(find('packages'))
  if path not in sys.path:
    sys.path.append(path)
