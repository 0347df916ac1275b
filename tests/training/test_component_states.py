"""What parts carry from batch to batch: controllers, running moments, keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import advantages, kl, kl_controllers, losses
from jaxrl.functional.components import component
from jaxrl.options import ConfigError
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from jaxrl.types import Advantages, Algorithm
from tests.calls import make_algorithm
from tests.marks import slow_except
from tests.training import toy

STILL = make_optimizer(OptimizerOptions(learning_rate=0.0))
OTHER = {'ref_params': toy.params(toy.Bigram, seed=1)}


async def train(algorithm, batches, **options):
  learner = toy.learner(algorithm, **options)
  return [await learner.update(groups) for groups in batches], learner


@pytest.mark.parametrize('target, sign', [(1e9, -1), (1e-9, 1)])
async def test_the_coefficient_follows_the_kl_a_fifth_at_most(target, sign):
  """Unmoved parameters: the term grows by its scale alone, 7 rows a batch."""
  controller = f'adaptive(target={target}, horizon=70.)'
  algorithm = make_algorithm('grpo', {'kl_controller': controller, 'kl_coef': 0.1})
  options = {'optimizer': STILL, **OTHER}
  batches = [toy.groups(sizes=(4, 3))] * 3
  metrics, learner = await train(algorithm, batches, **options)
  (fixed,), _ = await train(
    make_algorithm('grpo', {'kl_coef': 0.1}), batches[:1], **options
  )
  growth = 1 + sign * 0.2 * 7 / 70
  for step, row in enumerate(metrics):
    assert row['kl/coef'] == pytest.approx(0.1 * growth**step, rel=1e-5)
    want = fixed['loss/kl'] * growth**step
    assert want > 0 and row['loss/kl'] == pytest.approx(want, rel=1e-5)
  scale = learner.algorithm_state['kl_controller']['scale']
  assert float(scale) == pytest.approx(growth**3, rel=1e-5)


async def test_the_controller_steers_the_penalty_by_the_kl_at_coefficient_one():
  """Near its target it moves by (kl/target − 1)·n/horizon, whatever the coefficient."""
  plain = Algorithm(
    policy_loss=losses.vanilla, advantage=advantages.reinforce, kl_penalty=kl.k2
  )
  options = {'optimizer': STILL, **OTHER}
  (first,), _ = await train(plain, [toy.groups()], **options)
  measured = first['kl/penalty']
  controller = functools.partial(
    kl_controllers.adaptive, target=measured / 1.1, horizon=80.0
  )
  for coef in (0.5, 0.01):
    penalty = functools.partial(kl.k2, coef=coef)
    algorithm = dataclasses.replace(plain, kl_penalty=penalty, kl_controller=controller)
    rows, _ = await train(algorithm, [toy.groups()] * 2, **options)
    assert rows[0]['kl/behaviour'] == pytest.approx(measured, rel=1e-5)
    assert rows[0]['kl/penalty'] == pytest.approx(coef * measured, rel=1e-5)
    for name in ('kl/coef', 'kl/penalty'):
      growth = rows[1][name] / rows[0][name]
      assert growth == pytest.approx(1 + 0.1 * 8 / 80, rel=1e-4)


async def test_running_moments_are_those_of_all_batches():
  part = functools.partial(advantages.normalise, mean='running', std='running')
  algorithm = Algorithm(policy_loss=losses.vanilla, advantage=part)
  batches = [toy.groups(seed) for seed in range(3)]
  metrics, learner = await train(algorithm, batches)
  scores = [[row.score for group in groups for row in group] for groups in batches]
  seen = np.concatenate(scores)
  state = learner.algorithm_state['advantage']
  assert float(state['count']) == len(seen)
  assert float(state['mean']) == pytest.approx(seen.mean(), rel=1e-4)
  lengths = [row.action_mask.sum() for group in batches[2] for row in group]
  a = (np.array(scores[2]) - seen.mean()) / seen.std(ddof=1)
  want = np.average(a, weights=lengths)
  assert metrics[2]['advantage/mean'] == pytest.approx(want, rel=1e-3)


async def test_a_state_may_stay_as_it_is():
  """What is handed on unchanged is not the buffer that a step gives away."""

  @component(init_state=lambda: {'n': jnp.full((3,), 2.0)})
  def same(rewards, mask, state):
    return Advantages(jnp.where(mask, state['n'][0], 0), state=state)

  algorithm = Algorithm(policy_loss=losses.vanilla, advantage=same)
  metrics, learner = await train(algorithm, [toy.groups()] * 3, num_minibatches=2)
  assert [m['advantage/mean'] for m in metrics] == [pytest.approx(2)] * 3
  assert learner.algorithm_state['advantage']['n'].tolist() == [2, 2, 2]


async def test_a_state_without_a_mark_is_an_error():
  def part(rewards, mask):
    return Advantages(0 * rewards, state=jnp.ones(()))

  with pytest.raises(ConfigError, match='part returns a state but is not marked'):
    await train(Algorithm(policy_loss=losses.vanilla, advantage=part), [toy.groups()])


async def test_step_and_key_are_columns_that_change_without_compiling():
  """Each step draws anew; the same seed draws the same."""

  def loss(logprobs, mask, step, key):
    return -logprobs, {'step': step, 'draw': jax.random.uniform(key)}

  algorithm = Algorithm(policy_loss=loss)
  runs = [
    (await train(algorithm, [toy.groups()] * 3, seed=seed, num_micro_batches=2))[0]
    for seed in (5, 5, 2**40 + 6)
  ]
  draws = [[row['policy/draw'] for row in run] for run in runs]
  assert draws[0] == draws[1] and len({*draws[0], *draws[2]}) == 6
  assert [row['policy/step'] for row in runs[0]] == [0, 1, 2]
  assert all(row['compile/programs'] == 0 for row in runs[0][1:])


async def test_rec_drops_another_surplus_each_step():
  algorithm = make_algorithm('rec', {'advantage': "rec(drop='balance')"})
  groups = toy.groups(sizes=(8,))
  for row in groups[0]:
    row.rewards[-1] = float(row is groups[0][0])
  learner = toy.learner(algorithm)
  kept = []
  for _ in range(4):
    await learner.update(groups)
    kept.append(tuple(np.flatnonzero(np.asarray(learner.advantages).any(axis=1))))
  assert all(len(rows) == 2 and rows[0] == 0 for rows in kept)
  assert len(set(kept)) > 1


def tempered(state, advantages):
  return {'state': state + 1, 'advantages': state * advantages}


RUNNING = Algorithm(
  policy_loss=losses.ppo_clip,
  advantage=functools.partial(advantages.normalise, mean='running', std='running'),
  kl_loss=functools.partial(kl.k3, coef=0.1),
  kl_controller=functools.partial(kl_controllers.adaptive, horizon=50.0),
  prepare=tempered,
  init_state=lambda: jnp.ones(()),
)
ALGORITHMS = {
  'running': RUNNING,
  'critic': make_algorithm(
    'ppo', {'critic_warmup': 4, 'kl_controller': 'adaptive(target=1., horizon=50.)'}
  ),
  'drawn': make_algorithm('rec', {'advantage': "rec(drop='balance')"}),
  'corrected': make_algorithm('m2po', {'correction': 'tis'}),
}


async def run(folder, name, steps):
  """Trains to `steps` from the newest checkpoint; saves at the end."""
  changes = {'value_head': True} if name == 'critic' else {}
  learner = toy.learner(
    ALGORITHMS[name],
    changes=changes,
    num_minibatches=2,
    optimizer=make_optimizer(OptimizerOptions(learning_rate=0.1)),
  )
  checkpointer = Checkpointer(folder)
  if checkpointer.latest_step is not None:
    await learner.restore(checkpointer)
  metrics = []
  while learner.step < steps:
    metrics.append(await learner.update(toy.groups(learner.step)))
  await learner.save(checkpointer, {}, wait=True)
  checkpointer.close()
  return jax.tree.map(np.asarray, learner._arrays()), metrics[-1]


FAST = ('running', 'critic', 'drawn')


@pytest.mark.parametrize('name', slow_except(FAST, ALGORITHMS))
async def test_interrupted_is_uninterrupted_bit_for_bit(name, tmp_path):
  whole, metrics = await run(tmp_path / 'a', name, 6)
  await run(tmp_path / 'b', name, 3)
  resumed, again = await run(tmp_path / 'b', name, 6)
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)
  for key, value in metrics.items():
    if not key.startswith(('time/', 'compile/', 'tokens/learned')):
      assert again[key] == value, key
  state = whole['state'].algorithm_state
  moved = {'running': 'advantage', 'critic': 'critic_warmup'}
  if name in moved:
    assert float(jax.tree.leaves(state[moved[name]])[0]) > 0
