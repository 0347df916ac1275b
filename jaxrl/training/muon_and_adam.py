"""Muon and Adam share one optimizer state, shaped like the parameters.

optax's own combination masks the parameters of either part, so that its state has
another structure than they. Here every parameter has a first moment in its own place,
and is sharded as it is; only what Adam updates has a second.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from optax.contrib import MuonDimensionNumbers

from jaxrl.training.batch_fields import HParams
from jaxrl.types import Array, Params, PyTree


class MuonAndAdamState(NamedTuple):
  """The state of Muon and Adam.

  Attributes:
    count: Updates so far.
    mu: First moments, Muon's momentum among them.
    nu: Second moments; `[1]` stands for none where Muon updates.
  """

  count: Array
  mu: Params
  nu: Params


def matrix_axes(path: KeyPath, shape: Sequence[int]) -> tuple | None:
  """Returns the axes of a hidden matrix: of its inputs, and of its outputs.

  Args:
    path: Where the parameter is in the tree, as `jax.tree_util` gives it.
    shape: Its shape. The first axes are of layers and of experts.

  Returns:
    Two tuples of axes; None for all but hidden matrices.
  """
  names = [key.key for key in path]
  if names[0] != 'layers' or names[-1] != 'kernel':
    return None
  lead = 1 + ('experts' in names)
  inputs = 2 if names[-2] == 'o' else 1  # heads and their width
  axes = tuple(range(lead, len(shape)))
  return axes[:inputs], axes[inputs:]


def scale_by_muon_and_adam(
  hparams: HParams, ns_steps: int
) -> optax.GradientTransformation:
  """Returns the transformation, without learning rate and weight decay.

  Args:
    hparams: 'momentum', 'rms', 'b1', 'b2' and 'eps'; they may be traced.
    ns_steps: Newton-Schulz iterations.
  """
  adam = optax.scale_by_adam(hparams['b1'], hparams['b2'], hparams['eps'])

  def init(params: Params) -> MuonAndAdamState:
    def second(path: KeyPath, x: Array) -> Array:
      is_matrix = matrix_axes(path, x.shape) is not None
      return jnp.zeros((1,), x.dtype) if is_matrix else jnp.zeros_like(x)

    paths = jax.tree_util.tree_leaves_with_path(params)
    if all(matrix_axes(path, x.shape) is None for path, x in paths):
      raise ValueError(
        "optimizer.name='muon' updates the kernels of layers, and this run trains none "
        'of them. Adapters are trained by adamw'
      )
    mu = jax.tree.map(jnp.zeros_like, params)
    nu = jax.tree_util.tree_map_with_path(second, params)
    return MuonAndAdamState(jnp.zeros([], jnp.int32), mu, nu)

  def update(
    updates: Params, state: PyTree, params: Params | None = None
  ) -> tuple[Params, PyTree]:
    del params
    flat, treedef = jax.tree_util.tree_flatten_with_path(updates)
    axes = [matrix_axes(path, x.shape) for path, x in flat]
    grads = [x for _, x in flat]
    mu, nu = jax.tree.leaves(state.mu), jax.tree.leaves(state.nu)
    of_muon = [i for i, a in enumerate(axes) if a is not None]
    of_adam = [i for i, a in enumerate(axes) if a is None]

    muon = _muon(hparams, ns_steps, [axes[i] for i in of_muon])
    matrices = [grads[i] for i in of_muon]
    start: Any = muon.init(matrices)
    start = start._replace(count=state.count, mu=[mu[i] for i in of_muon])
    after: Any
    new: Any
    new, after = muon.update(matrices, start)
    for i, x, moment in zip(of_muon, new, after.mu, strict=True):
      grads[i] = hparams['rms'] * math.sqrt(_longer_side(x.shape, axes[i])) * x
      mu[i] = moment

    rest: Any = optax.ScaleByAdamState(
      state.count, [mu[i] for i in of_adam], [nu[i] for i in of_adam]
    )
    new, rest = adam.update([grads[i] for i in of_adam], rest)
    for i, x, first, second in zip(of_adam, new, rest.mu, rest.nu, strict=True):
      grads[i], mu[i], nu[i] = x, first, second
    unflatten: Callable[[list], Params] = functools.partial(jax.tree.unflatten, treedef)
    count: Any = optax.safe_increment(state.count)
    return unflatten(grads), MuonAndAdamState(count, unflatten(mu), unflatten(nu))

  return optax.GradientTransformation(init, update)


def _muon(
  hparams: HParams, ns_steps: int, axes: list[Any]
) -> optax.GradientTransformation:
  numbers: Any = [MuonDimensionNumbers(inputs, outputs) for inputs, outputs in axes]
  return optax.contrib.scale_by_muon(
    ns_steps=ns_steps,
    beta=hparams['momentum'],
    weight_dimension_numbers=numbers,
  )


def _longer_side(shape: Sequence[int], axes: Any) -> int:
  return max(math.prod(shape[i] for i in side) for side in axes)
