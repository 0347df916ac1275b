"""The train state: what training changes, and the static spec of a training step.

`StepSpec` holds everything static that the compiled steps depend on, `TrainState` the
arrays that an update changes. The functions below give the shapes and shardings of both
on a mesh, create the first state, and convert parameters for inference.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.algorithms import requirements
from jaxrl.functional import components
from jaxrl.models import lora
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training import batch_fields, optimizers
from jaxrl.training.optimizers import ADAMW_STATE, OptimizerStateSpec
from jaxrl.training.parallelism import model_sharding, sharding
from jaxrl.types import Algorithm, AnyArray, Params, PyTree

if TYPE_CHECKING:
  from kernels.block_rounding import BlockFormat

# Components that are called in each update; the others run once per batch.
UPDATE_COMPONENTS = (
  'prepare',
  'policy_loss',
  'kl_loss',
  'entropy_loss',
  'value_loss',
  'correction',
)
AlgorithmState = dict[str, PyTree]  # what stateful components carry, by component


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """The arrays that an update changes.

  Attributes:
    params: The model's parameters, float32.
    opt_state: The optimizer's state, of the trained parameters.
    algorithm_state: What stateful components carry from step to step, by component.
  """

  params: Params
  opt_state: PyTree
  algorithm_state: AlgorithmState = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepSpec:
  """Everything static that a training step depends on; hashable.

  Learners with equal specs share their compiled programs.

  Attributes:
    model: The model, with its activations pinned to the mesh.
    algorithm: The algorithm without its numeric options, which are traced.
    num_micro_batches: The number of micro-batches of a minibatch.
    entropy: Whether the exact entropy is computed even if no component reads it.
    top_k: The number of tokens in a teacher's top-k fields.
    optimizer_state: What fixes the structure of the optimizer's state.
    packed: Whether the model runs on packed rows, in as many micro-batches as these
      fill.
  """

  model: TransformerLM
  algorithm: Algorithm
  num_micro_batches: int = 1
  entropy: bool = False
  top_k: int = 0
  optimizer_state: OptimizerStateSpec = ADAMW_STATE
  packed: bool = False

  @property
  def is_split(self) -> bool:
    """Returns whether a minibatch is, or may be, more than one micro-batch."""
    return self.packed or self.num_micro_batches > 1

  @property
  def scored_fields(self) -> frozenset[str]:
    """Returns the fields that must be computed before the first update of a batch."""
    return requirements.needs(self.algorithm)

  @property
  def advantage_fields(self) -> frozenset[str]:
    """Returns the fields that are read before the first update of a batch."""
    return requirements.fields_read_before_update(self.algorithm)

  @property
  def update_fields(self) -> frozenset[str]:
    """Returns the fields that are read in each update."""
    return requirements.fields_read(self.algorithm, *UPDATE_COMPONENTS)

  @property
  def has_advantage_step(self) -> bool:
    """Returns whether a batch is scored or gets advantages before its first update."""
    scored = self.scored_fields & {'old_logprobs', 'ref_logprobs', 'values'}
    return bool(scored or self.advantage_fields)

  @property
  def teacher_fields(self) -> tuple[str, ...]:
    """Returns the fields that teachers add to a batch on the devices."""
    return batch_fields.teacher_fields(self.algorithm)

  @property
  def input_fields(self) -> tuple[str, ...]:
    """Returns the fields that the learner, not a teacher, puts on the devices."""
    optional = (*batch_fields.TOKEN_FIELDS, *batch_fields.ROW_FIELDS)
    read = requirements.fields_read(self.algorithm)
    replay = getattr(self.model, 'router_replay', False)
    return (
      *batch_fields.REQUIRED_FIELDS,
      *(name for name in optional if name in read),
      *(('routed_experts',) if replay else ()),
      *(batch_fields.IMAGE_FIELDS if sees_images(self.model) else ()),
    )

  def init_algorithm_state(self) -> AlgorithmState:
    """Returns the state of the stateful components before the first step."""
    state = requirements.init_state(self.algorithm)
    if self.algorithm.critic_warmup:
      from jaxrl.training import critic_warmup  # few algorithms have a critic

      state['critic_warmup'] = critic_warmup.init_warmup_state()
    return state

  def has_state(self, component: str) -> bool:
    """Returns whether `component` carries a state."""
    part = getattr(self.algorithm, component)
    return components.component_info(part).init_state is not None


def sees_images(model: object) -> bool:
  """Returns whether a model has a vision tower."""
  return getattr(getattr(model, 'config', None), 'vision', None) is not None


@functools.lru_cache(maxsize=64)
def params_shapes(spec: StepSpec, mesh: Mesh) -> Params:
  """Returns shapes, dtypes and shardings of the model's parameters."""
  shapes = jax.eval_shape(spec.model.init, jax.random.key(0))
  axes = spec.model.logical_axes()
  return with_shardings(shapes, sharding.params_sharding(mesh, axes, shapes))


@functools.lru_cache(maxsize=64)
def state_shapes(spec: StepSpec, mesh: Mesh) -> TrainState:
  """Returns shapes, dtypes and shardings of the whole train state."""
  model_sharding.check_experts_mesh(spec.model.config, mesh)
  params = params_shapes(spec, mesh)
  replicated = sharding.replicated(mesh)
  trained = lora.trainable_params(spec.model.config, params)
  init_optimizer = functools.partial(
    optimizers.init_optimizer_state, state_spec=spec.optimizer_state
  )
  opt_shardings = optimizers.optimizer_state_sharding(
    trained, shardings_of(trained), replicated, spec.optimizer_state
  )
  opt_state = with_shardings(jax.eval_shape(init_optimizer, trained), opt_shardings)
  algorithm_state = jax.eval_shape(
    lambda: jax.tree.map(jnp.asarray, spec.init_algorithm_state())
  )
  algorithm_state = with_shardings(
    algorithm_state, jax.tree.map(lambda _: replicated, algorithm_state)
  )
  return TrainState(params, opt_state, algorithm_state)


def reference_shapes(spec: StepSpec, mesh: Mesh) -> Params | None:
  """Returns shapes of the reference policy's own parameters; None without one.

  With LoRA these are its adapters: everything else is shared with the learner.
  """
  teacher = spec.algorithm.self_teacher
  has_own = teacher is not None and teacher.params != 'live'
  if 'ref_logprobs' not in spec.scored_fields and not has_own:
    return None
  return lora.trainable_params(spec.model.config, params_shapes(spec, mesh))


def check_params(spec: StepSpec, mesh: Mesh, params: Params) -> None:
  """Checks that parameters fit the model.

  Args:
    spec: What the model belongs to.
    mesh: The devices that they are split over.
    params: The parameters, or their shapes.

  Raises:
    ValueError: They do not, naming the parameter.
  """
  if spec.algorithm.value_loss and not spec.model.config.value_head:
    raise ValueError('this algorithm trains a critic: set value_head=True in the model')
  expected = flat_shapes(params_shapes(spec, mesh))
  actual = flat_shapes(params)
  for name in sorted(expected.keys() | actual.keys()):
    if expected.get(name) != actual.get(name):
      raise ValueError(
        f'parameter {name}: the model needs shape {expected.get(name)}, '
        f'given is {actual.get(name)}'
      )


def init_train_state(spec: StepSpec, mesh: Mesh, params: Params) -> TrainState:
  """Creates the first train state around a copy of the parameters.

  Args:
    spec: What the state belongs to.
    mesh: The devices that the state is split over.
    params: The parameters, as `model.init` returns them, or their shapes.

  Returns:
    The state, which a train step may donate, or its shapes if `params` are shapes.
  """
  shapes = state_shapes(spec, mesh)
  if is_abstract(params):
    return shapes
  params = place_params(params, shapes.params)
  init_optimizer = functools.partial(
    optimizers.init_optimizer_state, state_spec=spec.optimizer_state
  )
  trained = lora.trainable_params(spec.model.config, params)
  opt_shardings = shardings_of(shapes.opt_state)
  opt_state = jax.jit(init_optimizer, out_shardings=opt_shardings)(trained)
  algorithm_state = jax.tree.map(
    sharding.put_array,
    spec.init_algorithm_state(),
    shardings_of(shapes.algorithm_state),
  )
  return TrainState(params, opt_state, algorithm_state)


def place_params(params: Params, shapes: Params) -> Params:
  """Copies parameters to the devices.

  Args:
    params: Arrays, or shapes, which are not copied.
    shapes: The same tree, of shapes with the dtypes and shardings wanted.

  Returns:
    Arrays that share no memory with `params`, or `shapes` if `params` are shapes.
  """
  if is_abstract(params):
    return shapes

  def copy(x: AnyArray, shape: jax.ShapeDtypeStruct) -> jax.Array:
    if x.dtype != shape.dtype:
      x = x.astype(shape.dtype)
    return sharding.put_array(x, shape.sharding, copy=True)

  return jax.tree.map(copy, params, shapes)


def is_abstract(params: Params) -> bool:
  """Returns whether `params` are shapes: steps can be traced for them but not run."""
  return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))


def flat_shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every array of a tree by its dotted name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): tuple(x.shape)
    for path, x in leaves
  }


def shardings_of(tree: PyTree) -> PyTree:
  """Returns the tree of shardings of arrays or shapes."""
  return jax.tree.map(lambda x: x.sharding, tree)


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
  """Returns the tree of `shapes` with each leaf's sharding set."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )


@dataclasses.dataclass(frozen=True)
class InferenceParams:
  """Converts training parameters to inference parameters. Device thread only.

  Attributes:
    spec: The learner's spec.
    mesh: The learner's mesh.
    weights_format: How engines keep matrices in 8 bits, if they do.
  """

  spec: StepSpec
  mesh: Mesh
  weights_format: 'BlockFormat | None' = None

  def build(self, params: Params) -> Params:
    """Returns what inference engines are given for `params`.

    Args:
      params: The learner's parameters, on the devices.

    Returns:
      `params` themselves without LoRA. With it, a copy of the model into which the
      adapters are merged, or base model, adapters and their scale if engines merge.
      Matrices are in 8 bits if the engines keep them so, except where engines merge.
    """
    config = self.spec.model.config
    if config.lora is not None:
      if config.lora.transfer == 'adapters':
        return lora.make_transfer(config, params)
      params = self.merge(params)
    if self.weights_format is None:
      return params
    from jaxrl.models.decoding import eight_bit_weights  # few engines have them

    return eight_bit_weights.to_send(params, self.weights_format)

  @functools.cached_property
  def merge(self) -> Callable[[Params], Params]:
    """Returns the jitted function that merges adapters and keeps the shardings."""
    config, dtype = self.spec.model.config, self.spec.model.dtype
    merged_shapes = lora.without(params_shapes(self.spec, self.mesh))
    merge = functools.partial(lora.merged, config, dtype=dtype)
    return jax.jit(merge, out_shardings=shardings_of(merged_shapes))


def with_rounding(
  model: TransformerLM, weights_format: 'BlockFormat | None'
) -> TransformerLM:
  """Returns the model whose forward pass rounds matrices as engines do.

  Args:
    model: The model.
    weights_format: How engines keep matrices in 8 bits.

  Raises:
    ValueError: Engines do not, or round what the learner has not: merged adapters.
  """
  if weights_format is None:
    raise ValueError('engine_rounding=True needs the weights_format of 8-bit engines')
  if model.config.lora is not None or model.exact is not None:
    raise ValueError('engine_rounding=True excludes adapters and exact mode')
  return dataclasses.replace(model, rounding=weights_format)
