"""Corrections, weights, schedules, entropy and KL over a vocabulary, in numpy."""

import numpy as np

from tests.functional.harness import cexp
from tests.functional.restated_losses import row_mean, turns


def ratio(c, o):
  level = o.get('level', 'token')
  d = np.where(c['mask'], c['old_logprobs'] - c['rollout_logprobs'], 0)
  if level == 'sequence':
    d = d.sum(axis=1, keepdims=True) + 0 * d
  if level == 'geometric':
    d = row_mean(d, c['mask']) + 0 * d
  if level == 'segment':
    mean = 0 * d
    for row, stretches in enumerate(turns(c['mask'])):
      for where in stretches:
        mean[row, where] = d[row, where].mean()
    d = mean
  return np.exp(np.clip(d, -20, 20))


def tis(c, o):
  return np.where(c['mask'], np.minimum(ratio(c, o), o.get('cap', 2.0)), 0)


def mis(c, o):
  w = ratio(c, {'level': 'geometric'} | o)
  low, high = o.get('low', 0.5), o.get('high', 2.0)
  return 1.0 * (c['mask'] & (w >= low) & (w <= high))


def icepop(c, o):
  w = ratio(c, {})
  inside = (w >= o.get('low', 0.5)) & (w <= o.get('high', 5.0))
  return np.where(c['mask'] & inside, w, 0)


def train_infer_correction(c, o):
  w = np.ones(c['mask'].shape)
  if o['weight'] != 'none':
    w = ratio(c, {'level': o['weight']})
  judged = ratio(c, {'level': o['mask_level']})
  keep = c['mask'] & (judged >= o.get('ratio_low', 0))
  keep &= judged <= o.get('ratio_high', np.inf)
  p, q = np.exp(c['old_logprobs']), np.exp(c['rollout_logprobs'])
  keep &= np.abs(p - q) <= o.get('max_difference', np.inf)
  return np.where(keep, np.minimum(w, o.get('cap', 2.0)), 0)


def mismatch(c, o):
  d = np.where(c['mask'], c['old_logprobs'] - c['rollout_logprobs'], 0)
  return {'logprob_difference': np.abs(d), 'kl': cexp(d) - 1 - d}


def effective_sample_size(c, o):
  w = c['weights'][c['mask']]
  return w.sum() ** 2 / (len(w) * (w**2).sum()) if len(w) else np.array(0.0)


def _rows(c):
  return max(c['mask'].any(axis=1).sum(), 1)


def token_weights(c, o):
  m, mode = 1.0 * c['mask'], o['mode']
  if mode == 'token_mean':
    return m / max(m.sum(), 1)
  if mode == 'sequence_mean_token_sum':
    return m / _rows(c)
  if mode == 'sequence_mean_token_mean':
    return m / np.maximum(m.sum(axis=1, keepdims=True), 1) / _rows(c)
  return m / (_rows(c) * o.get('length', 9))


def term_scale(c, o):
  """What makes a mean over all rows one over the rows of a row's own kind."""
  tokens, expert = c['mask'].sum(axis=1), c['expert_mask']
  count = tokens if o['mode'] == 'token_mean' else 1.0 * (tokens > 0)
  scale = np.zeros(len(tokens))
  for kind in (expert, ~expert):
    if count[kind].sum() > 0:
      scale[kind] = count.sum() / count[kind].sum()
  return scale


def row_weights(c, o):
  return c['mask'].any(axis=1) / _rows(c)


def pair_weights(c, o):
  rows = c['pair_ids'] >= 0
  return rows / max(rows.sum(), 1)


def entropy_loss(c, o):
  return -o['coef'] * c['entropy']


def mix(c, o):
  bonus = -o['coef'] * c['entropy'] * c['term_scale'][:, None]
  return np.where(c['expert_mask'][:, None], 0, bonus)


def log_softmax(x):
  top = np.max(np.real(x), axis=-1, keepdims=True)
  return x - top - np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True))


def nec(c, o):
  logp = log_softmax(c['logits'])
  entropy = -np.sum(np.exp(logp) * logp, axis=-1, keepdims=True)
  return np.sum(np.exp(logp) ** 2 * (entropy + logp), axis=-1)


def adaptive_coef(c, o):
  error = np.clip(c['kl'] / o.get('target', 0.1) - 1, -0.2, 0.2)
  return c['beta'] * (1 + error * c['n'] / o.get('horizon', 10_000.0))


def overlong_penalty(c, o):
  longest, cache, out = o['max_length'], o.get('cache', 0.0), []
  for length in c['lengths']:
    if length <= longest - cache:
      out.append(0.0)
    elif length > longest or cache == 0:
      out.append(-1.0)
    else:
      out.append((longest - cache - length) / cache)
  return np.array(out)


def adaptive(c, o):
  scale = c['state']['scale']
  return {'scale': adaptive_coef({'beta': scale, 'kl': c['kl'], 'n': c['num_rows']}, o)}
