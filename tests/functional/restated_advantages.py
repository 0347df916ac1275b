"""Advantages in float64 numpy: loops over tasks, runs and tokens, no vector tricks."""

import numpy as np


def by_run(c, value_of_run):
  """`[B, T]` from {run: number}; 0 where the mask is 0."""
  out = np.zeros(c['mask'].shape)
  for row, run in enumerate(c['run_ids']):
    if run >= 0:
      out[row] = np.where(c['mask'][row], value_of_run[run], 0)
  return out


def returns_by_task(c):
  """{task: {run: R}}."""
  tasks = {}
  for row, (task, run) in enumerate(zip(c['task_ids'], c['run_ids'], strict=True)):
    if run >= 0:
      members = tasks.setdefault(int(task), {})
      members[int(run)] = members.get(int(run), 0.0) + c['rewards'][row].sum()
  return tasks


def _equal(values):
  # Rewards are float32, and equal rewards make equal float32 sums.
  return np.ptp(np.asarray(values, np.float32)) == 0


def grpo(c, o):
  tasks = returns_by_task(c)
  everyone = [r for members in tasks.values() for r in members.values()]
  batch_std = np.std(everyone, ddof=1) if len(everyone) > 1 else 1.0
  advantage = {}
  for members in tasks.values():
    values = list(members.values())
    mean, std = 0.0, 1.0
    if len(values) > 1:
      mean, std = np.mean(values), np.std(values, ddof=1)
    scale = batch_std if o.get('std_over') == 'batch' else std
    for run, value in members.items():
      a = value - mean
      if len(values) > 1 and _equal(values):
        a = 0.0
      if o.get('scale_by_std', True):
        a /= scale + 1e-6
      advantage[run] = a
  return by_run(c, advantage)


def opmd(c, o):
  tau, advantage = o.get('tau', 1.0), {}
  for members in returns_by_task(c).values():
    values = np.array(list(members.values()))
    if o.get('baseline', 'mean') == 'mean':
      b = values.mean()
    else:
      b = tau * np.log(np.mean(np.exp(values / tau)))
    if len(values) == 1:
      b = 0.0
    for run, value in members.items():
      advantage[run] = 0.0 if len(values) > 1 and _equal(values) else value - b
  return by_run(c, advantage)


def gae(c, o):
  gamma, lam = o.get('gamma', 1.0), o.get('lam', 1.0)
  out = np.zeros(c['mask'].shape)
  for row in range(len(out)):
    where = np.flatnonzero(c['mask'][row])
    value, advantage = 0.0, 0.0
    for t in where[::-1]:
      delta = c['rewards'][row, t] + gamma * value - c['old_values'][row, t]
      advantage = delta + gamma * lam * advantage
      value = c['old_values'][row, t]
      out[row, t] = advantage
  if o.get('whiten') and c['mask'].any():
    seen = out[c['mask']]
    std = np.std(seen, ddof=1) if len(seen) > 1 else 0.0
    out = np.where(c['mask'], (out - seen.mean()) / (std + 1e-6), 0)
  return out
