"""SweTask is a row of SWE-bench Verified: it names a commit, an issue and tests.

See https://huggingface.co/datasets/princeton-nlp/SWE-bench_Verified.
"""

import dataclasses
import json
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class SweTask:
  """One task.

  Attributes:
    instance_id: The task's id.
    repo: The repository as `owner/name`.
    base_commit: The commit that the agent starts from.
    problem_statement: The issue.
    test_patch: The patch that adds the tests.
    fail_to_pass: Ids of the tests that the solution must make pass, as their runner
      writes them.
    pass_to_pass: Ids of the tests that must keep passing.
    patch: The reference solution, for people's use only; '' if the row has none.
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
    """Returns the ids of all tests."""
    return self.fail_to_pass + self.pass_to_pass

  @property
  def files(self) -> tuple[str, ...]:
    """Returns the files of the tests whose ids name one, as pytest's do; each once."""
    named = (test.partition('::') for test in self.tests)
    return tuple(dict.fromkeys(file for file, separator, _ in named if separator))


def read_swe_task(row: Mapping[str, object]) -> SweTask:
  """Parses a row of the dataset.

  Args:
    row: The row.

  Returns:
    The task.

  Raises:
    ValueError: If the row is not a task; the error says why.
  """
  keys = ('instance_id', 'repo', 'base_commit', 'problem_statement', 'test_patch')
  for key in (*keys, 'FAIL_TO_PASS', 'PASS_TO_PASS'):
    if key not in row:
      raise ValueError(
        f'the row is not a task of SWE-bench: it lacks {key!r}; its keys are '
        f'{", ".join(row)}'
      )
  texts = {key: str(row[key] or '') for key in keys}
  task = SweTask(
    **texts,
    fail_to_pass=_ids(row, 'FAIL_TO_PASS'),
    pass_to_pass=_ids(row, 'PASS_TO_PASS'),
    patch=str(row.get('patch') or ''),
  )
  if not task.fail_to_pass:
    raise ValueError(f'{task.instance_id}: FAIL_TO_PASS names no test')
  return task


def _ids(row: Mapping[str, object], key: str) -> tuple[str, ...]:
  """Returns test ids, given as a list or as a list's JSON text."""
  ids = row[key]
  if isinstance(ids, str):
    try:
      ids = json.loads(ids)
    except ValueError as error:
      raise ValueError(f'{row["instance_id"]}: {key} is not JSON: {error}') from error
  if not isinstance(ids, list | tuple) or not all(isinstance(t, str) for t in ids):
    raise ValueError(f'{row["instance_id"]}: {key} must be a list of test names')
  return tuple(ids)
