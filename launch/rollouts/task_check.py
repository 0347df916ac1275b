"""Checks tasks: the reference solution must score 1, and an empty one must not."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any, cast

from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.seeds import base_seed
from jaxrl.envs.env_registry import (
  ISOLATED_PREFIX,
  Info,
  check_reset_result,
  check_step_result,
  env_factory,
  find_env,
  innermost,
)
from jaxrl.envs.sandbox.sandbox_api import SandboxError
from jaxrl.options import ConfigError, error_prefix
from jaxrl.rollout.thread_pool import ThreadPool, Timeouts
from jaxrl.run_options import EnvOptions
from jaxrl.types import Task
from jaxrl.user_code import describe_error
from launch.rollouts.env_datasets import load_datasets
from launch.runtime.runtime_base import Runtime
from launch.settings.run_settings import RunSettings

# What makes a task broken, by verdict.
BROKEN = {
  'solution_fails': 'the reference solution fails',
  'empty_passes': 'an empty solution passes',
  'setup_fails': 'setup or grading fails',
}
NO_SOLUTION = 'no_solution'
MAX_REASON_CHARS = 400
MAX_PARTS = 64  # of a task that is done in several


@dataclasses.dataclass(frozen=True)
class CheckedTask:
  """The result of checking a task.

  Attributes:
    tag: Its environment tag.
    index: Its row in the data set.
    name: What the row calls it; may be empty.
    verdict: 'ok', a key of BROKEN, or NO_SOLUTION.
    reason: Details of what is broken, in one line.
    output: What its tests printed in the attempt that decided the verdict.
  """

  tag: str
  index: int
  name: str
  verdict: str
  reason: str = ''
  output: str = ''

  @property
  def is_broken(self) -> bool:
    """Whether the task must not be trained on."""
    return self.verdict in BROKEN

  def __str__(self) -> str:
    name = f' ({self.name})' if self.name else ''
    text = self.verdict
    if self.is_broken:
      text = f'broken: {BROKEN[self.verdict]}'
    elif self.verdict == NO_SOLUTION:
      text = 'unverified: it has no reference solution'
    reason = f': {self.reason}' if self.reason else ''
    return f'{self.tag} row {self.index}{name}: {text}{reason}'


class TaskChecker:
  """Plays each task of a run twice, without a model: solved, and with nothing done.

  Attributes:
    num_tasks: How many tasks there are, by tag.
  """

  def __init__(self, settings: RunSettings, *, mode: str):
    """Loads the data sets, and checks the environments' options.

    Args:
      settings: Settings of the run, whose `eval` says which tasks to check.
      mode: 'train' or 'val'; seeds are those of this mode's episodes.

    Raises:
      ConfigError: For an environment whose tasks cannot be checked, or wrong options.
    """
    self._settings, self._mode = settings, mode
    self._make_env = {
      tag: _make_checkable(tag, env) for tag, env in settings.env.items()
    }
    tests = load_datasets(settings, Runtime()).tests
    self._datasets = cast('dict[str, GlobalDataset]', tests)  # none plays seeds
    self.num_tasks = {tag: data.get_size() for tag, data in self._datasets.items()}

  async def check(self) -> AsyncIterator[CheckedTask]:
    """Yields the results in the order of the rows, tag after tag.

    At most `max_concurrency` tasks of a tag are checked at the same time.
    """
    for tag, env in self._settings.env.items():
      pool = ThreadPool(env.max_concurrency)
      slots = asyncio.Semaphore(env.max_concurrency)
      checks = [
        asyncio.create_task(self._check_row(tag, row, pool, slots))
        for row in range(self.num_tasks[tag])
      ]
      try:
        for check in checks:
          yield await check
      finally:
        for check in checks:
          check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        pool.close()

  async def _check_row(
    self, tag: str, row: int, pool: ThreadPool, slots: asyncio.Semaphore
  ) -> CheckedTask:
    data: GlobalDataset = self._datasets[tag]
    seed = base_seed(self._settings.seed, self._mode, tag) + row
    item = data.get_data_item(seed, row)
    assert item is not None
    key = self._settings.dataset.columns.solution
    if key in item:
      item['solution'] = item[key]
    task = Task(seed=seed, index=row, item=item)
    async with slots:
      verdict, reason, output = await self._check_task(tag, task, pool)
    return CheckedTask(tag, row, _task_name(item), verdict, reason, output)

  async def _check_task(
    self, tag: str, task: Task, pool: ThreadPool
  ) -> tuple[str, str, str]:
    """Returns the verdict on a task, the reason and the output of its tests."""
    verdict = 'ok'
    for solve in (True, False):
      try:
        info = await self._play(tag, task, pool, solve=solve)
      except _SolutionError as error:
        return 'solution_fails', _one_line(str(error)), ''
      except Exception as error:
        what = 'with the reference solution' if solve else 'with nothing done'
        return 'setup_fails', _one_line(f'{what}: {describe_error(error)}'), ''
      if info is None:
        verdict = NO_SOLUTION
      elif solve and not _is_solved(info):
        return 'solution_fails', _why(info), _output(info)
      elif not solve and _is_solved(info):
        return 'empty_passes', '', _output(info)
    return verdict, '', ''

  async def _play(
    self, tag: str, task: Task, pool: ThreadPool, *, solve: bool
  ) -> dict[str, Any] | None:
    """Plays one episode; returns its reward and info, None without a solution."""
    env_settings = self._settings.env[tag]
    timeouts: Timeouts = env_settings.timeouts
    env: Any = await pool.run(self._make_env[tag], timeout=timeouts.reset)
    try:
      result = await pool.run(_reset, env, task, timeout=timeouts.reset)
      check_reset_result(env, result)
      name, _ = innermost(env_settings.env_type, env_settings.env_config)
      reply = find_env(name).empty_reply  # pyright: ignore
      for _ in range(MAX_PARTS):
        if solve:
          # An agent would have this long: a solution is not a single step.
          limit = timeouts.step * env_settings.max_steps
          reply = await _apply_solution(env, pool, limit)
        if reply is None:
          return None
        result = await pool.run(env.step, reply, timeout=timeouts.step)
        _, reward, terminated, truncated, info = check_step_result(env, result)
        if terminated or truncated:
          return {**info, 'reward': reward}
      raise RuntimeError(f'{MAX_PARTS} such replies do not end the episode')
    finally:
      end = getattr(env, 'kill', None) or getattr(env, 'close', None)
      if end is not None:
        with contextlib.suppress(Exception):  # the verdict is known
          end()


class _SolutionError(Exception):
  """The reference solution cannot be applied."""


async def _apply_solution(env: Any, pool: ThreadPool, timeout: float) -> str | None:
  try:
    return await pool.run(env.apply_solution, timeout=timeout)
  except SandboxError:  # through no fault of the solution
    raise
  except Exception as error:
    raise _SolutionError(describe_error(error)) from error


def _make_checkable(tag: str, env: EnvOptions) -> Any:
  """Returns the factory of a tag's environment, without what wraps it."""
  prefix = ISOLATED_PREFIX if env.env_type.startswith(ISOLATED_PREFIX) else ''
  name, options = innermost(env.env_type, env.env_config)
  env_class = find_env(name)
  if not hasattr(env_class, 'apply_solution') or not hasattr(env_class, 'empty_reply'):
    raise ConfigError(
      f'--check: the tasks of env.{tag} cannot be checked, as {name!r} has no '
      'reference solutions: --check is for code, swe, terminal_bench, and classes of '
      'your own with apply_solution and empty_reply'
    )
  with error_prefix(f'env.{tag}'):
    return env_factory(prefix + name.removeprefix(ISOLATED_PREFIX), options)


def _reset(env: Any, task: Task) -> Any:
  return env.reset(seed=task.seed, options={'task': task})


def _is_solved(info: Info) -> bool:
  """Returns whether an episode counts as solved: by its accuracy, or its reward."""
  return info.get('metrics', {}).get('accuracy', info['reward']) >= 1


def _why(info: Info) -> str:
  """Says in one line why an episode is not solved: failed tests, or the last output."""
  columns = info.get('columns', {})
  failed = str(columns.get('failed') or '').split('\n')
  if failed[0]:
    more = f' and {len(failed) - 3} more' if len(failed) > 3 else ''
    return _one_line(', '.join(failed[:3]) + more)
  if verdicts := columns.get('verdicts'):
    return _one_line(f'its tests are {verdicts}')
  return _one_line(_output(info)[-200:]) or f'the reward is {info["reward"]:g}'


def _output(info: Info) -> str:
  return str(info.get('columns', {}).get('test_output') or '')


def _one_line(text: str) -> str:
  line = ' '.join(text.split())
  return line if len(line) <= MAX_REASON_CHARS else f'{line[:MAX_REASON_CHARS]}…'


def _task_name(item: Any) -> str:
  """Returns what a row calls its task: an id, or a question of a few words."""
  for key in ('instance_id', 'task_id', 'question'):
    text = str(item.get(key) or '')
    if text and len(text) <= 60 and '\n' not in text:
      return text
  return ''
