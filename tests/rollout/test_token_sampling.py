import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.rollout.engine import token_sampling

LOGITS = np.array(
  [2.0, 0.5, -1.0, 1.9, 0.0, -3.0, 1.2, 0.3, 0.2, -0.7, 2.2], np.float32
)


def draw(logits, *, seeds=None, counts=0, temperature=1.0, top_p=1.0, top_k=0):
  """Samples each row of `logits`; scalars are broadcast."""
  logits = jnp.asarray(logits, jnp.float32)
  rows = logits.shape[0]
  seeds = np.arange(rows) if seeds is None else np.asarray(seeds)
  keys = np.stack([np.zeros(rows), seeds], axis=1).astype(np.uint32)
  tokens, logprobs = jax.jit(token_sampling.sample_tokens)(
    logits,
    keys,
    np.broadcast_to(np.int32(counts), rows),
    np.broadcast_to(np.float32(temperature), rows),
    np.broadcast_to(np.float32(top_p), rows),
    np.broadcast_to(np.int32(top_k), rows),
  )
  return np.asarray(tokens), np.asarray(logprobs)


def expected(temperature=1.0, keep=None):
  scaled = LOGITS.astype(np.float64) / temperature
  weights = np.exp(scaled - scaled.max())
  if keep is not None:
    weights[np.setdiff1d(np.arange(len(LOGITS)), keep)] = 0
  return weights / weights.sum()


# Likeliest first: 10, 0, 3, 6, 1, 7, …; top_p=.7 keeps four at temperature 1.
CASES = [
  ({}, expected()),
  ({'temperature': 0.5}, expected(0.5)),
  ({'temperature': 2.0}, expected(2.0)),
  ({'top_k': 3}, expected(keep=[10, 0, 3])),
  ({'top_k': 50}, expected()),
  ({'top_p': 0.7}, expected(keep=[10, 0, 3])),
  ({'top_p': 0.8}, expected(keep=[10, 0, 3, 6])),
  ({'top_p': 1e-6}, expected(keep=[10])),
  ({'top_p': 0.6, 'top_k': 3}, expected(keep=[10, 0])),
  ({'top_p': 0.5, 'temperature': 2.0}, None),
]


@pytest.mark.parametrize('rules, probs', CASES, ids=[str(c[0]) for c in CASES])
def test_draws_follow_the_stated_distribution(rules, probs):
  if probs is None:
    order = np.argsort(-LOGITS)
    full = expected(2.0)[order]
    kept = order[np.cumsum(full) - full < 0.5]
    probs = expected(2.0, keep=kept)
  draws = 20_000
  tokens, logprobs = draw(np.tile(LOGITS, (draws, 1)), **rules)
  counts = np.bincount(tokens, minlength=len(LOGITS))
  assert not counts[probs == 0].any()
  live = probs > 0
  chi2 = np.sum((counts - draws * probs)[live] ** 2 / (draws * probs[live]))
  # The statistic has mean n − 1 and variance 2(n − 1): five deviations and some.
  freedom = live.sum() - 1
  assert chi2 <= freedom + 6 * np.sqrt(2 * freedom) + 1e-9
  np.testing.assert_allclose(logprobs, np.log(probs[tokens]), atol=2e-6)


def test_two_levels_equal_the_plain_distribution_over_a_large_vocabulary():
  vocab, draws = 1001, 20_000
  logits = np.random.default_rng(0).normal(0, 2, vocab).astype(np.float32)
  tokens, _ = draw(np.tile(logits, (draws, 1)))
  probs = np.exp(logits.astype(np.float64))
  probs /= probs.sum()
  order = np.argsort(probs)
  bins = np.array_split(order, 60)
  counts = np.bincount(tokens, minlength=vocab)
  mass = np.array([probs[b].sum() for b in bins])
  seen = np.array([counts[b].sum() for b in bins])
  chi2 = np.sum((seen - draws * mass) ** 2 / (draws * mass))
  assert chi2 < 59 + 6 * np.sqrt(118)


def test_the_key_of_token_t_is_folded_in_from_the_seed():
  data = jax.random.key_data(jax.random.key(7))
  np.testing.assert_array_equal(data, [0, 7])
  bits = jax.random.bits(jax.random.fold_in(jax.random.key(7), 3), (2,), jnp.uint32)
  uniforms = token_sampling._uniforms(jnp.array([[0, 7]], jnp.uint32), jnp.array([3]))
  np.testing.assert_array_equal(uniforms[0], np.asarray(bits >> 8) * 2.0**-24)


def test_streams_differ_between_seeds_and_tokens():
  flat = np.zeros((512, 64))
  by_seed, _ = draw(flat)
  by_count, _ = draw(flat, seeds=np.zeros(512), counts=np.arange(512))
  assert len(set(by_seed)) > 60 and len(set(by_count)) > 60
  assert (by_seed != by_count).mean() > 0.9


def test_greedy_takes_the_likeliest_at_any_seed():
  tokens, logprobs = draw(np.tile(LOGITS, (9, 1)), temperature=0.0, top_p=0.3, top_k=2)
  assert (tokens == 10).all()
  np.testing.assert_allclose(logprobs, np.log(expected()[10]), atol=1e-6)


def test_ties_with_the_last_kept_token_are_kept():
  tokens, logprobs = draw(np.tile([1.0, 1.0, 1.0, 0.0], (64, 1)), top_k=1)
  assert set(tokens) == {0, 1, 2}
  np.testing.assert_allclose(logprobs, -np.log(3), atol=1e-6)


def test_a_row_is_untouched_by_its_neighbours():
  """Neighbours that truncate or are greedy switch branches on, not bits."""
  random = np.random.default_rng(1)
  logits = random.normal(0, 3, (8, 97)).astype(np.float32)
  plain = draw(logits)
  temperature = np.array([1, 0, 1, 0.3, 1, 1, 1, 2])
  top_p = np.array([1, 1, 1, 0.4, 1, 0.9, 1, 1])
  top_k = np.array([0, 0, 0, 0, 0, 5, 0, 3])
  mixed = draw(logits, temperature=temperature, top_p=top_p, top_k=top_k)
  same = [0, 2, 4, 6]
  np.testing.assert_array_equal(plain[0][same], mixed[0][same])
  np.testing.assert_array_equal(plain[1][same], mixed[1][same])
  back = np.arange(8)[::-1]
  turned = draw(
    logits[back],
    seeds=back,
    temperature=temperature[back],
    top_p=top_p[back],
    top_k=top_k[back],
  )
  np.testing.assert_array_equal(turned[0][back], mixed[0])
  np.testing.assert_array_equal(turned[1][back], mixed[1])


def test_impossible_tokens_are_never_drawn():
  logits = np.full((4096, 40), -np.inf)
  logits[:, [3, 39]] = 0.0
  tokens, logprobs = draw(logits)
  assert set(tokens) == {3, 39}
  np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


def test_a_number_on_the_border_of_two_tokens_draws_the_second():
  weights = jnp.array([[1.0, 0.0, 1.0, 2.0]] * 4)
  drawn = token_sampling._inverse_cdf(weights, jnp.array([0.0, 0.25, 0.5, 0.75]))
  assert drawn.tolist() == [0, 2, 3, 3]


def test_logits_that_are_no_numbers_show_in_the_logprob():
  tokens, logprobs = draw(np.array([[np.nan, 1.0], [0.0, 1.0]]))
  assert 0 <= tokens[0] < 2 and np.isnan(logprobs[0]) and np.isfinite(logprobs[1])
