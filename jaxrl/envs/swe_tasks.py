"""Tasks as SWE-bench Verified has them: rows that name a commit, an issue and tests.

https://huggingface.co/datasets/princeton-nlp/SWE-bench_Verified
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Instance:
  """One row. fail_to_pass, pass_to_pass: ids of tests, as their runner writes them.

  patch: the reference solution, '' where the row has none; only for people's use.
  """

  instance_id: str
  repo: str
  base_commit: str
  problem_statement: str
  test_patch: str
  fail_to_pass: tuple[str, ...]
  pass_to_pass: tuple[str, ...]
  patch: str = ''

  @property
  def tests(self) -> tuple[str, ...]:
    return self.fail_to_pass + self.pass_to_pass

  @property
  def files(self) -> tuple[str, ...]:
    """The files of those tests whose ids name one, as pytest's do; each once."""
    named = (test.partition('::') for test in self.tests)
    return tuple(dict.fromkeys(file for file, mark, _ in named if mark))


def read_instance(row: Mapping[str, Any]) -> Instance:
  """A row of the data set. ValueError says what is wrong with it."""
  keys = ('instance_id', 'repo', 'base_commit', 'problem_statement', 'test_patch')
  for key in (*keys, 'FAIL_TO_PASS', 'PASS_TO_PASS'):
    if key not in row:
      raise ValueError(
        f'this row is no task of SWE-bench: it has no {key!r}, only {", ".join(row)}'
      )
  texts = {key: str(row[key] or '') for key in keys}
  instance = Instance(
    **texts,
    fail_to_pass=_ids(row, 'FAIL_TO_PASS'),
    pass_to_pass=_ids(row, 'PASS_TO_PASS'),
    patch=str(row.get('patch') or ''),
  )
  if not instance.fail_to_pass:
    raise ValueError(f'{instance.instance_id}: FAIL_TO_PASS names no test')
  return instance


def _ids(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
  """Test ids: a list, or one written as JSON."""
  ids = row[key]
  if isinstance(ids, str):
    try:
      ids = json.loads(ids)
    except ValueError as error:
      raise ValueError(f'{row["instance_id"]}: {key} is no JSON: {error}') from error
  if not isinstance(ids, list | tuple) or not all(isinstance(t, str) for t in ids):
    raise ValueError(f'{row["instance_id"]}: {key} is no list of test names')
  return tuple(ids)
