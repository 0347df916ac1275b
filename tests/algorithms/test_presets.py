"""With nothing but a name, each algorithm runs with the values of its paper's table."""

import pytest

from jaxrl import signature
from jaxrl.algorithms import compose

# name: advantage, policy loss, aggregation, group size, KL as (use, estimator, coef)
K2 = ('loss', 'k2', 1e-3)
K1 = ('penalty', 'k1', 1e-3)
PRESETS = {
  'ppo': ('gae', 'ppo_clip', 'token_mean', 1, K1),
  'grpo': ('grpo', 'ppo_clip', 'token_mean', 8, K2),
  'opmd': ('opmd', 'opmd', 'token_mean', 2, K2),
  'sft': (None, 'sft', 'token_mean', 1, None),
}


def read(algorithm):
  """The preset, off the running object."""
  uses = [('loss', algorithm.kl_loss), ('penalty', algorithm.kl_penalty)]
  terms = [
    (use, signature.unwrap(part).__name__, part.keywords['coef'])
    for use, part in uses
    if part is not None
  ]
  assert len(terms) <= 1
  advantage = algorithm.advantage
  return (
    advantage and signature.unwrap(advantage).__name__,
    signature.unwrap(algorithm.policy_loss).__name__,
    algorithm.aggregation,
    algorithm.group_size,
    terms[0] if terms else None,
  )


def test_every_algorithm_has_a_row():
  assert set(compose.names()) == set(PRESETS)


@pytest.mark.parametrize('name', PRESETS)
def test_preset(name):
  algorithm = compose.make(name)
  assert read(algorithm) == PRESETS[name]
  assert algorithm.entropy_loss is None
  assert algorithm.behaviour == 'rollout'
