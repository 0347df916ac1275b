"""Custom losses: graphs of operations that a client has traced with torch.fx.

Nothing that a client sends is executed: a graph is a list of nodes, and each node names
an operation of the closed list below, which is computed with jax.numpy. A loss reads
one datum's log-probs and inputs, at their own length.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.rollout.tinker import request_bodies
from jaxrl.rollout.tinker.pending_results import RequestError
from jaxrl.rollout.tinker.proto_codec import write_forward_backward
from jaxrl.rollout.tinker.tenant_learner import Tenant, TenantLearner, TrainingRow

MAX_NODES, MAX_INPUTS = 512, 16
MAX_CELLS = 1 << 24  # elements of a value
_METRIC = re.compile(r'custom/[a-z0-9_./-]{1,64}:(sum|mean)')
_DTYPES = {
  'float32': jnp.float32,
  'float': jnp.float32,
  'float64': jnp.float32,
  'int64': jnp.int32,
  'int32': jnp.int32,
  'bool': jnp.bool_,
}

Operation = Callable[..., Any]  # on arrays and numbers, under the names that torch has


def _reduce(fn: Operation) -> Operation:
  def run(x, dim=None, keepdim=False, *, dtype=None):
    x = x if dtype is None else jnp.asarray(x, dtype)
    axis = tuple(dim) if isinstance(dim, list | tuple) else dim
    return fn(x, axis=axis, keepdims=keepdim)

  return run


def _extreme(reduce: Operation, pair: Operation) -> Operation:
  def run(x, other=None, *, dim=None):
    if dim is not None or isinstance(other, int):
      raise RequestError('max and min with a dim return indices too; use amax and amin')
    return reduce(x) if other is None else pair(x, other)

  return run


def _clamp(x, min=None, max=None):
  return jnp.clip(x, min, max)


def _mean(x, axis=None, keepdims=False):
  return jnp.mean(x, axis=axis, keepdims=keepdims)


def _std(x, axis=None, keepdims=False):
  return jnp.std(x, axis=axis, keepdims=keepdims, ddof=1)


def _var(x, axis=None, keepdims=False):
  return jnp.var(x, axis=axis, keepdims=keepdims, ddof=1)


def _cat(arrays, dim=0):
  return jnp.concatenate(arrays, axis=dim)


def _stack(arrays, dim=0):
  return jnp.stack(arrays, axis=dim)


def _where(condition, x, y):
  return jnp.where(condition, x, y)


def _reshape(x, *shape):
  sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
  return jnp.reshape(x, tuple(sizes))


def _expand(x, *shape):
  sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
  lead = len(sizes) - x.ndim
  whole = [x.shape[i - lead] if n == -1 else n for i, n in enumerate(sizes)]
  return jnp.broadcast_to(x, tuple(whole))


def _size(x, dim=None):
  return x.shape if dim is None else x.shape[dim]


def _to(x, kind=None, *, dtype=None):
  wanted = kind if dtype is None else dtype
  return x if wanted is None or isinstance(wanted, _Ignored) else x.astype(wanted)


def _full_like(x, fill_value):
  return jnp.full_like(x, fill_value)


def _softplus(x, beta=1.0, threshold=20.0):
  del threshold  # past which torch takes x itself, as the formula does
  return jax.nn.softplus(x * beta) / beta


def _huber(x, target, reduction='mean', delta=1.0):
  d = jnp.abs(x - target)
  loss = jnp.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta))
  return {'mean': jnp.mean, 'sum': jnp.sum, 'none': lambda x: x}[reduction](loss)


def _getitem(x, index):
  return x[index]


def _softmax(fn):
  return lambda x, dim=-1: fn(x, axis=dim)


_MATH = ('exp', 'log', 'sqrt', 'sin', 'cos', 'tanh', 'log1p', 'expm1', 'pow', 'floor')
_ELEMENTWISE: dict[str, Operation] = {
  **{
    name: getattr(jnp, name)
    for name in (
      *('exp', 'log', 'log1p', 'expm1', 'sqrt', 'square', 'abs', 'sign', 'tanh', 'sin'),
      *('cos', 'exp2', 'log2', 'maximum', 'minimum', 'logaddexp', 'floor', 'ceil'),
      *('isfinite', 'isnan', 'logical_and', 'logical_or', 'logical_not', 'power'),
      *('zeros_like', 'ones_like', 'cumsum', 'cumprod', 'diff', 'flip', 'outer', 'dot'),
      *('round', 'reciprocal', 'matmul'),
    )
  },
  'rsqrt': jax.lax.rsqrt,
  'sigmoid': jax.nn.sigmoid,
  'relu': jax.nn.relu,
  'logsigmoid': jax.nn.log_sigmoid,
  'softplus': _softplus,
  'silu': jax.nn.silu,
  'clamp': _clamp,
  'clip': _clamp,
  'clamp_min': lambda x, min: jnp.maximum(x, min),
  'clamp_max': lambda x, max: jnp.minimum(x, max),
  'where': _where,
  'add': lambda x, y, alpha=1: x + alpha * y,
  'sub': lambda x, y, alpha=1: x - alpha * y,
  'mul': operator.mul,
  'div': operator.truediv,
  'neg': operator.neg,
  'pow': operator.pow,
  'lt': operator.lt,
  'le': operator.le,
  'gt': operator.gt,
  'ge': operator.ge,
  'eq': operator.eq,
  'ne': operator.ne,
  'sum': _reduce(jnp.sum),
  'mean': _reduce(_mean),
  'std': _reduce(_std),
  'var': _reduce(_var),
  'prod': _reduce(jnp.prod),
  'amax': _reduce(jnp.max),
  'amin': _reduce(jnp.min),
  'any': _reduce(jnp.any),
  'all': _reduce(jnp.all),
  'max': _extreme(jnp.max, jnp.maximum),
  'min': _extreme(jnp.min, jnp.minimum),
  'logsumexp': lambda x, dim, keepdim=False: jax.nn.logsumexp(
    x, axis=dim, keepdims=keepdim
  ),
  'softmax': _softmax(jax.nn.softmax),
  'log_softmax': _softmax(jax.nn.log_softmax),
  'huber_loss': _huber,
  'smooth_l1_loss': _huber,
  'cat': _cat,
  'stack': _stack,
  'full_like': _full_like,
  'unsqueeze': lambda x, dim: jnp.expand_dims(x, dim),
  'squeeze': lambda x, dim=None: jnp.squeeze(x, dim),
  'reshape': _reshape,
  'flatten': lambda x: jnp.reshape(x, (-1,)),
  'detach': jax.lax.stop_gradient,
}
# What `torch.NAME` and `torch.nn.functional.NAME` may be.
_FUNCTIONS = dict(_ELEMENTWISE)
_METHODS: dict[str, Operation] = {
  **_ELEMENTWISE,
  'view': _reshape,
  'expand': _expand,
  'size': _size,
  'dim': lambda x: x.ndim,
  'numel': lambda x: x.size,
  'to': _to,
  'type': _to,
  'float': lambda x: x.astype(jnp.float32),
  'bool': lambda x: x.astype(jnp.bool_),
  'long': lambda x: x.astype(jnp.int32),
  'int': lambda x: x.astype(jnp.int32),
  'contiguous': lambda x: x,
  'clone': lambda x: x,
  'masked_fill': lambda x, mask, value: jnp.where(mask, value, x),
  'type_as': lambda x, other: x.astype(other.dtype),
}
_OPERATORS: dict[str, Operation] = {
  **{
    name: getattr(operator, name)
    for name in (
      *('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow', 'neg', 'pos', 'abs'),
      *('lt', 'le', 'gt', 'ge', 'eq', 'ne', 'and_', 'or_', 'xor', 'invert', 'matmul'),
    )
  },
  'getitem': _getitem,
}
_ATTRIBUTES = 'shape', 'ndim', 'dtype'


class _Ignored:
  """What says where a tensor lies, which means nothing here."""


def _function(target: str) -> Operation:
  module, _, name = target.rpartition('.')
  tables: dict[str, Mapping[str, Operation]] = {
    'torch': _FUNCTIONS,
    'torch.nn.functional': _FUNCTIONS,
    'torch.functional': _FUNCTIONS,
    'torch.special': _FUNCTIONS,
    'torch._C._nn': _FUNCTIONS,
    'operator': _OPERATORS,
    'math': {name: getattr(math, name) for name in _MATH},
  }
  if target in ('builtins.getattr', 'getattr'):
    return _attribute
  if module not in tables or name not in tables[module]:
    raise RequestError(f'a custom loss may not call {target[:80]!r}')
  return tables[module][name]


def _attribute(x: object, name: object) -> Any:
  if name not in _ATTRIBUTES:
    raise RequestError(f'a custom loss may not read {name!r}')
  return getattr(x, name)


@dataclasses.dataclass(frozen=True, eq=False)
class CustomLoss:
  """One stored loss.

  Attributes:
    name: The client's name for it.
    inputs: The names of the inputs and their ranks, log-probs first.
    nodes: The graph's nodes.
  """

  name: str
  inputs: tuple[tuple[str, int], ...]
  nodes: tuple[request_bodies.CustomLossNode, ...]

  @classmethod
  def parse(cls, body: request_bodies.CreateCustomLoss) -> 'CustomLoss':
    """Reads a loss, and runs it on shapes alone.

    Args:
      body: The request.

    Raises:
      RequestError: If it does what is not on the list.
    """
    nodes, inputs = body.graph.nodes, body.inputs
    if body.graph.format != 1 or not 1 <= len(nodes) <= MAX_NODES:
      raise RequestError(f'a custom loss has from 1 to {MAX_NODES} nodes, of format 1')
    if not 1 <= len(inputs) <= MAX_INPUTS or inputs[0].name != 'logprobs':
      raise RequestError(f'a custom loss has up to {MAX_INPUTS} inputs, logprobs first')
    ranks = tuple((entry.name, entry.rank) for entry in inputs)
    if any(rank not in (0, 1, 2) for _, rank in ranks) or ranks[0][1] == 0:
      raise RequestError('an input of a custom loss has rank 0, 1 or 2')
    loss = cls(body.name[:100], ranks, tuple(nodes))
    shapes = [
      jax.ShapeDtypeStruct(((), (2,), (2, 2))[rank], jnp.float32) for _, rank in ranks
    ]
    jax.eval_shape(loss.evaluate, *shapes)
    return loss

  def check(self, row: TrainingRow) -> None:
    """Checks that a row has what the loss reads.

    Args:
      row: The row.

    Raises:
      RequestError: If it has not.
    """
    for name, rank in self.inputs[1:]:
      if name not in row.inputs:
        raise RequestError(f'loss {self.name!r} reads {name!r} in loss_fn_inputs')
      if row.inputs[name].ndim != rank:
        raise RequestError(
          f'loss {self.name!r}: {name!r} has rank {row.inputs[name].ndim}, not {rank}'
        )
    if self.inputs[0][1] != (1 if row.is_flat else 2):
      raise RequestError(f'loss {self.name!r}: target_tokens has another rank')

  def evaluate(self, *inputs: object) -> tuple[Any, dict[str, Any]]:
    """Computes the loss and its metrics of one datum.

    Args:
      *inputs: The log-probs, and the other inputs in order.

    Raises:
      RequestError: If an operation is not on the list or fails.
    """
    values: dict[str, Any] = {}
    by_name = {name: x for (name, _), x in zip(self.inputs, inputs, strict=True)}
    for node in self.nodes:
      read = functools.partial(_read, values)
      args = [read(x) for x in node.args]
      kwargs = {key: read(x) for key, x in node.kwargs.items()}
      if node.op == 'output':
        return _check_output(args[0] if args else None)
      if node.op == 'placeholder':
        if node.target not in by_name:
          raise RequestError(f'a custom loss reads an unknown input {node.target!r}')
        values[node.name] = by_name[node.target]
        continue
      values[node.name] = _apply(node, args, kwargs)
    raise RequestError('a custom loss has no output')


def _apply(node: request_bodies.CustomLossNode, args: list, kwargs: dict) -> Any:
  if node.op == 'call_function':
    function = _function(node.target)
  elif node.op == 'call_method' and node.target in _METHODS:
    function = _METHODS[node.target]
  else:
    raise RequestError(f'a custom loss may not use {node.op} {node.target[:80]!r}')
  try:
    value = function(*args, **kwargs)
  except RequestError:
    raise
  except Exception as error:  # whatever jax.numpy says of the arguments
    text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    raise RequestError(f'a custom loss fails at {node.target}: {text}') from error
  if getattr(value, 'size', 0) > MAX_CELLS:
    raise RequestError(
      f'a custom loss makes an array of more than {MAX_CELLS} elements'
    )
  return value


def _read(values: Mapping[str, object], arg: object) -> Any:
  """Returns an argument of a node, decoded."""
  read = functools.partial(_read, values)
  if isinstance(arg, list):
    return [read(x) for x in arg]
  if not isinstance(arg, dict):
    return arg
  if len(arg) != 1:
    raise RequestError('an argument of a custom loss is not valid')
  ((kind, value),) = arg.items()
  if kind == 'ref' and value in values:
    return values[value]
  if kind == 'tuple' and isinstance(value, list):
    return tuple(read(x) for x in value)
  if kind == 'dict' and isinstance(value, dict):
    return {key: read(x) for key, x in value.items()}
  if kind == 'slice' and isinstance(value, list) and len(value) == 3:
    return slice(*(read(x) for x in value))
  if kind == 'ellipsis':
    return ...
  if kind == 'float' and value in ('inf', '-inf', 'nan'):
    return float(value)
  if kind == 'dtype' and value in _DTYPES:
    return _DTYPES[value]
  if kind in ('device', 'layout', 'memory_format'):
    return _Ignored()
  raise RequestError(f'an argument of a custom loss is not valid: {str(arg)[:80]}')


def _check_output(output: object) -> tuple[Any, dict[str, Any]]:
  if not isinstance(output, list | tuple) or len(output) != 2:
    raise RequestError('a custom loss must return its loss and its metrics')
  loss, metrics = output
  if getattr(loss, 'shape', None) != () or not isinstance(metrics, dict):
    raise RequestError('a custom loss must return a scalar, and a dict of metrics')
  for name, value in metrics.items():
    if not _METRIC.fullmatch(name) or getattr(value, 'size', 1) != 1:
      raise RequestError(
        f'metric {name[:80]!r} must be a scalar custom/NAME:sum or :mean'
      )
  return loss, {name: jnp.reshape(value, ()) for name, value in metrics.items()}


@functools.lru_cache(maxsize=64)
def _program(loss: CustomLoss) -> Operation:
  return jax.jit(jax.value_and_grad(loss.evaluate, has_aux=True))


def run_custom_loss(
  learner: TenantLearner,
  tenant: Tenant,
  loss: CustomLoss,
  rows: Sequence[TrainingRow],
  *,
  backward: bool,
) -> bytes:
  """Runs rows forward, their loss, and backward with the gradient that it has.

  Args:
    learner: The learner, on whose thread this runs.
    tenant: The tenant.
    loss: The loss.
    rows: The rows, with the loss's inputs.
    backward: Whether gradients are wanted.

  Returns:
    The result, as `write_forward_backward` writes it.

  Raises:
    RequestError: If the loss or its gradient is not finite.
  """
  plain = [dataclasses.replace(row, inputs={}) for row in rows]
  logprobs = _run(learner, tenant, plain, backward=False)
  weighted, outputs, total = [], [], 0.0
  metrics: dict[str, float] = {}
  for row, own in zip(rows, logprobs, strict=True):
    own = own[:, 0] if row.is_flat else own
    others = [row.inputs[name].astype(np.float32) for name, _ in loss.inputs[1:]]
    (value, own_metrics), gradient = _program(loss)(own, *others)
    gradient = np.asarray(gradient)
    if not (np.isfinite(float(value)) and np.isfinite(gradient).all()):
      raise RequestError(f'loss {loss.name!r} or its gradient is not finite')
    total += float(value)
    for name, metric in own_metrics.items():
      share = 1 / len(rows) if name.endswith(':mean') else 1.0
      metrics[name] = metrics.get(name, 0.0) + share * float(metric)
    outputs.append({'logprobs': own})
    weights = {'weights': -gradient.reshape(row.targets.shape)}
    weighted.append(dataclasses.replace(row, inputs=weights))
  if backward:
    _run(learner, tenant, weighted, backward=True)
  return write_forward_backward(outputs, {'loss:sum': total, **metrics})


def _run(
  learner: TenantLearner, tenant: Tenant, rows: Sequence[TrainingRow], *, backward: bool
) -> list[np.ndarray]:
  """Runs one tenant's rows in as many programs as they need."""
  results: dict[int, np.ndarray] = {}
  buckets: dict[tuple[int, int], list[int]] = {}
  for i, row in enumerate(rows):
    key = learner.bucket(len(row.tokens)), row.targets.shape[1]
    buckets.setdefault(key, []).append(i)
  for (bucket, _), indices in sorted(buckets.items()):
    size = learner.rows_per_step(bucket)
    for start in range(0, len(indices), size):
      part = indices[start : start + size]
      done = learner.run([(tenant, rows[i]) for i in part], backward=backward)
      results.update({i: own for i, (own, _) in zip(part, done, strict=True)})
  return [results[i] for i in range(len(rows))]
