"""The algorithm of a run, as its config has it."""

import logging
import warnings

from jaxrl.algorithms import compose
from jaxrl.config import Config
from jaxrl.types import Algorithm
from launch import off_policy

log = logging.getLogger(__name__)


def make_algorithm(config: Config) -> Algorithm:
  """The algorithm, with the run's own limit on lengths where it leaves that open."""
  options = config.algorithm.to_dict()
  with warnings.catch_warnings(record=True) as doubts:
    warnings.simplefilter('always')
    algorithm = compose.make(options.pop('name'), options)
  for doubt in doubts:
    log.warning('%s', doubt.message)
  plays = algorithm.schema == 'rollout' and config.env
  limits = [response_limit(config, tag) for tag in config.env] if plays else []
  algorithm = off_policy.adapt(config, algorithm)
  return compose.with_length(algorithm, max(limits or [config.batch.max_length]))


def response_limit(config: Config, tag: str) -> int:
  """Tokens that one attempt of a tag may write, all of its turns together."""
  env = config.env[tag]
  return min(config.batch.max_length, env.max_steps * env.max_tokens_per_step)
