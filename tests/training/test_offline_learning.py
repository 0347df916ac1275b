"""Files through the learner: pairs, rated rows and texts teach what they should."""

import jax
import numpy as np
import pytest

from jaxrl.algorithms import registry
from jaxrl.data.file_sampler import FileSampler
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from tests.data.letters import END, letters
from tests.training import toy

DIGITS = '0123456789'


def row(tokens, reward, member):
  """A prompt of one token, then actions."""
  rng = np.random.default_rng(0)
  trajectory = toy.trajectory(rng, len(tokens), sample_index=member, is_expert=True)
  trajectory.tokens[:] = tokens
  trajectory.action_mask[:] = np.arange(len(tokens)) > 0
  trajectory.rollout_logprobs[:] = 0
  trajectory.rewards[:] = 0
  trajectory.rewards[-1] = reward
  return trajectory


def pairs(count, seed=0):
  """Even tokens are preferred to odd ones, whatever the prompt."""
  rng = np.random.default_rng(seed)
  prompts, drawn = rng.integers(64, size=count), rng.integers(32, size=(count, 2, 4))
  triples = [
    (p, 2 * even, 2 * odd + 1) for p, (even, odd) in zip(prompts, drawn, strict=True)
  ]
  return [[row([p, *a], 1, 0), row([p, *b], 0, 1)] for p, a, b in triples]


def learner(name, rows, rate=0.1, **options):
  optimizer = make_optimizer(OptimizerOptions(learning_rate=rate, max_grad_norm=None))
  algorithm = registry.make(name, options)
  return toy.learner(
    algorithm, num_rows=rows, length_buckets=(16,), optimizer=optimizer
  )


async def learn(trainer, groups, steps):
  return [await trainer.update(groups) for _ in range(steps)]


@pytest.mark.parametrize('name', ['dpo', 'cdpo', 'ipo'])
async def test_preferences_are_learned_and_hold_for_other_pairs(name):
  trainer = learner(name, 64, rate=0.02)
  history = [await trainer.update(pairs(32, seed)) for seed in range(20)]
  assert history[0]['policy/margin'] == pytest.approx(0, abs=1e-6)
  assert history[0]['policy/accuracy'] == 0  # a tie is no success
  assert history[-1]['policy/accuracy'] > 0.9
  margins = [metrics['policy/margin'] for metrics in history]
  assert margins[-1] > margins[10] > margins[1] > 0
  assert history[-1]['loss/policy'] < history[0]['loss/policy']


@pytest.mark.slow
async def test_ipo_stops_at_its_margin():
  for beta in (0.25, 1.0):
    history = await learn(learner('ipo', 8, rate=0.02, beta=beta), pairs(4), 200)
    assert history[-1]['policy/margin'] == pytest.approx(1 / (2 * beta), rel=0.01)
    assert history[-1]['loss/policy'] < 1e-3


@pytest.mark.slow
async def test_cdpo_stops_where_the_odds_are_those_of_wrong_labels():
  history = await learn(
    learner('cdpo', 8, beta=0.5, label_smoothing=0.2), pairs(4), 200
  )
  assert history[-1]['policy/margin'] == pytest.approx(np.log(0.8 / 0.2), rel=0.02)
  plain = await learn(learner('dpo', 8, beta=0.5), pairs(4), 200)
  assert plain[-1]['policy/margin'] > 2 * history[-1]['policy/margin']


async def test_raft_learns_the_best_row_of_a_prompt_alone():
  rows = [
    {'text': f'{DIGITS[i]}{word}', 'reward': i % 2} for i, word in enumerate('37517')
  ]
  texts = await FileSampler(letters(), rows, data_format='text', batch_size=5).next(0)
  groups = [[line for (line,) in texts]]
  for member, line in enumerate(groups[0]):
    line.sample_index = member
    line.rewards[-1] = line.env_group % 2
  best = [[line] for line in groups[0] if line.score > 0]
  raft, sft = learner('raft', 8, data_format='messages'), learner('sft', 8)
  await raft.update(groups)
  await sft.update(best)
  for one, other in zip(*map(jax.tree.leaves, (raft.params, sft.params)), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-6)


async def test_rows_without_log_probs_start_from_ratio_one_when_decoupled():
  options = {
    'data_format': 'preference',
    'old_logprobs_source': 'decoupled',
    'kl_coef': 0.0,
  }
  trainer = learner('grpo', 16, **options)
  metrics = await trainer.update(pairs(8))
  assert metrics['loss/policy'] == pytest.approx(0, abs=1e-5)  # advantages sum to 0
  assert not any(name.startswith('mismatch/') for name in metrics)
  history = await learn(trainer, pairs(8), 20)
  assert np.isfinite(history[-1]['loss/policy'])
  table = np.asarray(trainer.params['bigram']['table'])
  before = toy.params(toy.Bigram)['bigram']['table']
  moved = (table - before).mean(axis=0)
  assert moved[0::2].mean() > 0 > moved[1::2].mean()


async def test_texts_are_learned_to_their_end():
  rows = [{'text': DIGITS[i:] + DIGITS[:i]} for i in range(4)]
  sampler = FileSampler(letters(), rows, data_format='text', batch_size=4, max_length=8)
  trainer, history = learner('cpt', 4), []
  for step in range(60):
    history.append(await trainer.update(await sampler.next(step)))
  assert history[-1]['loss/policy'] < 0.6 < 3 < history[0]['loss/policy']
  table = np.asarray(trainer.params['bigram']['table'])
  follows = {int(np.argmax(table[ord(digit)])) for digit in '0456'}
  assert follows == {ord(digit) for digit in '1567'}
  p = np.exp(table[ord('9')] - np.logaddexp.reduce(table[ord('9')]))
  assert p[ord('0')] > 0.5 and p[ord(END)] > 0.1
