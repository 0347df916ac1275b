"""Functions that take calls, for tests that write calls as a config does."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.component_calls import parse_call, parse_calls
from jaxrl.data import curricula, row_sources, samplers
from jaxrl.data.row_sources import parse_row_sources
from jaxrl.envs import env_registry
from jaxrl.envs.graders import composite
from jaxrl.envs.tools import toolbox
from jaxrl.rollout.queue import group_filters, reward_shaping
from jaxrl.run_options import ModelOptions, RolloutOptions, WeightSyncOptions
from jaxrl.training import optimizers
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.optimizers import OptimizerOptions
from launch.settings import component_options
from launch.settings.component_options import build_algorithm as make_algorithm

__all__ = ['make_algorithm', 'parse_call', 'parse_calls', 'parse_row_sources']


def make_curriculum(text, *arguments):
  return curricula.make_curriculum(parse_call(text), *arguments)


def make_sampler(text, source):
  return samplers.make_sampler(parse_call(text), source)


def make_group_filter(text, *arguments, **options):
  calls = parse_calls(text)
  return group_filters.make_group_filter(calls, *arguments, **options)


def make_reward_shaper(text, limits=None):
  return reward_shaping.make_reward_shaper(parse_calls(text), limits)


def make_grader(text):
  return composite.make_grader(component_options.parse_grader_calls(text))


def make_tools(text):
  return toolbox.make_tools(parse_calls(text))


def load_rows(text, *arguments, **options):
  return row_sources.load_rows(parse_row_sources(str(text)), *arguments, **options)


def make_optimizer(options=None, *, num_steps=None, **fields):
  options = options or OptimizerOptions(**fields)
  return optimizers.make_optimizer(options, num_steps=num_steps)


def split_options(cls, values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns keyword arguments with those that are fields of `cls` as `options`."""
  names = {field.name for field in dataclasses.fields(cls)}
  own = {name: value for name, value in values.items() if name in names}
  rest = {name: value for name, value in values.items() if name not in names}
  return {'options': cls(**own), **rest}


def make_optimizer_spec(text):
  return optimizers.make_optimizer_spec(parse_call(text))


def env_config(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
  return component_options.parse_env_config(name, options, 'env.test.env_config')


def env_factory(name: str, options: Mapping[str, Any] | None = None) -> Any:
  return env_registry.env_factory(name, env_config(name, options or {}))


def parse_packing(text):
  return LearnerOptions(packing=text).packing_plan


def parse_sync_policy(text):
  return WeightSyncOptions(policy=text).sync_policy


def parse_staleness_limit(text):
  return RolloutOptions(staleness_policy=text).staleness_limit


def parse_lora(text):
  return ModelOptions(lora=text).adapters
