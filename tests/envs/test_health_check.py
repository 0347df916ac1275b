"""Health checks of Harbor's tasks, compared with Harbor's own."""

import logging
import types

import pytest

from jaxrl.envs.sandbox import sandbox_api
from jaxrl.envs.terminal import health_check
from tests.envs.harbor_package import harbor
from tests.marks import adapter

HARBOR = adapter('.venv-harbor')


class Codes:
  """An environment whose commands end with given codes, each after two seconds."""

  def __init__(self, codes):
    self.codes, self.now, self.started = list(codes), 0.0, []

  def run(self):
    self.started.append(self.now)
    self.now += 2.0
    return self.codes.pop(0) if self.codes else 1

  def exec(self, command, *, seconds):
    return sandbox_api.ExecResult(self.run(), b'', b'')

  def sleep(self, seconds):
    self.now += seconds


CHECKS = {  # settings and the codes of the attempts
  'at once': ({}, [0]),
  'at last': ({}, [1, 2, 0]),
  'too late': ({}, [1, 1, 1, 0]),
  'grace': ({'start_period_sec': 12.0, 'start_interval_sec': 1.5}, [1] * 6 + [0]),
  'after grace': ({'start_period_sec': 5.0, 'retries': 2}, [1, 1, 1, 1, 0]),
  'one': ({'retries': 1, 'interval_sec': 0.0}, [1]),
  'none': ({'retries': 0}, [1, 0]),
}


@HARBOR
@pytest.mark.parametrize('name', CHECKS)
def test_a_health_check_is_repeated_as_by_harbor(name, monkeypatch):
  settings, codes = CHECKS[name]
  base, check = harbor('environments.base'), {'command': 'check', **settings}
  theirs, ours = Codes(codes), Codes(codes)

  async def run(command, timeout_sec):
    return types.SimpleNamespace(return_code=theirs.run())

  async def sleep(seconds):
    theirs.sleep(seconds)

  environment = types.SimpleNamespace(exec=run, logger=logging.getLogger('harbor'))
  monkeypatch.setattr(base, 'asyncio', types.SimpleNamespace(sleep=sleep))
  clock = types.SimpleNamespace(monotonic=lambda: theirs.now)
  monkeypatch.setattr(base, 'time', clock)
  config = harbor('models.task.config').HealthcheckConfig(**check)
  made = base.BaseEnvironment.run_healthcheck(environment, config)
  has_passed = True
  try:
    made.send(None)
  except StopIteration:
    pass
  except base.HealthcheckError:
    has_passed = False
  found = health_check.read_health_check(check, 'healthcheck')
  problem = found.run(ours, clock=lambda: ours.now, sleep=ours.sleep)
  assert (problem == '') == has_passed
  assert ours.started == theirs.started
  assert has_passed or 'with exit code 1' in problem


@pytest.mark.parametrize(
  'table, words',
  [
    ('x', 'must be a table'),
    ({}, 'command=None'),
    ({'command': ' '}, "command=' '"),
    ({'command': 'x', 'retries': 1.5}, 'retries=1.5'),
    ({'command': 'x', 'retries': True}, 'retries=True'),
    ({'command': 'x', 'timeout_sec': 0}, 'timeout_sec must be above 0'),
    ({'command': 'x', 'interval_sec': -1}, 'interval_sec=-1'),
    ({'command': 'x', 'start_period_sec': float('nan')}, 'start_period_sec=nan'),
  ],
)
def test_what_is_no_check_is_said(table, words):
  with pytest.raises(ValueError, match=words):
    health_check.read_health_check(table, 'healthcheck')
  assert health_check.read_health_check(None, 'healthcheck') is None
