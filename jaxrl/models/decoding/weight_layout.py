"""The weight layout is the order in which a decode step reads the weights fastest."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxrl.models import layer_stack
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.types import Params, PyTree
from kernels.dispatch import platform_of

if TYPE_CHECKING:
  from kernels.block_rounding import BlockFormat


def arrange(
  model: TransformerLM,
  weights_format: 'BlockFormat | None',
  num_devices: int,
  params: Params,
  old: Params | None = None,
) -> Params:
  """Lays parameters out for decoding.

  Args:
    model: The model, for its engine's platform.
    weights_format: How matrices are kept in 8 bits; None keeps their type.
    num_devices: The devices that hold the weights.
    params: The parameters.
    old: What `spent_panels` returned of earlier parameters, to be overwritten.

  Returns:
    Parameters whose 'layers' is a tuple of single layers. On one CPU device, matrices
    lie in panels if there is a kernel for them, or else output-major in the model's
    `weights_dtype`, if any; on a GPU, those that read the same input are joined.
  """
  platform = platform_of(model.platform)
  if platform == 'cpu':
    return _arrange_on_cpu(model, weights_format, num_devices, params, old)
  params = layer_stack.unstack(model.config, params)
  if weights_format is not None:
    from jaxrl.models.decoding import eight_bit_weights  # few engines have them

    params = eight_bit_weights.encode(params, weights_format)
  if platform != 'gpu':
    return params
  from jaxrl.models.decoding import joined_products

  return joined_products.join(params)


def _arrange_on_cpu(
  model: TransformerLM,
  weights_format: 'BlockFormat | None',
  num_devices: int,
  params: Params,
  old: Params | None,
) -> Params:
  # Modules are imported as they are needed: few engines have more than one layout.
  arrange_layers = functools.partial(unstack_by_layer, model.config)
  if weights_format is not None:
    from jaxrl.models.decoding import eight_bit_weights, output_major

    params = output_major.cast_tables(params, model.weights_dtype)
    return arrange_layers(params, eight_bit_weights.encode_layer, weights_format)
  if num_devices == 1 and model.exact is None:
    from kernels.native import row_product

    dtype = model.weights_dtype or model.dtype
    known = dtype in row_product.DTYPES
    if known and not row_product.obstacle('cpu', kernels=model.kernels):
      from jaxrl.models.decoding import joined_products

      spent = {} if old is None else old
      params = joined_products.pack_ends(params, dtype, spent)
      options = {'spent': spent.get('layers', ())}
      return arrange_layers(params, joined_products.pack_layer, dtype, **options)
  if model.weights_dtype:  # there is no C compiler
    from jaxrl.models.decoding import output_major

    params = output_major.cast_tables(params, model.weights_dtype)
    return arrange_layers(params, output_major.arrange_layer, model.weights_dtype)
  return arrange_layers(params)


def spent_panels(params: Params) -> Params | None:
  """Returns the arrays whose places in memory `arrange` can give to new parameters.

  Args:
    params: What `arrange` returned for a CPU, if nobody needs it any more.

  Returns:
    Panels, by the names of their parts, for 'layers' a list of each layer's; None for
    parameters without any, which are to be dropped before others are laid out.
  """
  from jaxrl.models.decoding.joined_products import panels

  found: Params = {n: panels(part) for n, part in params.items() if n != 'layers'}
  found['layers'] = [panels(layer) for layer in params['layers']]
  return found if jax.tree.leaves(found) else None


def unstack_by_layer(
  config: ModelConfig,
  params: Params,
  change: Callable[..., Params] | None = None,
  *options: Hashable,
  spent: Sequence[PyTree] = (),
) -> Params:
  """Does what `layer_stack.unstack` does, and changes each layer as it is cut.

  A layer is cut and changed by one program, which all layers of its kind share: a
  program for hundreds of slices takes XLA long to compile. One layer follows the other,
  so that no second copy of the weights is ever in memory.

  Args:
    config: The model's shape.
    params: The parameters, outside of any program.
    change: A function of a module, which maps a layer's parameters and `options` to
      others; None changes nothing.
    *options: Hashable arguments.
    spent: For each layer arrays that nobody needs any more. Results of the same shapes
      take their places in memory.
  """
  if isinstance(params['layers'], tuple):
    if change is None:
      return params
    sources = [(x, None) for x in params['layers']]
  else:
    stacks = params['layers']
    sources = [
      (stacks[name] if name else stacks, np.int32(i))
      for name, i in layer_stack.places(config)
    ]
  spent = spent or [()] * len(sources)
  changed = [
    jax.block_until_ready(_changed_layer(weights, i, old, change, options))
    for (weights, i), old in zip(sources, spent, strict=True)
  ]
  return params | {'layers': tuple(changed)}


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=2, keep_unused=True)
def _changed_layer(
  weights: Params,
  i: jax.Array | None,
  spent: PyTree,
  change: Callable[..., Params] | None,
  options: tuple[Hashable, ...],
) -> Params:
  """Changes a layer, which is the i-th of a stack unless i is None."""
  del spent  # the results lie there
  layer = weights if i is None else jax.tree.map(lambda x: x[i], weights)
  return layer if change is None else change(layer, *options)
