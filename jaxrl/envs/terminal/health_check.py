"""HealthCheck is a command that must succeed before an agent begins, as in Harbor."""

import dataclasses
import math
import time
from collections.abc import Callable

from jaxrl.envs.sandbox.sandbox_api import Sandbox
from jaxrl.envs.terminal.shell_session import describe_exit

_DEFAULTS = {
  'interval_sec': 5.0,
  'timeout_sec': 30.0,
  'start_period_sec': 0.0,
  'start_interval_sec': 5.0,
}
_MAX_SECONDS = 3600.0
_MAX_RETRIES = 1000


@dataclasses.dataclass(frozen=True)
class HealthCheck:
  """A command that is repeated until it ends with 0, or has failed too often.

  Attributes:
    command: The command, for bash.
    interval_sec: Seconds between two attempts.
    timeout_sec: Seconds that one attempt may take; one that takes longer has failed.
    start_period_sec: Seconds at the beginning in which failures do not count.
    start_interval_sec: Seconds between two attempts in that time.
    retries: Failures after which the check has failed.
  """

  command: str
  interval_sec: float
  timeout_sec: float
  start_period_sec: float
  start_interval_sec: float
  retries: int

  def run(
    self,
    sandbox: Sandbox,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
  ) -> str:
    """Runs the check to its end.

    Args:
      sandbox: A started sandbox.
      clock: Tells the seconds.
      sleep: Waits for a number of seconds.

    Returns:
      Why it has failed; '' if it has passed.

    Raises:
      SandboxError: If the sandbox is stopped meanwhile.
    """
    counts_from = clock() + self.start_period_sec
    failures = 0
    while True:
      counts = clock() >= counts_from
      result = sandbox.exec(['bash', '-c', self.command], seconds=self.timeout_sec)
      if result.code == 0 and not result.limit:
        return ''
      failures += counts
      if counts and failures >= self.retries:
        end = describe_exit(result, self.timeout_sec)
        return (
          f'the health check {self.command[:200]!r} failed {failures} times, at last '
          f'with {end}: {result.text[-500:]} (no server outlives a command here)'
        )
      sleep(self.interval_sec if counts else self.start_interval_sec)


def read_health_check(table: object, key: str) -> HealthCheck | None:
  """Reads a health check of task.toml.

  Args:
    table: Its table; None for no check.
    key: The table's name, for errors.

  Raises:
    ValueError: If it is wrong; the error names the key.
  """
  if table is None:
    return None
  if not isinstance(table, dict):
    raise ValueError(f'{key} must be a table')
  command, retries = table.get('command'), table.get('retries', 3)
  if not isinstance(command, str) or not command.strip() or '\0' in command:
    raise ValueError(f'{key}.command={command!r} must be a command')
  if type(retries) is not int or not 0 <= retries <= _MAX_RETRIES:
    raise ValueError(f'{key}.retries={retries!r} must be from 0 to {_MAX_RETRIES}')
  seconds = {}
  for name, default in _DEFAULTS.items():
    value = table.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value <= _MAX_SECONDS:
      raise ValueError(f'{key}.{name}={value!r} must be from 0 to {_MAX_SECONDS:g}')
    seconds[name] = float(value)
  if not seconds['timeout_sec']:
    raise ValueError(f'{key}.timeout_sec must be above 0')
  return HealthCheck(command=command, retries=retries, **seconds)
