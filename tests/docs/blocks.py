"""Code blocks of Markdown pages, run as a reader would type them."""

import os
import pathlib
import re
import shlex
import subprocess

from tests.launch import runs

ROOT = runs.ROOT
BLOCK = re.compile(r'^```(\w*)\n(.*?)^```', re.MULTILINE | re.DOTALL)


def blocks(page: pathlib.Path) -> list[tuple[str, str]]:
  """The (language, text) of each code block of a page."""
  return BLOCK.findall(page.read_text())


def lay_out(folder: pathlib.Path, page_blocks: list[tuple[str, str]]) -> None:
  """Makes a folder like a checkout's, with the files that the blocks name."""
  for name in ('configs', 'examples'):
    (folder / name).symlink_to(ROOT / name)
  for kind, text in page_blocks:
    name = re.match(r'# (\w+\.py)\n', text)
    if kind == 'python' and name:
      (folder / name[1]).write_text(text)


def environment(folder: pathlib.Path) -> dict[str, str]:
  path = os.pathsep.join([str(ROOT), str(folder)])
  return {**runs.environment(), 'PYTHONPATH': path}


def run(command: list[str], folder: pathlib.Path, **variables: str) -> str:
  """Runs a command in the folder; what it printed."""
  done = subprocess.run(
    command,
    cwd=folder,
    env=environment(folder) | variables,
    capture_output=True,
    text=True,
    timeout=900,  # on a machine with others; most take seconds
  )
  assert done.returncode == 0, f'{shlex.join(command)}\n{done.stdout}\n{done.stderr}'
  return done.stdout


def check_make(words: list[str]) -> None:
  """That it works is what running this suite, and .ci, shows."""
  done = subprocess.run(['make', '-n', *words[1:]], cwd=ROOT, capture_output=True)
  assert done.returncode == 0, done.stderr
