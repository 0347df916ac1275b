"""Trust regions and newer losses in float64 numpy, each written from its formula."""

import jax
import numpy as np

from tests.functional.harness import cexp, clip, largest, sg, smallest
from tests.functional.restated_losses import (
  _masked,
  importance_sampling,
  ppo_clip,
  row_mean,
)


def _probabilities(c):
  """Of the policy and of the old policy; a log-prob above 0 counts as 0."""
  return [np.exp(np.minimum(sg(c[k]), 0)) for k in ('logprobs', 'old_logprobs')]


def _dppo(c, o, up, down):
  a, r = c['advantages'], sg(cexp(c['logprobs'] - c['old_logprobs']))
  keep = np.where(a > 0, ~up, ~down)
  return _masked(-a * np.minimum(r, o.get('cap', 20.0)) * keep * c['logprobs'], c)


def dppo_tv(c, o):
  new, old = _probabilities(c)
  up, down = new - old > o.get('clip_high', 0.2), old - new > o.get('clip_low', 0.2)
  return _dppo(c, o, up, down)


def dppo_kl(c, o):
  p, q = sg(c['logprobs']), sg(c['old_logprobs'])
  _, old = _probabilities(c)
  rest_new, rest_old = (-np.expm1(np.minimum(x, 0)) for x in (p, q))
  kl = old * (q - p) + rest_old * np.log((rest_old + 1e-8) / (rest_new + 1e-8))
  up = (p > q) & (kl > o.get('clip_high', 0.2))
  down = (p < q) & (kl > o.get('clip_low', 0.2))
  return _dppo(c, o, up, down)


def probability_band(c, o):
  new, old = _probabilities(c)
  keep = np.abs(new - old) <= o.get('threshold', 0.1)
  square = (c['logprobs'] - c['old_logprobs']) ** 2
  pull = o.get('regulariser_coef', 1e-3) * square
  return _masked(importance_sampling(c, o) * keep + pull, c)


def dro(c, o):
  d = c['logprobs'] - c['old_logprobs']
  loss = -(c['advantages'] * c['logprobs'] - o.get('beta', 0.05) / 2 * d**2)
  return _masked(loss, c)


def stable_reinforce(c, o):
  low, high = np.log(o.get('ratio_low', 1e-3)), np.log(o.get('ratio_high', 1e3))
  d = clip(c['logprobs'] - c['old_logprobs'], low, high)
  bounds = {'clip_low': o.get('clip_low', 0.2), 'clip_high': o.get('clip_high', 0.2)}
  columns = c | {'logprobs': d, 'old_logprobs': 0 * sg(d)}
  return ppo_clip(columns, bounds | {'dual_clip': None})


def gmpo(c, o):
  a, d = c['advantages'], c['logprobs'] - c['old_logprobs']
  sign, low, high = np.sign(a), o.get('clip_low', 0.4), o.get('clip_high', 0.4)
  least = sign * smallest(sign * d, sign * clip(d, -low, high))
  return _masked(-a * cexp(row_mean(least, c['mask'])), c)


def vespo(c, o):
  a, p = c['advantages'], c['logprobs']
  d = np.clip(sg(p - c['old_logprobs']), -20, 20)
  log_w = np.where(c['mask'], d, 0).sum(axis=1, keepdims=True)
  log_w = np.clip(log_w, np.log(1e-8), 20)
  k = np.where(a < 0, o.get('power_negative', 3.0), o.get('power_positive', 2.0))
  decay = np.where(a < 0, o.get('decay_negative', 2.0), o.get('decay_positive', 3.0))
  return _masked(-a * np.exp(k * log_w + decay * (1 - np.exp(log_w))) * p, c)


def token_covariance(c, o=None):
  p, a, m = sg(c['logprobs']), c['advantages'], c['mask']
  if not m.any():
    return np.zeros(m.shape)
  return np.where(m, (a - a[m].mean()) * (p - p[m].mean()), 0)


def _share(c, ratio):
  return max(int(ratio * c['mask'].sum()), 1)


def clip_cov_keep(c, o):
  a, r = c['advantages'], sg(cexp(c['logprobs'] - c['old_logprobs']))
  low, high = o.get('clip_low', 0.2), o.get('clip_high', 0.2)
  clipped = ((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low))
  cov = token_covariance(c)
  within = (cov > o.get('cov_low', 1.0)) & (cov < o.get('cov_high', 5.0))
  lots = np.asarray(jax.random.uniform(c['key'], c['mask'].shape))
  drawable = zip(*np.nonzero(within & ~clipped & c['mask']), strict=True)
  keep = np.ones(c['mask'].shape, bool)
  for at in sorted(drawable, key=lambda at: -lots[at])[
    : _share(c, o.get('ratio', 2e-4))
  ]:
    keep[at] = False
  return keep


def clip_cov(c, o):
  bounds = {'clip_low': o.get('clip_low', 0.2), 'clip_high': o.get('clip_high', 0.2)}
  return ppo_clip(c, bounds | {'dual_clip': None}) * clip_cov_keep(c, o)


def kl_cov_penalised(c, o):
  """The tokens with the largest covariances, with those that equal the last of them."""
  cov = np.float32(token_covariance(c))
  ranked = np.sort(cov[c['mask']])[::-1]
  last = ranked[: _share(c, o.get('ratio', 2e-4))][-1:]
  return c['mask'] & (cov >= last if last.size else False)


def kl_cov(c, o):
  d = c['logprobs'] - c['old_logprobs']
  size = largest(d, -d) * (sg(d) != 0)  # slope 0 where both are equal
  return importance_sampling(c, o) + kl_cov_penalised(c, o) * _masked(
    o.get('coef', 1.0) * size, c
  )


def proximal_logprobs(c, o=None):
  """Of the sampler's share 1/d, for a token that is d steps old."""
  version = c['weights_version']
  age = np.where(version < 0, 1, c['step'][:, None] - version)
  share = 1 / np.maximum(age, 1)
  return (1 - share) * sg(c['logprobs']) + share * c['old_logprobs']


def a3po(c, o):
  prox = proximal_logprobs(c)
  weight = cexp(prox - c['old_logprobs'])
  bounds = {'clip_low': o.get('clip_low', 0.2), 'clip_high': o.get('clip_high', 0.2)}
  loss = ppo_clip(c | {'old_logprobs': prox}, bounds | {'dual_clip': None})
  return np.where(weight > o.get('cap', 5.0), 0, weight * loss)


def self_distill(c, o):
  def complete(logprobs):
    p = np.exp(logprobs[..., : o.get('top_k')])
    total = p.sum(axis=-1, keepdims=True)
    if not o.get('tail', True):
      return p / total
    rest = largest(1 - total, -np.expm1(-1e-7) + 0 * total)
    return np.concatenate([p, rest], axis=-1)

  def divergence(a, b):
    return np.sum(a * np.log(a / b), axis=-1)

  s, t = complete(c['topk_logprobs']), complete(c['teacher_topk_logprobs'])
  alpha, is_clip = o.get('alpha', 0.5), o.get('is_clip', 2.0)
  if alpha in (0, 1):
    loss = divergence(s, t) if alpha else divergence(t, s)
  else:
    m = alpha * t + (1 - alpha) * s
    loss = alpha * divergence(t, m) + (1 - alpha) * divergence(s, m)
  if is_clip is not None:
    loss = loss * np.minimum(sg(cexp(c['logprobs'] - c['old_logprobs'])), is_clip)
  return _masked(np.where(c['teacher_mask'], loss, 0), c)
