"""Losses and KL estimators in float64 numpy, each written from its formula."""

import numpy as np

from tests.functional.harness import cexp, clip, largest, sg, smallest


def _masked(loss, c):
  return np.where(c['mask'], loss, 0)


def row_mean(x, mask):
  count = np.maximum(mask.sum(axis=1, keepdims=True), 1)
  return np.where(mask, x, 0).sum(axis=1, keepdims=True) / count


def vanilla(c, o):
  return _masked(-c['advantages'] * c['logprobs'], c)


def opmd(c, o):
  return _masked(-c['advantages'] * c['logprobs'] / (1 + o.get('tau', 1.0)), c)


def sft(c, o):
  return _masked(-c['logprobs'], c)


def ppo_clip(c, o):
  low, high = o.get('clip_low', 0.2), o.get('clip_high', 0.2)
  dual, delta = o.get('dual_clip', 3.0), o.get('sequence_mask')
  a, d = c['advantages'], c['logprobs'] - c['old_logprobs']
  r = cexp(d)
  loss = largest(-a * r, -a * clip(r, 1 - low, 1 + high))
  if dual is not None:
    loss = np.where(a < 0, smallest(loss, -dual * a), loss)
  if delta is not None:
    far = row_mean(sg(-d), c['mask']) > delta
    loss = np.where((a < 0) & far, 0, loss)
  return _masked(loss, c)


def value_loss(c, o):
  eps = o.get('clip', 0.2)
  v, old, g = c['values'], c['old_values'], c['returns']
  square = (v - g) ** 2
  if eps is not None:
    # The bounds differ from token to token, as V_old does.
    moved = np.where(sg(v) < old - eps, old - eps, v)
    moved = np.where(sg(v) > old + eps, old + eps, moved)
    square = largest(square, (moved - g) ** 2)
  return _masked(o.get('coef', 1.0) * square / 2, c)


def k1(c, o):
  return o.get('coef', 1.0) * (c['logprobs'] - c['ref_logprobs'])


def k2(c, o):
  return o.get('coef', 1.0) * (c['logprobs'] - c['ref_logprobs']) ** 2 / 2


def k3(c, o):
  d = c['ref_logprobs'] - c['logprobs']
  return o.get('coef', 1.0) * (cexp(d) - 1 - d)


def low_var(c, o):
  return o.get('coef', 1.0) * clip(k3(c, {}), -10, 10)


def abs_(c, o):
  d = c['logprobs'] - c['ref_logprobs']
  return o.get('coef', 1.0) * np.where(sg(d) > 0, d, -d)


def corrected_k3(c, o):
  ratio = clip(cexp(c['logprobs'] - c['old_logprobs']), 0, 2)
  return o.get('coef', 1.0) * ratio * k3(c, {})
