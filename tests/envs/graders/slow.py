"""Functions for a grader's process: what it imports, each of them imports."""

import decimal
import fractions
import os
import time


def length(reply, item, *, scale=1.0):
  return scale * len(reply)


def number(reply, item):
  return float(reply)


def nothing(reply, item):
  return 'much'


def scalar(reply, item, *, kind):
  """Returns 0.5 as a scalar of some kind, or what is none."""
  import numpy as np

  if kind == 'jax':
    import jax.numpy as jnp

    return jnp.float32(0.5)
  kinds = {
    'np.float32': np.float32(0.5),
    'np.float16': np.float16(0.5),
    'np.float64': np.float64(0.5),
    'array': np.array(0.5),
    'fraction': fractions.Fraction(1, 2),
    'decimal': decimal.Decimal('0.5'),
    'np.bool': np.bool_(True),
    'np.int64': np.int64(1),
    'bool': True,
    'text': '0.5',
    'complex': 0.5 + 0j,
    'np.complex64': np.complex64(0.5),
    'list': [0.5],
    'vector': np.array([0.5]),
    'none': None,
    'np.nan': np.float32('nan'),
    'np.inf': np.float32('inf'),
  }
  return kinds[kind]


def one_argument(reply):
  return 1.0


def act(reply, item=None):
  """Does what the reply says."""
  if reply == 'hang':
    while True:
      time.sleep(60)
  if reply == 'die':
    os._exit(7)
  if reply == 'eat':
    return len(bytearray(1 << 40))
  if reply == 'fill':
    return 'x' * (65 << 20)
  if reply == 'raise':
    raise KeyError('broken')
  if reply == 'print':
    print('not an answer')
  return float(os.getpid())
