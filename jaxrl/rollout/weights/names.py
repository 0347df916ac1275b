"""What everything is called in a transport.

part: number of the publisher, one for each process of the learner. run: a random word,
new with every publisher, so that nobody mistakes a restarted one's versions for others.
"""


def head(part: int) -> str:
  """Which version is the newest."""
  return f'{part}-head.json'


def of_run(part: int, run: str) -> str:
  """How every name begins below."""
  return f'{part}-run-{run}-'


def of_part(part: int) -> str:
  return f'{part}-run-'


def manifest(part: int, run: str, version: int) -> str:
  return f'{of_run(part, run)}{version}.json'


def blob(part: int, run: str, version: int, number: int) -> str:
  return f'{of_run(part, run)}{version}-{number}.safetensors'


def repair(part: int, run: str, version: int, region: int, chunk: int) -> str:
  """A chunk's full bytes once more."""
  return f'{of_run(part, run)}{version}-repair-{region}-{chunk}.safetensors'
