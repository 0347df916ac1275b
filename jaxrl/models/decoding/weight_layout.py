"""The weight layout is the order in which a decode step reads the weights fastest."""

import functools
from typing import TYPE_CHECKING

from jaxrl.models import layer_stack
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.types import Params
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
    old: What this returned for earlier parameters, if nobody needs it any more; on a
      CPU the new ones may take its place in memory.

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
  arrange_layers = functools.partial(layer_stack.unstack_by_layer, model.config)
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

      return joined_products.pack(model.config, params, dtype, old)
  if model.weights_dtype:  # there is no C compiler
    from jaxrl.models.decoding import output_major

    params = output_major.cast_tables(params, model.weights_dtype)
    return arrange_layers(params, output_major.arrange_layer, model.weights_dtype)
  return arrange_layers(params)
