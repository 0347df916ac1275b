"""Which runs may be stale, how stale, and what is done about it by default."""

import pytest

from configs import debug
from jaxrl.algorithms import consistency, registry, requirements
from jaxrl.functional import components, corrections
from jaxrl.options import ConfigError
from launch.rollouts import group_samplers
from launch.settings import off_policy
from launch.settings.resolve import resolve_settings


def configured(
  algorithm='grpo',
  *,
  correction='',
  kl_penalty='',
  sampler='',
  sync='fixed',
  **rollout,
):
  config = debug.get_config(algorithm)
  config.weight_sync.policy = sync
  config.rollout.update(rollout)
  config.algorithm.update(
    correction=correction,
    kl_penalty=kl_penalty,
    sampler=sampler,
  )
  return config


def resolve_config(*args, **options):
  config = configured(*args, **options)
  settings = resolve_settings(config)
  return settings, settings.algorithm


def correction(*args, **options):
  part = resolve_config(*args, **options)[1].correction
  return part and components.function_of(part)


STALE = [
  {'async_ratio': 0.5},
  {'sync': 'fixed(interval=2)'},
  {'sync': 'trainer'},
  {'sync': 'explorer'},
  {'engine': 'vllm'},
  {'sampler': 'replay'},
]


@pytest.mark.parametrize('rollout', STALE, ids=str)
def test_stale_and_foreign_rollouts_are_corrected_unless_it_is_switched_off(rollout):
  config, algorithm = resolve_config(**rollout)
  assert components.function_of(algorithm.correction) is corrections.tis
  assert algorithm.old_logprobs_source == 'decoupled'
  assert 'old_logprobs' in requirements.needs(algorithm)
  description = off_policy.describe(config)
  assert 'corrected by tis' in description and 'forward pass' in description
  assert correction(correction='none', **rollout) is None
  assert correction(correction='mis(low=.2)', **rollout) is corrections.mis


def test_synchronous_runs_are_as_they_were():
  config, algorithm = resolve_config()
  assert algorithm.correction is None and algorithm.old_logprobs_source == 'rollout'
  assert off_policy.describe(config) is None
  assert not off_policy.may_be_stale(config) and off_policy.max_staleness(config) == 0


def test_what_is_learned_from_again_is_not_said_to_be_young():
  config, _ = resolve_config(sampler='replay(decay=1)')
  description = off_policy.describe(config)
  assert description.startswith(
    'at most 0 steps old when first learned from, then as old as'
  )
  config, _ = resolve_config(sampler='replay', staleness_policy='drop(max=3)')
  assert off_policy.describe(config).startswith('at most 3 steps old, sync')
  for rule, most in (('drop(max=3)', 3), ('mask(max=3)', None), ('', None)):
    config, _ = resolve_config(sampler='replay', staleness_policy=rule)
    source = group_samplers.RunSource(config, groups=None, tokenizer=None)
    assert source.max_staleness == most


def test_losses_that_are_off_policy_by_themselves_are_left_alone():
  rollout = {'async_ratio': 1.0}
  config, plain = resolve_config('rloo', kl_penalty='none', **rollout)
  assert components.function_of(plain.correction) is corrections.tis
  assert 'forward pass' not in off_policy.describe(config)  # it has no ratio
  for name in ('topr', 'opmd', 'asymre', 'rec', 'kimi', 'sppo', 'm2po', 'raft'):
    config, algorithm = resolve_config(name, **rollout)
    assert algorithm.correction is None, name
    assert "algorithm.correction='tis' for one" in off_policy.describe(config)


def test_every_loss_of_rollouts_that_a_correction_is_put_on_is_one_a_token():
  for name in registry.names():
    algorithm = registry.make(name)
    if consistency.supports_correction(algorithm):
      assert algorithm.batch_unit != 'pair' and algorithm.data_format == 'rollout', name


def test_recompute_has_the_learner_score_old_log_probs():
  config, algorithm = resolve_config(
    staleness_policy='recompute(max=1)', correction='none'
  )
  assert algorithm.old_logprobs_source == 'decoupled' and algorithm.correction is None
  off_policy.validate_off_policy(config)


@pytest.mark.parametrize(
  'rollout, most',
  [
    ({'async_ratio': 0.5}, 1),
    ({'async_ratio': 1.5, 'sync': 'fixed(interval=3)'}, 4),
    ({'async_ratio': 1.0, 'sync': 'trainer'}, 2),
    ({'async_ratio': 1.0, 'sync': 'explorer'}, 3),
    ({'async_ratio': 1.0, 'staleness_policy': 'drop(max=4)'}, 4),
    ({'async_ratio': 1.0, 'staleness_policy': 'mask(max=4)'}, None),
  ],
  ids=str,
)
def test_the_bound_without_a_rule_follows_from_ratio_and_style(rollout, most):
  assert off_policy.max_staleness(resolve_settings(configured(**rollout))) == most


@pytest.mark.parametrize(
  'options, message',
  [
    ({'sync': 'asynchronous'}, "such as --config.rollout.staleness_policy='drop"),
    (
      {'sync': 'fixed(interval=4)', 'staleness_policy': 'drop(max=2)'},
      'tokens are already up to 3 steps old.*raise max, or lower the interval',
    ),
    ({'algorithm': 'rloo', 'staleness_policy': 'recompute'}, 'nothing to recompute'),
  ],
  ids=str,
)
def test_what_cannot_be_together_is_refused(options, message):
  config, _ = resolve_config(**options)
  with pytest.raises(ConfigError, match=message):
    off_policy.validate_off_policy(config)


OWN_LOSS = """
from jaxrl.functional.components import component


@component(on_policy={on_policy})
def mine(logprobs, old_logprobs, advantages, mask, *, scale: float = 1.0):
  return -scale * advantages * logprobs * mask, {{}}
"""


@pytest.mark.parametrize('on_policy', [True, False])
def test_a_users_own_on_policy_loss_is_corrected_by_default(on_policy, tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(OWN_LOSS.format(on_policy=on_policy))
  config = configured(async_ratio=0.5)
  config.algorithm.policy_loss = f'{file}:mine(scale=2.0)'
  algorithm = resolve_settings(config).algorithm
  assert (algorithm.correction is corrections.tis) == on_policy
