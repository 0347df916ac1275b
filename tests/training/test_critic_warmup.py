"""While the critic warms up, nothing but the value head moves."""

import jax
import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.optimizers import OptimizerOptions
from tests.calls import make_optimizer
from tests.marks import extended, slow
from tests.training import toy

RATE = 0.01


def trees(learner):
  state = learner._state
  adam = state.opt_state[0]
  return jax.tree.map(np.array, {'params': state.params, 'mu': adam.mu, 'nu': adam.nu})


def equal(a, b, *, head):
  """Whether the value heads, or all else, are the same bits, and of each tree."""

  def chosen(tree):
    return {k: v for k, v in tree.items() if (k == 'value_head') == head}

  return {
    name: all(
      (x == y).all()
      for x, y in zip(
        jax.tree.leaves(chosen(a[name])), jax.tree.leaves(chosen(b[name])), strict=True
      )
    )
    for name in a
  }


@pytest.mark.parametrize(
  ('kind', 'num_minibatches'),
  [
    (toy.Bigram, 1),
    slow(TransformerLM, 2),
    extended(TransformerLM, 1),
  ],
)
async def test_only_the_value_head_moves_until_it_is_over(kind, num_minibatches):
  learner = toy.learner(
    registry.make('ppo', {'critic_warmup': 2}),
    kind=kind,
    changes={'value_head': True},
    optimizer=make_optimizer(
      OptimizerOptions(learning_rate=RATE, name='adamw(weight_decay=.1)')
    ),
    num_minibatches=num_minibatches,
  )
  seen, metrics = [trees(learner)], []
  for step in range(4):
    metrics.append(await learner.update(toy.groups(step)))
    seen.append(trees(learner))
  for before, after in ((0, 1), (1, 2)):
    same = equal(seen[before], seen[after], head=False)
    assert same == {'params': True, 'mu': True, 'nu': True}
  assert not any(equal(seen[0], seen[1], head=True).values())
  for before, after in ((2, 3), (3, 4)):
    assert not any(equal(seen[before], seen[after], head=False).values())
  assert all(m['loss/policy'] != 0 for m in metrics)
  assert [m['compile/programs'] for m in metrics[1:]] == [0, 0, 0]


async def test_the_policys_first_step_is_as_if_the_run_began_there():
  """Adam's first step is one of ±rate; moments corrected for steps not taken: ×3."""
  options = {
    'changes': {'value_head': True},
    'optimizer': make_optimizer(
      OptimizerOptions(learning_rate=RATE, max_grad_norm=None)
    ),
  }
  late = toy.learner(
    registry.make('ppo', {'critic_warmup': 3, 'kl_coef': 0.0}), **options
  )
  for step in range(3):
    await late.update(toy.groups(step))
  start = np.array(late.params['bigram']['table'])
  await late.update(toy.groups(9))
  moved = np.abs(np.array(late.params['bigram']['table']) - start)
  assert np.quantile(moved[moved > 0], 0.9) == pytest.approx(RATE, rel=1e-3)
  assert moved.max() < 1.001 * RATE


async def test_the_norm_reported_and_clipped_is_the_value_heads():
  """With a clip far under the policy's own norm, the head's step is not shrunk."""
  norms = []
  for warmup in (0, 1):
    learner = toy.learner(
      registry.make('ppo', {'critic_warmup': warmup}), changes={'value_head': True}
    )
    norms.append((await learner.update(toy.groups()))['optimizer/grad_norm'])
  assert 0 < norms[1] < norms[0]
