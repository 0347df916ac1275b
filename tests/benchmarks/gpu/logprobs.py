"""token_logprobs against the whole table of logits, and against other libraries."""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl.training.parallelism.device_memory import read_kept_bytes
from kernels.token_logprobs import token_logprobs
from tests.benchmarks.gpu import device

# Label → (tokens, width, vocabulary). The last does not fit a card as float32 logits
# with their gradient; what fails there says so.
SHAPES = {
  'Qwen3-1.7B': (8192, 2048, 151_936),
  'Qwen3-0.6B': (8192, 1024, 151_936),
  '1.7B, 32k tokens': (32_768, 2048, 151_936),
}
TINY = {'tiny': (64, 32, 512)}


def naive(hidden, table, targets):
  """Rounds logits to the dtype of the states, as models that hold them whole do."""
  return scored((hidden @ table.T).astype(jnp.float32), targets)


def naive_float32(hidden, table, targets):
  """As precise as `token_logprobs`, whose statistics are of float32 logits."""
  product = jnp.matmul(hidden, table.T, preferred_element_type=jnp.float32)
  return scored(product, targets)


def scored(logits, targets):
  chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
  return chosen - jax.nn.logsumexp(logits, axis=-1)


def library(hidden, table, targets):
  logits = (hidden @ table.T).astype(jnp.float32)
  return -optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets)


def ours(hidden, table, targets, function=token_logprobs, **options):
  return function(hidden, table, targets, **options).logprobs


def kept_bytes() -> int | None:
  """What a learner on this card would let the kept softmax take."""
  return read_kept_bytes(Mesh(np.array(jax.devices()[:1]), ('data',)))


def implementations() -> dict[str, Callable[..., Any] | str]:
  """By label; a text in the place of one that is not here."""
  plain = device.reference(token_logprobs)
  if not isinstance(plain, str):
    plain = functools.partial(ours, function=plain)
  functions: dict[str, Callable[..., Any] | str] = {
    'kernels': functools.partial(ours, kept_bytes=kept_bytes()),
    'kernels, nothing kept': functools.partial(ours, kept_bytes=0),
    'reference': plain,
    'naive XLA': naive,
    'naive XLA, f32 logits': naive_float32,
    'optax': library,
  }
  try:
    tokamax: Any = importlib.import_module('tokamax')
    loss = tokamax.linear_softmax_cross_entropy_loss
  except (ImportError, AttributeError) as error:
    return functions | {'tokamax': f'{type(error).__name__}: {error}'}

  def fused(hidden, table, targets):
    width = hidden.shape[-1]
    flat = hidden.reshape(-1, width), targets.reshape(-1), table.T
    return -loss(*flat, reduction='sum')

  return functions | {'tokamax, one sum': fused}


def measure(tiny: bool = False) -> Iterator[dict[str, Any]]:
  """shape → implementation → 'forward' and 'both', each 'ms' and 'mib'; so far."""
  rates, tables = device.rates(tiny), {}
  for label, (tokens, width, vocab) in (TINY if tiny else SHAPES).items():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, tokens, width), jnp.bfloat16)
    table = 0.02 * jax.random.normal(keys[1], (vocab, width), jnp.bfloat16)
    targets = jax.random.randint(keys[2], (1, tokens), 0, vocab)
    rows = tables[label] = {}
    for name, function in implementations().items():
      if isinstance(function, str):
        rows[name] = {'failed': function}
      else:
        rows[name] = device.both(function, (0, 1), hidden, table, targets)
      yield {'shapes': tables, **rates}
