"""Environments: Gymnasium's API over text.

`reset(*, seed, options={'task': Task}) -> (observation, info)` and
`step(action) -> (observation, reward, terminated, truncated, info)`. An observation
is text or a list of chat messages; `None` from reset says there is nothing to play.
An action is the model's reply as text. `info` may hold `metrics` (name → number),
`suffix` (text for the turn template) and `columns` (values for dumps). A class whose
tasks are seeds alone says `uses_dataset = False`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxrl import signature
from jaxrl.envs.process import ProcessEnv

Observation = str | list[dict[str, Any]] | None

ENVS = {
  'math': 'jaxrl.envs.math:MathEnv',
  'frozen_lake': 'jaxrl.envs.frozen_lake:FrozenLakeEnv',
}


class Env(Protocol):
  """One environment. It sees neither tokens nor the cluster, and no global RNG."""

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[Observation, dict[str, Any]]: ...

  def step(
    self, action: str
  ) -> tuple[Observation, float, bool, bool, dict[str, Any]]: ...


def find(name: str) -> Callable[..., Env]:
  """The class of a known name, of 'package.module:Class', or of 'file.py:Class'."""
  if name not in ENVS and ':' not in name:
    raise signature.unknown(name, ENVS, 'environment', 'env_type')
  return signature.resolve(ENVS.get(name, name))


def factory(
  name: str, options: Mapping[str, Any] | None = None, *, isolate: bool = False
) -> Callable[[], Env]:
  """A function that makes the environment; name and options are checked at once.

  isolate: each in a process of its own, which is killed if it hangs.
  """
  options = dict(options or {})
  env = find(name)
  signature.check_options(env, options, f'environment {name!r}')
  if isolate:
    return lambda: ProcessEnv(ENVS.get(name, name), options)
  return lambda: env(**options)
