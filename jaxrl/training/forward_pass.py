"""Forward passes run the model on a batch micro-batch by micro-batch.

The batch is a rectangle `[B, T]`; with a packing plan the model runs on packed rows and
its outputs are scattered back to the rectangle. Gradients of a plan's micro-batches are
accumulated here too, by `gradient_sums`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import Keywords
from jaxrl.training.batch_fields import DENSE_IDS, BatchFields
from jaxrl.training.batching import gradient_sums
from jaxrl.training.batching.packing_plan import PackingPlan, most_sequences_per_row
from jaxrl.training.parallelism import sharding
from jaxrl.training.train_state import StepSpec
from jaxrl.types import Array, Batch, PackedRows, Params, PolicyOutputs, PyTree
from kernels.dispatch import platform_of

# Maps a micro-batch's fields and weights to gradients and sums of metrics.
MicroBatchGradFn = Callable[[BatchFields, PyTree], tuple[Params, PyTree]]


def compute_outputs(
  model: TransformerLM,
  params: Params,
  tokens: Array,
  segment_ids: Array,
  routed_experts: Array | None = None,
  images: tuple[Array, Array] | None = None,
  packed_rows: PackedRows | None = None,
  *,
  topk_ids: Array | None = None,
  **options: Any,
) -> PolicyOutputs:
  """Runs the model on a rectangle of tokens, on packed rows if there are any.

  Args:
    model: The model.
    params: Its parameters.
    tokens: `[B, T]` int32.
    segment_ids: `[B, T]` int32.
    routed_experts: `[B, T, L, k]` int16, experts to replay.
    images: The features and positions of `ImagePlaces`.
    packed_rows: Where the tokens lie in packed rows.
    topk_ids: `[B, T, K]` int32, tokens to score in the place of each token.
    **options: Further options of `model.policy_outputs`.

  Returns:
    Outputs `[B, T]`. They are 0 for padding and for tokens of a prompt that is shared
    with another row without a tree.
  """
  if packed_rows is None:
    options |= _present_options(topk_ids, routed_experts, images)
    return model.policy_outputs(params, tokens, segment_ids, **options)
  more = topk_ids, routed_experts, images
  return _compute_packed_outputs(
    model, params, tokens, segment_ids, more, packed_rows, options
  )


def _present_options(
  topk_ids: Array | None,
  routed_experts: Array | None,
  images: tuple[Array, Array] | None,
) -> Keywords:
  """Returns those of the model's options that are given."""
  options: Keywords = {}
  if topk_ids is not None:
    options['topk_ids'] = topk_ids
  if routed_experts is not None:
    options['routed_experts'] = routed_experts
  if images is not None:
    from jaxrl.models.vision.image_places import ImagePlaces  # few models see any

    options['images'] = ImagePlaces(*images)
  return options


def _compute_packed_outputs(
  model: TransformerLM,
  params: Params,
  tokens: Array,
  segment_ids: Array,
  more: tuple[Array | None, Array | None, tuple[Array, Array] | None],
  packed_rows: PackedRows,
  options: Keywords,
) -> PolicyOutputs:
  """Gathers tokens into packed rows, runs the model, and scatters its outputs back."""
  is_slot_used = packed_rows.origin >= 0
  origin = jnp.maximum(packed_rows.origin, 0)

  def pack(x: Array, fill: int = 0) -> Array:
    slots = x.reshape(-1, *x.shape[2:])[origin]
    used = is_slot_used.reshape(is_slot_used.shape + (1,) * (x.ndim - 2))
    slots = jnp.where(used, slots, fill)
    return model.constrain(slots, 'batch', 'length', *(None,) * (x.ndim - 2))

  packed_tokens = pack(tokens)
  if packed_rows.tree is None:
    options |= _attention_options(model, packed_rows, segment_ids)
  else:
    options |= {'tree': packed_rows.tree}
  topk_ids, routed_experts, images = more
  options |= _present_options(
    None if topk_ids is None else pack(topk_ids),
    None if routed_experts is None else pack(routed_experts, -1),
    jax.tree.map(pack, images),
  )
  packed = model.policy_outputs(
    params,
    packed_tokens,
    packed_rows.segment_ids,
    prefix_ids=packed_rows.prefix_ids,
    positions=packed_rows.positions,
    **options,
  )
  has_output, place = packed_rows.place >= 0, jnp.maximum(packed_rows.place, 0)

  def unpack(x: Array) -> Array:
    tokens = x.reshape(-1, *x.shape[2:])[place]
    has = has_output.reshape(has_output.shape + (1,) * (x.ndim - 2))
    return jnp.where(has, tokens, 0)

  return jax.tree.map(unpack, packed)


def _attention_options(
  model: TransformerLM, packed_rows: PackedRows, segment_ids: Array
) -> Keywords:
  """Returns the model's option to attend on unpacked rows, where that is cheaper.

  Otherwise, returns how many segments packed rows have. They are not unpacked unless
  one device has all rows: on several devices, what an unpacked row needs would lie on
  others.
  """
  # Imported here because only packed rows can be unpacked.
  from jaxrl.training.batching import unpacked_attention

  mesh = getattr(model.constrain, 'mesh', None)
  has_all_rows = mesh is None or sharding.num_row_shards(mesh) == 1
  platform = _platform(model)
  if not has_all_rows or not unpacked_attention.is_cheaper(packed_rows, platform):
    if not (segments := getattr(model, 'row_segments', 0)):
      return {}
    length, (sequences, longest) = packed_rows.origin.shape[1], packed_rows.place.shape
    most = most_sequences_per_row(sequences, length, longest)
    prompts = 0 if packed_rows.prefix_ids is None else most // 2
    return {'row_segments': most * segments + prompts}
  unpacked = unpacked_attention.unpack_rows(packed_rows, segment_ids)
  return {
    'attend_with': functools.partial(unpacked_attention.attend, unpacked, packed_rows)
  }


def image_options(fields: BatchFields) -> tuple[Array, Array] | None:
  """Returns the images of rows, as `compute_outputs` takes them; None without any.

  Args:
    fields: Fields of a batch.
  """
  if fields.get('image_features') is None:
    return None
  return fields['image_features'], fields['image_positions']


def with_images(spec: StepSpec, params: Params, batch: Batch) -> Params:
  """Returns the parameters with the features of a batch's images in the tower's place.

  Args:
    spec: The spec of the step.
    params: The model's parameters.
    batch: The batch; without images the parameters stay as they are.
  """
  if batch.patch_rows is None:
    return params
  from jaxrl.models.vision import vision_tower  # few models see images

  return vision_tower.encode(spec.model, params, batch.patch_rows)


def constrain_rows(spec: StepSpec, x: Array) -> Array:
  """Pins an array `[R, …]` to the mesh, with its rows split."""
  return spec.model.constrain(x, 'rows', *(None,) * (x.ndim - 1))


def map_micro_batches(
  spec: StepSpec,
  chunks: int | PackingPlan,
  function: Callable[..., PyTree],
  tokens: Array,
  *arrays: PyTree,
) -> PyTree:
  """Applies a function to one micro-batch after the other and joins the results.

  Args:
    spec: The spec of the step.
    chunks: The number of micro-batches, with as many rows each, or a plan of them.
    function: Maps `(tokens, *arrays, packed_rows)` of a micro-batch to arrays `[B, T,
      …]`; without a plan `packed_rows` is None.
    tokens: `[N, T]` int32.
    *arrays: Further arrays `[N, …]`, or trees of them.

  Returns:
    The results of all rows, `[N, T, …]`.
  """
  inputs = tokens, *arrays
  if not isinstance(chunks, PackingPlan):
    return _map_chunks(spec, chunks, lambda *x: function(*x, None), *inputs)
  plan = chunks
  num_rows, length = tokens.shape

  def run(i: Array | int) -> PyTree:
    rows = jnp.maximum(plan.micro_batch_rows[i], 0)
    selected = jax.tree.map(lambda x: x[rows], inputs)
    return function(*selected, plan.packed_rows(i, length))

  def body(i: Array, results: PyTree) -> PyTree:
    rows = plan.micro_batch_rows[i]
    target = jnp.where(rows < 0, num_rows, rows)  # beyond the end: dropped
    put = lambda y, x: y.at[target].set(x, mode='drop')  # noqa: E731
    return jax.tree.map(put, results, run(i))

  start = jax.tree.map(
    lambda x: constrain_rows(spec, jnp.zeros((num_rows, *x.shape[1:]), x.dtype)),
    jax.eval_shape(run, 0),
  )
  return jax.lax.fori_loop(0, plan.num_micro_batches, body, start)


def _map_chunks(
  spec: StepSpec, num_chunks: int, function: Callable[..., PyTree], *arrays: PyTree
) -> PyTree:
  """Applies a function to one chunk of the rows `[N, …]` after the other."""

  def body(_: None, inputs: PyTree) -> tuple[None, PyTree]:
    return None, function(*jax.tree.map(lambda x: constrain_rows(spec, x), inputs))

  split = jax.tree.map(lambda x: x.reshape(num_chunks, -1, *x.shape[1:]), arrays)
  results = jax.lax.scan(body, None, split)[1]
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)


def accumulate_micro_batches(
  spec: StepSpec,
  index: Array | PackingPlan,
  grad_fn: MicroBatchGradFn,
  params: Params,
  fields: BatchFields,
  weights: PyTree,
) -> tuple[Params, PyTree]:
  """Sums gradients and metrics over the micro-batches of a minibatch.

  How many micro-batches a plan has is known only at run time: one program serves any
  number. A plan with room for one has one, and its gradients are not added to anything.

  Args:
    spec: The spec of the step.
    index: The micro-batches: `[num_micro_batches, R]`, of whose shape `fields` are the
      rows in order, or a plan of packed rows.
    grad_fn: Computes gradients and metrics of one.
    params: The trained parameters.
    fields: Fields of the minibatch's rows `[N, …]`.
    weights: Weights of the minibatch's rows `[N, …]`.

  Returns:
    `(gradients, sums)`.
  """
  if not isinstance(index, PackingPlan):
    return _accumulate_chunks(spec, index.shape, grad_fn, params, (fields, weights))
  plan = index
  if len(plan.micro_batch_rows) == 1:
    return micro_batch_grads(spec, plan, grad_fn, fields, weights, 0)
  start = zero_grads(spec, plan, grad_fn, params, fields, weights)

  def add(i: Array, total: PyTree) -> PyTree:
    return add_micro_batch(spec, plan, grad_fn, fields, weights, i, total)

  grads, sums = jax.lax.fori_loop(0, plan.num_micro_batches, add, start)
  return gradient_sums.stack_layers(grads), sums


def _accumulate_chunks(
  spec: StepSpec,
  shape: tuple[int, ...],
  grad_fn: MicroBatchGradFn,
  params: Params,
  arrays: tuple[BatchFields, Any],
) -> tuple[Params, Any]:
  """Sums gradients and metrics over `shape` [num_micro_batches, R] of the rows."""
  split = jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), arrays)

  def run(micro_batch: Any) -> tuple[Params, Any]:
    return grad_fn(*jax.tree.map(lambda x: constrain_rows(spec, x), micro_batch))

  if spec.num_micro_batches == 1:
    return run(jax.tree.map(lambda x: x[0], split))

  def add(total: Params, micro_batch: Any) -> tuple[Params, Any]:
    return gradient_sums.add(_platform(spec.model), run, total, micro_batch)

  start = jax.tree.map(jnp.zeros_like, params)
  if _platform(spec.model) == 'cpu':  # elsewhere tracing would change nothing
    first = jax.tree.map(lambda x: x[0], split)
    start, _ = gradient_sums.zeros('cpu', run, params, first)
  grads, sums = jax.lax.scan(add, start, split)
  grads = gradient_sums.stack_layers(grads)
  return grads, jax.tree.map(lambda x: x.sum(0), sums)


def micro_batch_grads(
  spec: StepSpec,
  plan: PackingPlan,
  grad_fn: MicroBatchGradFn,
  fields: BatchFields,
  weights: PyTree,
  i: Array | int,
) -> tuple[Params, PyTree]:
  """Computes gradients and metrics of micro-batch `i` of a plan.

  The other arguments are those of `accumulate_micro_batches`.
  """
  index = plan.micro_batch_rows[i]
  selected, selected_weights = select_rows(spec, fields, weights, index)
  selected |= {
    'packed_rows': plan.packed_rows(i, fields['tokens'].shape[1]),
    'num_micro_batches': plan.num_micro_batches.astype(jnp.float32),
  }
  return grad_fn(selected, selected_weights)


def add_micro_batch(
  spec: StepSpec,
  plan: PackingPlan,
  grad_fn: MicroBatchGradFn,
  fields: BatchFields,
  weights: PyTree,
  i: Array | int,
  total: tuple[Params, PyTree],
) -> tuple[Params, PyTree]:
  """Adds gradients and metrics of micro-batch `i` of a plan to `total`.

  The other arguments are those of `accumulate_micro_batches`.
  """
  run = functools.partial(micro_batch_grads, spec, plan, grad_fn, fields, weights)
  grads, sums = gradient_sums.add(_platform(spec.model), run, total[0], i)
  return grads, jax.tree.map(jnp.add, total[1], sums)


def zero_grads(
  spec: StepSpec,
  plan: PackingPlan,
  grad_fn: MicroBatchGradFn,
  params: Params,
  fields: BatchFields,
  weights: PyTree,
) -> tuple[Params, PyTree]:
  """Returns the sums over no micro-batches; see `accumulate_micro_batches`.

  Gradients of unrolled layers may be `LayerSums`.
  """
  run = functools.partial(micro_batch_grads, spec, plan, grad_fn, fields, weights)
  grads, shapes = gradient_sums.zeros(_platform(spec.model), run, params, 0)
  return grads, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _platform(model: TransformerLM) -> str:
  """Returns what a model is compiled for; a user's own may not say."""
  return platform_of(getattr(model, 'platform', None))


def select_rows(
  spec: StepSpec, fields: BatchFields, weights: PyTree, index: Array
) -> tuple[BatchFields, PyTree]:
  """Selects rows of a minibatch's fields and weights.

  Args:
    spec: The spec of the step.
    fields: Fields `[N, …]`.
    weights: Weights `[N, …]`.
    index: `[B]` int32; −1 makes a padding row, with ids −1, no action and weight 0.

  Returns:
    Fields and weights `[B, …]`.
  """
  is_row = index >= 0
  selected, selected_weights = jax.tree.map(
    lambda x: constrain_rows(spec, x[jnp.maximum(index, 0)]), (fields, weights)
  )
  for name in (*DENSE_IDS, 'turn_ids'):
    if selected.get(name) is not None:
      selected[name] = jnp.where(is_row, selected[name], -1)
  selected['mask'] &= is_row[:, None]

  def zero_padding(x: Array) -> Array:
    return jnp.where(is_row.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

  return selected, jax.tree.map(zero_padding, selected_weights)
