"""Environments that misbehave: the run goes on without them, or says why it cannot."""

from tests.chaos.trials import Trials, judge, launch

RESETS = {
  'reset raises': 'raise RuntimeError("no")',
  'reset returns None': 'return None',
  'reset returns a number': 'return 3',
  'reset hangs': 'import time; time.sleep(1000)',
  'reset returns bytes': 'return b"x", {}',
  'reset returns 20 MB': 'return "x" * 20_000_000, {}',
}
STEPS = {
  'step raises': 'raise RuntimeError("no")',
  'step raises SystemExit': 'raise SystemExit(3)',
  'step raises KeyboardInterrupt': 'raise KeyboardInterrupt',
  'step hangs': 'import time; time.sleep(1000)',
  'step returns too few': 'return "x", 1.0',
  'step returns None': 'return None',
  'the reward is a text': 'return None, "high", True, False, {}',
  'the reward is nan': 'return None, float("nan"), True, False, {}',
  'the reward is 1e300': 'return None, 1e300, True, False, {}',
  'the reward is an array': (
    'import numpy; return None, numpy.ones(3), True, False, {}'
  ),
  'the observation is 20 MB': 'return "x" * 20_000_000, 0.0, False, False, {}',
  'the observation is an object': 'return object(), 0.0, False, False, {}',
  'the observation has surrogates': 'return "\\ud800", 0.0, False, False, {}',
  'info is a list': 'return None, 1.0, True, False, [1]',
  'info holds itself': 'i = {}; i["i"] = i; return None, 1.0, True, False, i',
  'metrics are texts': 'return None, 1.0, True, False, {"metrics": {"a": "b"}}',
  'it never ends': 'return "go on", 0.0, False, False, {}',
  'it closes stdout': 'import os; os.close(1); return None, 1.0, True, False, {}',
  'it replaces stdout': (
    'import sys; sys.stdout = None; return None, 1.0, True, False, {}'
  ),
  'it leaves threads': (
    'import threading, time; threading.Thread(target=time.sleep, args=(5,)).start(); '
    'return None, 1.0, True, False, {}'
  ),
  'it prints without end': 'print("x" * 1_000_000); return None, 1.0, True, False, {}',
  'it changes the folder': (
    'import os; os.chdir("/"); return None, 1.0, True, False, {}'
  ),
  'it seeds numpy': (
    'import numpy; numpy.random.seed(0); return None, 1.0, True, False, {}'
  ),
}
# Only an environment in a process of its own can do these without ending the run.
ISOLATED_STEPS = {
  'it exits at once': 'import os; os._exit(7)',
  'it kills itself': 'import os; os.kill(os.getpid(), 9)',
  'it takes memory without end': 'self.kept = bytearray(8 << 30); return 0',
  'it never reads its pipe': 'import time; time.sleep(1000)',
}
CODE = """
class Bad:
  uses_dataset = False
  def __init__(self):
    self.steps = 0
  def reset(self, *, seed, options=None):
    {reset}
  def step(self, action):
    self.steps += 1
    {step}
"""
GOOD_RESET = 'return "go", {}'
GOOD_STEP = 'return None, 1.0, True, False, {}'
CONFIG = """
from configs import base, debug
def get_config():
  c = debug.get_config()
  c.env.bad = base.env_section(
    {kind!r}, max_tokens_per_step=4, max_steps=3, timeouts={{'reset': 3, 'step': 3}})
  c.sft.num_steps = 0
  c.num_steps = 2
  c.eval.update(interval=2, num_tasks=2)
  c.rollout.max_retries = 1
  c.rollout.max_consecutive_drops = 6
  return c
"""


def trials(rng, folder) -> Trials:
  """Yields every kind of misbehaviour once, in random order."""
  kinds = [(name, code, GOOD_STEP, '') for name, code in RESETS.items()]
  kinds += [(name, GOOD_RESET, code, '') for name, code in STEPS.items()]
  both = {**STEPS, **ISOLATED_STEPS}
  kinds += [
    (f'{name} (isolated)', GOOD_RESET, code, 'isolated:') for name, code in both.items()
  ]
  for number, place in enumerate(rng.permutation(len(kinds))):
    name, reset, step, prefix = kinds[place]

    def attempt(number=number, reset=reset, step=step, prefix=prefix) -> str:
      file = folder / f'bad{number}.py'
      file.write_text(CODE.format(reset=reset, step=step))
      config = folder / f'config{number}.py'
      config.write_text(CONFIG.format(kind=f'{prefix}{file}:Bad'))
      workdir = f'--workdir={folder / f"run{number}"}'
      sinks = '--config.logging.sinks='
      return judge(*launch(f'--config={config}', workdir, sinks, timeout=120))

    yield name, attempt
