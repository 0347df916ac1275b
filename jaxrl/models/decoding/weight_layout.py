"""The weight layout is the order in which a decode step reads the weights fastest."""

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
) -> Params:
  """Lays parameters out for decoding.

  Args:
    model: The model, for its engine's platform.
    weights_format: How matrices are kept in 8 bits; None keeps their type.
    num_devices: The devices that hold the weights.
    params: The parameters.

  Returns:
    Parameters whose 'layers' is a tuple of single layers. On one CPU device, matrices
    lie in panels if there is a kernel for them, or else output-major in the model's
    `weights_dtype`, if any; on a GPU, those that read the same input are joined.
  """
  platform = platform_of(model.platform)
  if platform == 'cpu':
    params = layer_stack.unstack_by_layer(model.config, params)
  else:
    params = layer_stack.unstack(model.config, params)
  if weights_format is not None:
    from jaxrl.models.decoding import eight_bit_weights  # few engines have them

    params = eight_bit_weights.encode(params, weights_format)
  elif platform == 'cpu' and num_devices == 1 and model.exact is None:
    from kernels.native import row_product  # not for other platforms

    dtype = model.weights_dtype or model.dtype
    known = dtype in row_product.DTYPES
    if known and not row_product.obstacle('cpu', kernels=model.kernels):
      from jaxrl.models.decoding import joined_products

      return joined_products.pack(params, dtype)
  if model.weights_dtype:
    from jaxrl.models.decoding import output_major  # for CPUs without a C compiler

    return output_major.arrange(params, model.weights_dtype)
  if platform != 'gpu':
    return params
  from jaxrl.models.decoding import joined_products

  return joined_products.join(params)
