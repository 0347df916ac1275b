"""A-3PO scores nothing before an update; decoupled PPO pays a forward pass for that."""

from jaxrl.algorithms import registry, requirements
from jaxrl.models.transformer_lm import TransformerLM
from launch.planning import flops
from tests.training import toy

SHAPE = 64


def flops_by_program(name, options=None):
  algorithm = registry.make(name, options)
  assert ('old_logprobs' in requirements.needs(algorithm)) == bool(options)
  learner = toy.learner(algorithm, kind=TransformerLM, length_buckets=(SHAPE,))
  programs = learner.trace(SHAPE)[1]
  return {name: flops.count_flops(traced.jaxpr) for name, traced in programs.items()}


def test_a_quarter_of_the_operations_of_a_decoupled_step_is_saved():
  """A forward pass beside the forward and backward of the update itself."""
  decoupled = flops_by_program('dapo', {'old_logprobs_source': 'decoupled'})
  saved = flops_by_program('a3po')
  share = 1 - sum(saved.values()) / sum(decoupled.values())
  print(f'saved {share:.1%}: {decoupled} {saved}')
  assert decoupled['train'] == saved['train']
  assert saved.get('prepare', 0) == 0 and decoupled['prepare'] > 0
  assert 0.15 < share < 0.3
