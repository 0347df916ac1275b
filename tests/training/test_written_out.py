"""Learners on eight devices against the papers' formulas written out in numpy.

Two updates from one batch, each in two micro-batches, on a mesh of data, fsdp and
tensor: losses, metrics, norms of gradients and the new parameters. Rows differ in
length, prompts and observations are masked, groups are unequal, and some tokens are
clipped.
"""

import functools

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.optimizers import OptimizerOptions
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.teacher_scoring import Teachers
from jaxrl.types import Trajectory
from tests.calls import make_algorithm, make_optimizer
from tests.marks import slow_except, slow_in_gate
from tests.training import toy, written_out

RATE, MAX_NORM, UPDATES = 20.0, 0.15, 2
VOCABULARY = toy.CONFIG.vocab_size


def table(seed):
  """Logits of a bigram model that differ by about 1."""
  return 50 * toy.params(toy.Bigram, seed=seed)['bigram']['table']


def make_row(rng, policy, length, **fields):
  """A prompt and one or two turns; the sampler is off by factors up to e^±1.5."""
  mask = np.arange(length) >= rng.integers(1, 4)
  if length > 8:
    mask[rng.integers(5, length - 2)] = False  # an observation
  tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
  policy_logprobs = policy.logprobs(tokens)[np.arange(length), tokens]
  rollout = np.where(mask, policy_logprobs + rng.uniform(-1.5, 1.5, length), 0)
  rewards = np.zeros(length, np.float32)
  rewards[np.flatnonzero(mask)[[0, -1]]] = rng.normal(size=2)
  version = np.where(mask, 0, -1).astype(np.int32)
  return Trajectory(tokens, mask, np.float32(rollout), rewards, version, **fields)


def rollouts(policy, sizes=(4, 3, 2, 1)):
  """Unequal groups; the third has equal rewards, the last is one sample alone."""
  rng = np.random.default_rng(0)
  groups = [
    [
      make_row(rng, policy, rng.integers(5, 15), env_group=g, sample_index=m)
      for m in range(size)
    ]
    for g, size in enumerate(sizes)
  ]
  for row in groups[2]:
    row.rewards[:] = 0
    row.rewards[written_out.actions(row)[-1]] = 0.7
  return groups


def turns(policy):
  """Two groups of two samples that have one to three turns, each turn a row."""
  rng = np.random.default_rng(1)
  return [
    [
      make_row(rng, policy, rng.integers(5, 15), env_group=g, sample_index=m, turn=k)
      for m in range(2)
      for k in range(1 + (g + m) % 3)
    ]
    for g in range(2)
  ]


def pairs(policy):
  """As from a file; the chosen answer comes first or second."""
  rng = np.random.default_rng(2)
  groups = [
    [make_row(rng, policy, n, env_group=g, is_expert=True) for n in lengths]
    for g, lengths in enumerate(rng.integers(5, 15, (5, 2)))
  ]
  for g, pair in enumerate(groups):
    for m, row in enumerate(pair):
      row.rewards[:] = 0
      row.rewards[-1] = float(m == g % 2)
  return groups


def mixed(policy):
  """Rollouts, and rows of an expert that are longer than they."""
  rng = np.random.default_rng(3)
  experts = [
    [make_row(rng, policy, 15, env_group=9 + g, is_expert=True)] for g in range(3)
  ]
  for (row,) in experts:
    row.rollout_logprobs[:] = 0
  return rollouts(policy) + experts


def taught(policy, k=5):
  """Rollouts that bring their teacher's log-probs, and its k likeliest tokens."""
  groups, teacher = rollouts(policy), written_out.Bigram(table(7))
  for row in written_out.flat(groups):
    logprobs = teacher.logprobs(row.tokens)
    ids = np.argsort(-logprobs, axis=-1)[:, :k]
    row.extras['teacher_logprobs'] = np.float32(written_out.chosen(teacher, row))
    row.extras['teacher_topk_ids'] = np.int32(ids)
    likeliest = np.take_along_axis(logprobs, ids, axis=-1)
    row.extras['teacher_topk_logprobs'] = np.float32(likeliest)
  return groups


def formula(name, **options):
  return functools.partial(getattr(written_out, name), **options)


def corrected(rule, *bounds):
  return formula('corrected', rule=getattr(written_out, rule)(*bounds))


PLAIN = {'kl_coef': 0.0}
# What is checked: algorithm, its options, rows and formula.
CASES = {
  'drgrpo': ('drgrpo', {'length': 10.0}, rollouts, formula('drgrpo', length=10.0)),
  'reinforce++': (
    'reinforce_plus_plus',
    {'kl_coef': 0.1},
    rollouts,
    formula('reinforce_plus_plus', coef=0.1),
  ),
  'tis': (
    'grpo',
    PLAIN | {'correction': 'tis(cap=1.5)'},
    rollouts,
    corrected('tis', 1.5),
  ),
  'tis as a loss': (
    'grpo',
    PLAIN | {'policy_loss': 'tis(cap=1.5)'},
    rollouts,
    formula('truncated', cap=1.5),
  ),
  'icepop': (
    'grpo',
    PLAIN | {'correction': 'icepop(low=.6, high=1.8)'},
    rollouts,
    corrected('icepop', 0.6, 1.8),
  ),
  'mis': (
    'grpo',
    PLAIN | {'correction': 'mis(low=.8, high=1.5)'},
    rollouts,
    corrected('mis', 0.8, 1.5),
  ),
  'clip_b': (
    'grpo',
    PLAIN | {'advantage': 'clip_b(mu=.3)'},
    rollouts,
    formula('clip_b', mu=0.3),
  ),
  'dpo': ('dpo', {'beta': 0.3}, pairs, formula('dpo', beta=0.3)),
  'cdpo': (
    'cdpo',
    {'beta': 0.3, 'label_smoothing': 0.2},
    pairs,
    formula('dpo', beta=0.3, smoothing=0.2),
  ),
  'ipo': ('ipo', {'beta': 0.5}, pairs, formula('ipo', tau=0.5)),
  'mix': ('mix', {'mu': 0.3}, mixed, formula('mix', mu=0.3)),
  'corrected_k3': (
    'grpo',
    {'kl_loss': 'corrected_k3(coef=.5)'},
    rollouts,
    formula('corrected_k3', coef=0.5),
  ),
  'step_reinforce': (
    'step_reinforce',
    {'gamma': 0.5},
    turns,
    formula('step_reinforce', gamma=0.5),
  ),
  'grpo_distill': (
    'grpo',
    PLAIN | {'advantage': 'grpo_distill(coef=.5)'},
    taught,
    formula('grpo_distill', coef=0.5),
  ),
  'forward distillation': (
    'distill',
    {'data_format': 'rollout', 'kind': 'forward', 'top_k': 5},
    taught,
    formula('distill', kind='forward'),
  ),
  'reverse distillation': (
    'distill',
    {'data_format': 'rollout', 'kind': 'reverse', 'top_k': 5},
    taught,
    formula('distill', kind='reverse'),
  ),
}
# The others run in the slow part; their formulas are also in tests/functional.
FAST = ('reinforce++', 'tis', 'dpo', 'mix', 'forward distillation')
# Neither none nor all of them, lest the formula say little.
SHARES = ('policy/clip_fraction', 'policy/accuracy', 'advantage/dropped')


async def learn(name, model, params, reference, groups):
  """The learner after the updates, and what it says of them."""
  spec, options, *_ = CASES[name]
  algorithm, mesh = (
    make_algorithm(spec, options),
    make_mesh(MeshOptions(data=2, fsdp=2, tensor=2)),
  )
  teachers = Teachers(algorithm, mesh=mesh, chunk_rows=16)
  learner = Learner(
    model,
    params,
    algorithm,
    num_rows=16,
    length_buckets=(16,),
    mesh=mesh,
    optimizer=make_optimizer(
      OptimizerOptions(learning_rate=RATE, name='sgd', max_grad_norm=MAX_NORM)
    ),
    ref_params=reference,
    teachers=teachers if teachers.fields else None,
    options=LearnerOptions(ppo_epochs=UPDATES, num_micro_batches=2),
  )
  return learner, await learner.update(groups)


def check_metrics(metrics, name, policy, reference, groups):
  """Compares metrics with the formula's; the policy after the updates."""
  start, rows, wanted = policy, written_out.flat(groups), []
  for _ in range(UPDATES):
    out = CASES[name][3](policy, groups, start, reference)
    policy, norm = policy.descend(rows, out.slopes, RATE, MAX_NORM)
    wanted.append({'loss/total': out.loss, 'optimizer/grad_norm': norm, **out.metrics})
  for key in wanted[0]:
    value = np.mean([each[key] for each in wanted])
    assert metrics[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key
    assert key not in SHARES or 0 < value < 1, key
  return policy


@pytest.mark.parametrize('name', slow_except(FAST, CASES))
async def test_updates_equal_the_formula(name):
  start, reference = written_out.Bigram(table(0)), written_out.Bigram(table(1))
  groups = CASES[name][2](start)
  params = [{'bigram': {'table': table(seed)}} for seed in (0, 1)]
  learner, metrics = await learn(name, toy.Bigram(), *params, groups)
  wanted = check_metrics(metrics, name, start, reference, groups)
  learned_table = learner.params['bigram']['table']
  assert {shard.data.shape for shard in learned_table.addressable_shards} == {
    (16, VOCABULARY)
  }
  moved = np.abs(wanted.table - start.table).max()
  assert moved > 0.02
  np.testing.assert_allclose(
    learned_table, wanted.table, rtol=0, atol=3e-5 * moved + 1e-6
  )


@pytest.mark.parametrize('name', slow_in_gate(('tis', 'dpo'), FAST))
async def test_updates_of_a_transformer_equal_those_of_torch(name, tmp_path):
  """The same formulas; torch and transformers run and differentiate the model."""
  pytest.importorskip('torch')
  import transformers

  def load(seed):
    params = toy.params(seed=seed)
    params = {key: _sharpened(value) for key, value in params.items()}
    huggingface.save(tmp_path / str(seed), toy.CONFIG, params)
    kind = transformers.AutoModelForCausalLM
    return params, written_out.TorchPolicy(kind.from_pretrained(tmp_path / str(seed)))

  (params, start), (ref_params, reference) = load(0), load(1)
  groups = CASES[name][2](start)
  learner, metrics = await learn(
    name, TransformerLM(toy.CONFIG), params, ref_params, groups
  )
  wanted = check_metrics(metrics, name, start, reference, groups).model.state_dict()
  huggingface.save(tmp_path / 'after', toy.CONFIG, learner.params)
  before, after = (
    load_file(tmp_path / each / 'model.safetensors') for each in ('0', 'after')
  )
  assert len(after) > 20
  for key, value in after.items():
    moved = np.abs(wanted[key].numpy() - before[key]).max()
    np.testing.assert_allclose(
      value, wanted[key], rtol=0, atol=1e-4 * moved + 1e-6, err_msg=key
    )


def _sharpened(x):
  """Parameters that make some tokens likelier than others; scales of norms stay."""
  if isinstance(x, dict):
    return {k: v if k == 'scale' else _sharpened(v) for k, v in x.items()}
  return 8 * x
