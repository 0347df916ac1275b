"""Row adapters give each row of a batch LoRA adapters of its own, from a stack.

A stack holds the adapters of N tenants, their ranks padded with zeros to one rank R. An
adapter of zeros computes nothing and has gradients of zeros, so that layers which a
tenant does not train need no program of their own.

Training gathers each row's pair, and its backward pass adds a row's gradient to the
tenant's sum: rows are added in order, one after the other, so that the sum does not
depend on how rows were spread over programs. Decoding multiplies with all pairs and
keeps what belongs to the row, because a stack is smaller than a pair for every slot.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.types import AnyArray, Array, Params

HEAD = 'unembed'
PART_OF = {
  **dict.fromkeys(('q', 'k', 'v', 'o'), 'attention'),
  **dict.fromkeys(('gate', 'up', 'down'), 'mlp'),
}
Pair = tuple[AnyArray, ...]  # A and B
# Layer → pair. Of one tenant A is [L, inputs, r] and B [L, r, outputs]; of the head
# [D, r] and [r, V].
Adapters = dict[str, Pair]
# Of each layer, and of the head: layer → A [inputs, N, R], scaled B [N, R, outputs].
DecodingStack = tuple[tuple[Adapters, ...], Adapters]


def check_model(config: ModelConfig) -> None:
  """Checks that rows of a model can have adapters of their own.

  Args:
    config: The model's shape.

  Raises:
    ValueError: If they cannot.
  """
  problem = ''
  if config.num_experts:
    problem = 'it has experts'
  elif config.kv_latent or config.has_linear_attention:
    problem = 'its attention is latent or linear'
  elif len(set(config.layer_types)) > 1:
    problem = 'its layers are of several kinds'
  elif config.vision is not None:
    problem = 'it sees images'
  if problem:
    raise ValueError(
      f'family {config.family}: a model whose rows have adapters of their own must be '
      f'dense, with one kind of attention, and {problem}'
    )


def layer_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
  """Returns the inputs and outputs of each layer that can have adapters.

  Args:
    config: The model's shape.
  """
  width, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
  heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim
  return {
    'q': (width, heads),
    'k': (width, kv_heads),
    'v': (width, kv_heads),
    'o': (heads, width),
    'gate': (width, wide),
    'up': (width, wide),
    'down': (wide, width),
    HEAD: (width, config.vocab_size),
  }


def init_adapters(
  config: ModelConfig, rank: int, seed: int, layers: frozenset[str]
) -> Adapters:
  """Makes a tenant's first adapters: A uniform within ±1/√inputs, B zero.

  Args:
    config: The model's shape.
    rank: Their rank.
    seed: Philox draws a layer's A with the seed and the layer's number as its key.
    layers: The layers that are trained; the others get zeros.

  Returns:
    numpy arrays, float32.
  """
  adapters = {}
  for number, (name, (inputs, outputs)) in enumerate(layer_sizes(config).items()):
    lead = () if name == HEAD else (config.num_layers,)
    a = np.zeros((*lead, inputs, rank), np.float32)
    if name in layers:
      draw = np.random.Generator(
        np.random.Philox(key=np.array([seed, number], np.uint64))
      )
      a = (2 * draw.random(a.shape, np.float32) - 1) * np.float32(inputs**-0.5)
    adapters[name] = a, np.zeros((*lead, rank, outputs), np.float32)
  return adapters


def pad_rank(adapters: Adapters, rank: int) -> Adapters:
  """Pads the rank of a tenant's adapters with zeros.

  Args:
    adapters: numpy arrays.
    rank: At least their own.
  """

  def pad(x: np.ndarray, axis: int) -> np.ndarray:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, rank - x.shape[axis])
    return np.pad(x, widths)

  return {name: (pad(a, -1), pad(b, -2)) for name, (a, b) in adapters.items()}


def cut_rank(adapters: Adapters, rank: int) -> Adapters:
  """Undoes `pad_rank`.

  Args:
    adapters: numpy arrays.
    rank: The rank to keep.
  """
  return {name: (a[..., :rank], b[..., :rank, :]) for name, (a, b) in adapters.items()}


def tenant_axis(name: str) -> int:
  """Returns the axis of tenants in a training stack.

  Args:
    name: A layer.
  """
  return 0 if name == HEAD else 1


def empty_stack(config: ModelConfig, num_tenants: int, rank: int) -> Adapters:
  """Makes the stack that training uses, all zero.

  Args:
    config: The model's shape.
    num_tenants: Tenants N.
    rank: Their padded rank R.

  Returns:
    A `[L, N, inputs, R]` and B `[L, N, R, outputs]`; of the head without L.
  """
  stack = {}
  for name, (inputs, outputs) in layer_sizes(config).items():
    lead = () if name == HEAD else (config.num_layers,)
    a = jnp.zeros((*lead, num_tenants, inputs, rank), jnp.float32)
    stack[name] = a, jnp.zeros((*lead, num_tenants, rank, outputs), jnp.float32)
  return stack


@jax.custom_vjp
def add_gradients(stack: Array, total: Array, rows: Array) -> Array:
  """Gathers each row's entry of a stack.

  The cotangent of the stack is `total` plus the rows' cotangents, added in order.

  Args:
    stack: `[N, …]`.
    total: `[N, …]`, the sum so far.
    rows: `[G]` int32; those of N or more gather something and add nothing.

  Returns:
    `[G, …]`.
  """
  del total
  return jnp.take(stack, rows, axis=0, mode='clip')


def _gather(stack, total, rows):
  return add_gradients(stack, total, rows), (total, rows)


def _scatter(residuals, gradients):
  total, rows = residuals
  return total.at[rows].add(gradients, mode='drop'), None, None


add_gradients.defvjp(_gather, _scatter)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingRows:
  """The adapters of rows in training, of all layers or of one.

  Attributes:
    pairs: Layer → the stack's pair.
    totals: The gradients so far, like `pairs`.
    rows: `[(L,) G]` int32, each row's tenant.
    scales: `[(L,) G]` float32, α / rank of each row's tenant.
  """

  pairs: Adapters
  totals: Adapters
  rows: AnyArray
  scales: AnyArray

  def bind(self, layer: object) -> None:
    """Makes a layer's linear maps use the adapters.

    Args:
      layer: The `Block`.
    """
    for name in self.pairs:
      linear = getattr(getattr(layer, PART_OF[name]), name)
      linear.row_product = functools.partial(self._product, *self.gathered(name))

  def gathered(self, name: str) -> Pair:
    """Returns each row's A and scaled B.

    Args:
      name: The layer.
    """
    a, b = (
      add_gradients(x, total, self.rows)
      for x, total in zip(self.pairs[name], self.totals[name], strict=True)
    )
    return a, b * self.scales[:, None, None]

  @staticmethod
  def _product(a: Array, b: Array, x: Array) -> Array:
    flat = x.reshape(x.shape[0], -1, a.shape[1])
    return (flat @ a.astype(x.dtype)) @ b.astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingRows:
  """The adapters of rows where nothing is trained, of one layer or of the head.

  Attributes:
    pairs: Layer → A `[inputs, N, R]` and scaled B `[N, R, outputs]`.
    rows: `[S]` int32, each row's adapters; N or more for none.
  """

  pairs: Adapters
  rows: AnyArray

  def bind(self, layer: object) -> None:
    """Makes a layer's linear maps use the adapters.

    Args:
      layer: The `Block`.
    """
    for name, pair in self.pairs.items():
      linear = getattr(getattr(layer, PART_OF[name]), name)
      linear.row_product = functools.partial(self._product, *pair)

  def logits(self, hidden: Array) -> Array:
    """Computes what the head's adapters add to the logits.

    Args:
      hidden: `[S, …, D]`.

    Returns:
      `[S, …, V]` float32.
    """
    a, b = self.pairs[HEAD]
    added = self._product(a, b, hidden)
    return added.reshape(*hidden.shape[:-1], -1).astype(jnp.float32)

  def _product(self, a: Array, b: Array, x: Array) -> Array:
    inputs, number, rank = a.shape
    flat = x.reshape(x.shape[0], -1, inputs)
    inner = flat @ a.reshape(inputs, -1).astype(x.dtype)
    inner = inner.reshape(*flat.shape[:2], number, rank)
    is_own = self.rows[:, None] == jnp.arange(number)
    inner = jnp.where(is_own[:, None, :, None], inner, 0)
    inner = inner.reshape(*flat.shape[:2], -1)
    return inner @ b.reshape(number * rank, -1).astype(x.dtype)


def decoding_stack(config: ModelConfig, number: int, rank: int) -> DecodingStack:
  """Makes the stack that decoding uses, all zero.

  Args:
    config: The model's shape.
    number: Adapters N.
    rank: Their padded rank R.
  """

  def pair(name: str) -> Pair:
    inputs, outputs = layer_sizes(config)[name]
    a = jnp.zeros((inputs, number, rank), jnp.float32)
    return a, jnp.zeros((number, rank, outputs), jnp.float32)

  layers = tuple(
    {name: pair(name) for name in PART_OF} for _ in range(config.num_layers)
  )
  return layers, {HEAD: pair(HEAD)}


@functools.partial(jax.jit, donate_argnums=0)
def put_adapters(
  stack: DecodingStack, index: Array, adapters: Adapters, scale: Array
) -> DecodingStack:
  """Replaces one entry of a decoding stack.

  Args:
    stack: The stack; it is donated.
    index: Which entry.
    adapters: Padded to the stack's rank.
    scale: α / rank.
  """

  def put(pair: Pair, own: Pair) -> Pair:
    a, b = pair
    return a.at[:, index].set(own[0]), b.at[index].set(own[1] * scale)

  layers, head = stack
  layers = tuple(
    {
      name: put(pair, tuple(x[i] for x in adapters[name]))
      for name, pair in layer.items()
    }
    for i, layer in enumerate(layers)
  )
  return layers, {HEAD: put(head[HEAD], adapters[HEAD])}


def attach_training(
  params: Params, stack: Adapters, totals: Adapters, rows: Array, scales: Array
) -> tuple[Params, Pair]:
  """Adds each row's adapters to a model's parameters, for training.

  Args:
    params: The parameters, with layers stacked.
    stack: From `empty_stack`.
    totals: The gradients so far, like `stack`.
    rows: `[G]` int32, each row's tenant.
    scales: `[G]` float32, α / rank of each row's tenant.

  Returns:
    The parameters, and each row's A and scaled B of the head.
  """
  num_layers = next(a.shape[0] for name, (a, _) in stack.items() if name != HEAD)
  inner = {name: pair for name, pair in stack.items() if name != HEAD}
  sums = {name: pair for name, pair in totals.items() if name != HEAD}
  repeat = lambda x: jnp.broadcast_to(x, (num_layers, *x.shape))  # noqa: E731
  layers = TrainingRows(inner, sums, repeat(rows), repeat(scales))
  head = TrainingRows({HEAD: stack[HEAD]}, {HEAD: totals[HEAD]}, rows, scales)
  with_rows = {**params['layers'], 'row_adapters': layers}
  return {**params, 'layers': with_rows}, head.gathered(HEAD)


def attach_decoding(params: Params, stack: DecodingStack, rows: Array) -> Params:
  """Adds each row's adapters to a model's parameters, for decoding and scoring.

  Args:
    params: The parameters, with layers as a tuple.
    stack: From `decoding_stack`.
    rows: `[S]` int32, each row's adapters; N or more for none.
  """
  pairs, head = stack
  layers = tuple(
    {**layer, 'row_adapters': DecodingRows(own, rows)}
    for layer, own in zip(params['layers'], pairs, strict=True)
  )
  return {**params, 'layers': layers, 'head_adapters': DecodingRows(head, rows)}
